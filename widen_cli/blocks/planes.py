"""How the codes of one plane lie in its bytes: taken apart into units and put together again, or copied as they lie.

Stored bytes are an array [blocks, bytes]; their codes become one of [blocks, units], a byte each. Codes are shifted and
masked in 64-bit words, eight bytes at a time, where a mask takes away what a shift carries over.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from widen_cli.blocks.types import Plane, Trits

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

_WORD: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_ONES = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


def or_into(target: Bytes, other: Bytes) -> None:
    """Sets in `target` the bits of `other`, an array of the same shape; both contiguous."""
    words = _words(target)
    np.bitwise_or(words, _words(other), out=words)


def _words(array: Bytes) -> Words:
    """A contiguous array as a flat one of the largest words that fill it."""
    size = 8 if array.size % 8 == 0 else 4 if array.size % 4 == 0 else 1
    return array.reshape(-1).view(_WORD[size])


def _mask(bits: int, words: Words) -> Any:
    """A word with these bits in each byte."""
    return words.dtype.type(bits * _ONES[words.itemsize])


def _shift(words: Words, left: int, out: Words) -> Words:
    if left < 0:
        return np.asarray(np.right_shift(words, words.dtype.type(-left), out=out))
    return np.asarray(np.left_shift(words, words.dtype.type(left), out=out)) if left else words


# Codes as they lie.


class Doubler:
    """Puts every code of a plane twice into its bytes, or makes room for that, without taking codes apart."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        code = (1 << plane.width) - 1
        self._swaps = []
        turns = 1
        while turns < plane.in_word:
            even = sum(code << plane.width * turn for turn in range(plane.in_word) if not turn & turns)
            self._swaps.append((plane.width * turns, even))
            turns *= 2

    def halve_lanes(self, stored: Bytes, lanes: int) -> None:
        """Puts codes that lie in `lanes` lanes into half as many, in place.

        Written in binary, a code's number in its word of lanes is that of its turn followed by that of its lane. Half as
        many lanes are one bit less of the lane and one more of the turn, so the leading bit of the lane (the half of the
        lanes) becomes the last of the turn, and the turn's leading bit the half: by swaps of the half with each bit of
        the turn, from the last to the first.
        """
        halves = stored.view(f"V{lanes // 2}").reshape(-1, 2)
        lower, upper = (_words(np.array(halves[:, half]).view(np.uint8)) for half in (0, 1))
        word = lower.dtype.type
        for by, even in self._swaps:
            changed = lower >> word(by)
            changed ^= upper
            changed &= _mask(even, lower)
            upper ^= changed
            changed <<= word(by)
            lower ^= changed
        for half, words in enumerate((lower, upper)):
            halves[:, half] = words.view(halves.dtype)

    def doubled(self, stored: Bytes) -> Bytes:
        """Codes one after another in bytes, each of them twice: they are spread as far, by halves, and or-ed."""
        words = _words(stored.astype("<u2").view(np.uint8))
        word, by = words.dtype.type, 8
        while by > self.plane.width:
            by //= 2
            words |= words << word(by)
            words &= _mask({4: 0x0F, 2: 0x33, 1: 0x55}[by], words)
        words |= words << word(self.plane.width)
        return words.view(np.uint8).reshape(len(stored), -1)


# Codes as units.


class PlaneCoder(Protocol):
    def units(self, stored: Bytes) -> Bytes:
        """Stored bytes [blocks, nbytes] as units [blocks, units], each code at its bits of the unit."""

    def stored(self, units: Bytes) -> Bytes:
        """The reverse, of the plane's own bits alone. Either may overwrite its argument, `stored` only if no plane shares it."""


def plane_coder(plane: Plane | Trits, shared: bool) -> PlaneCoder:
    """`shared`: other planes have bits of the same units."""
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
