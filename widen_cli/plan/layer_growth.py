"""Growth by ranges of layers: `--grow intermediate=2@8-15`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from widen_cli.errors import WidenError, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import Factor
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.wishes import Wish, parse_grow

LAYERS_LIMIT = 100_000


@dataclass(frozen=True)
class LayerGrowth:
    """An axis grows by a factor in layers `first` to `last`, both counted from 0 and included."""

    axis: str
    factor: int
    first: int
    last: int

    def __str__(self) -> str:
        layers = f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"
        return f"{self.axis}={self.factor}@{layers}"


def parse_growth(text: str, option: str = "--grow") -> tuple[dict[str, Wish], tuple[LayerGrowth, ...]]:
    """The wishes of `hidden=2,intermediate=3@8-15`: of whole axes, and of ranges of layers.

    Raises WidenError with an example for what cannot be read, and for ranges that meet.
    """
    pieces = text.split(",")
    plain = [piece for piece in pieces if "@" not in piece]
    wishes = parse_grow(",".join(plain), option) if plain else {}
    ranges: list[LayerGrowth] = []
    for piece in (piece for piece in pieces if "@" in piece):
        found = _range(piece, text, option)
        if any(one.axis == found.axis and one.first <= found.last and found.first <= one.last for one in ranges):
            raise WidenError(f"{option} {printable(text)}: two ranges of '{found.axis}' share a layer")
        ranges.append(found)
    return wishes, tuple(ranges)


def _range(piece: str, text: str, option: str) -> LayerGrowth:
    growth, _, layers = piece.partition("@")
    hit = re.fullmatch(r"\s*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*", layers)
    first, last = (int(hit[1]), int(hit[2] or hit[1])) if hit else (1, 0)
    if not first <= last < LAYERS_LIMIT:
        raise WidenError(
            f"{option} {printable(text)}: '{printable(piece)}' names no layers; write for example intermediate=2@8-15, or "
            "intermediate=2@3 for one, counted from 0"
        )
    ((axis, wish),) = parse_grow(growth, option).items()
    factor = wish.as_factor()
    if factor is None or factor.denominator != 1:
        raise WidenError(
            f"{option} {printable(text)}: '{printable(piece)}' says no whole factor, which it has to be layer by layer; write for "
            f"example {axis}=2x@{layers.strip()}"
        )
    return LayerGrowth(axis, int(factor), first, last)


def layer_factors(
    architecture: ArchitectureMap, sizes: Sizes, factors: Mapping[str, Factor], asked: Sequence[LayerGrowth]
) -> dict[str, tuple[int, ...]]:
    """The factor in every layer of the axes that grow by ranges; `factors` are those of layers that are not named.

    Raises WidenError for layers that the model does not have.
    """
    repeated = next(iter(architecture.repeats.values()), ("",))
    layers = sizes.config.get(repeated[0], architecture.defaults.get(repeated[0]))
    faults = []
    found: dict[str, list[int]] = {}
    for one in asked:
        if not isinstance(layers, int) or one.last >= layers:
            faults.append(f"--grow {one}: the model has {layers} layers, counted from 0")
            continue
        others = factors[one.axis]
        if not isinstance(others, int):
            faults.append(
                f"--grow {one}: '{one.axis}' grows by {others} in the other layers; only whole factors differ by layer"
            )
            continue
        of_axis = found.setdefault(one.axis, [others] * layers)
        of_axis[one.first : one.last + 1] = [one.factor] * (one.last + 1 - one.first)
    if faults:
        raise WidenError(*faults)
    return {axis: tuple(each) for axis, each in found.items()}


def by_layer(factors: Mapping[str, Factor], layered: Mapping[str, Sequence[int]]) -> list[dict[str, Factor]]:
    """The factors of all axes in every layer; nothing where no axis grows by ranges of layers."""
    return [{**factors, **dict(zip(layered, each, strict=True))} for each in zip(*layered.values(), strict=True)]
