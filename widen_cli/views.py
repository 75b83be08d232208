"""Tensors that a run makes of the input's before it widens them: pieces of stored ones laid anew, zeros, and seeded numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.draws import Draws
from widen_cli.dtypes import DType
from widen_cli.safetensors_file import StoredTensor
from widen_cli.sources import HeldSource

TOGETHER = 4 << 20  # bytes that pieces of rows are cut out of at a time


@dataclass(frozen=True)
class Window:
    """`count` pieces of `piece` bytes, one every `stride` bytes, from byte `start` of a stored tensor on."""

    start: int
    piece: int
    stride: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.piece * self.count


class Shared:
    """A stored tensor that `uses` new ones are made of: of a pipe, which passes once, held from the first to the last of them."""

    def __init__(self, tensor: StoredTensor, uses: int) -> None:
        self.tensor = tensor
        self._left = uses
        self._held: HeldSource | None = None

    def taken(self) -> StoredTensor:
        """The tensor, readable in any order. To be asked for in the order of the pipe, once for each use."""
        if not self.tensor.source.sequential:
            return self.tensor
        if self._held is None:
            source = self.tensor.source
            # A tensor that is made itself, as an expert's of a new layer is: of the pipe it is one use.
            given = source.taken() if isinstance(source, ViewSource) else source
            self._held = HeldSource(source.name, given.read(self.tensor.offset, self.tensor.nbytes))
        held = replace(self.tensor, source=self._held, offset=0)
        self._left -= 1
        if not self._left:
            self._held = None  # whoever still reads keeps it
        return held


class ViewSource:
    """The bytes of windows of one stored tensor, laid one after the other; all windows have one size."""

    def __init__(self, shared: Shared, windows: Sequence[Window]) -> None:
        self.name = shared.tensor.source.name
        self.size: int | None = sum(window.nbytes for window in windows)
        self._shared = shared
        self._windows = tuple(windows)
        self._each = windows[0].nbytes

    @property
    def sequential(self) -> bool:
        return self._shared.tensor.source.sequential

    def taken(self) -> ViewSource:
        """The same bytes, readable in any order; see `Shared.taken`."""
        return ViewSource(Shared(self._shared.taken(), 1), self._windows)

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        pieces: list[bytes | memoryview] = []
        while nbytes > 0:
            number, inside = divmod(offset, self._each)
            length = min(nbytes, self._each - inside)
            pieces += _cut(self._shared.tensor, self._windows[number], inside, length)
            offset, nbytes = offset + length, nbytes - length
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def expect_unchanged(self) -> None:
        self._shared.tensor.source.expect_unchanged()

    def close(self) -> None:
        self._shared.tensor.source.close()


def _cut(tensor: StoredTensor, window: Window, inside: int, nbytes: int) -> list[bytes | memoryview]:
    """Bytes [inside, inside + nbytes) of a window, read in runs that stay small."""
    if window.count == 1:
        return [tensor.source.read(tensor.offset + window.start + inside, nbytes)]
    found: list[bytes | memoryview] = []
    step = max(1, TOGETHER // window.stride)
    while nbytes > 0:
        row, skipped = divmod(inside, window.piece)
        rows = min(step, -(-(skipped + nbytes) // window.piece))
        length = min(nbytes, rows * window.piece - skipped)
        at = tensor.offset + window.start + row * window.stride
        data = np.frombuffer(tensor.source.read(at, (rows - 1) * window.stride + window.piece), np.uint8)
        cut = np.lib.stride_tricks.as_strided(data, (rows, window.piece), (window.stride, 1), writeable=False)
        found.append(cut.tobytes()[skipped : skipped + length])
        inside, nbytes = inside + length, nbytes - length
    return found


class FilledSource:
    """One value throughout, `item` over and over; zero bytes are zeros in every number and block type."""

    sequential = False

    def __init__(self, name: str, nbytes: int, item: bytes = bytes(1)) -> None:
        self.name = name
        self.size: int | None = nbytes
        self._item = item

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        start = offset % len(self._item)
        times = -(-(start + nbytes) // len(self._item))
        return memoryview(self._item * times)[start : start + nbytes]

    def expect_unchanged(self) -> None:
        """It is made here."""

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Drawing:
    """Numbers drawn by a seed, [rows, columns], each row `times` in a row, uniform with a standard deviation."""

    seed: int
    rows: int
    columns: int
    times: int
    deviation: float


class DrawnSource:
    """A matrix of seeded numbers: the same for one seed and name on every machine, and in every version of numpy.

    It is drawn anew whenever it is read, so that nothing is held; a router is small.
    """

    sequential = False

    def __init__(self, name: str, drawing: Drawing, dtype: DType) -> None:
        self.name = name
        self.size: int | None = dtype.nbytes((drawing.rows * drawing.times, drawing.columns))
        self._drawing = drawing
        self._dtype = dtype

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        return memoryview(self._values().tobytes())[offset : offset + nbytes]

    def _values(self) -> npt.NDArray[Any]:
        drawn = self._drawing
        bits = Draws.of(drawn.seed, self.name).words(np.arange(drawn.rows), drawn.columns)
        # 53 bits make a number in [-1, 1); the root of 3 makes their deviation 1.
        numbers = ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1) * (math.sqrt(3) * drawn.deviation)
        return numbers.repeat(drawn.times, axis=0).astype(self._dtype.numpy)

    def expect_unchanged(self) -> None:
        """It is made here."""

    def close(self) -> None:
        pass
