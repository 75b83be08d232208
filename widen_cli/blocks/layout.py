"""Where the values of a widened row come from, and whether blocks of a type can hold them so. Sees sizes, not data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from widen_cli.blocks.types import BlockLayoutError, BlockType
from widen_cli.dimensions import Growth, Laid, Run, runs

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_WORD: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


@dataclass(frozen=True, eq=False)
class Move:
    """Items of a row at their new places: they move in chunks, new chunk i being old chunk `source[i]`.

    `each`: every chunk stands so many times in a row, and `source` is empty; None where they stand otherwise.
    """

    chunk: int
    source: Numbers
    each: int | None

    @cached_property
    def doublings(self) -> int:
        """How often everything is doubled, if the copies of every chunk are a power of two, else 0."""
        each = self.each or 1
        return 0 if each & (each - 1) else each.bit_length() - 1

    @staticmethod
    def of(source: Numbers, old: int) -> Move:
        """The move that takes new item i from item `source[i]` of `old`."""
        starts = np.flatnonzero(np.diff(source, prepend=-2) != 1)
        chunk = int(np.gcd.reduce(np.concatenate([starts, source[starts], [source.size, old]])))
        chunks = source[::chunk] // chunk
        each, rest = divmod(chunks.size, old // chunk)
        if not rest and each and bool((chunks == np.arange(chunks.size) // each).all()):
            return Move(chunk, chunks[:0], each)
        return Move(chunk, chunks, None)

    def apply(self, items: Bytes, wide: int, out: Bytes | None = None) -> Bytes:
        """Rows of chunks of `wide` bytes each, [rows, bytes], moved: [rows, new bytes], in `out` if that is given."""
        if self.each is None:
            chunks = items.reshape(len(items), -1, wide)
            target = None if out is None else out.reshape(len(items), self.source.size, wide)
            # No index is out of range; but where it may raise, numpy takes into a buffer and not into `out`.
            return np.take(chunks, self.source, axis=1, out=target, mode="clip").reshape(len(items), -1)
        if out is None and wide * self.each in _WORD:
            return _multiplied(items, wide, self.each)
        result = np.empty((len(items), items.shape[1] * self.each), np.uint8) if out is None else out
        chunks = items.view(f"V{wide}")
        copies = result.view(f"V{wide}").reshape(*chunks.shape, self.each)
        for copy in range(self.each):
            copies[..., copy] = chunks
        return result


def _multiplied(items: Bytes, wide: int, each: int) -> Bytes:
    """Copies side by side as one word: the bits times 0x...0101."""
    words = items.view(_WORD[wide]).astype(_WORD[wide * each])
    words *= _factor(wide, each)
    return words.view(np.uint8)


@cache
def _factor(wide: int, each: int) -> Any:
    return _WORD[wide * each].type(sum(1 << 8 * wide * copy for copy in range(each)))


@dataclass(frozen=True, eq=False)
class RowLayout:
    """How a row of `old` blocks becomes one of `new` blocks.

    `whole` moves blocks, if all new ones are old ones. Otherwise `moves` moves the codes that stand for a number of
    values, by that number; `zeros` marks the new ones of them that stand for zeros only, where there are such.
    `empty`: the new blocks that hold nothing but zeros.
    """

    old: int
    new: int
    whole: Move | None
    moves: dict[int, Move]
    zeros: dict[int, Flags]
    empty: Numbers


def can_widen(kind: BlockType, growth: Growth) -> str | None:
    """None where rows of this type can be widened so in the quantised domain, else the reason and what to do.

    Decided from sizes alone. It says nothing of the scales in the tree: see can_scale.
    """
    layout = _judged(kind, growth)
    return layout if isinstance(layout, str) else None


def row_layout(kind: BlockType, growth: Growth) -> RowLayout:
    """The layout of a widened row. Raises BlockLayoutError with the reason that can_widen gives."""
    layout = _judged(kind, growth)
    if isinstance(layout, str):
        raise BlockLayoutError(layout)
    return layout


@lru_cache(maxsize=64)
def row_layout_back(kind: BlockType, growth: Growth) -> RowLayout:
    """The layout of a narrow row made of a widened one: every code from where its first value's first copy stands.

    It brings back what was widened so, and says nothing of other rows. Raises as `row_layout`.
    """
    row_layout(kind, growth)
    places = [_places(run) for run in runs(growth)]
    origin = np.concatenate([numbers for numbers, _ in places])
    held = np.flatnonzero(~np.concatenate([flags for _, flags in places]))
    source = held[np.unique(origin[held], return_index=True)[1]]
    moves = {size: Move.of(source[::size] // size, growth.new // size) for size in {codes.size for codes in kind.codes}}
    blocks = _items(source, np.zeros(source.size, np.bool_), kind.size, entire=True)
    old, new = growth.new // kind.size, growth.old // kind.size
    return RowLayout(old, new, None if blocks is None else Move.of(blocks, old), moves, {}, np.empty(0, np.int64))


@lru_cache(maxsize=64)
def _judged(kind: BlockType, growth: Growth) -> RowLayout | str:
    for size, which in ((growth.old, "stored"), (growth.new, "widened")):
        if not size or size % kind.size:
            return f"{kind.name}: {which} rows of {size} values do not fill blocks of {kind.size}; {_NO_BLOCKS}"
    places = [_places(run) for run in runs(growth)]
    source = np.concatenate([numbers for numbers, _ in places])
    zero = np.concatenate([flags for _, flags in places])
    reason = _zeros_beside_values(kind, zero)
    moves: dict[int, Move] = {}
    for size in sorted({codes.size for codes in kind.codes}, reverse=True):
        items = _items(source, zero, size, entire=size == kind.atom)
        if items is None:
            reason = reason or _torn(kind, size, source)
        else:
            moves[size] = Move.of(items, growth.old // size)
    if reason is not None:
        return f"{kind.name}: {reason}; {_advice(kind, growth)}"
    return _row_layout(kind, growth, source, zero, moves)


def _places(run: Run) -> tuple[Numbers, Flags]:
    """The old place of each value of a run, and whether it is a zero instead."""
    source = np.repeat(np.arange(run.start, run.stop), run.each)
    return source, (np.arange(source.size) % run.each >= run.live) | run.filled


def _items(source: Numbers, zero: Flags, size: int, entire: bool) -> Numbers | None:
    """The old item of `size` values that each new one is made of, or None where one would be made of several.

    `entire`: the values of an item also stand as they stood in the old one.
    """
    values = ~zero.reshape(-1, size)
    old = source.reshape(-1, size)
    first = old[np.arange(len(old)), values.argmax(axis=1)] // size
    torn = old != first[:, None] * size + np.arange(size) if entire else old // size != first[:, None]
    return None if bool((torn & values).any()) else first


def _row_layout(kind: BlockType, growth: Growth, source: Numbers, zero: Flags, moves: dict[int, Move]) -> RowLayout:
    old, new = growth.old // kind.size, growth.new // kind.size
    partly, empty = (way(zero.reshape(new, kind.size), axis=1) for way in (np.any, np.all))
    blocks = _items(source, zero, kind.size, entire=True)
    whole = None if blocks is None or (partly & ~empty).any() else Move.of(blocks, old)
    zeros = {size: np.asarray(zero.reshape(-1, size).all(axis=1)) for size in moves} if zero.any() else {}
    return RowLayout(old, new, whole, moves, zeros, np.flatnonzero(empty))


# Reasons.

_NO_BLOCKS = "store this tensor in an unquantised type"


def _zeros_beside_values(kind: BlockType, zero: Flags) -> str | None:
    beside = zero.reshape(-1, kind.zero_run)
    if bool((beside.all(axis=1) == beside.any(axis=1)).all()):
        return None
    if kind.zero_run == kind.size:
        return f"zeros cannot stand beside values in a block of {kind.size}, since none of its codes is 0"
    return f"zeros can stand beside values of a block only in whole sub-blocks of {kind.zero_run}"


def _torn(kind: BlockType, size: int, source: Numbers) -> str:
    starts = np.flatnonzero(np.diff(source, prepend=-2, append=-2) != 1)
    run = int(np.diff(starts).min())
    copied = "single values" if run == 1 else f"runs of {run} values"
    if size == kind.atom:
        return f"one code stands for {size} values together, so {copied} cannot be copied"
    what = "block" if size == kind.size else "sub-block"
    return (
        f"copies of {copied} would bring values of two {what}s, each with a scale of its own, into one {what} of {size}"
    )


def _advice(kind: BlockType, growth: Growth) -> str:
    parts = growth.parts if isinstance(growth, Laid) else (growth,)
    return "use --layout tile" if all(part.old % kind.size == 0 for part in parts) else _NO_BLOCKS
