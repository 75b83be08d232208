"""Streams wide tensors through the fold to the narrow output, in blocks of narrow rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    parts_apart,
    sum_of_parts,
    zeros_apart,
)
from widen_cli.dimensions import Copies, inverted, leaf_scales
from widen_cli.dtypes import STORED, DType
from widen_cli.errors import WidenError, printable
from widen_cli.places import Numbers, Places, places
from widen_cli.plan.narrowing import Header
from widen_cli.plan.result import DEPENDS, EXACT, TensorPlan
from widen_cli.safetensors_file import StoredTensor
from widen_cli.scales import ONE, Scale
from widen_cli.stream import BLOCK_BYTES, StoredBytes, Target, layout, parting
from widen_cli.threads import WorkingThreads
from widen_cli.transform import Counts, rounded_once

Array = npt.NDArray[Any]

# Of wide rows at a time: small enough that the numbers in float64 that are made of them stay in a core's cache.
_WIDE_BYTES = 1 << 20


@dataclass(frozen=True)
class Fold:
    """One narrow tensor: the plan that widens it, in the wide model's type, the wide tensors, and the type it is written in.

    `remedy`: only the same bits can be folded; what to do where they differ.
    """

    plan: TensorPlan
    wide: tuple[StoredTensor, ...]
    target: DType
    remedy: str | None = None

    @property
    def copies(self) -> bool:
        """Whether the wide model holds values of the tensor more than once, or zeros beside them."""
        return len(self.wide) > 1 or any(growth.new != growth.old for growth in self.plan.growth or ())

    @property
    def exactness(self) -> str:
        """How exactly the conversion had kept the values, coming from the type that is written now; as of a TensorPlan.

        What it does to a type with a small range matters where it makes values smaller.
        """
        if self.target.kind != self.plan.dtype.kind:
            return EXACT
        narrow = Header(self.plan.source.name, self.target, self.plan.source.shape)
        plan = replace(self.plan, source=narrow)
        shrinks = any(float(scale) < 1 for scale in plan.scales)
        return EXACT if plan.exactness == DEPENDS and not shrinks else plan.exactness


@dataclass(frozen=True)
class _Task:
    """Narrow rows [start, stop) under one scale, or (`zero`) wide rows that hold nothing."""

    start: int
    stop: int
    scale: Scale = ONE
    zero: bool = False


class FoldStream(WorkingThreads):
    """Carries folds out, on `threads` threads; what it finds depends on neither their number nor their order."""

    def __init__(self, folds: dict[str, Fold], threads: int) -> None:
        super().__init__(threads)
        self._folds = folds
        self._found: dict[str, dict[int, Distance]] = {}

    @property
    def distances(self) -> dict[str, Distance]:
        """How far the copies of each tensor are apart, once `finish` has returned."""
        return {name: Distance.sum([parts[at] for at in sorted(parts)]) for name, parts in self._found.items()}

    def run(self, plan: TensorPlan, stored: StoredBytes, targets: Sequence[Target], forward_only: bool) -> Counts:
        """Writes one narrow tensor, `plan` being what is written and `stored` of no account."""
        name, counts = plan.source.name, Counts()
        work = _Work(self._folds[name], targets)
        self._found[name] = {}
        for number, task in enumerate(work.tasks()):
            self.start(work.task, task, partial(self._take, name, number, counts), here=forward_only)
        return counts

    def _take(self, name: str, number: int, counts: Counts, found: tuple[Counts, Distance]) -> None:
        done, self._found[name][number] = found
        counts.add(done)


class _Work:
    def __init__(self, fold: Fold, targets: Sequence[Target]) -> None:
        self.fold = fold
        self.targets = targets
        self.layout = layout(fold.plan)
        self.rows: Places = places(self.layout.rows)
        # Tensors that are numbered copies are one more dimension, whose old size is 1.
        self.trailing = (Copies(1, len(fold.wide)), *self.layout.trailing)
        self.blocks = fold.plan.dtype.kind == "blocks" and fold.target.kind == "blocks"
        self.old_sizes = self.layout.old_sizes
        self.new_bytes = self.layout.new_bytes
        self.parting = parting(fold.plan, self.layout)

    def tasks(self) -> Iterator[_Task]:
        """The work in the order of the output."""
        if self.fold.plan.growth is None:
            (stored,) = self.fold.wide
            for start in range(0, stored.nbytes, BLOCK_BYTES):
                yield _Task(start, min(start + BLOCK_BYTES, stored.nbytes))
            return
        step = max(1, _WIDE_BYTES // max(1, self.new_bytes * len(self.rows.copies) * len(self.fold.wide)))
        for start, stop, scale in self.rows.parts:
            for row in range(start, stop, step):
                yield _Task(row, min(row + step, stop), scale)
        for start in range(0, len(self.rows.zeros), step):
            yield _Task(start, min(start + step, len(self.rows.zeros)), zero=True)

    def task(self, task: _Task) -> tuple[Counts, Distance]:
        counts = Counts()
        if self.fold.plan.growth is None:
            (stored,) = self.fold.wide
            self.write(task.start, stored.source.read(stored.offset + task.start, task.stop - task.start))
            return counts, Distance()
        if task.zero:
            return counts, self.zero(self.read(self.rows.zeros[task.start : task.stop]))
        copies = self.rows.copies[:, task.start : task.stop]
        needed = np.unique(copies)
        wide = self.read(needed)
        rows = Places(
            np.searchsorted(needed, copies), self.rows.counts[task.start : task.stop], np.empty(0, np.int64), ()
        )
        scale = (task.scale * self.fold.plan.scale) ** -1
        if self.parting is not None:
            narrow, distance = self.folded_parts(wide, rows, scale, counts, needed, task.start)
        else:
            narrow, distance = (self.folded_blocks if self.blocks else self.folded)(wide, rows, scale, counts)
        data = np.ascontiguousarray(narrow).data.cast("B") if narrow.size else b""
        self.write(task.start * self.fold.target.nbytes(self.old_sizes), data)
        return counts, distance

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
        if self.blocks or self.fold.remedy is not None:
            if wide.any():
                raise self.moved()
            return Distance()
        return zeros_apart(self.values(wide), self.fold.plan.offset)

    def folded(self, wide: Array, rows: Places, scale: Scale, counts: Counts) -> tuple[Array, Distance]:
        plan, values = self.fold.plan, self.values(wide)
        if plan.copy_factors:
            mean = mean_of_divisors(values[rows.copies[0]], plan.copy_factors)
        else:
            mean = mean_of_copies(values, (rows, *map(places, self.trailing)), plan.offset)
        if self.fold.remedy is not None and (not mean.alike or mean.distance.apart):
            raise self.moved()
        held = STORED["F32"] if plan.dtype.kind == "blocks" else plan.dtype
        inverse = tuple(inverted(growth) for growth in self.trailing)
        return folded(mean, inverse, scale, held, self.fold.target, plan.offset, counts), mean.distance

    def folded_parts(
        self, wide: Array, rows: Places, scale: Scale, counts: Counts, needed: Numbers, start: int
    ) -> tuple[Array, Distance]:
        """Rows whose copies, along the dimension that is read, are parts: their sums, and how far the wide ones are from the
        parts of these. `needed` are the numbers of the wide rows, `start` is that of the first narrow one."""
        plan, values = self.fold.plan, self.values(wide)
        assert self.parting is not None
        assert plan.dtype.numpy is not None
        axis = self.parting.axis + bool(self.parting.axis)
        dimensions = [rows, *map(places, self.trailing)]
        sums = sum_of_parts(values, dimensions, axis)
        dimensions[axis] = places(Copies(sums.shape[axis]))
        mean = mean_of_copies(sums, dimensions, 0)
        means = mean.first if mean.means is None else mean.means
        with np.errstate(over="ignore", invalid="ignore"):
            bits = rounded_once(means[:, 0], plan.dtype.numpy)
        parts = self.parting.wide(bits.view(f"u{bits.dtype.itemsize}"), start, needed).view(plan.dtype.numpy)
        distance = parts_apart(values, np.broadcast_to(parts[:, None], values.shape))
        if self.fold.remedy is not None and distance.apart:
            raise self.moved()
        inverse = tuple(inverted(growth) for growth in self.trailing)
        folded_sums = Mean(mean.first, means, distance)
        return folded(folded_sums, inverse, scale, plan.dtype, self.fold.target, plan.offset, counts), distance

    def folded_blocks(self, wide: Array, rows: Places, scale: Scale, counts: Counts) -> tuple[Array, Distance]:
        """Rows of quantised blocks, whose copies have to be the same."""
        (growth,) = self.layout.trailing
        kind = block_type(self.fold.plan.dtype.name)
        first = wide[rows.copies[0], 0]
        alike = all(np.array_equal(wide[copy, at], first) for copy in rows.copies for at in range(wide.shape[1]))
        narrow = narrow_row_blocks(np.ascontiguousarray(first), kind, growth) if alike else None
        if narrow is None:
            raise self.moved()
        scale = scale * next(leaf_scales(growth)) ** -1
        if not scale.is_one:
            narrow, scaled = scale_blocks(narrow, kind, scale)
            counts.add(scaled)
        return narrow, Distance(values=wide.shape[0] * wide.shape[1] * growth.new)

    def moved(self) -> WidenError:
        names = ", ".join(printable(stored.name) for stored in self.fold.wide[:2])
        kind = self.fold.plan.dtype.name
        return WidenError(
            f"tensor '{names}': its copies have moved apart, and {kind} as it is stored has no mean; {self.fold.remedy}"
        )

    def write(self, offset: int, data: bytes | memoryview) -> None:
        for target in self.targets:
            target.writer.write_at(target.offset + offset, data)
