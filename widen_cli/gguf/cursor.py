"""Walks through the header of a GGUF file: what is read is checked first against the bytes that are there."""

from __future__ import annotations

import struct
from typing import Any

from widen_cli.errors import WidenError, printable
from widen_cli.gguf.values import FIXED_SIZES, GgufValue, ValueType
from widen_cli.safetensors_file import AGAIN
from widen_cli.sources import PIECE, Source

# The format has no limit. A vocabulary of half a million tokens takes 20 MB, so this leaves room and stops a header
# that claims all of a large file.
HEADER_LIMIT = 1 << 27
# What has to be walked one by one is bounded too, so that 128 MB of nothing but lengths do not take a minute. The largest
# vocabularies have a million strings with their merges; no model nests arrays, and llama.cpp reads none that are.
STRINGS_LIMIT = 1 << 22
NESTED_LIMIT = 1 << 16
NESTING_LIMIT = 8

_LENGTH = struct.Struct("<Q")
_ARRAY_START_NBYTES = 12


class HeaderCursor:
    """A position in a header, from the source's first byte on.

    Of a pipe it reads no byte before that byte is known to belong to the header, so the tensors can still be read.
    `inside` is what the messages say is being read. Every method raises WidenError where the source ends too early or
    the header grows beyond a limit.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        self.inside = "the header"
        self._held = bytearray()
        self._strings = 0
        self._nested = 0

    @property
    def left(self) -> int:
        """How many bytes the header can still have."""
        size = self.source.size
        return (HEADER_LIMIT if size is None else min(size, HEADER_LIMIT)) - self.position

    def refusal(self, text: str) -> WidenError:
        """An error about what is being read."""
        return self.error(f"{printable(self.inside[:200])} {text}; {AGAIN}")

    def error(self, text: str) -> WidenError:
        """An error that begins with the source's name."""
        return WidenError(f"{self.source.name}: {text}")

    def peek(self, limit: int) -> bytes:
        """The bytes from the start, at most `limit` and fewer where the source ends; for a file that may be another kind."""
        size = self.source.size
        if size is not None:
            return bytes(self.source.read(0, min(limit, size)))
        while len(self._held) < limit:
            try:
                self._held += self.source.read(len(self._held), 1)
            except WidenError:
                break
        return bytes(self._held[:limit])

    def fields(self, layout: str) -> tuple[Any, ...]:
        """The numbers of a `struct` layout."""
        nbytes = struct.calcsize(layout)
        self._need(nbytes)
        numbers = struct.unpack_from(layout, self._held, self.position)
        self.position += nbytes
        return numbers

    def string(self) -> bytes:
        """A string's bytes."""
        (length,) = self.fields("<Q")
        self._need(length)
        begin, self.position = self.position, self.position + length
        return self._from(begin)

    def value(self) -> GgufValue:
        """A type number and the value of that type, whose bytes are copied and not decoded."""
        type = self._type()
        begin = self.position
        self._skip(type)
        return GgufValue(type, self._from(begin))

    def _from(self, begin: int) -> bytes:
        with memoryview(self._held) as held:
            return bytes(held[begin : self.position])

    def _need(self, nbytes: int) -> None:
        """Holds the next `nbytes` bytes."""
        end = self.position + nbytes
        if end <= len(self._held):
            return
        size = self.source.size
        if size is not None and end > size:
            left = size - self.position
            raise self.refusal(f"is truncated or damaged: {nbytes} more bytes needed, {left} are left")
        if end > HEADER_LIMIT:
            raise self.refusal(f"makes the metadata longer than {HEADER_LIMIT} bytes")
        ahead = end if size is None else min(max(end, len(self._held) + PIECE), size)
        self._held += self.source.read(len(self._held), ahead - len(self._held))

    def _type(self) -> ValueType:
        (number,) = self.fields("<I")
        try:
            return ValueType(number)
        except ValueError:
            raise self.refusal(f"has the value type {number}, which GGUF does not have") from None

    def _skip(self, type: ValueType, depth: int = 0) -> None:
        if type is ValueType.STRING:
            self._skip_strings(1)
        elif type is not ValueType.ARRAY:
            self._skip_fixed(type, 1)
        elif depth == NESTING_LIMIT:
            raise self.refusal(f"nests arrays more than {NESTING_LIMIT} deep")
        else:
            element = self._type()
            (count,) = self.fields("<Q")
            if element is ValueType.STRING:
                self._skip_strings(count)
            elif element is ValueType.ARRAY:
                self._need(_ARRAY_START_NBYTES * count)
                self._nested += count
                if self._nested > NESTED_LIMIT:
                    raise self.refusal(f"makes more than {NESTED_LIMIT} nested arrays")
                for _ in range(count):
                    self._skip(element, depth + 1)
            else:
                self._skip_fixed(element, count)

    def _skip_fixed(self, type: ValueType, count: int) -> None:
        nbytes = count * FIXED_SIZES[type]
        self._need(nbytes)
        begin, self.position = self.position, self.position + nbytes
        if type is ValueType.BOOL and self._from(begin).translate(None, b"\0\1"):
            raise self.refusal("has a bool that is neither 0 nor 1")

    def _skip_strings(self, count: int) -> None:
        self._need(_LENGTH.size * count)
        self._strings += count
        if self._strings > STRINGS_LIMIT:
            raise self.refusal(f"makes more than {STRINGS_LIMIT} strings")
        while count:
            self._need(_LENGTH.size)
            (length,) = _LENGTH.unpack_from(self._held, self.position)
            # The lengths of the strings behind this one are certain to follow, so a pipe is read in large pieces.
            self._need(_LENGTH.size * count + length)
            count = self._skip_held_strings(count)

    def _skip_held_strings(self, count: int) -> int:
        """Skips the strings that are held as a whole, at most `count`; how many remain."""
        held, position, end = self._held, self.position, len(self._held)
        while count and position + 8 <= end:
            after = position + 8 + _LENGTH.unpack_from(held, position)[0]
            if after > end:
                break
            position = after
            count -= 1
        self.position = position
        return count
