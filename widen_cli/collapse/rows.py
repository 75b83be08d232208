"""Narrow rows made of wide ones: read where their copies stand, folded, and how far the copies are apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.blocks import block_type, dequantized, narrow_row_blocks, scale_blocks
from widen_cli.collapse.average import (
    Distance,
    Mean,
    folded,
    mean_of_copies,
    mean_of_divisors,
    sum_of_parts,
    zeros_apart,
)
from widen_cli.collapse.fold import Fold
from widen_cli.dimensions import Copies, Fill, inverted, leaf_scales, nested
from widen_cli.dtypes import STORED
from widen_cli.places import Numbers, Places, places
from widen_cli.plan.result import TensorPlan
from widen_cli.scales import Scale
from widen_cli.stream import Layout, layout
from widen_cli.transform import Counts, rounded_once

Array = npt.NDArray[Any]

# Of wide rows at a time: small enough that the numbers in float64 that are made of them stay in a core's cache.
_WIDE_BYTES = 1 << 20


class FoldedRows:
    """The rows of one narrow tensor, or of a slice of one, as `fold` makes them.

    `computed`: what belongs where no copy is stands in no narrow value by itself (means, draws, parts of a sum), so that its
    distance is measured once all of them are known.
    """

    def __init__(self, fold: Fold) -> None:
        self.fold = fold
        self.layout = stacked_layout(fold.plan) if fold.stacked else layout(fold.plan)
        self.rows: Places = places(self.layout.rows)
        # Tensors that are numbered copies are one more dimension, whose old size is 1.
        self.trailing = (Copies(1, len(fold.wide)), *self.layout.trailing)
        self.blocks = fold.plan.dtype.kind == "blocks" and fold.target.kind == "blocks"
        self.new_bytes = self.layout.new_bytes
        self.narrow_bytes = fold.target.nbytes(self.layout.old_sizes)
        self.computed = bool(fold.plan.fills - {Fill.ZERO}) or fold.plan.split is not None
        self.step = max(1, _WIDE_BYTES // max(1, self.new_bytes * len(self.rows.copies) * len(fold.wide)))

    @property
    def summed(self) -> int | None:
        """Along which dimension of [rows, wide tensors, *trailing] copies are parts of a sum; None where they are equal."""
        if self.fold.plan.split is None:
            return None
        leading = len(self.fold.plan.growth or ()) - len(self.layout.trailing)
        number = self.fold.plan.split.dimension - leading
        return 0 if number < 0 else number + 2

    def spans(self) -> Iterator[tuple[int, int, Scale]]:
        """All narrow rows in order, as many at a time as suits, with the scale that is theirs."""
        for start, stop, scale in self.rows.parts:
            for row in range(start, stop, self.step):
                yield row, min(row + self.step, stop), scale

    def folded(self, start: int, stop: int, scale: Scale, counts: Counts) -> tuple[Array, Distance]:
        """Narrow rows [start, stop) as the target's bits or bytes, and how far their copies are apart; `scale` is theirs.

        Raises WidenError where copies have moved apart of which there is no mean.
        """
        wide, rows = self.wide(start, stop)
        scale = (scale * self.fold.plan.scale) ** -1
        return (self.folded_blocks if self.blocks else self.folded_values)(wide, rows, scale, counts)

    def wide(self, start: int, stop: int) -> tuple[Array, Places]:
        """The wide rows that narrow rows [start, stop) have copies in, and where these stand among them."""
        copies = self.rows.copies[:, start:stop]
        needed = np.unique(copies)
        rows = Places(np.searchsorted(needed, copies), self.rows.counts[start:stop], np.empty(0, np.int64), ())
        return self.read(needed), rows

    def read(self, rows: Numbers) -> Array:
        """Wide rows in ascending order as bytes, [rows, wide tensors, bytes of a row], neighbours by one reading."""
        result = np.empty((len(rows), len(self.fold.wide), self.new_bytes), np.uint8)
        cuts = np.flatnonzero(np.diff(rows, prepend=-2, append=-2) != 1)
        for at, stored in enumerate(self.fold.wide):
            for begin, end in pairwise(cuts):
                start, nbytes = stored.offset + int(rows[begin]) * self.new_bytes, int(end - begin) * self.new_bytes
                data = np.frombuffer(stored.source.read(start, nbytes), np.uint8)
                result[begin:end, at] = data.reshape(-1, self.new_bytes)
        return result

    def values(self, wide: Array) -> Array:
        """Wide rows as numbers, [rows, wide tensors, *sizes]."""
        kind = self.fold.plan.dtype
        sizes = tuple(growth.new for growth in self.layout.trailing)
        if kind.kind == "blocks":
            return dequantized(wide.reshape(-1, self.new_bytes), block_type(kind.name)).reshape(*wide.shape[:2], *sizes)
        assert kind.numpy is not None
        return wide.view(kind.numpy).reshape(*wide.shape[:2], *sizes)

    def zero(self, wide: Array) -> Distance:
        """The distance of wide rows that hold nothing. Raises WidenError where they have to and do not."""
        if self.blocks or self.fold.remedy is not None:
            if wide.any():
                raise self.fold.moved()
            return Distance()
        return zeros_apart(self.values(wide), self.fold.plan.offset)

    def mean(self, wide: Array, rows: Places) -> Mean:
        """The means of the copies in wide rows; of parts, those of the copies of their sums."""
        plan, values = self.fold.plan, self.values(wide)
        if plan.copy_factors:
            return mean_of_divisors(values[rows.copies[0]], plan.copy_factors)
        dimensions = [rows, *map(places, self.trailing)]
        if self.summed is None:
            return mean_of_copies(values, dimensions, plan.offset, zeros=not self.computed)
        sums = sum_of_parts(values, dimensions, self.summed)
        dimensions[self.summed] = places(Copies(sums.shape[self.summed]))
        mean = mean_of_copies(sums, dimensions, 0, zeros=False)
        # The distance is that from the parts, and sums of numbers have a type of their own.
        return Mean(mean.first, mean.first if mean.means is None else mean.means, Distance())

    def as_stored(self, start: int, stop: int) -> bytes:
        """The means of narrow rows [start, stop) as the wide model would hold them, factors and all, in its type."""
        mean, kind = self.mean(*self.wide(start, stop)), self.fold.plan.dtype.numpy
        assert kind is not None
        if mean.means is None:
            return np.ascontiguousarray(mean.first).tobytes()
        with np.errstate(over="ignore", invalid="ignore"):
            return rounded_once(mean.means, kind).tobytes()

    def folded_values(self, wide: Array, rows: Places, scale: Scale, counts: Counts) -> tuple[Array, Distance]:
        """Rows of numbers."""
        plan, mean = self.fold.plan, self.mean(wide, rows)
        if self.fold.remedy is not None and not (mean.alike or self.summed is not None):
            raise self.fold.moved()
        if self.fold.remedy is not None and mean.distance.apart:
            raise self.fold.moved()
        held = STORED["F32"] if plan.dtype.kind == "blocks" else plan.dtype
        inverse = tuple(inverted(growth) for growth in self.trailing)
        return folded(mean, inverse, scale, held, self.fold.target, plan.offset, counts), mean.distance

    def folded_blocks(self, wide: Array, rows: Places, scale: Scale, counts: Counts) -> tuple[Array, Distance]:
        """Rows of quantised blocks, whose copies have to be the same."""
        (growth,) = self.layout.trailing
        kind = block_type(self.fold.plan.dtype.name)
        first = wide[rows.copies[0], 0]
        alike = all(np.array_equal(wide[copy, at], first) for copy in rows.copies for at in range(wide.shape[1]))
        narrow = narrow_row_blocks(np.ascontiguousarray(first), kind, growth) if alike else None
        if narrow is None:
            raise self.fold.moved()
        scale = scale * next(leaf_scales(growth)) ** -1
        if not scale.is_one:
            narrow, scaled = scale_blocks(narrow, kind, scale)
            counts.add(scaled)
        return narrow, Distance(values=wide.shape[0] * wide.shape[1] * growth.new)


def stacked_layout(plan: TensorPlan) -> Layout:
    """A tensor that holds several matrices, seen as the rows of all of them."""
    assert plan.growth is not None
    first, second, *trailing = plan.growth
    return Layout(nested(first, second), tuple(trailing), plan.source.dtype, plan.dtype)
