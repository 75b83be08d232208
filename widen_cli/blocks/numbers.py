"""Turns quantised blocks into the numbers they stand for, by gguf-py's codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.blocks.types import BlockType

# ggml has these, gguf-py cannot read them.
WITHOUT_CODEC = ("Q8_1", "Q8_K", "Q1_0", "Q2_0")


def can_dequantize(kind: BlockType) -> str | None:
    """None where blocks of the type can be read as numbers, else the reason and what to do."""
    if kind.name in WITHOUT_CODEC:
        return f"{kind.name}: gguf-py cannot dequantise it; leave --dequantize and --embedding-type out"
    return None


def dequantized(rows: npt.NDArray[np.uint8], kind: BlockType) -> npt.NDArray[np.float32]:
    """Rows of blocks, uint8 [rows, bytes of a row], as float32 [rows, values]: bit for bit what llama.cpp computes with."""
    from gguf import GGMLQuantizationType, quants  # imported when used: it costs a plain run more than all else

    # A scale may be infinite or no number in a damaged file; it is for the values to say so.
    with np.errstate(all="ignore"):
        values: npt.NDArray[Any] = quants.dequantize(rows, GGMLQuantizationType[kind.name])
    return values.astype(np.float32, copy=False)
