"""Takes codes out of blocks and puts them back, many blocks at a time.

Blocks are an array [blocks, bytes]; their codes become one of [blocks, units], a byte each. Nothing loops over blocks.
Bytes of a block are copied as the field of a record, which numpy does several times faster than as a slice; codes are
shifted and masked in 64-bit words, eight bytes at a time, where a mask takes away what a shift carries over.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from widen_cli.blocks.layout import Move
from widen_cli.blocks.types import BlockType, Codes, Plane, Trits

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

_WORD: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


class _PlaneCoder(Protocol):
    def units(self, stored: Bytes) -> Bytes:
        """Stored bytes [blocks, nbytes] as units [blocks, units], each code at its bits of the unit."""

    def stored(self, units: Bytes) -> Bytes:
        """The reverse, of the plane's own bits alone. Either may overwrite its argument, `stored` only if no plane shares it."""


class PlaneAccess:
    """Reads and writes one plane of some codes in blocks of a type."""

    def __init__(self, kind: BlockType, codes: Codes, plane: Plane | Trits) -> None:
        self.plane = plane
        self.whole = plane.units == codes.units
        self._shared = len(codes.planes) > 1
        self._begun = plane in kind.begun
        self._coder = _plane_coder(plane, self._shared)
        self._bytes = Field(plane.at, plane.nbytes, kind.nbytes)
        self._units = Field(plane.first, plane.units, codes.units)
        self._narrow: dict[int, _PlaneCoder] = {}

    def merge(self, blocks: Bytes, units: Bytes | None) -> Bytes:
        """The plane's codes in units [blocks, units], or-ed with those of other planes in `units`."""
        mine = self._coder.units(self._bytes.read(blocks))
        if units is None:
            return mine
        if self.whole:
            _or(units, mine)
        else:
            self._units.write(units, mine, begun=True)
        return units

    def pack(self, units: Bytes, blocks: Bytes) -> None:
        """Writes the plane's codes in units [blocks, units]."""
        self._write(self._coder.stored(units if self.whole else self._units.read(units)), blocks)

    def pack_repeated(self, units: Bytes, move: Move, blocks: Bytes) -> bool:
        """Writes the repeated codes of units that are not repeated yet, [rows, units], if that can be done to whole bytes.

        The codes in a byte stand a lane's width apart in the row. Where the repeated runs divide the lanes, all codes of
        a byte are repeated alike: put into bytes in as many times fewer lanes, they are repeated several at a time.
        Returns False, with nothing written, where that is not so.
        """
        plane, each = self.plane, move.each or 0
        if isinstance(plane, Trits) or not self.whole or not each or plane.lanes % (move.chunk * each):
            return False
        if each not in self._narrow:
            self._narrow[each] = _plane_coder(replace(plane, lanes=plane.lanes // each), self._shared)
        stored = self._narrow[each].stored(units)
        self._write(move.apply(stored.reshape(len(units), -1), 1).reshape(len(blocks), -1), blocks)
        return True

    def _write(self, stored: Bytes, blocks: Bytes) -> None:
        self._bytes.write(blocks, stored, self._begun)


class Coder:
    """Reads and writes one kind of codes of a block type."""

    def __init__(self, kind: BlockType, codes: Codes) -> None:
        self.codes = codes
        self.planes = [PlaneAccess(kind, codes, plane) for plane in codes.planes]

    def unpacked(self, blocks: Bytes) -> Bytes:
        """The units of all blocks, [blocks, units], in memory of their own."""
        units: Bytes | None = None
        if not self.planes[0].whole:
            units = np.zeros((len(blocks), self.codes.units), np.uint8)
        for plane in self.planes:
            units = plane.merge(blocks, units)
        assert units is not None
        return units


@cache
def coders(kind: BlockType) -> tuple[Coder, ...]:
    """A coder for each kind of codes of the type, in its order; packing with all of them writes every byte but sums."""
    return tuple(Coder(kind, codes) for codes in kind.codes)


class Field:
    """The same bytes of every row of an array."""

    def __init__(self, at: int, nbytes: int, width: int) -> None:
        self._nbytes = nbytes
        self._item = np.dtype(f"V{nbytes}")
        self._record = np.dtype({"names": ["f"], "formats": [self._item], "offsets": [at], "itemsize": width})

    def read(self, rows: Bytes) -> Bytes:
        """The bytes, [rows, nbytes], as a copy."""
        return np.array(rows.view(self._record)["f"]).view(np.uint8)

    def write(self, rows: Bytes, stored: Bytes, begun: bool = False) -> None:
        """Puts as many bytes there; or-ed with what is there where that has begun."""
        if begun:
            _or(stored, self.read(rows))
        rows.view(self._record)["f"] = stored.view(self._item).reshape(-1, 1)


def _words(array: Bytes) -> Words:
    """A contiguous array as a flat one of the largest words that fill it."""
    size = 8 if array.size % 8 == 0 else 4 if array.size % 4 == 0 else 1
    return array.reshape(-1).view(_WORD[size])


def _or(target: Bytes, other: Bytes) -> None:
    words = _words(target)
    np.bitwise_or(words, _words(other), out=words)


def _mask(bits: int, words: Words) -> Any:
    """A word with these bits in each byte."""
    return words.dtype.type(bits * (0x0101010101010101 >> 64 - 8 * words.itemsize))


def _shift(words: Words, left: int, out: Words) -> Words:
    if left < 0:
        return np.asarray(np.right_shift(words, words.dtype.type(-left), out=out))
    return np.asarray(np.left_shift(words, words.dtype.type(left), out=out)) if left else words


def _plane_coder(plane: Plane | Trits, shared: bool) -> _PlaneCoder:
    if isinstance(plane, Trits):
        return _Trits(plane)
    if plane.lanes > 1:
        return _Lanes(plane, shared)
    if plane.width == 8 and plane.in_word == plane.word:
        return _AsStored()
    return _Bits(plane) if plane.width == plane.word == 1 else _InRow(plane)


class _AsStored:
    def units(self, stored: Bytes) -> Bytes:
        return stored

    def stored(self, units: Bytes) -> Bytes:
        return units


class _Lanes:
    """Codes in lanes: a word's turns are taken apart, and put together again, by halves.

    Apart, the codes of even turns stand before those of odd turns; then those of every fourth turn before those two
    turns on; at the end they stand in order.
    """

    def __init__(self, plane: Plane, shared: bool) -> None:
        self._plane = plane
        self._shared = shared
        self._steps = [1 << step for step in range(plane.in_word.bit_length() - 1)]

    def units(self, stored: Bytes) -> Bytes:
        plane = self._plane
        words = _words(stored)
        if not self._steps:
            _shift(words, plane.to - plane.shift, words)
            words &= _mask(self._bits(1) << plane.to, words)
        for turns in self._steps:
            words = self._apart(words, turns)
        return words.view(np.uint8).reshape(-1, plane.units)

    def _apart(self, words: Words, turns: int) -> Words:
        plane = self._plane
        to = plane.to if turns == self._steps[-1] else 0
        result = np.empty(2 * words.nbytes, np.uint8)
        halves = result.view(f"V{plane.lanes * turns}").reshape(-1, 2)
        mask, half = _mask(self._bits(2 * turns) << to, words), np.empty_like(words)
        for number in (0, 1):
            np.bitwise_and(_shift(words, to - number * plane.width * turns, half), mask, out=half)
            halves[:, number] = half.view(halves.dtype)
        return _words(result)

    def stored(self, units: Bytes) -> Bytes:
        plane = self._plane
        words = _words(units)
        if self._shared:
            words = words & _mask(self._bits(plane.in_word) << plane.to, words)
        if not self._steps:
            _shift(words, plane.shift - plane.to, words)
        for turns in reversed(self._steps):
            words = self._together(words, turns)
        return words.view(np.uint8).reshape(len(units), -1)

    def _together(self, words: Words, turns: int) -> Words:
        plane = self._plane
        to = plane.to if turns == self._steps[-1] else 0
        halves = words.view(f"V{plane.lanes * turns}").reshape(-1, 2)
        low, high = (_words(np.array(halves[:, number]).view(np.uint8)) for number in (0, 1))
        _shift(low, -to, low)
        _shift(high, plane.width * turns - to, high)
        return np.bitwise_or(low, high, out=low)

    def _bits(self, apart: int) -> int:
        """The bits of codes in a byte, of which only every `apart`-th is there."""
        code = (1 << self._plane.width) - 1
        return sum(code << self._plane.width * turn for turn in range(0, self._plane.in_word, apart))


class _Bits:
    """Single bits one after another."""

    def __init__(self, plane: Plane) -> None:
        self._to = plane.to

    def units(self, stored: Bytes) -> Bytes:
        bits = np.unpackbits(stored.reshape(-1), bitorder="little").reshape(len(stored), -1)
        words = _words(bits)
        _shift(words, self._to, words)
        return bits

    def stored(self, units: Bytes) -> Bytes:
        words = _words(units)
        set_bits = (words & _mask(1 << self._to, words)).view(np.uint8)
        return np.packbits(set_bits, bitorder="little").reshape(len(units), -1)


class _InRow:
    """Wider codes one after another: the upper half of a word of codes moves up to where its bytes begin, and so on."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._word, self._spread = _WORD[plane.word], _WORD[plane.in_word]

    def units(self, stored: Bytes) -> Bytes:
        plane = self._plane
        words = stored.view(self._word)
        words = _shift(words, -plane.shift, words)
        words &= self._word.type((1 << plane.width * plane.in_word) - 1)
        units = words.astype(self._spread)
        codes = plane.in_word // 2
        while codes and plane.width < 8:
            stay, moved, by = self._halves(codes)
            units = (units & stay) | (units << by & moved)
            codes //= 2
        return _shift(units, plane.to, units).view(np.uint8)

    def stored(self, units: Bytes) -> Bytes:
        plane = self._plane
        words = units.view(self._spread)
        words = words >> self._spread.type(plane.to) & _mask((1 << plane.width) - 1, words)
        codes = 1
        while codes < plane.in_word and plane.width < 8:
            stay, moved, by = self._halves(codes)
            words = (words & stay) | (words & moved) >> by
            codes *= 2
        words = words.astype(self._word, copy=False)
        return _shift(words, plane.shift, words).view(np.uint8)

    def _halves(self, codes: int) -> tuple[Any, Any, Any]:
        """Where every 2 `codes` codes are two halves: masks of those that stay, those moved up, and by how many bits."""
        half = (1 << self._plane.width * codes) - 1
        stay = sum(half << 8 * start for start in range(0, self._plane.in_word, 2 * codes))
        of = self._spread.type
        return of(stay), of(stay << 8 * codes), of((8 - self._plane.width) * codes)


# The smallest byte whose five digits are those of the number, which is the one that ggml writes.
_FRACTION = np.array([-(-number * 256 // 243) for number in range(243)], np.uint8)


class _Trits:
    """A digit is the whole part of three times the fraction, whose rest holds the digits after it."""

    def __init__(self, plane: Trits) -> None:
        self._plane = plane
        self._item = np.dtype(f"V{plane.lanes}")

    def units(self, stored: Bytes) -> Bytes:
        result = np.empty((len(stored), self._plane.units), np.uint8)
        turns = result.view(self._item).reshape(-1, self._plane.in_word)
        for turn in range(self._plane.in_word):
            digits = (stored > 85).view(np.uint8)
            digits += stored > 170
            turns[:, turn] = digits.view(self._item)[:, 0]
            stored *= np.uint8(3)
        return result

    def stored(self, units: Bytes) -> Bytes:
        turns = units.view(self._item).reshape(-1, self._plane.in_word)
        number = np.array(turns[:, 0]).view(np.uint8)
        for turn in range(1, self._plane.in_word):
            number *= np.uint8(3)
            number += np.array(turns[:, turn]).view(np.uint8)
        number *= np.uint8(3 ** (5 - self._plane.in_word))
        return _FRACTION.take(number, mode="clip").reshape(len(units), -1)
