"""Growths that bring a model near a number of parameters: whole factors, and sizes that are multiples of 64 or 128."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from widen_cli.errors import WidenError, printable
from widen_cli.plan.parameters import Parameters
from widen_cli.plan.sizes import Sizes

SHOWN = 3  # of each kind
TRIED = 40  # growths that are planned, the nearest first
FAR = 4  # times as many, or as few, as were asked for: that is another model
WIDEST = 64  # the largest factor that is looked at
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
Refusal = Callable[[Mapping[str, Fraction]], tuple[str, ...]]
Growth = dict[str, Fraction]


def parse_params(text: str) -> int:
    """The number in `1.3B`, `350M` or `7e9`. Raises WidenError for what is none."""
    hit = re.fullmatch(r"([0-9]{1,12})(\.[0-9]{1,12})?(?:e([0-9]{1,2}))?([kmbt]?)", text.strip().lower())
    number = Fraction(hit[1] + (hit[2] or "")) * 10 ** int(hit[3] or 0) * _UNITS[hit[4]] if hit else Fraction(0)
    if number < 1:
        raise WidenError(
            f"--target-params {printable(text)}: is no number of parameters; write for example 1.3B, 350M or 7e9"
        )
    return int(number)


@dataclass(frozen=True)
class Proposal:
    """A growth that can be planned, the sizes it leads to, and the parameters it has."""

    ratios: Growth
    sizes: dict[str, int]
    parameters: int

    @property
    def grow(self) -> str:
        """What to give to --grow: factors where they are whole, else sizes."""
        return ",".join(
            f"{axis}={ratio}x" if ratio.denominator == 1 or self.sizes[axis] <= 16 else f"{axis}={self.sizes[axis]}"
            for axis, ratio in self.ratios.items()
        )


@dataclass(frozen=True)
class Proposals:
    """The growths that come nearest to `target`, the nearest first."""

    target: int
    present: int
    found: tuple[Proposal, ...]

    @property
    def ratios(self) -> Growth:
        """The nearest one."""
        return self.found[0].ratios

    @property
    def doubts(self) -> tuple[str, ...]:
        best = self.found[0]
        return (
            f"--target-params: takes the nearest growth, --grow {best.grow}, to {best.parameters} parameters ({self._off(best)})",
        )

    def _off(self, proposal: Proposal) -> str:
        return f"{100 * (proposal.parameters / self.target - 1):+.2f} %"

    @property
    def lines(self) -> tuple[str, ...]:
        axes = list(self.found[0].ratios)
        rows = [["parameters", "off", *axes, "to be had by"]]
        rows += [
            [str(one.parameters), self._off(one), *(str(one.sizes[axis]) for axis in axes), f"--grow {one.grow}"]
            for one in self.found
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(axes) + 2)]
        cells = [
            ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])]
            for row in rows
        ]
        return (f"{self.present} parameters now, {self.target} wanted:", *(f"  {row[0]}" for row in cells))

    @property
    def values(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "parameters": self.present,
            "target": self.target,
            "proposals": [{"parameters": one.parameters, "sizes": one.sizes, "grow": one.grow} for one in self.found],
        }


def propose(
    target: int, sizes: Sizes, parameters: Parameters, fixed: Mapping[str, Fraction], refusal: Refusal
) -> Proposals:
    """The legal growths nearest to a number of parameters. `fixed` are the axes that the user speaks of.

    Raises WidenError where the model has more parameters already, or no growth comes near.
    """
    present = parameters.count({})
    least = parameters.count(fixed)
    if target < least:
        beside = " with what --grow says" if fixed else ""
        raise WidenError(
            f"--target-params: the model has {least} parameters{beside}, more than {target}, and nothing shrinks here"
        )
    search = _Search(target, sizes, parameters, fixed)
    if refusal(search.doubled):
        search.heads = ()  # ALiBi, for one: a head's size follows the stream then, where it can
    found = [
        proposal for growths in (search.whole(), search.multiples()) for proposal in search.legal(growths, refusal)
    ]
    if not found:
        raise WidenError(
            f"--target-params: no growth of this model by factors up to {WIDEST} can be planned; say one with --grow"
        )
    found.sort(key=lambda one: abs(one.parameters - target))
    if not target <= FAR * found[0].parameters <= FAR * FAR * target:
        raise WidenError(
            f"--target-params: {target} is far from all that factors up to {WIDEST} reach; the nearest is "
            f"{found[0].parameters}, by --grow {found[0].grow}; say what is meant with --grow"
        )
    return Proposals(target, present, tuple(found))


class _Search:
    """Stream and heads are tried in steps; between them the count rises with the units, so those are looked up."""

    def __init__(self, target: int, sizes: Sizes, parameters: Parameters, fixed: Mapping[str, Fraction]) -> None:
        self.target = target
        self.sizes = sizes
        self.parameters = parameters
        self.fixed = dict(fixed)
        growth, axes = sizes.architecture.growth, sizes.architecture.axes
        free = [axis for axis in growth.width if axis not in fixed and sizes.known.get(axis)]
        self.stream = growth.width[:1] if growth.width[0] in free else ()
        self.units = tuple(axis for axis in free if axis not in self.stream)
        told = all(axis in sizes.known and axes[axis].keys for axis in growth.heads)
        self.heads = growth.heads if told and not {*growth.heads} & {*fixed} else ()
        head_dim = growth.head_dim
        self.tied = head_dim is not None and axes[head_dim].computed

    @property
    def doubled(self) -> Growth:
        return dict.fromkeys((*self.stream, *self.units, *self.heads), Fraction(2))

    def count(self, growth: Growth) -> int:
        return self.parameters.count({**self.fixed, **growth})

    def whole(self) -> list[Growth]:
        """Whole factors of about the same size, or of any beside axes that the user fixed."""
        streams = [Fraction(factor) for factor in range(1, WIDEST + 1)] if self.stream else [self.widest_fixed]
        apart = Fraction(WIDEST if self.fixed else 2)
        return [growth for stream in streams for growth in self.of_stream(stream, apart, self.factors(stream, apart))]

    @property
    def widest_fixed(self) -> Fraction:
        return max(self.fixed.values(), default=Fraction(1))

    def multiples(self) -> list[Growth]:
        """Sizes that are multiples of 128, or of 64 where the stream is narrower than 1024."""
        if not self.stream or any(axis in self.sizes.layered for axis in (*self.stream, *self.units)):
            return []
        old, apart = self.sizes.known[self.stream[0]], Fraction(5, 4)
        step = 128 if old >= 1024 else 64
        streams = (Fraction(size, old) for size in range(-(-old // step) * step, old * WIDEST, step))
        return [
            growth
            for stream in streams
            if stream.denominator > 1
            for growth in self.of_stream(stream, apart, self.steps(stream, apart, step))
        ]

    def of_stream(self, stream: Fraction, apart: Fraction, units: list[Growth]) -> Iterator[Growth]:
        """Growths with one factor of the stream: with each of the heads the two of `units`, which rise, next to the target."""
        if self.count(dict.fromkeys(self.stream, stream)) > self.target * 3 // 2:
            return
        for heads in self.of_heads(stream, apart):
            base = dict.fromkeys((*self.stream, *self.units), Fraction(1)) | dict.fromkeys(self.stream, stream) | heads
            place = bisect_left(units, self.target, key=lambda growth: self.count(base | growth))
            for growth in units[max(0, place - 1) : place + 1]:
                yield base | growth

    def of_heads(self, stream: Fraction, apart: Fraction) -> list[Growth]:
        """Growths of the heads beside one of the stream, whole groups of them; none where they follow by themselves."""
        if not self.heads or self.tied:
            return [dict.fromkeys(self.heads, stream)] if self.heads and stream.denominator == 1 else [{}]
        fewest = min(self.sizes.known[axis] for axis in self.heads)
        numbers = range(fewest, int(fewest * stream * apart) + 1)
        ratios = [Fraction(number, fewest) for number in numbers]
        return [
            dict.fromkeys(self.heads, ratio)
            for ratio in ratios
            if stream / apart <= ratio and (ratio.denominator == 1 or stream.denominator > 1)
        ]

    def factors(self, stream: Fraction, apart: Fraction) -> list[Growth]:
        """Whole factors of the units, at most `apart` times that of the stream or a part of it."""
        if not self.units:
            return [{}]
        return [
            dict.fromkeys(self.units, Fraction(factor))
            for factor in range(max(1, -int(-stream // apart)), int(stream * apart) + 1)
        ]

    def steps(self, stream: Fraction, apart: Fraction, step: int) -> list[Growth]:
        """Multiples of `step` for the units, all about as many times as large."""
        if not self.units:
            return [{}]
        old = {axis: self.sizes.known[axis] for axis in self.units}
        largest = max(old.values())
        numbers = range(-int(-stream / apart * largest // step) * step, int(stream * apart * largest) + 1, step)
        growths = [
            {axis: Fraction(max(size, -(-number * size // largest // step) * step), size) for axis, size in old.items()}
            for number in numbers
        ]
        return list({tuple(growth.items()): growth for growth in growths}.values())

    def legal(self, growths: list[Growth], refusal: Refusal) -> list[Proposal]:
        """Of the growths nearest to the target those that can be planned."""
        counted = {tuple(growth.items()): self.count(growth) for growth in growths}
        nearest = sorted(counted.items(), key=lambda item: (abs(item[1] - self.target), item[0]))
        found: list[Proposal] = []
        for items, number in nearest[:TRIED]:
            growth = dict(items)
            if len(found) < SHOWN and not refusal(growth):
                wide = self.sizes.grown({**self.fixed, **growth})
                found.append(Proposal(growth, {axis: wide.known[axis] for axis in growth}, number))
        return found
