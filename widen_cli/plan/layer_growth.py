"""Growth by ranges of layers: `--grow intermediate=2x@8-15`, `heads=to:12@3`; each layer by what it has itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from widen_cli.errors import Faults, WidenError, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import Factor, factor_of, is_whole
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.wishes import Wish, parse_grow

LAYERS_LIMIT = 100_000

Wishes = Mapping[str, Wish | Factor]


@dataclass(frozen=True)
class LayerGrowth:
    """What is asked of an axis in layers `first` to `last`, both counted from 0 and included."""

    wish: Wish
    first: int
    last: int

    @property
    def axis(self) -> str:
        return self.wish.axis

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return str(self.wish)

    @classmethod
    def of(cls, wish: Wish, first: int, last: int) -> LayerGrowth:
        """A wish for these layers."""
        return cls(replace(wish, at=_at(first, last)), first, last)


def _at(first: int, last: int) -> str:
    return f"@{first}-{last}" if last > first else f"@{first}"


def parse_growth(text: str, option: str = "--grow") -> tuple[dict[str, Wish], tuple[LayerGrowth, ...]]:
    """The wishes of `hidden=2,intermediate=5120@8-15`: of whole axes, and of ranges of layers.

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
    ((_, wish),) = parse_grow(growth, option).items()
    return LayerGrowth.of(wish, first, last)


def layer_count(architecture: ArchitectureMap, sizes: Sizes) -> int | None:
    """How many layers the config says that there are, None where it does not."""
    repeated = next(iter(architecture.repeats.values()), ("",))
    layers = sizes.config.get(repeated[0], architecture.defaults.get(repeated[0]))
    return layers if isinstance(layers, int) else None


def by_range(
    architecture: ArchitectureMap, sizes: Sizes, wishes: Wishes, asked: Sequence[LayerGrowth]
) -> tuple[Wishes, tuple[LayerGrowth, ...]]:
    """The same wishes, but that one for all layers becomes one for each where one factor cannot say it: a size of an axis
    that differs from layer to layer, and what the layers beside a range grow by, if that is no whole factor."""
    layers = layer_count(architecture, sizes)
    plain, ranges = dict(wishes), list(asked)
    for axis, wish in wishes.items():
        named = [one for one in asked if one.axis == axis]
        factor = wish.as_factor() if isinstance(wish, Wish) else Fraction(wish)
        once = factor is not None and (is_whole(factor) or not named)
        if axis not in architecture.layered_axes or once or layers is None or not (named or axis in sizes.layered):
            continue
        own = wish if isinstance(wish, Wish) else Wish.by(axis, wish)
        each = sizes.layered.get(axis)
        taken = {layer for one in named for layer in one.layers}
        free = [layer for layer in range(layers) if layer not in taken and (each is None or each[layer])]
        ranges += [LayerGrowth.of(own, *gap) for gap in alike(dict.fromkeys(free))]
        plain[axis] = 1
    return plain, tuple(ranges)


def alike(layers: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """The first and the last of neighbouring layers that have one value, of layers in order."""
    first = 0
    for layer, value in layers.items():
        if layer - 1 not in layers or layers[layer - 1] != value:
            first = layer
        if layer + 1 not in layers or layers[layer + 1] != value:
            yield first, layer


def layer_factors(
    architecture: ArchitectureMap,
    sizes: Sizes,
    factors: Mapping[str, Factor],
    asked: Sequence[LayerGrowth],
    told: Callable[[Wish, Sizes], Fraction] = Wish.ratio,
) -> dict[str, tuple[Factor, ...]]:
    """The factor in every layer of the axes that grow by ranges, 1 in one that has none of an axis.

    `factors` are those of layers that are not named; `told` says what a wish means of the `sizes` in one layer.
    Raises WidenError for layers that the model does not have, and with every layer that cannot be what is asked.
    """
    layers = layer_count(architecture, sizes)
    found: dict[str, list[Factor]] = {}
    with Faults() as faults:
        for one in asked:
            if layers is None or one.last >= layers:
                faults.add(f"--grow {one}: the model has {layers} layers, counted from 0")
                continue
            of_axis = found.setdefault(one.axis, [factors[one.axis]] * layers)
            with faults.collecting():
                of_axis[one.first : one.last + 1] = _of_range(one, sizes, told)
    return {axis: tuple(each) for axis, each in found.items()}


def _of_range(one: LayerGrowth, sizes: Sizes, told: Callable[[Wish, Sizes], Fraction]) -> list[Factor]:
    """The factor in each layer of a range."""
    by_size: dict[int | None, Factor] = {0: 1}
    each: list[int | None] = []
    with Faults() as faults:
        for layer in one.layers:
            own = sizes.at(layer)
            each.append(own.known.get(one.axis))
            if each[-1] not in by_size:
                by_size[each[-1]] = 1
                with faults.collecting():
                    by_size[each[-1]] = factor_of(told(LayerGrowth.of(one.wish, layer, layer).wish, own))
        if not any(size != 0 for size in each):
            which = f"layers {one.first} to {one.last} have" if one.last > one.first else f"layer {one.first} has"
            faults.add(f"--grow {one}: {which} no '{one.axis}'")
    return [by_size[size] for size in each]


def said_ranges(
    layered: Mapping[str, Sequence[Factor]], asked: Sequence[LayerGrowth], sizes: Sizes
) -> tuple[LayerGrowth, ...]:
    """What was asked for as factors, such as `intermediate=5/4x@8-15`: neighbouring layers that grow alike together, with those
    between them that have none of the axis."""
    found: list[LayerGrowth] = []
    for one in asked:
        each = layered[one.axis]
        some = [n for n in one.layers if sizes.at(n).known.get(one.axis) != 0]
        starts = [
            n for before, n in zip([None, *some], some, strict=False) if before is None or each[before] != each[n]
        ]
        for start, behind in zip([one.first, *starts[1:]], [*starts[1:], one.last + 1], strict=True):
            factor = each[start if start in some else some[0]]
            found.append(LayerGrowth.of(Wish.by(one.axis, factor), start, behind - 1))
    return tuple(found)
