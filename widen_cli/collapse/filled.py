"""How far places whose values are computed are from what belongs there: means, draws, and parts of sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.collapse.average import Distance, values_apart
from widen_cli.collapse.rows import FoldedRows
from widen_cli.places import places
from widen_cli.plan.result import TensorPlan
from widen_cli.stream import BLOCK_BYTES, SPLIT_BYTES, Layout, Target, TensorWork, blocks, layout

Array = npt.NDArray[Any]


def filled_apart(rows: FoldedRows, copy: int) -> Distance:
    """The distance of all places of the wide tensor number `copy` where no copy stands; of a split one, of all its places.

    What belongs there is made as the conversion makes it, of the means in place of the values that it had: factors and all
    they are what the wide model would hold, so that of copies that nothing has moved the same bits come. Raises WidenError
    where other bits have no mean.
    """
    plan = rows.fold.made_by(copy).without_factors
    comparison = _Comparison(rows, copy, layout(plan), plan)
    work = TensorWork(plan, comparison.layout, _Means(rows), [Target(comparison, 0)])
    for group in blocks(work.layout, BLOCK_BYTES if plan.split is None else SPLIT_BYTES):
        work.group(group)
    distance = Distance.sum(comparison.found)
    if rows.fold.remedy is not None and distance.apart:
        raise rows.fold.moved()
    return distance


@dataclass(frozen=True)
class _Means:
    """A narrow tensor in the wide model's type, its bytes made when they are asked for; copies of it follow one another."""

    rows: FoldedRows
    sequential: bool = False
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        return self.rows.layout.old_bytes

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.rows.layout.rows.old

    @property
    def source(self) -> _Means:
        return self

    def read(self, offset: int, nbytes: int) -> bytes:
        parts: list[bytes] = []
        while nbytes > 0:
            first = offset % self.nbytes // self.row_bytes
            last = min(first + self.rows.step, first + nbytes // self.row_bytes, self.rows.layout.rows.old)
            parts.append(self.rows.as_stored(first, last))
            offset, nbytes = offset + len(parts[-1]), nbytes - len(parts[-1])
        return b"".join(parts)


@dataclass
class _Comparison:
    """Takes whole rows as they should be, and measures the places of them that are computed."""

    rows: FoldedRows
    copy: int
    layout: Layout
    plan: TensorPlan
    found: list[Distance] = field(default_factory=list)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        kind, stored = self.plan.dtype.numpy, self.rows.fold.wide[self.copy]
        wide = np.frombuffer(stored.source.read(stored.offset + offset, len(data)), kind)
        wanted = np.frombuffer(data, kind)
        if self.plan.split is None:
            beside = self.beside(offset // self.layout.new_bytes, len(data) // self.layout.new_bytes)
            wide, wanted = wide[beside], wanted[beside]
        self.found.append(values_apart(wide, wanted, self.plan.offset))

    def beside(self, first: int, count: int) -> Array:
        """Which values of rows are no copies."""
        found = np.isin(np.arange(first, first + count), places(self.layout.rows).zeros)
        for growth in self.layout.trailing:
            found = found[..., None] | np.isin(np.arange(growth.new), places(growth).zeros)
        return found.reshape(-1)
