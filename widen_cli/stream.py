"""Streams tensors from a source through the transform to known offsets of an output, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from widen_cli.blocks import block_type, dequantized, scale_blocks, widen_row_blocks
from widen_cli.dimensions import Copies, Fill, Growth, Laid, Run, fills, leaf_scales, nested, runs
from widen_cli.draws import Draws
from widen_cli.dtypes import DType
from widen_cli.plan.result import TensorPlan
from widen_cli.scales import Scale
from widen_cli.splitting import Parting
from widen_cli.threads import WorkingThreads
from widen_cli.transform import Cast, Counts, rounded_mean, scaled_values, times_copies, valued, widened_rows

BLOCK_BYTES = 4 << 20  # of output; small enough for the caches, large enough that a system call costs nothing beside it
ROWS_TOGETHER = (
    8  # so many rows, that are copied as one, are better seen as one: gate and up of a unit, where they alternate
)
SPLIT_BYTES = BLOCK_BYTES >> 3  # of what is split, which takes several numbers of 64 bits for each that is written
ROW_BYTES = 1 << 20  # rows above this size are taken apart along their next dimension


class Reader(Protocol):
    """Where stored bytes come from; a sequential one is asked in ascending order only."""

    @property
    def sequential(self) -> bool: ...
    def read(self, offset: int, nbytes: int) -> bytes | memoryview: ...


class Writer(Protocol):
    """Where bytes go, by offset."""

    def write_at(self, offset: int, data: memoryview | bytes) -> None: ...


class StoredBytes(Protocol):
    """A stored tensor's bytes: their place in a source."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def source(self) -> Reader: ...


@dataclass(frozen=True)
class Target:
    """The place of one written tensor."""

    writer: Writer
    offset: int


class Stream(Protocol):
    """Carries tensors out, one after the other; see TensorStream."""

    def run(self, plan: TensorPlan, stored: StoredBytes, targets: Sequence[Target], forward_only: bool) -> Counts: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Block:
    """A piece of one run: rows [run.start, run.stop), written from row `row` on."""

    run: Run
    row: int

    @property
    def rows(self) -> int:
        """How many rows are written."""
        return (self.run.stop - self.run.start) * self.run.each

    def origins(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The old row of each row written, and whether it is zero instead."""
        run, copy = self.run, np.arange(self.rows) % self.run.each
        return np.arange(run.start, run.stop).repeat(run.each), (copy >= run.live) | run.filled

    @property
    def computed(self) -> bool:
        """Whether rows are filled with something that has to be computed."""
        return self.run.fill is not Fill.ZERO and (self.run.filled or self.run.live < self.run.each)


@dataclass(frozen=True)
class Layout:
    """A tensor seen as rows: how the rows grow, and how each row's trailing dimensions do."""

    rows: Growth
    trailing: tuple[Growth, ...]
    source: DType
    target: DType

    @property
    def old_sizes(self) -> tuple[int, ...]:
        return tuple(growth.old for growth in self.trailing)

    @property
    def old_bytes(self) -> int:
        return self.source.nbytes(self.old_sizes)

    @property
    def new_bytes(self) -> int:
        return self.target.nbytes(tuple(growth.new for growth in self.trailing))


def layout(plan: TensorPlan) -> Layout:
    """Splits a tensor's dimensions into rows and what a row holds, so that a row stays small."""
    dimensions = plan.growth or ()
    if len(dimensions) < 2:
        return Layout(Copies(1), dimensions, plan.source.dtype, plan.dtype)
    leading = len(dimensions) - 1 if plan.source.dtype.kind == "blocks" else 1
    # What is split is a dimension of its own.
    last = len(dimensions) - 1 if plan.split is None else max(1, plan.split.dimension)
    while (
        leading < last
        and not fills(dimensions[0]) - {Fill.ZERO}
        and plan.source.dtype.nbytes(tuple(g.old for g in dimensions[leading:])) > ROW_BYTES
    ):
        leading += 1
    rows = dimensions[0]
    for growth in dimensions[1:leading]:
        rows = nested(rows, growth)
    trailing = dimensions[leading:]
    if plan.source.dtype.kind == "blocks" and 1 < (together := _together(rows)) <= ROWS_TOGETHER:
        rows, trailing = _without_leaf(rows), (nested(Copies(together), trailing[0]),)
    return Layout(rows, trailing, plan.source.dtype, plan.dtype)


def parting(plan: TensorPlan, shape: Layout) -> Parting | None:
    """How a tensor's rows are split, None where its copies are equal."""
    if plan.split is None:
        return None
    leading = len(plan.growth or ()) - len(shape.trailing)
    axis = 0 if plan.split.dimension < leading else plan.split.dimension - leading + 1
    return Parting(plan.split, plan.dtype, (shape.rows, *shape.trailing), axis)


def _together(rows: Growth) -> int:
    """How many neighbouring rows are always copied as one, 1 where they are copied one by one."""
    if isinstance(rows, Laid) or rows.inner is None:
        return 1
    inner = rows.inner
    return inner.size if isinstance(inner, Copies) and inner.inner is None and inner.copies == 1 else _together(inner)


def _without_leaf(rows: Growth) -> Growth:
    """The tree of rows copied as one, as if each lot of them were a row; their factor stays."""
    assert isinstance(rows, Copies)
    assert isinstance(rows.inner, Copies)
    inner = rows.inner
    return replace(rows, inner=_without_leaf(inner)) if inner.inner else replace(rows, inner=None, scale=inner.scale)


def blocks(shape: Layout, limit: int) -> Iterator[list[Block]]:
    """The work of a tensor, in the order of the output, as groups.

    The groups' old rows follow one another; within a group rows may be met again (copies of a head), so a source that
    cannot go back has to hold a group's rows.
    """
    group: list[Block] = []
    stop, row = 0, 0
    planned = runs(shape.rows)
    # The first old row that is still to come, run by run: before it, nothing has to be kept.
    coming = list(accumulate((run.start for run in reversed(planned)), min))[::-1]
    for run, first in zip(planned, coming, strict=True):
        if first >= stop and group:
            yield group
            group = []
        stop = max(stop, run.stop)
        step = max(1, limit // max(1, shape.new_bytes * run.each))
        for start in range(run.start, run.stop, step):
            piece = replace(run, start=start, stop=min(start + step, run.stop))
            group.append(Block(piece, row))
            row += (piece.stop - piece.start) * piece.each
    if group:
        yield group


class TensorStream(WorkingThreads):
    """Carries tensors out, on `threads` threads where source and targets can be read and written at any offset."""

    def run(self, plan: TensorPlan, stored: StoredBytes, targets: Sequence[Target], forward_only: bool) -> Counts:
        """Writes one tensor, whose last blocks may be under way while the next one begins.

        All bytes are written, and the counts of what happened to the values complete, when `finish` has returned.
        """
        counts = Counts()
        if plan.growth is None or stored.nbytes == 0:
            _copy(stored, targets)
            return counts
        if stored.source.sequential and Fill.MEAN in fills(plan.growth[0]):
            stored = _Held(bytes(stored.source.read(stored.offset, stored.nbytes)))
        work = TensorWork(plan, layout(plan), stored, targets)
        limit = BLOCK_BYTES if plan.split is None else SPLIT_BYTES
        if self._pool is None or stored.source.sequential or forward_only:
            for group in blocks(work.layout, limit):
                counts.add(work.group(group))
        else:
            for task in _tasks(blocks(work.layout, limit), work.layout.new_bytes, limit):
                self.start(work.task, task, counts.add, here=False)
        return counts


def _tasks(groups: Iterable[list[Block]], row_bytes: int, limit: int) -> Iterator[list[Block]]:
    """Small groups together, as the heads of a tensor are, and large ones block by block: what a thread does at a time."""
    small: list[Block] = []
    held = 0
    for group in groups:
        nbytes = sum(block.rows for block in group) * row_bytes
        if small and held + nbytes > limit:
            yield small
            small, held = [], 0
        if nbytes > limit:
            yield from ([block] for block in group)
        else:
            small, held = small + group, held + nbytes
    if small:
        yield small


@dataclass(frozen=True)
class _Held:
    """A tensor of a source that cannot go back, held since its rows have to be read twice."""

    data: bytes
    offset: ClassVar[int] = 0
    sequential: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def source(self) -> Reader:
        return self

    def read(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.data)[offset : offset + nbytes]


@dataclass(frozen=True)
class TensorWork:
    """What one tensor takes: its plan, the layout of its rows, where it is read from and written to."""

    plan: TensorPlan
    layout: Layout
    stored: StoredBytes
    targets: Sequence[Target]
    lock: Lock = field(default_factory=Lock)
    means: list[npt.NDArray[Any]] = field(default_factory=list)

    def group(self, group: list[Block]) -> Counts:
        """A group in order, its old rows read once."""
        counts = Counts()
        if not any(block.run.again for block in group):
            for block in group:
                counts.add(self.block(block))
            return counts
        start, stop = min(block.run.start for block in group), max(block.run.stop for block in group)
        held = memoryview(self.read(start, stop))
        for block in group:
            begin, end = ((row - start) * self.layout.old_bytes for row in (block.run.start, block.run.stop))
            counts.add(self.widen(block, held[begin:end]))
        return counts

    def task(self, task: list[Block]) -> Counts:
        """Blocks whose rows follow one another, all copies of their old rows among them; or a block alone."""
        first = task[0].run
        if len(task) == 1 or self.parting or any(block.run.scale != first.scale or block.computed for block in task):
            return self.group(task)
        start, stop = min(block.run.start for block in task), max(block.run.stop for block in task)
        counts, origins = Counts(), [block.origins() for block in task]
        wide = self.widened(self.read(start, stop), Run(start, stop, 1, first.scale), counts)
        rows, zero = (np.concatenate(parts) for parts in zip(*origins, strict=True))
        wide = wide[rows - start]
        wide[zero] = self.cast.silent
        self.write(task[0].row, wide)
        return counts

    def read(self, start: int, stop: int) -> bytes | memoryview:
        row = self.layout.old_bytes
        return self.stored.source.read(self.stored.offset + start * row, (stop - start) * row)

    def widened(self, data: bytes | memoryview, run: Run, counts: Counts) -> npt.NDArray[Any]:
        """A block's rows with their trailing dimensions widened, [n, ...]."""
        scale = run.scale * self.plan.scale
        if self.layout.target.kind == "blocks":
            return _widened_blocks(data, self.layout, scale, counts)
        wide = widened_rows(
            self.values(data, run), self.layout.trailing, scale, self.cast, counts, self.draws.from_row(run.start)
        )
        return times_copies(wide, self.plan.copy_factors, counts) if self.plan.copy_factors else wide

    def values(self, data: bytes | memoryview, run: Run) -> npt.NDArray[Any]:
        """A block's rows as numbers, [n, *old sizes]."""
        if self.layout.source.kind == "blocks":
            stored = np.frombuffer(data, np.uint8).reshape(run.stop - run.start, self.layout.old_bytes)
            return dequantized(stored, block_type(self.layout.source.name))
        return np.frombuffer(data, self.layout.source.numpy).reshape(run.stop - run.start, *self.layout.old_sizes)

    @cached_property
    def parting(self) -> Parting | None:
        return parting(self.plan, self.layout)

    @property
    def cast(self) -> Cast:
        return Cast(self.plan.held, self.layout.target, self.plan.offset)

    def block(self, block: Block) -> Counts:
        return self.widen(block, self.read(block.run.start, block.run.stop))

    def widen(self, block: Block, data: bytes | memoryview) -> Counts:
        """Widens a block's rows and writes them to every target."""
        counts, run = Counts(), block.run
        if self.parting is not None:
            scale = run.scale * self.plan.scale
            rows = scaled_values(self.values(data, run), self.layout.trailing, scale, self.cast, counts)
            self.write(block.row, self.parting.wide(rows, run.start, block.row + np.arange(block.rows)))
            return Counts() if run.again else counts
        wide = self.widened(data, run, counts)
        narrow, counts = wide, Counts() if run.again else counts
        if run.each > 1:
            wide = np.repeat(narrow, run.each, axis=0)
            for copy in range(run.live, run.each):
                wide[copy :: run.each] = self.filled(narrow, run.start, copy, run.fill, counts)
        if run.filled:
            wide = self.filled(wide, block.row, 0, run.fill, counts)
        self.write(block.row, wide)
        return counts

    def filled(self, wide: npt.NDArray[Any], row: int, copy: int, fill: Fill, counts: Counts) -> npt.NDArray[Any]:
        """What stands in the place of widened rows, of which the first has the number `row`, or of a copy of them."""
        if fill is Fill.MEAN:
            return np.broadcast_to(self.mean(counts), wide.shape)
        if fill is Fill.RANDOM:
            flat = wide.reshape(len(wide), -1)
            return self.draws.from_row(row).of_rows(flat, flat.shape[1], copy * flat.shape[1]).reshape(wide.shape)
        return np.full_like(wide, self.cast.silent)

    def mean(self, counts: Counts) -> npt.NDArray[Any]:
        """The mean of all rows, widened: computed once, row after row, and counted where it is."""
        with self.lock:
            if not self.means:
                self.means.append(self.mean_of_rows(counts))
            return self.means[0]

    def mean_of_rows(self, counts: Counts) -> npt.NDArray[Any]:
        rows, scale = self.layout.rows.old, next(leaf_scales(self.layout.rows))
        total: Any = 0
        step = max(1, BLOCK_BYTES // max(1, self.layout.new_bytes))
        for start in range(0, rows, step):
            run = Run(start, min(start + step, rows), 1, scale)
            bits = self.widened(self.read(run.start, run.stop), run, Counts())
            with np.errstate(over="ignore", invalid="ignore"):
                total = total + valued(bits, self.layout.target).astype(self.cast.wide).sum(axis=0)
        return rounded_mean(total / rows, self.layout.target, counts)

    @property
    def draws(self) -> Draws:
        return Draws.of(self.plan.seed, self.plan.source.name)

    def write(self, row: int, wide: npt.NDArray[Any]) -> None:
        """Writes widened rows to every target, from row `row` on."""
        data = np.ascontiguousarray(wide).data.cast("B") if wide.size else b""
        for target in self.targets:
            target.writer.write_at(target.offset + row * self.layout.new_bytes, data)


def _widened_blocks(data: bytes | memoryview, shape: Layout, scale: Scale, counts: Counts) -> npt.NDArray[Any]:
    """Rows of quantised blocks, [n, row bytes], with their last dimension widened and their block scales multiplied."""
    (growth,) = shape.trailing
    kind = block_type(shape.source.name)
    rows = np.frombuffer(data, np.uint8).reshape(-1, shape.old_bytes)
    scale = scale * next(leaf_scales(growth))
    if not scale.is_one:
        rows, scaled = scale_blocks(rows, kind, scale)
        counts.add(scaled)
    return widen_row_blocks(rows, kind, growth)


def _copy(stored: StoredBytes, targets: Sequence[Target]) -> None:
    for start in range(0, stored.nbytes, BLOCK_BYTES):
        data = stored.source.read(stored.offset + start, min(BLOCK_BYTES, stored.nbytes - start))
        for target in targets:
            target.writer.write_at(target.offset + start, data)
