"""The metadata values of GGUF, kept as the bytes they are stored in and decoded when they are asked for.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, enum gguf_metadata_value_type.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class ValueType(IntEnum):
    """The type of a metadata value, with GGUF's number."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12

    @property
    def is_integer(self) -> bool:
        """True for the eight integer types."""
        return self in _INTEGERS


# What `struct` calls a single value; strings and arrays have no fixed size.
_CODES = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "?",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}
_INTEGERS = _CODES.keys() - {ValueType.F32, ValueType.F64, ValueType.BOOL}

FIXED_SIZES: dict[ValueType, int] = {kind: struct.calcsize(f"<{code}") for kind, code in _CODES.items()}

_LENGTH = struct.Struct("<Q")
_ARRAY_START = struct.Struct("<IQ")

Decoded = int | float | bool | str | list["Decoded"]


@dataclass(frozen=True)
class GgufValue:
    """One value: its type, and the bytes that follow the type's number in the file.

    A string's bytes begin with its length, an array's with its element type and count; what `GgufValue.of` and the
    header reader make is well formed.
    """

    type: ValueType
    raw: bytes = field(repr=False)

    @property
    def element(self) -> ValueType | None:
        """The type of an array's elements, None for other values."""
        return ValueType(_ARRAY_START.unpack_from(self.raw)[0]) if self.type is ValueType.ARRAY else None

    @property
    def count(self) -> int | None:
        """How many elements an array has, None for other values."""
        return int(_ARRAY_START.unpack_from(self.raw)[1]) if self.type is ValueType.ARRAY else None

    @property
    def value(self) -> Decoded:
        """The value itself: int, float, bool, str, or a list for an array (of lists where arrays are nested).

        Bytes that are no UTF-8 become lone surrogates, which `GgufValue.of` turns back into the same bytes.
        """
        return _decoded(self.type, self.raw, 0)[0]

    def like(self, value: object) -> GgufValue:
        """Another value of the same type and, for an array, of the same element type; ValueError as in `of`."""
        return GgufValue.of(self.type, value, self.element)

    def longer(self, values: Sequence[object]) -> GgufValue:
        """The array with more elements behind its own; ValueError where its element type cannot hold them."""
        if self.element is None or self.count is None:
            raise ValueError("only an array has elements")
        start = _ARRAY_START.pack(self.element, self.count + len(values))
        return GgufValue(self.type, start + self.raw[_ARRAY_START.size :] + _encoded(self.element, values))

    @staticmethod
    def of(type: ValueType, value: object, element: ValueType | None = None) -> GgufValue:
        """The value as stored; an array is a sequence and needs its `element` type.

        The elements of a nested array are arrays made by `of`. ValueError where the type cannot hold the value.
        """
        if (type is ValueType.ARRAY) != (element is not None):
            raise ValueError("an array, and only an array, has an element type")
        if element is None:
            return GgufValue(type, _encoded(type, [value]))
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError(f"an array holds a sequence, not {value!r}")
        return GgufValue(type, _ARRAY_START.pack(element, len(value)) + _encoded(element, value))


def _decoded(type: ValueType, raw: bytes, at: int) -> tuple[Decoded, int]:
    """The value at an offset, and the offset behind it."""
    if type is ValueType.STRING:
        begin = at + _LENGTH.size
        end = begin + int(_LENGTH.unpack_from(raw, at)[0])
        return raw[begin:end].decode(errors="surrogateescape"), end
    if type is not ValueType.ARRAY:
        (number,) = struct.unpack_from(f"<{_CODES[type]}", raw, at)
        return number, at + FIXED_SIZES[type]
    number, count = _ARRAY_START.unpack_from(raw, at)
    element = ValueType(number)
    at += _ARRAY_START.size
    if element in FIXED_SIZES:
        numbers = struct.unpack_from(f"<{count}{_CODES[element]}", raw, at)
        return list(numbers), at + count * FIXED_SIZES[element]
    elements: list[Decoded] = []
    for _ in range(count):
        item, at = _decoded(element, raw, at)
        elements.append(item)
    return elements, at


def _encoded(type: ValueType, values: Sequence[object]) -> bytes:
    """The bytes of values of one type, one after the other."""
    if type is ValueType.STRING:
        return b"".join(map(_string, values))
    if type is ValueType.ARRAY:
        return b"".join(map(_nested, values))
    # struct takes True for 1 and any object for a bool, which would hide a mistake.
    if any(isinstance(value, bool) != (type is ValueType.BOOL) for value in values):
        raise ValueError(f"{type.name} cannot hold all of {_excerpt(values)}")
    try:
        return struct.pack(f"<{len(values)}{_CODES[type]}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{type.name} cannot hold all of {_excerpt(values)}: {error}") from None


def _string(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"a string is text, not {value!r}")
    # A surrogate that stands for no byte is no text: UnicodeEncodeError, which is a ValueError.
    data = value.encode(errors="surrogateescape")
    return _LENGTH.pack(len(data)) + data


def _nested(value: object) -> bytes:
    if not isinstance(value, GgufValue) or value.type is not ValueType.ARRAY:
        raise ValueError(f"an element of a nested array is an array value, not {value!r}")
    return value.raw


def _excerpt(values: Sequence[object]) -> str:
    text = repr(list(values[:4]))
    return text if len(values) <= 4 else f"{text[:-1]}, ...]"
