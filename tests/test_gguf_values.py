"""Metadata values are the bytes they are stored in, and every Python value comes back as what it was."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widen_cli.gguf.values import FIXED_SIZES, GgufValue, ValueType

# Numbers and sizes as the text of the format gives them, and the ends of each type.
STATED = {
    ValueType.U8: (0, 1, "<B", [0, 255]),
    ValueType.I8: (1, 1, "<b", [-128, 127]),
    ValueType.U16: (2, 2, "<H", [0, 65535]),
    ValueType.I16: (3, 2, "<h", [-32768, 32767]),
    ValueType.U32: (4, 4, "<I", [0, 2**32 - 1]),
    ValueType.I32: (5, 4, "<i", [-(2**31), 2**31 - 1]),
    ValueType.F32: (6, 4, "<f", [0.0, -1.5, math.inf, 2.0**-149]),
    ValueType.BOOL: (7, 1, "<B", [False, True]),
    ValueType.U64: (10, 8, "<Q", [0, 2**64 - 1]),
    ValueType.I64: (11, 8, "<q", [-(2**63), 2**63 - 1]),
    ValueType.F64: (12, 8, "<d", [0.1, 5e-324]),
}


@pytest.mark.parametrize("type", STATED)
def test_single_values(type: ValueType) -> None:
    number, size, layout, ends = STATED[type]
    assert (type, FIXED_SIZES[type]) == (number, size)
    for end in ends:
        made = GgufValue.of(type, end)
        assert made.raw == struct.pack(layout, end)
        assert made.value == end
        assert isinstance(made.value, bool) == (type is ValueType.BOOL)
        assert (made.element, made.count) == (None, None)


@pytest.mark.parametrize("type", STATED)
def test_arrays(type: ValueType) -> None:
    number, _, layout, ends = STATED[type]
    made = GgufValue.of(ValueType.ARRAY, ends, type)
    assert made.raw == struct.pack("<IQ", number, len(ends)) + b"".join(struct.pack(layout, end) for end in ends)
    assert made.value == ends
    assert (made.element, made.count) == (type, len(ends))
    empty = GgufValue.of(ValueType.ARRAY, [], type)
    assert (empty.value, empty.element, empty.count) == ([], type, 0)


def test_strings() -> None:
    assert GgufValue.of(ValueType.STRING, "zé中").raw == b"\x06" + bytes(7) + "zé中".encode()
    made = GgufValue.of(ValueType.ARRAY, ["", "a", "zé"], ValueType.STRING)
    assert (
        made.raw == b"\x08\0\0\0\x03" + bytes(7) + bytes(8) + b"\x01" + bytes(7) + b"a\x03" + bytes(7) + "zé".encode()
    )
    assert made.value == ["", "a", "zé"]


def test_bytes_that_are_no_text_come_back() -> None:
    stored = GgufValue(ValueType.STRING, b"\x03" + bytes(7) + b"a\xff\xc3")
    assert stored.value == "a\udcff\udcc3"
    assert stored.like(stored.value) == stored


def test_nested_arrays() -> None:
    inner = [
        GgufValue.of(ValueType.ARRAY, [1, 2], ValueType.U8),
        GgufValue.of(ValueType.ARRAY, ["x"], ValueType.STRING),
    ]
    outer = GgufValue.of(ValueType.ARRAY, inner, ValueType.ARRAY)
    assert (outer.element, outer.count) == (ValueType.ARRAY, 2)
    assert outer.value == [[1, 2], ["x"]]


def test_another_value_keeps_the_type() -> None:
    assert GgufValue.of(ValueType.U64, 5).like(7) == GgufValue.of(ValueType.U64, 7)
    counts = GgufValue.of(ValueType.ARRAY, [1], ValueType.I32)
    assert counts.like([2, 3]) == GgufValue.of(ValueType.ARRAY, [2, 3], ValueType.I32)


@pytest.mark.parametrize(
    ("type", "value", "element", "text"),
    [
        (ValueType.U8, 256, None, "U8 cannot hold all of [256]"),
        (ValueType.U32, -1, None, "U32 cannot hold all of [-1]"),
        (ValueType.U32, 1.0, None, "U32 cannot hold all of [1.0]"),
        (ValueType.U32, True, None, "U32 cannot hold all of [True]"),
        (ValueType.BOOL, 1, None, "BOOL cannot hold all of [1]"),
        (ValueType.F32, 1e39, None, "F32 cannot hold all of [1e+39]"),
        (ValueType.F32, "1", None, "F32 cannot hold all of ['1']"),
        (ValueType.ARRAY, [1, 2, 3, 4, -1], ValueType.U8, "U8 cannot hold all of [1, 2, 3, 4, ...]"),
        (ValueType.STRING, 5, None, "a string is text, not 5"),
        (ValueType.STRING, "\ud800", None, "surrogates not allowed"),
        (ValueType.ARRAY, [1], None, "an array, and only an array, has an element type"),
        (ValueType.U8, 1, ValueType.U8, "an array, and only an array, has an element type"),
        (ValueType.ARRAY, "ab", ValueType.STRING, "an array holds a sequence, not 'ab'"),
        (ValueType.ARRAY, 5, ValueType.U8, "an array holds a sequence, not 5"),
        (ValueType.ARRAY, [[1]], ValueType.ARRAY, "an element of a nested array is an array value, not [1]"),
    ],
)
def test_what_a_type_cannot_hold(type: ValueType, value: object, element: ValueType | None, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        GgufValue.of(type, value, element)
    assert text in str(caught.value)


@given(st.lists(st.text()), st.lists(st.integers(-(2**63), 2**63 - 1)), st.binary())
def test_any_value_comes_back(texts: list[str], numbers: list[int], data: bytes) -> None:
    assert GgufValue.of(ValueType.ARRAY, texts, ValueType.STRING).value == texts
    assert GgufValue.of(ValueType.ARRAY, numbers, ValueType.I64).value == numbers
    stored = GgufValue(ValueType.STRING, struct.pack("<Q", len(data)) + data)
    assert stored.like(stored.value) == stored


def test_a_large_value_is_not_printed_whole() -> None:
    assert repr(GgufValue.of(ValueType.STRING, "x" * 1000)) == "GgufValue(type=<ValueType.STRING: 8>)"
