"""Axes whose new size is no multiple of the old one: how often each old position stands.

All stand floor(new / old) times, and the last of them once more: so many that the new size is reached. Whole heads are shared
out among the groups that read one key, so that a copy of a query still reads a copy of its key. Rotary pairs under a raised
base stand in front in their old order, each once, and copies of the last ones behind them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from widen_cli.dimensions import Copies, Fill, Growth, Laid, times
from widen_cli.errors import WidenError
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import Factor, is_whole, unfit_size
from widen_cli.plan.sizes import Sizes
from widen_cli.scales import ONE, Scale


@dataclass(frozen=True)
class Segment:
    """`units` neighbouring old positions that stand `copies` times each; `kept` of them where the others are filled."""

    units: int
    copies: int
    kept: int

    def laid(self, tiled: bool, scale: Scale, inner: Growth | None, live: int, fill: Fill) -> Growth:
        """Its positions with their copies, of which `live` hold a value (0: all), side by side or as a whole after itself."""
        if tiled and self.copies > 1:
            return Copies(1, self.copies, False, ONE, Copies(self.units, 1, False, scale, inner), live, fill)
        return Copies(self.units, self.copies, False, scale, inner, live, fill)


@dataclass(frozen=True)
class Partial:
    """An axis that grows by a fraction, `ratio`: every old position stands at least `whole` times."""

    axis: str
    ratio: Fraction
    segments: tuple[Segment, ...]

    @property
    def whole(self) -> int:
        return int(self.ratio)

    @property
    def old(self) -> int:
        return sum(segment.units for segment in self.segments)

    @property
    def spread(self) -> Scale:
        """What becomes of the root mean square over the axis where `whole` copies stand and the rest adds nothing."""
        return Scale.of(self.whole / self.ratio) ** Fraction(1, 2)

    def laid(
        self, tiled: bool, scale: Scale, inner: Growth | None, how: Callable[[Segment], tuple[Scale, int, Fill]]
    ) -> Growth:
        """The axis with its copies; `how` says of a segment its factor, how many copies hold a value, and what the others hold."""
        parts: list[Growth] = []
        for segment in (each for each in self.segments if each.units):
            factor, live, fill = how(segment)
            own, within = (scale * factor, None) if inner is None else (ONE, times(inner, factor))
            parts.append(segment.laid(tiled, own, within, live, fill))
        return Laid(tuple(parts)) if len(parts) != 1 else parts[0]

    def places(self, position: int) -> range:
        """Where the copies of an old position stand."""
        start = 0
        for segment in self.segments:
            if position < segment.units:
                start += position * segment.copies
                return range(start, start + segment.copies)
            position -= segment.units
            start += segment.units * segment.copies
        raise IndexError(position)


Partials = Mapping[str, Partial]


def partial_axes(
    architecture: ArchitectureMap,
    sizes: Sizes,
    factors: Mapping[str, Factor],
    in_front: frozenset[str] = frozenset(),
    at: str = "",
) -> dict[str, Partial]:
    """The axes that grow by a fraction; of those `in_front` the old positions come first, in their order.

    `at` is what tells the layer, as `--grow` takes it, whose sizes and factors these are. Raises WidenError for those of which
    it cannot be said where the copies go.
    """
    found = {axis: Partial(axis, Fraction(factor), ()) for axis, factor in factors.items() if not is_whole(factor)}
    known = {axis: partial for axis, partial in found.items() if sizes.known.get(axis)}
    faults = [
        f"--grow {axis}={factors[axis]}{at}: {why}; give a whole factor"
        for axis in found
        if (why := architecture.axes[axis].whole)
    ]
    faults += [fault for axis in known if (fault := unfit_size(axis, factors[axis], sizes.known, at))]
    if faults:
        raise WidenError(*faults)
    made = {
        axis: Partial(axis, each.ratio, (_behind if axis in in_front else _segments)(each.ratio, sizes.known[axis]))
        for axis, each in known.items()
    }
    return made | _grouped(architecture, sizes, factors, made, at)


def _segments(ratio: Fraction, size: int) -> tuple[Segment, ...]:
    whole = int(ratio)
    more = int(ratio * size) - whole * size
    return Segment(size - more, whole, whole), Segment(more, whole + 1, whole)


def _behind(ratio: Fraction, size: int) -> tuple[Segment, ...]:
    """The first positions once, and the last ones laid as a whole after themselves: as many as divide what is added."""
    more = int(ratio * size) - size
    again = next(number for number in range(min(size, more), 0, -1) if more % number == 0)
    return Segment(size - again, 1, 1), Segment(again, 1 + more // again, 1)


def _grouped(
    architecture: ArchitectureMap, sizes: Sizes, factors: Mapping[str, Factor], made: Mapping[str, Partial], at: str
) -> dict[str, Partial]:
    """The heads of queries, where they share keys: within each group, as many copies as the group's keys serve."""
    found: dict[str, Partial] = {}
    for heads, keys in shared_keys(architecture).items():
        if sizes.known.get(heads) and sizes.known.get(keys) and {heads, keys} & made.keys():
            found |= _in_groups(heads, keys, sizes, factors, made, at)
    return found


def shared_keys(architecture: ArchitectureMap) -> dict[str, str]:
    """The axes of heads that share keys and values, each with the axis of those: where a map requires heads % kv_heads == 0."""
    found: dict[str, str] = {}
    for formula in architecture.requires:
        for node in ast.walk(formula.tree):
            match node:
                case ast.Compare(
                    left=ast.BinOp(left=ast.Name(id=heads), op=ast.Mod(), right=ast.Name(id=keys)),
                    ops=[ast.Eq()],
                    comparators=[ast.Constant(value=0)],
                ) if heads in architecture.growth.heads and keys in architecture.axes:
                    found[heads] = keys
    return found


def _in_groups(
    heads: str, keys: str, sizes: Sizes, factors: Mapping[str, Factor], made: Mapping[str, Partial], at: str
) -> dict[str, Partial]:
    old, kept = sizes.known[heads], sizes.known[keys]
    new, serving = old * Fraction(factors[heads]), kept * Fraction(factors[keys])
    told = f"--grow {heads}={factors[heads]}{at},{keys}={factors[keys]}{at}: {new} {heads} over {serving} {keys}"
    if new % serving or old % kept:
        raise WidenError(f"{told} are not as many for each; choose {heads} as a multiple of {keys}")
    copies = _copies_of_keys(made.get(keys), kept, factors[keys])
    group, slots = old // kept, [number * int(new / serving) for number in copies]
    if any(number < group for number in slots):
        raise WidenError(
            f"{told} leave some of the old {group} heads of a group without a place; grow {heads} more, or {keys} by a whole factor"
        )
    counts = [number // group + (at >= group - number % group) for number in slots for at in range(group)]
    ratio = Fraction(factors[heads])
    if is_whole(ratio) and set(counts) == {int(ratio)}:
        return {}
    parts = [(number, len([*each])) for number, each in groupby(counts)]
    return {heads: Partial(heads, ratio, tuple(Segment(n, k, min(k, int(ratio))) for k, n in parts))}


def _copies_of_keys(partial: Partial | None, size: int, factor: Factor) -> list[int]:
    if partial is None:
        return [int(factor)] * size
    return [segment.copies for segment in partial.segments for _ in range(segment.units)]


def partial_output(partial: Partial, mean: bool, scale: Scale, layout: str) -> str:
    """How an output comes out along such an axis, said of several."""
    (_, _), (more, _) = ((segment.units, segment.copies) for segment in partial.segments)
    how = "as a whole" if layout == "tile" else "side by side"
    begin = "begin with the old ones" if partial.whole == 1 else f"stand {partial.whole}x {how}"
    times = "" if scale.is_one else f", times {scale}"
    what = "their mean" if mean else "zero"
    return f"{begin}{times}; {more} places hold {what}"
