"""How far weights that were made to write nothing have come from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.blocks import block_type, can_dequantize, dequantized
from widen_cli.collapse.average import Distance
from widen_cli.collapse.fold import Fold
from widen_cli.dtypes import DType
from widen_cli.safetensors_file import StoredTensor
from widen_cli.stream import BLOCK_BYTES

Array = npt.NDArray[Any]


def silent_apart(fold: Fold, silent: StoredTensor) -> Distance:
    """The distance of a weight from writing nothing, beside what the weight that it was made of holds now: the relative one is
    |new| / |old|. Of numbers that cannot be told from their blocks, infinite unless all bytes are zero."""
    number, total, largest = _square(silent, fold.plan.offset)
    held, _, _ = _square(fold.wide[0], fold.plan.offset)
    return Distance(number, held if number else 1.0, largest, total)


def _square(stored: StoredTensor, offset: int) -> tuple[float, int, float]:
    """The sum of squares, how many values there are, and the largest."""
    total, count, largest = 0.0, 0, 0.0
    step = (
        max(1, BLOCK_BYTES // stored.dtype.block_bytes) * stored.dtype.block_bytes
        if stored.dtype.kind == "blocks"
        else BLOCK_BYTES
    )
    for start in range(0, stored.nbytes, step):
        data = stored.source.read(stored.offset + start, min(step, stored.nbytes - start))
        values = _numbers(np.frombuffer(data, np.uint8), stored.dtype) + offset
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.square(values).sum())
            largest = max(largest, float(np.abs(values).max(initial=0.0)))
        count += values.size
    return total, count, largest


def _numbers(data: Array, dtype: DType) -> Array:
    if dtype.numpy is not None:
        return data.view(dtype.numpy).astype(np.float64)
    kind = block_type(dtype.name)
    if can_dequantize(kind) is None:
        return dequantized(data.reshape(1, -1), kind).astype(np.float64)
    return np.where(data, np.inf, 0.0)
