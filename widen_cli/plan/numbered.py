"""Heads that a file beside the model names by the numbers of their layer and of their own, such as Whisper's alignment_heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widen_cli.plan.factors import Factor
from widen_cli.plan.partial import Partials
from widen_cli.plan.sizes import Sizes


@dataclass(frozen=True)
class Numbered:
    """What becomes of such pairs: of an old head its first copy, of an old layer the first that has its weights.

    `copies` are the new numbers of each old head; `layers` those of each old layer of `stack`, None where all keep theirs.
    """

    stack: str
    copies: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, ...], ...] | None = None

    @property
    def moves(self) -> bool:
        """Whether any number changes."""
        heads = any(places[:1] != (number,) for number, places in enumerate(self.copies))
        return heads or any(places[:1] != (number,) for number, places in enumerate(self.layers or ()))

    def folded(self, layers: Sequence[int] | None) -> Numbered:
        """The way back: of any copy the old head; of the wide model's `layers` each says which old one it is, below 0 for none."""
        old = {place: number for number, places in enumerate(self.copies) for place in places}
        return Numbered(
            self.stack,
            tuple((old[place],) for place in sorted(old)),
            None if layers is None else tuple((layer,) if layer >= 0 else () for layer in layers),
        )

    def renumbered(self, pairs: Any) -> list[list[int]]:
        """The pairs in new numbers, without those whose layers are gone. Raises ValueError with what is no pair of the model's."""
        if not isinstance(pairs, list):
            raise ValueError(pairs)
        return [new for pair in pairs if (new := self._new(pair))]

    def _new(self, pair: Any) -> list[int]:
        if not isinstance(pair, list) or [type(number) for number in pair] != [int, int]:
            raise ValueError(pair)
        layer, head = pair
        if not 0 <= head < len(self.copies) or not 0 <= layer < (
            layer + 1 if self.layers is None else len(self.layers)
        ):
            raise ValueError(pair)
        layers = (layer,) if self.layers is None else self.layers[layer]
        return [layers[0], self.copies[head][0]] if layers else []


def numbered_heads(
    sizes: Sizes, factors: Mapping[str, Factor], partials: Partials, tiles: Callable[[str], bool]
) -> dict[str, dict[str, Numbered]]:
    """By file and key the pairs that a map speaks of, with where the heads go; `tiles`: whether an axis stands after itself."""

    def numbered(stack: str, axis: str) -> Numbered:
        return Numbered(stack, _copies(sizes.known[axis], factors[axis], partials, axis, tiles(axis)))

    return {
        file: {key: numbered(*said) for key, said in keys.items() if said[1] in sizes.known}
        for file, keys in sizes.architecture.numbered.items()
    }


def _copies(old: int, factor: Factor, partials: Partials, axis: str, tiled: bool) -> tuple[tuple[int, ...], ...]:
    if axis in partials:
        return tuple(tuple(partials[axis].places(head)) for head in range(old))
    times = int(factor)
    if tiled:
        return tuple(tuple(head + old * copy for copy in range(times)) for head in range(old))
    return tuple(tuple(range(head * times, (head + 1) * times)) for head in range(old))
