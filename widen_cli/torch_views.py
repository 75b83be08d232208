"""A tensor whose elements do not lie in order in its file (a transposed one, a slice), read as if they did."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.sources import Source

_Array = npt.NDArray[Any]


class HeldBytes:
    """The range of a file that was asked for last, so that of all its views only one is in memory."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lock = Lock()
        self._range = (0, 0)
        self._data: bytes | memoryview = b""

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        """The bytes of the range; those that were held for another range are given up first. WidenError as the file's."""
        with self._lock:
            if self._range != (offset, nbytes):
                self._range, self._data = (0, 0), b""
                self._data = self.source.read(offset, nbytes)
                self._range = (offset, nbytes)
            return self._data


class StridedSource:
    """A view's elements in the order of its shape; offsets count from the first one's first byte.

    `offset` is where the first element lies in the file, `strides` are counted in elements. The bytes from the first to the
    last element are read when they are needed and held until another view is read; what is asked for is put in order.
    """

    sequential = False

    def __init__(
        self, held: HeldBytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.name = held.source.name
        self._held = held
        self._offset = offset
        self._shape = shape
        self._strides = tuple(step * itemsize for step in strides)
        self._dtype = np.dtype(f"<u{itemsize}")
        count = itemsize
        for size in shape:
            count *= size
        self.size: int | None = count
        self._span = sum((size - 1) * step for size, step in zip(shape, self._strides, strict=True)) + itemsize

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        width = self._dtype.itemsize
        first, last = offset // width, -(-(offset + nbytes) // width)
        view = np.ndarray(self._shape, self._dtype, self._held.read(self._offset, self._span), strides=self._strides)
        pieces = [piece.reshape(-1) for piece in _in_order(view, first, last)]
        found = np.ascontiguousarray(
            pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [view[:0].reshape(-1)])
        )
        data = found.data.cast("B") if found.size else memoryview(b"")
        return data[offset - first * width : offset - first * width + nbytes]

    def expect_unchanged(self) -> None:
        self._held.source.expect_unchanged()

    def close(self) -> None:
        self._held.source.close()


def _in_order(view: _Array, start: int, stop: int) -> Iterator[_Array]:
    """The elements [start, stop) of a view: its whole rows at once, those of a row that is cut in the same way."""
    if view.ndim < 2:
        yield view[start:stop]
        return
    row = view[0].size
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_order(view[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_order(view[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield view[first:last]
    if stop > last * row:
        yield from _in_order(view[last], 0, stop - last * row)
