"""Widens rows of quantised blocks in the quantised domain: codes are moved, scales are copied, nothing is dequantised.

A new block takes over the scales of the old one that its values come from, so that each value is computed from the same
numbers as before: a widened row, dequantised, is bit for bit the dequantised row, widened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from widen_cli.blocks.codes import Access, Coder, Field, coders
from widen_cli.blocks.layout import RowLayout, can_widen, row_layout, row_layout_back
from widen_cli.blocks.numbers import can_dequantize, dequantized
from widen_cli.blocks.scales import can_scale, scale_blocks
from widen_cli.blocks.types import BLOCK_TYPES, BlockLayoutError, BlockType, block_type
from widen_cli.dimensions import Growth

__all__ = [
    "BLOCK_TYPES",
    "BlockLayoutError",
    "BlockType",
    "block_type",
    "can_dequantize",
    "can_scale",
    "can_widen",
    "dequantized",
    "narrow_row_blocks",
    "scale_blocks",
    "widen_row_blocks",
]

Bytes = npt.NDArray[np.uint8]

# Bytes to write at a time, so that old and new blocks stay in a core's second-level cache while one kind of codes after
# the other is moved; and codes to take apart at a time, a byte each, so that what is made on the way stays there too.
_STEP = 1 << 20
_CODES = 1 << 19


def widen_row_blocks(blocks: Bytes, kind: BlockType, growth: Growth) -> Bytes:
    """Rows of blocks, widened as the tree says: [rows, bytes of a row] to [rows, bytes of a new row], both uint8.

    Each value of a new row has the bits that the old one put there dequantises to, and is 0 where the tree has zeros
    (a block of nothing but zeros is zero bytes). The scales of the tree are not applied: see scale_blocks.
    Raises BlockLayoutError where can_widen gives a reason, ValueError where the rows have another size than the tree.
    """
    layout = row_layout(kind, growth)
    if blocks.ndim != 2 or blocks.dtype != np.uint8 or blocks.shape[1] != layout.old * kind.nbytes:
        raise ValueError(f"{kind.name}: {blocks.dtype} {blocks.shape} are no rows of {growth.old} values")
    return _laid(blocks, kind, layout)


def narrow_row_blocks(blocks: Bytes, kind: BlockType, growth: Growth) -> Bytes | None:
    """The rows that `widen_row_blocks` makes these of by the same tree; None where they are none that it makes."""
    narrow = _laid(blocks, kind, row_layout_back(kind, growth))
    return narrow if np.array_equal(widen_row_blocks(narrow, kind, growth), blocks) else None


def _laid(blocks: Bytes, kind: BlockType, layout: RowLayout) -> Bytes:
    """Rows of blocks, their codes moved to where the layout has them."""
    result = np.empty((len(blocks), layout.new * kind.nbytes), np.uint8)
    step = max(1, _STEP // result.shape[1])
    for start in range(0, len(blocks), step):
        old, new = np.ascontiguousarray(blocks[start : start + step]), result[start : start + step]
        if layout.whole is not None:
            layout.whole.apply(old, layout.whole.chunk * kind.nbytes, new)
        else:
            _recode(old, kind, layout, new)
        if layout.empty.size:
            new.reshape(len(new), layout.new, kind.nbytes)[:, layout.empty] = 0
    return result


def _recode(old: Bytes, kind: BlockType, layout: RowLayout, new: Bytes) -> None:
    """All codes, from rows of old blocks into rows of new ones."""
    stored, blocks = old.reshape(-1, kind.nbytes), new.reshape(-1, kind.nbytes)
    for coder in coders(kind):
        codes, move = coder.codes, layout.moves[coder.codes.size]
        needed = kind.sums is not None or (codes.zero is not None and codes.size in layout.zeros)
        apart = [plane for plane in coder.planes if needed or not plane.move(stored, len(old), move, blocks)]
        step = max(1, _CODES // (layout.new * codes.units))
        for start in range(0, len(old) if apart else 0, step):
            _move_apart(coder, apart, old[start : start + step], kind, layout, new[start : start + step])


def _move_apart(
    coder: Coder, planes: Sequence[Access], old: Bytes, kind: BlockType, layout: RowLayout, new: Bytes
) -> None:
    """The codes of these planes, taken apart, moved and put together again."""
    codes, blocks = coder.codes, new.reshape(-1, kind.nbytes)
    move, zeros = layout.moves[codes.size], None if codes.zero is None else layout.zeros.get(codes.size)
    units = coder.unpacked(old.reshape(-1, kind.nbytes)).reshape(-1, layout.old * codes.units)
    units = move.apply(units, move.chunk * codes.units * codes.size // kind.size)
    if zeros is not None:
        units &= zeros.view(np.uint8) - np.uint8(1)
        units |= zeros * np.uint8(codes.zero or 0)
    units = units.reshape(-1, codes.units)
    if codes.size == 1:
        _put_sums(units, kind, blocks)
    for plane in planes:
        plane.pack(units, blocks)


def _put_sums(units: Bytes, kind: BlockType, blocks: Bytes) -> None:
    """The sums that blocks of the type keep of their quants, which are units of these types as they are."""
    if kind.sums is None:
        return
    sums = units.view(np.int8).reshape(len(blocks), -1, kind.sums.of).sum(axis=2, dtype=np.int16)
    if kind.sums.scaled:
        scale = Field(kind.scales[0].at, 2).read(blocks).view("<f2").astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            stored = (scale * sums).astype("<f2")
    else:
        stored = sums.astype("<i2", copy=False)
    Field(kind.sums.at, stored.itemsize * stored.shape[1]).write(blocks, stored.view(np.uint8))
