"""What `--grow` asks of each axis: a factor, a size, so many more, or the next multiple; read from text, resolved against sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from widen_cli.errors import Faults, WidenError, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import Factor, factor_of
from widen_cli.plan.growth import FACTOR_LIMIT, check_asked
from widen_cli.plan.sizes import Sizes

LARGEST_FACTOR = 16  # of a plain whole number; a larger one is a size
EXAMPLES = "hidden=2x, hidden=5120, heads=+4, heads=to:12, intermediate=round:256 or intermediate=1.5x:round:256"
_WISH = re.compile(r"(\+|to:|)([0-9]{1,9})(?:([./])([0-9]{1,9}))?(x?)")
_KINDS = {"+": "more", "to:": "size"}


@dataclass(frozen=True)
class Wish:
    """What is asked of one axis; `text` is how it was written, with `at` (`@8-15`) behind it where it is asked of some layers.

    `kind` says what `number` is: a `factor`, a count of `more`, a `size`, or `plain`, which the present size decides.
    `multiple` is what the new size is rounded up to.
    """

    axis: str
    text: str
    kind: str
    number: Fraction
    multiple: int = 0
    at: str = ""

    @classmethod
    def by(cls, axis: str, factor: Factor) -> Wish:
        """That an axis grow by a factor."""
        return cls(axis, f"{factor}x", "factor", Fraction(factor))

    def __str__(self) -> str:
        return self.instead(self.text)

    def instead(self, text: str) -> str:
        """Another wish of the same axis and layers, as it is written."""
        return f"{self.axis}={text}{self.at}"

    def ratio(self, sizes: Sizes) -> Fraction:
        """New size over old. Raises WidenError with what cannot be meant, or reached, from the present size."""
        here = f"--grow {printable(str(self))}"
        if self.axis in sizes.layered:
            return self._of_layers(here, sizes.layered[self.axis])
        present = sizes.known.get(self.axis)
        if present is None or present == 0:
            return self._of_unknown(here)
        size = self._size(here, present)
        if self.multiple:
            size = Fraction(-(-size // self.multiple) * self.multiple)
        if size.denominator != 1:
            above = -(-size // 1)
            # A small number could be a factor too.
            plain = f"{above}" if above > LARGEST_FACTOR else f"to:{above}"
            raise WidenError(
                f"{here}: {_decimal(self.number)} times {present} is {_decimal(size)}, no whole number; write "
                f"{self.instead(plain)}, or {self.instead(f'{self.text}:round:1')} for the next one"
            )
        if size < present:
            raise WidenError(
                f"{here}: {size} is less than the {present} there are, and nothing shrinks here; `widen-ckpt collapse` takes a growth back"
                + (
                    f", and {size} times as many is {self.instead(f'{size}x')}"
                    if self.kind == "plain" and not self.multiple
                    else ""
                )
            )
        return _bounded(here, Fraction(size, present))

    def _size(self, here: str, present: int) -> Fraction:
        """The new size before it is rounded to a multiple."""
        if self.kind == "factor":
            return present * self.number
        if self.kind == "more":
            return present + self.number
        if self.kind == "size" or self.number > LARGEST_FACTOR or present == 1:
            return self.number
        if self.number < present:
            return present * self.number
        called = f"{self.number} {self.axis}" if self.axis.endswith("s") else f"{self.axis} {self.number}"
        raise WidenError(
            f"{here}: can mean {called} or {self.number} times as many; write {self.instead(f'{self.number}x')} for "
            f"{present * self.number}, or {self.instead(f'to:{self.number}')} for {self.number}"
        )

    def _of_layers(self, here: str, layers: tuple[int, ...]) -> Fraction:
        """Of an axis whose size differs from layer to layer, where only a factor can be meant."""
        ratio = self.as_factor()
        if ratio is None:
            raise WidenError(
                f"{here}: '{self.axis}' is {min(layers)} to {max(layers)}, layer by layer, so a size cannot be said of all; "
                f"write a factor, such as {self.axis}=2x"
            )
        if any((ratio * size).denominator != 1 for size in layers):
            raise WidenError(
                f"{here}: is no whole number in every layer, where '{self.axis}' is {min(layers)} to {max(layers)}"
            )
        return ratio

    def _of_unknown(self, here: str) -> Fraction:
        ratio = self.as_factor()
        if ratio is None:
            raise WidenError(
                f"{here}: nothing tells how many '{self.axis}' there are, so only a factor can be said, such as {self.instead('2x')}; "
                "give --config, or --set with its size"
            )
        return ratio

    def as_factor(self) -> Fraction | None:
        """The factor that it is whatever the present size; None where it is a size, or depends on one."""
        if self.multiple or self.kind in ("more", "size") or (self.kind == "plain" and self.number > LARGEST_FACTOR):
            return None
        return self.number


def parse_grow(text: str, option: str = "--grow") -> dict[str, Wish]:
    """The wishes of `hidden=2x,intermediate=round:256`. Raises WidenError with every piece that cannot be read."""
    wishes: dict[str, Wish] = {}
    with Faults() as faults:
        for piece in text.split(","):
            axis, equals, said = (part.strip() for part in piece.partition("="))
            wish = _read(axis, said) if equals and axis else None
            if wish is None:
                faults.add(
                    f"{option} {printable(text)}: '{printable(piece)}' says of no axis what it grows to; write for example {EXAMPLES}"
                )
            elif axis in wishes:
                faults.add(f"{option} {printable(text)}: '{printable(axis)}' stands twice")
            elif wish.kind == "factor" and wish.number < 1:
                faults.add(
                    f"{option} {printable(text)}: '{printable(piece)}' is less than 1, and nothing shrinks here; "
                    "`widen-ckpt collapse` takes a growth back"
                )
            else:
                wishes[axis] = wish
    return wishes


def _read(axis: str, said: str) -> Wish | None:
    base, colon, multiple = said.rpartition("round:")
    if colon and (not re.fullmatch("[1-9][0-9]{0,8}", multiple) or base[-1:] not in ("", ":")):
        return None
    number = (base[:-1] if base else "+0") if colon else said
    hit = _WISH.fullmatch(number)
    if hit is None or base == ":":
        return None
    count, whole, mark, part, times = hit.groups()
    if (
        (count and (mark or times))
        or (mark == "/" and int(part) == 0)
        or (not mark and count != "+" and int(whole) == 0)
    ):
        return None
    if count == "+" and int(whole) == 0 and not colon:
        return None
    value = Fraction(f"{whole}{mark}{part}") if mark else Fraction(int(whole))
    kind = _KINDS.get(count, "factor" if mark or times else "plain")
    return Wish(axis, said, kind, value, int(multiple) if colon else 0)


def wished(
    architecture: ArchitectureMap, sizes: Sizes, wishes: Mapping[str, Wish | Fraction | int]
) -> dict[str, Factor]:
    """New size over old for every axis that is spoken of; numbers that are no wishes are factors.

    Raises WidenError with every axis that does not exist, cannot grow, or cannot be what is asked.
    """
    ratios: dict[str, Fraction] = {}
    with Faults() as faults:
        for axis, wish in wishes.items():
            if isinstance(wish, Wish):
                with faults.collecting():
                    ratios[axis] = wish.ratio(sizes) if axis in architecture.axes else Fraction(0)
            else:
                ratios[axis] = Fraction(wish)
        with faults.collecting():
            check_asked(architecture, ratios)
    return {axis: factor_of(ratio) for axis, ratio in ratios.items()}


def said_as_factors(wishes: Mapping[str, Wish | Fraction | int], sizes: Sizes) -> dict[str, Fraction]:
    """Of a model that was widened: the factors that it was widened by; `sizes` are the wide ones.

    Raises WidenError with every wish that tells the new size alone, of which the old one does not follow.
    """
    factors: dict[str, Fraction] = {}
    with Faults() as faults:
        for axis, wish in wishes.items():
            with faults.collecting():
                factors[axis] = said_factor(wish, sizes) if isinstance(wish, Wish) else Fraction(wish)
    return factors


def said_factor(wish: Wish, sizes: Sizes) -> Fraction:
    """The same of one wish. Raises WidenError for one that tells the new size alone."""
    factor = wish.as_factor()
    if factor is None and wish.kind == "plain" and not wish.multiple and wish.number < sizes.known.get(wish.axis, 0):
        factor = wish.number
    if factor is None:
        raise WidenError(
            f"--grow {printable(str(wish))}: tells what '{printable(wish.axis)}' grew to, and the way back needs by how much; "
            f"write {printable(wish.instead('2x'))}"
        )
    return factor


def _bounded(here: str, ratio: Fraction) -> Fraction:
    if ratio > FACTOR_LIMIT:
        raise WidenError(f"{here}: is {_decimal(ratio)} times as many; {FACTOR_LIMIT} is the largest factor")
    return ratio


def _decimal(number: Fraction) -> str:
    """A number as people write it: a decimal where it has few digits, else a fraction."""
    short = f"{float(number):.6g}"
    return short if Fraction(short) == number else str(number)
