"""What it takes to give a model the sizes of another one, axis by axis: what can be reached exactly, what not, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from widen_cli.errors import printable
from widen_cli.map_rules import Axis
from widen_cli.other_models import OtherModel
from widen_cli.plan.growth import growing_axes
from widen_cli.plan.layer_growth import LayerGrowth, alike, layer_count
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.wishes import Wish

Refusal = Callable[[Mapping[str, Fraction], Sequence[LayerGrowth]], tuple[str, ...]]


@dataclass(frozen=True)
class Reach:
    """One axis: its size here and there, the ratio by which it is reached, or why it is not; `layers` are what reaches it where
    no one ratio does, with the largest sizes as those here and there.

    `needed`: without it the model does not become what was asked for; what no width changes is only told.
    """

    axis: str
    here: int | None
    there: int | None
    ratio: Fraction | None = None
    layers: tuple[LayerGrowth, ...] = ()
    why: str = ""
    needed: bool = True

    def __str__(self) -> str:
        here, there = ("not told" if size is None else str(size) for size in (self.here, self.there))
        return f"{self.axis} is {here} here and {there} there: {self.how}"

    @property
    def how(self) -> str:
        """How it is reached, or why not."""
        if self.why or self.layers:
            return self.why or ", ".join(map(str, self.layers))
        return "stays" if self.ratio == 1 else f"{self.axis}={self.ratio}x"


@dataclass(frozen=True)
class Likeness:
    """Every axis of a model that is to be like another."""

    name: str
    reaches: tuple[Reach, ...]

    @property
    def ratios(self) -> dict[str, Fraction]:
        """New size over old, of the axes that are reached."""
        return {reach.axis: reach.ratio for reach in self.reaches if reach.ratio is not None}

    @property
    def layers(self) -> tuple[LayerGrowth, ...]:
        """The sizes of single layers, of the axes that are reached by these."""
        return tuple(one for reach in self.reaches for one in reach.layers)

    @property
    def faults(self) -> tuple[str, ...]:
        """The axes that are not reached."""
        return tuple(
            f"--like {printable(self.name)}: {reach}; --grow beside it says another size"
            for reach in self.reaches
            if reach.why and reach.needed
        )

    @property
    def doubts(self) -> tuple[str, ...]:
        """What stays other than in the other model, whatever grows."""
        return tuple(
            f"--like {printable(self.name)}: {reach}" for reach in self.reaches if reach.why and not reach.needed
        )

    @property
    def lines(self) -> tuple[str, ...]:
        return (f"like {printable(self.name)}:", *(f"  {reach}" for reach in self.reaches))

    @property
    def values(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "like": [
                {
                    "axis": reach.axis,
                    "here": reach.here,
                    "there": reach.there,
                    "ratio": None if reach.ratio is None else str(reach.ratio),
                    "layers": [*map(str, reach.layers)],
                    "why_not": reach.why or None,
                }
                for reach in self.reaches
            ]
        }


def likeness(
    here: Sizes, other: OtherModel, said: Collection[str], ranges: Sequence[LayerGrowth], refusal: Refusal
) -> Likeness:
    """How each axis of a model gets the size that it has in the other one, or those that it has there layer by layer.

    Axes in `said` and layers in `ranges` are left to the user; `refusal` tells what speaks against a growth as a whole.
    """
    following = _following(here) | _following(other.sizes)
    growing = [axis for axis in growing_axes(here.architecture) if axis not in {*said, *following}]
    found = {axis: _reach(axis, here, other.sizes, ranges) for axis in growing}
    found = _kept(found, refusal)
    return Likeness(other.name, (*found.values(), *_unchanged(here, other, {*said, *following})))


def _following(sizes: Sizes) -> set[str]:
    """The axes that grow as a head's size does."""
    return {*sizes.architecture.growth.with_head_dim}


def _reach(axis: str, here: Sizes, there: Sizes, ranges: Sequence[LayerGrowth]) -> Reach:
    old, new = here.known.get(axis), there.known.get(axis)
    if (axis in here.layered or axis in there.layered) and old and new:
        named = {layer for one in ranges if one.axis == axis for layer in one.layers}
        return _layered(axis, here, there, named)
    if new is None:
        why = (
            "nothing there tells it"
            if axis in there.architecture.axes
            else f"map '{there.architecture.architecture}' has no such axis"
        )
        return Reach(axis, old, new, why=why, needed=False)
    if old is None:
        return Reach(axis, old, new, why="nothing here tells it; give --config, or --set with its size")
    if new < old:
        return Reach(axis, old, new, why="smaller, and nothing shrinks here")
    return Reach(axis, old, new, Fraction(new, old))


def _layered(axis: str, here: Sizes, there: Sizes, named: Collection[int]) -> Reach:
    """An axis whose size differs by layer, here or there: reached by one ratio, or layer by layer but for those `named`."""
    sizes = here.known[axis], there.known[axis]
    each, theirs = (_of_layers(axis, model) for model in (here, there))
    if len(each) != len(theirs):
        why = (
            f"it differs from layer to layer, of which there are {len(each)} here and {len(theirs)} there; see --depth"
        )
        return Reach(axis, *sizes, why=why)
    pairs = {layer: (old, new) for layer, (old, new) in enumerate(zip(each, theirs, strict=True)) if layer not in named}
    for layer, (old, new) in pairs.items():
        if new < old or (new and not old):
            less = "and nothing shrinks here" if new < old else "and nothing is made of none"
            return Reach(axis, *sizes, why=f"layer {layer} has {old} here and {new} there, {less}")
    ratios = {Fraction(new, old) for old, new in pairs.values() if old}
    if len(ratios) == 1:
        return Reach(axis, *sizes, ratios.pop())
    grown = {layer: new for layer, (old, new) in pairs.items() if new != old}
    layers = [
        LayerGrowth.of(Wish(axis, f"to:{theirs[first]}", "size", Fraction(theirs[first])), first, last)
        for first, last in alike(grown)
    ]
    return Reach(axis, *sizes, layers=tuple(layers)) if layers else Reach(axis, *sizes, Fraction(1))


def _of_layers(axis: str, sizes: Sizes) -> tuple[int, ...]:
    """The size in every layer."""
    alike = (sizes.known[axis],) * (layer_count(sizes.architecture, sizes) or 0)
    return sizes.layered.get(axis, alike)


def _kept(found: dict[str, Reach], refusal: Refusal) -> dict[str, Reach]:
    """The axes as they are where all can grow together; else as many as can, one after the other, with the reason of each."""

    def refused(reaches: Collection[Reach]) -> tuple[str, ...]:
        ratios = {reach.axis: reach.ratio for reach in reaches if reach.ratio is not None}
        return refusal(ratios, [one for reach in reaches for one in reach.layers])

    reached = [reach for reach in found.values() if not reach.why]
    if not refused(reached):
        return found
    together: list[Reach] = []
    kept = dict(found)
    # What does not grow can be kept whatever else does, if that follows nothing.
    for reach in sorted(reached, key=lambda reach: reach.ratio != 1):
        faults = refused([*together, reach])
        if not faults:
            together.append(reach)
            continue
        kept[reach.axis] = Reach(reach.axis, reach.here, reach.there, why=_reason(reach.axis, faults))
    return kept


def _reason(axis: str, refused: tuple[str, ...]) -> str:
    """Of what was refused what speaks of the axis, without the name of the option."""
    own = next((fault for fault in refused if fault.startswith(f"--grow {axis}")), refused[0])
    return own.partition(": ")[2] if own.startswith("--grow ") else own


def _unchanged(here: Sizes, other: OtherModel, said: Collection[str]) -> Iterator[Reach]:
    """What no width changes, where it differs: fixed sizes, axes that only the other model has, the number of layers."""
    there = other.sizes
    for axis, there_axis in there.architecture.axes.items():
        here_axis = here.architecture.axes.get(axis)
        sizes = here.known.get(axis), there.known.get(axis)
        if axis in said or not there_axis.keys or sizes[0] == sizes[1]:
            continue
        if here_axis is None:
            why = f"map '{here.architecture.architecture}' has no such axis"
            yield Reach(axis, *sizes, why=why, needed=False)
        elif here_axis.fixed and None not in sizes:
            yield Reach(axis, *sizes, why="it is no width" + _padding(here_axis, *sizes), needed=False)
    layers = [_layers(sizes) for sizes in (here, there)]
    for (key, old), (_, new) in zip(*layers, strict=False):
        if old != new:
            yield Reach(key, old, new, why="width changes no number of layers; see --depth", needed=False)


def _padding(axis: Axis, old: int | None, new: int | None) -> str:
    """How a vocabulary gets the other's size, where it can."""
    can = axis.padded and old is not None and new is not None and old < new < 2 * old
    return f"; --grow {axis.name}={new} pads it" if can else ""


def _layers(sizes: Sizes) -> list[tuple[str, int]]:
    """The config keys that count layers, and what they say."""
    found = [(keys[0], sizes.config.get(keys[0])) for keys in sizes.architecture.repeats.values()]
    return [(key, value) for key, value in found if isinstance(value, int)]
