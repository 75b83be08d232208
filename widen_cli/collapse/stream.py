"""Streams wide tensors through the fold to the narrow output, in blocks of narrow rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.collapse.average import Distance
from widen_cli.collapse.filled import filled_apart
from widen_cli.collapse.fold import Fold
from widen_cli.collapse.rows import FoldedRows
from widen_cli.collapse.silent import silent_apart
from widen_cli.plan.result import TensorPlan
from widen_cli.scales import ONE, Scale
from widen_cli.stream import BLOCK_BYTES, StoredBytes, Target
from widen_cli.threads import WorkingThreads
from widen_cli.transform import Counts

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Task:
    """Narrow rows [start, stop) of a slice (None: of all of them, side by side) under one scale; or (`zero`) wide rows that
    hold nothing; or (`computed`) the wide tensor of this number, for what is computed in it; or (`silent`) a weight of this
    number that writes nothing."""

    slice: int | None
    start: int
    stop: int
    scale: Scale = ONE
    zero: bool = False
    computed: int | None = None
    silent: int | None = None


class FoldStream(WorkingThreads):
    """Carries folds out, on `threads` threads; what it finds depends on neither their number nor their order."""

    def __init__(self, folds: dict[str, Fold], threads: int) -> None:
        super().__init__(threads)
        self._folds = folds
        self._found: dict[str, dict[int, Distance]] = {}
        self._silent: dict[str, Distance] = {}

    @property
    def distances(self) -> dict[str, Distance]:
        """How far the copies of each tensor are apart, once `finish` has returned."""
        return {name: Distance.sum([parts[at] for at in sorted(parts)]) for name, parts in self._found.items()}

    @property
    def silent(self) -> dict[str, Distance]:
        """How far the weights of new layers that are to write nothing are from it, by their names in the wide model: measured
        by what the layer that they were made of holds."""
        return dict(sorted(self._silent.items()))

    def run(self, plan: TensorPlan, stored: StoredBytes, targets: Sequence[Target], forward_only: bool) -> Counts:
        """Writes one narrow tensor, `plan` being what is written and `stored` of no account."""
        name, counts = plan.source.name, Counts()
        work = _Work(self._folds[name], targets)
        self._found[name] = {}
        for number, task in enumerate(work.tasks()):
            silent = None if task.silent is None else self._folds[name].silent[task.silent].name
            self.start(work.task, task, partial(self._take, name, silent, number, counts), here=forward_only)
        return counts

    def _take(self, name: str, silent: str | None, number: int, counts: Counts, found: tuple[Counts, Distance]) -> None:
        done, distance = found
        counts.add(done)
        if silent is None:
            self._found[name][number] = distance
        else:
            self._silent[silent] = distance


class _Work:
    """What it takes to write one narrow tensor."""

    def __init__(self, fold: Fold, targets: Sequence[Target]) -> None:
        self.fold = fold
        self.targets = targets
        self.slices = [FoldedRows(each) for each in (fold, *fold.more)]
        # Where the slices that stand side by side begin, in narrow rows.
        self.columns = [(each, 0) for each in self.slices]
        if fold.stacked and fold.beside:
            count = fold.plan.source.shape[0]
            height = self.slices[0].layout.rows.old // count
            self.columns = [(self.slices[0], number * height) for number in range(count)]
        sizes = [each.narrow_bytes * each.layout.rows.old for each in self.slices]
        self.starts = list(accumulate(sizes, initial=0))

    def tasks(self) -> Iterator[_Task]:
        """The work in the order of the output."""
        if self.fold.plan.growth is None:
            stored = self.fold.wide[0]
            for start in range(0, stored.nbytes, BLOCK_BYTES):
                yield _Task(0, start, min(start + BLOCK_BYTES, stored.nbytes))
            return
        yield from self.rows()
        for number, each in enumerate(self.slices):
            if each.computed:
                yield from (_Task(number, 0, 0, computed=copy) for copy in range(len(each.fold.wide)))
                continue
            for start in range(0, len(each.rows.zeros), each.step):
                yield _Task(number, start, min(start + each.step, len(each.rows.zeros)), zero=True)
        yield from (_Task(0, 0, 0, silent=number) for number in range(len(self.fold.silent)))

    def rows(self) -> Iterator[_Task]:
        """All that is written."""
        if not self.fold.beside:
            for number, each in enumerate(self.slices):
                yield from (_Task(number, start, stop, scale) for start, stop, scale in each.spans())
            return
        height = self.columns[1][1] if len(self.columns) > 1 else 0
        height = height or self.slices[0].layout.rows.old
        for start, stop, scale in self.slices[0].spans():
            if start < height:
                yield _Task(None, start, min(stop, height), scale)

    def task(self, task: _Task) -> tuple[Counts, Distance]:
        counts = Counts()
        if self.fold.plan.growth is None:
            stored = self.fold.wide[0]
            self.write(task.start, stored.source.read(stored.offset + task.start, task.stop - task.start))
            return counts, Distance()
        if task.slice is None:
            return counts, self.side_by_side(task, counts)
        rows = self.slices[task.slice]
        if task.silent is not None:
            return counts, silent_apart(self.fold, self.fold.silent[task.silent])
        if task.computed is not None:
            return counts, filled_apart(rows, task.computed)
        if task.zero:
            return counts, rows.zero(rows.read(rows.rows.zeros[task.start : task.stop]))
        narrow, distance = rows.folded(task.start, task.stop, task.scale, counts)
        self.write(self.starts[task.slice] + task.start * rows.narrow_bytes, _bytes(narrow))
        return counts, distance

    def side_by_side(self, task: _Task, counts: Counts) -> Distance:
        """The same rows of all slices, in each narrow row one after the other."""
        parts: list[Array] = []
        distances: list[Distance] = []
        for each, first in self.columns:
            narrow, distance = each.folded(first + task.start, first + task.stop, task.scale, counts)
            width = each.fold.target.nbytes(each.fold.plan.source.shape[-1:])
            parts.append(np.frombuffer(_bytes(narrow), np.uint8).reshape(-1, width))
            distances.append(distance)
        together = np.concatenate(parts, axis=1)
        self.write(task.start * sum(each.narrow_bytes for each, _ in self.columns), _bytes(together))
        return Distance.sum(distances)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        for target in self.targets:
            target.writer.write_at(target.offset + offset, data)


def _bytes(narrow: Array) -> bytes | memoryview:
    return np.ascontiguousarray(narrow).data.cast("B") if narrow.size else b""
