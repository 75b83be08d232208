"""Moves codes from blocks of a type into other blocks, many blocks at a time. Nothing loops over blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from widen_cli.blocks.layout import Move
from widen_cli.blocks.planes import Doubler, or_into, plane_coder
from widen_cli.blocks.types import SIX_BITS, BlockType, Codes, Plane, Trits

Bytes = npt.NDArray[np.uint8]


class Field:
    """The same bytes of every row of an array, copied as one item a row, which numpy does several times faster."""

    def __init__(self, at: int, nbytes: int) -> None:
        self._bytes = slice(at, at + nbytes)
        self._item = np.dtype(f"V{nbytes}")

    def read(self, rows: Bytes) -> Bytes:
        """The bytes, [rows, nbytes], as a copy."""
        return np.array(rows[:, self._bytes].view(self._item)).view(np.uint8)

    def write(self, rows: Bytes, stored: Bytes, begun: bool = False) -> None:
        """Puts as many bytes there; or-ed with what is there where that has begun."""
        if begun:
            or_into(stored, self.read(rows))
        rows[:, self._bytes].view(self._item)[:] = stored.view(self._item).reshape(-1, 1)


class Access(Protocol):
    """Reads and writes some codes in blocks of a type."""

    @property
    def whole(self) -> bool:
        """Whether it knows all codes, so that it can make the array of units."""

    def merge(self, blocks: Bytes, units: Bytes | None) -> Bytes:
        """Its codes in units, or-ed with those of others in `units`."""

    def pack(self, units: Bytes, blocks: Bytes) -> None:
        """Writes its codes in units."""

    def move(self, old: Bytes, rows: int, move: Move, new: Bytes) -> bool:
        """Moves its codes from rows of old blocks into new ones without making units of them, if that can be done.

        Returns False, with nothing written, where that is not so.
        """


class PlaneAccess:
    """One plane of some codes: units are [blocks, units]."""

    def __init__(self, kind: BlockType, codes: Codes, plane: Plane | Trits) -> None:
        self.whole = plane.units == codes.units
        self._begun = plane in kind.begun
        self._coder = plane_coder(plane, shared=len(codes.planes) > 1)
        self._bytes = Field(plane.at, plane.nbytes)
        self._units = Field(plane.first, plane.units)
        self._item = codes.units * codes.size // kind.size
        # Codes can be moved as they lie where the bytes hold all of them, in order and nothing else.
        self._doubler = None
        if isinstance(plane, Plane) and plane.fills_words and self.whole:
            self._doubler = Doubler(plane)

    def merge(self, blocks: Bytes, units: Bytes | None) -> Bytes:
        mine = self._coder.units(self._bytes.read(blocks))
        if units is None:
            return mine
        if self.whole:
            or_into(units, mine)
        else:
            self._units.write(units, mine, begun=True)
        return units

    def pack(self, units: Bytes, blocks: Bytes) -> None:
        stored = self._coder.stored(units if self.whole else self._units.read(units))
        self._bytes.write(blocks, stored, self._begun)

    def move(self, old: Bytes, rows: int, move: Move, new: Bytes) -> bool:
        moved = self._moved(old, rows, move)
        if moved is not None:
            self._bytes.write(new, moved.reshape(len(new), -1))
        return moved is not None

    def _moved(self, old: Bytes, rows: int, move: Move) -> Bytes | None:
        """The bytes of rows of blocks, moved, where codes move by whole words or are doubled, once or several times."""
        doubler = self._doubler
        if doubler is None:
            return None
        plane, chunk = doubler.plane, move.chunk * self._item
        turns = plane.lanes * plane.in_word
        if chunk % turns == 0:
            return move.apply(self._bytes.read(old).reshape(rows, -1), chunk // turns * plane.lanes * plane.word)
        if not move.doublings:
            return None
        if plane.lanes % (chunk << move.doublings) == 0:
            # With as many times fewer lanes, all codes of a byte are copied alike.
            stored = self._bytes.read(old)
            for doubling in range(move.doublings):
                doubler.halve_lanes(stored, plane.lanes >> doubling)
            return move.apply(stored.reshape(rows, -1), chunk)
        if plane.lanes == plane.word == chunk == 1:
            stored = self._bytes.read(old)
            for _ in range(move.doublings):
                stored = doubler.doubled(stored)
            return stored
        return None


class SixBits:
    """The scales and minimums of SIX_BITS: units are [2, blocks, 8], and eight of them are handled as one word."""

    whole = True

    def merge(self, blocks: Bytes, units: Bytes | None) -> Bytes:
        both = np.empty((2, len(blocks)), "<u8")
        both[0], both[1], last = self._words(blocks)
        both |= both << 30
        both &= 0x303030303F3F3F3F
        for part, to in zip(both, (32, 28), strict=True):
            part |= last.astype("<u8") << to & 0x0F0F0F0F00000000
        return both.view(np.uint8)

    def pack(self, units: Bytes, blocks: Bytes) -> None:
        both = units.view("<u8").reshape(2, -1)
        scales, minimums, last = self._words(blocks)
        scales[:], minimums[:] = both | both >> 30 & 0xC0C0C0C0
        last[:] = both[0] >> 32 & 0x0F0F0F0F | both[1] >> 28 & 0xF0F0F0F0

    def move(self, old: Bytes, rows: int, move: Move, new: Bytes) -> bool:
        return False

    def _words(self, blocks: Bytes) -> list[npt.NDArray[np.uint32]]:
        """The four bytes each of scales, minimums and the rest of both, where they are."""
        return [blocks[:, at : at + 4].view("<u4")[:, 0] for at in (4, 8, 12)]


class Coder:
    """Reads and writes one kind of codes of a block type."""

    def __init__(self, kind: BlockType, codes: Codes) -> None:
        self.codes = codes
        self.planes: Sequence[Access] = [PlaneAccess(kind, codes, plane) for plane in codes.planes]
        if codes == SIX_BITS[0]:
            self.planes = [SixBits()]

    def unpacked(self, blocks: Bytes) -> Bytes:
        """The units of all blocks, in memory of their own."""
        units: Bytes | None = None
        if not self.planes[0].whole:
            units = np.zeros((len(blocks), self.codes.units), np.uint8)
        for plane in self.planes:
            units = plane.merge(blocks, units)
        assert units is not None
        return units


@cache
def coders(kind: BlockType) -> tuple[Coder, ...]:
    """A coder for each kind of codes of the type, in its order; packing with all of them writes every byte but sums.

    The minimums of SIX_BITS go with the scales.
    """
    return tuple(Coder(kind, codes) for codes in kind.codes if codes != SIX_BITS[1])
