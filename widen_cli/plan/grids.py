"""Weights beside which a tensor of their own holds the numbers that multiply their blocks: block-scaled FP8, and MXFP4.

Source: DeepSeek-V3's and transformers' fine-grained FP8: `weight_scale_inv` [ceil(out / b), ceil(in / b)] holds what the
values of a block of b x b are multiplied by. A widened weight keeps its bytes; its factor goes into the grid. For MXFP4
see packed.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.dimensions import Copies, Fill, Growth, Laid, Run, runs
from widen_cli.errors import printable
from widen_cli.map_rules import BLOCKS, SCALES
from widen_cli.plan.match import GRID, StoredHeader
from widen_cli.plan.packed import CODES, POWERS, SIZE, PackedWeight
from widen_cli.plan.result import TensorPlan
from widen_cli.scales import ONE, Scale

BLOCK = (128, 128)

Place = tuple[int, Scale]


class UnfitGridError(Exception):
    """A weight whose blocks cannot be widened under one number each; the text says why."""


def block_size(config: ModelConfig) -> tuple[int, int]:
    """Rows and columns of a block, by the config's quantization_config; 128 by 128 where it does not say."""
    stated: Any = config.get("quantization_config.weight_block_size")
    if isinstance(stated, list) and len(stated) == 2 and all(isinstance(size, int) and size > 0 for size in stated):
        return stated[0], stated[1]
    return BLOCK


def with_grid(plan: TensorPlan, grid: StoredHeader, block: tuple[int, int]) -> tuple[TensorPlan, TensorPlan]:
    """The plans of a weight and of its grid: the weight's bytes are moved, its factors go into the grid.

    Raises UnfitGridError where a block of the wide weight would hold values of two old ones.
    """
    expected = tuple(-(-size // side) for size, side in zip(plan.source.shape, block, strict=True))
    if len(plan.source.shape) != 2 or grid.shape != expected:
        raise UnfitGridError(
            f"tensor '{printable(grid.name)}' has shape {list(grid.shape)}, where blocks of {block[0]} x {block[1]} need "
            f"{list(expected)}; the config's weight_block_size belongs to another model"
        )
    growth = plan.growth or ()
    if plan.fills - {Fill.ZERO}:
        raise UnfitGridError(
            f"tensor '{printable(plan.source.name)}' is block-scaled FP8, of whose values no mean is taken and none is drawn; "
            "dequantise the model first"
        )
    try:
        own = tuple(_grid_growth(tree, side) for tree, side in zip(growth, block, strict=True))
    except UnfitGridError as error:
        raise UnfitGridError(f"tensor '{printable(plan.source.name)}': {error}") from None
    return plan.without_factors, TensorPlan(grid, (grid.name,), plan.pattern + GRID, grid.dtype, own, plan.scale)


def apart(plans: Sequence[TensorPlan], order: Sequence[str]) -> tuple[TensorPlan, ...]:
    """The plans with those of weights in MXFP4 blocks taken apart: one for the codes, which are moved, and one for the
    scales, which take the factors. Where a weight is in two tensors all stand in the `order` of the input, as a pipe gives
    them; those it lacks come first."""
    if not any(isinstance(plan.source, PackedWeight) or plan.pattern.endswith(GRID) for plan in plans):
        return tuple(plans)
    halves = [half for plan in plans for half in _halves(plan)]
    made = [plan for plan in halves if plan.made]
    place = {name: number for number, name in enumerate(order)}
    return (*made, *sorted((plan for plan in halves if not plan.made), key=lambda plan: place[plan.source.name]))


def _halves(plan: TensorPlan) -> tuple[TensorPlan, ...]:
    weight = plan.source
    if not isinstance(weight, PackedWeight):
        return (plan,)
    growth = plan.growth or ()
    own = (*growth[:-1], _grid_growth(growth[-1], SIZE))
    names = tuple(name.removesuffix(BLOCKS) + SCALES for name in plan.names)
    codes = replace(plan.without_factors, source=weight.codes, dtype=CODES, pattern=plan.pattern + BLOCKS)
    return codes, TensorPlan(weight.scales, names, plan.pattern + SCALES, POWERS, own, plan.scale)


# Experts by the thousand have the same few dimensions.
@lru_cache(maxsize=256)
def _grid_growth(tree: Growth, side: int) -> Growth:
    """How one dimension of the grid grows: for each new block, the old one that its values come from."""
    places: list[Place] = []
    held: set[Place] = set()
    for position, place in enumerate(_places(runs(tree), side)):
        if position % side == 0 and position:
            places.append(_only(held, side))
            held = set()
        held.add(place)
    places.append(_only(held, side))
    try:
        return _as_growth(places, -(-tree.old // side), side)
    except UnfitGridError:
        # Parts that begin and end with blocks are laid each by itself.
        if isinstance(tree, Laid) and not any(part.old % side or part.new % side for part in tree.parts):
            return Laid(tuple(_grid_growth(part, side) for part in tree.parts))
        raise


def _places(found: Sequence[Run], side: int) -> Iterator[Place]:
    """The old block and the factor of each new position."""
    for run in found:
        for old in range(run.start, run.stop):
            yield from ((old // side, run.scale) for _ in range(run.each))


def _only(held: set[Place], side: int) -> Place:
    if len(held) > 1:
        raise UnfitGridError(
            f"a block of {side} would hold values of two blocks of its {GRID[1:]}, each with a number "
            "of its own; use --layout tile, or grow other axes"
        )
    return next(iter(held))


def _as_growth(places: list[Place], old: int, side: int) -> Growth:
    """The sequence of old blocks as a growth tree."""
    scales = {scale for _, scale in places}
    numbers = [number for number, _ in places]
    copies = len(numbers) // old
    for unit in (unit for unit in range(1, old + 1) if old % unit == 0 and len(scales) == 1):
        groups = [range(start, start + unit) for start in range(0, old, unit)]
        if numbers == [number for group in groups for _ in range(copies) for number in group]:
            inner = Copies(unit, 1, False, next(iter(scales)))
            return Copies(old // unit, copies, False, ONE, inner)
    parts: list[Growth] = []
    for number in range(old):
        own = [place for place in places if place[0] == number]
        if len(set(own)) != 1:
            raise UnfitGridError(f"parts with factors of their own share a block of {side}")
        parts.append(Copies(1, len(own), False, own[0][1]))
    if numbers != sorted(numbers):
        raise UnfitGridError(f"rows of {side} cannot be laid so block by block; use --layout interleave")
    return Laid(tuple(parts))
