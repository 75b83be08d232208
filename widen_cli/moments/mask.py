"""A mask of new parameters: for every tensor written, which of its entries are not the old ones in their first place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.dimensions import Growth, runs
from widen_cli.dtypes import STORED
from widen_cli.folders import DirectoryOutput
from widen_cli.outputs import FileOutput
from widen_cli.plan import Plan, TensorPlan
from widen_cli.safetensors_file import header_bytes

BLOCK = 4 << 20
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NewParameters:
    """The mask's file: a safetensors file of BOOL tensors, named and shaped as those of the model; true is new."""

    target: str
    plan: Plan
    force: bool

    @property
    def entries(self) -> list[tuple[str, TensorPlan]]:
        return [(name, tensor) for tensor in self.plan.tensors for name in tensor.names]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(tensor.shape) for _, tensor in self.entries)

    def write(self, stack: ExitStack, folder: DirectoryOutput | None) -> list[FileOutput]:
        named = [(name, STORED["BOOL"], tensor.shape) for name, tensor in self.entries]
        header, offsets = header_bytes(named, {})
        output = stack.enter_context(FileOutput(self.target, len(header) + self.nbytes, self.force))
        output.write_at(0, header)
        for (name, tensor), offset in zip(self.entries, offsets, strict=True):
            for block in blocks(tensor, first=name == tensor.names[0]):
                output.write_at(offset, block.tobytes())
                offset += block.size
        return [output]


def blocks(tensor: TensorPlan, first: bool = True) -> Iterator[Flags]:
    """The mask of a tensor, rows after rows; of one that is written under several names, the `first` holds the old entries."""
    shape = tensor.shape or (1,)
    rows, row = shape[0], math.prod(shape[1:])
    old = [old_places(growth) for growth in tensor.growth] if tensor.growth else [np.ones(size, bool) for size in shape]
    if tensor.made or not first:
        old[0] = np.zeros(rows, bool)
    inner: Any = reduce(lambda one, other: np.logical_and.outer(one, other).reshape(-1), old[1:], np.ones(1, bool))
    step = max(1, BLOCK // max(1, row))
    for start in range(0, rows, step):
        yield ~np.logical_and.outer(old[0][start : start + step], inner)


def old_places(growth: Growth) -> Flags:
    """Which new positions hold an old one for the first time."""
    found = []
    for run in runs(growth):
        first = np.arange((run.stop - run.start) * run.each) % run.each == 0
        found.append(first & (not run.again and not run.filled))
    return np.concatenate(found) if found else np.zeros(0, bool)
