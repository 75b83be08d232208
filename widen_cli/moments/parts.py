"""Parameters that are made of several tensors of a checkpoint, as all experts of a layer are: how the whole grows.

A parameter's moments are one tensor, so they take one tree for each of its dimensions. The tensors that it is made of stand in
it as the cells of a grid; where all cells along a cut of a dimension grow alike there, the cut grows so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from widen_cli.dimensions import Copies, Growth, Laid, times
from widen_cli.plan.result import Gradient
from widen_cli.scales import ONE, Scale


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint within a parameter: its name and shape there, where it begins in the parameter, and along which
    dimension of the parameter each of its own lies."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    along: tuple[int, ...]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Part:
        """What a child process says of it."""
        return cls(told["name"], tuple(told["shape"]), tuple(told["at"]), tuple(told["along"]))

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Part:
        """A tensor that is a parameter as it is."""
        return cls(name, shape, (0,) * len(shape), tuple(range(len(shape))))


class UnevenPartsError(ValueError):
    """The parts of a parameter grow each in its own way."""


def joined(shape: tuple[int, ...], parts: Sequence[tuple[Part, Gradient]]) -> Gradient:
    """The gradient of a parameter of this shape whose parts have these; nothing is known of it where nothing is of a part.

    Raises UnevenPartsError where no trees for the dimensions of the whole say what becomes of each part.
    """
    if reason := next((gradient.reason for _, gradient in parts if gradient.reason), ""):
        return Gradient(reason=reason)
    cuts = [_cuts(axis, parts) for axis in range(len(shape))]
    if math.prod(map(len, cuts)) != len(parts):
        raise UnevenPartsError
    scale = _shared_scale(cuts, parts)
    growth = tuple(_laid(list(axis.values())) for axis in cuts)
    if tuple(tree.old for tree in growth) != shape:
        raise UnevenPartsError
    return Gradient(growth, scale, sum(gradient.unknown for _, gradient in parts))


def _cuts(axis: int, parts: Sequence[tuple[Part, Gradient]]) -> dict[int, Growth]:
    """How each cut of a dimension grows, by where it begins, in order; one place where a part has no such dimension."""
    found: dict[int, Growth] = {}
    for part, gradient in parts:
        tree = gradient.growth[part.along.index(axis)] if axis in part.along else Copies(1)
        if found.setdefault(part.at[axis], tree) != tree:
            raise UnevenPartsError
    return dict(sorted(found.items()))


def _shared_scale(cuts: list[dict[int, Growth]], parts: Sequence[tuple[Part, Gradient]]) -> Scale:
    """The factor of all parts; where they have several, these go to the cuts of the dimension along which they differ."""
    if len({gradient.scale for _, gradient in parts}) == 1:
        return parts[0][1].scale
    for axis, trees in enumerate(cuts):
        scales: dict[int, set[Scale]] = {}
        for part, gradient in parts:
            scales.setdefault(part.at[axis], set()).add(gradient.scale)
        if all(len(found) == 1 for found in scales.values()):
            for start, (scale,) in scales.items():
                trees[start] = times(trees[start], scale)
            return ONE
    raise UnevenPartsError


def _laid(trees: list[Growth]) -> Growth:
    """Trees one after the other, neighbours that do the same as one."""
    merged: list[Growth] = []
    for tree in trees:
        last = merged[-1] if merged else None
        if isinstance(last, Copies) and isinstance(tree, Copies) and replace(last, size=tree.size) == tree:
            merged[-1] = replace(last, size=last.size + tree.size)
        else:
            merged.append(tree)
    return merged[0] if len(merged) == 1 else Laid(tuple(merged))
