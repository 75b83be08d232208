"""By how much an axis grows: a whole number, or a fraction where the new size is no multiple of the old one."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

Factor = int | Fraction

NO_SIZES: Mapping[str, int] = MappingProxyType({})


def factor_of(number: Factor) -> Factor:
    """The same number, an int where it is whole."""
    return int(number) if is_whole(number) else Fraction(number)


def is_whole(number: Factor) -> bool:
    """Whether the new size is a multiple of the old one."""
    return Fraction(number).denominator == 1


def unfit_size(axis: str, factor: Factor, sizes: Mapping[str, int], at: str = "") -> str | None:
    """Why an axis cannot grow by a factor, by its old size alone, which may be that `at` a layer; None where it can."""
    if is_whole(factor):
        return None
    if axis not in sizes:
        return f"--grow {axis}={factor}: the size of '{axis}' is not known, so only whole factors can be; give --config"
    if (sizes[axis] * Fraction(factor)).denominator != 1:
        return f"--grow {axis}={factor}{at}: {factor} of {axis} {sizes[axis]} is no whole size"
    return None
