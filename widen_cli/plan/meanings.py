"""Config values that are no sizes but tell them, such as the multiple of hidden that a layer's FFN has.

A map says what a value means (`means`, docs/maps.md); the value for another size is looked for, and is one of which the
formula says just that size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import product
from typing import Any, Protocol

from widen_cli.config import is_number
from widen_cli.formulas import Formula, evaluate
from widen_cli.map_checks import VALUE

DIGITS = 12  # behind the point of a value that is looked for
LARGEST = 2.0**40  # of such values
HALVINGS = 64
FAR = 1024  # times a value is beyond every rounding of it

Meaning = Callable[[Any], int]


class Known(Protocol):
    """Sizes, and the values of config keys."""

    def named(self, name: str) -> Any: ...


def meaning(formula: Formula, known: Known) -> Meaning:
    """What a value means: raises UnknownValueError for a name that nothing tells, ValueError for a value that means no size."""

    def size(value: Any) -> int:
        if not is_number(value):
            raise ValueError("a number is needed")
        found = evaluate(formula, lambda name: value if name == VALUE else known.named(name))
        if not is_number(found) or int(found) != found or found < 0:
            raise ValueError(f"{formula.text} is {found!r}")
        return int(found)

    return size


def telling(means: Meaning, size: int, old: Any, ratios: Mapping[str, Fraction]) -> Any:
    """A value that means a size: the old one, or it times or divided by the `ratios` of the sizes that it is made of; else,
    where a larger value means more, of all numbers that do one with few digits. None where there is none."""
    for value in _candidates(old, ratios):
        if _means(means, value) == size:
            return value
    if (_means(means, FAR * old) or 0) <= (_means(means, old) or 0):
        return None
    found = _searched(means, size)
    # A key that holds a whole number is one of whole numbers, where there is one.
    return int(found) if found is not None and isinstance(old, int) and found.is_integer() else found


def _candidates(old: Any, ratios: Mapping[str, Fraction]) -> Iterator[Any]:
    yield old
    for powers in product((1, 0, -1), repeat=len(ratios)):
        value = Fraction(old)
        for ratio, power in zip(ratios.values(), powers, strict=True):
            value *= ratio**power
        if isinstance(old, float):
            yield float(value)
        elif value.denominator == 1:
            yield int(value)


def _means(means: Meaning, value: Any) -> int | None:
    try:
        return means(value)
    except ValueError:
        return None


def _searched(means: Meaning, size: int) -> float | None:
    """The middle of the numbers that mean a size, with as few digits as do."""
    first, behind = _first(means, size), _first(means, size + 1)
    for digits in range(DIGITS + 1):
        value = round((first + behind) / 2, digits)
        if _means(means, value) == size:
            return value
    return None


def _first(means: Meaning, size: int) -> float:
    """Where the numbers begin that mean a size or a larger one."""

    def reaches(value: float) -> bool:
        found = _means(means, value)
        return found is not None and found >= size

    low, high = 0.0, 1.0
    while not reaches(high) and high < LARGEST:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
