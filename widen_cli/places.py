"""Where the copies of each old position stand along one widened dimension. Sees growth trees, no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.dimensions import Growth, runs
from widen_cli.scales import Scale

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Places:
    """The new positions of old ones.

    `copies` [k, old]: the position of each one's k-th copy, its first again where it has fewer; `counts` [old]: how many it
    has. `zeros` are the new positions that hold nothing. `parts`: old positions [start, stop) and the one scale on them.
    """

    copies: Numbers
    counts: Numbers
    zeros: Numbers
    parts: tuple[tuple[int, int, Scale], ...]

    @cached_property
    def selectors(self) -> tuple[Any, ...]:
        """What picks each copy of all positions out of an array: a slice where it can be one, which costs nothing."""
        return tuple(selector(copy) for copy in self.copies)

    @cached_property
    def even(self) -> bool:
        """Whether all positions have as many copies."""
        return bool((self.counts == len(self.copies)).all())

    @cached_property
    def origins(self) -> Numbers:
        """The old position of each new one; of one that holds nothing, 0."""
        return self._told[0]

    @cached_property
    def numbers(self) -> Numbers:
        """Which of the copies each new position is, from 0 on; of one that holds nothing, 0."""
        return self._told[1]

    @cached_property
    def _told(self) -> tuple[Numbers, Numbers]:
        origins, numbers = (np.zeros(int(self.counts.sum()) + len(self.zeros), np.int64) for _ in range(2))
        for number, positions in enumerate(self.copies):
            held = self.has(number)
            origins[positions[held]], numbers[positions[held]] = np.flatnonzero(held), number
        return origins, numbers

    def has(self, copy: int) -> Flags:
        """Which of the positions have a copy of this number."""
        return np.asarray(self.counts > copy)


def selector(numbers: Numbers) -> Any:
    """Numbers as a slice, where they lie at equal distances."""
    if len(numbers) == 0:
        return slice(0, 0)
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if step > 0 and bool((np.diff(numbers) == step).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers


# Layers and experts have the same few dimensions.
@lru_cache(maxsize=128)
def places(growth: Growth) -> Places:
    """The places of a dimension that grew so."""
    found = runs(growth)
    origins = [np.arange(run.start, run.stop).repeat(run.each) for run in found]
    empty = [
        (np.arange(len(origin)) % run.each >= run.live) | run.filled for run, origin in zip(found, origins, strict=True)
    ]
    origin, zero = np.concatenate([*origins, np.empty(0, np.int64)]), np.concatenate([*empty, np.empty(0, np.bool_)])
    held = np.flatnonzero(~zero)
    order = held[np.argsort(origin[held], kind="stable")]
    counts = np.bincount(origin[held], minlength=growth.old)
    first = np.cumsum(counts) - counts
    most = int(counts.max(initial=0))
    copies = np.array([order[first + np.where(counts > copy, copy, 0)] for copy in range(most)], np.int64)
    copies = copies.reshape(most, growth.old)
    return Places(copies, counts, np.flatnonzero(zero), _parts([run for run in found if not run.again]))


def _parts(found: Sequence[Any]) -> tuple[tuple[int, int, Scale], ...]:
    """Runs as parts in order, neighbours with one scale together."""
    parts: list[tuple[int, int, Scale]] = []
    for run in sorted(found, key=lambda run: int(run.start)):
        if parts and parts[-1][2] == run.scale and parts[-1][1] == run.start:
            parts[-1] = (parts[-1][0], run.stop, run.scale)
        else:
            parts.append((run.start, run.stop, run.scale))
    return tuple(parts)
