"""The header reader refuses every kind of damage by name; the writer's bytes are those of the library."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes  # noqa: F401 - numpy learns bfloat16
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from widen_cli.dtypes import STORED
from widen_cli.errors import WidenError
from widen_cli.safetensors_file import AGAIN, header_bytes, parse_json, read_header, shown
from widen_cli.sources import FileSource, PipeSource, Source

WILD = Path(__file__).parents[2] / "shared" / "wild"
HEALTHY = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def packed(header: object, data: int = 32) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def changed(name: str, **fields: object) -> bytes:
    return packed({**HEALTHY, name: {**HEALTHY[name], **fields}})


def write(tmp_path: Path, data: bytes) -> Source:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    return FileSource(path, name="x")


def faults(source: Source) -> list[str]:
    with pytest.raises(WidenError) as caught:
        read_header(source)
    return list(caught.value.faults)


def test_healthy(tmp_path: Path) -> None:
    data = packed({"__metadata__": {"format": "pt", "note": "é"}, **HEALTHY})
    source = write(tmp_path, data)
    header = read_header(source)
    a, b = header.tensors
    assert (a.name, a.dtype, a.shape, a.offset, a.nbytes) == ("a", STORED["F32"], (2, 3), len(data) - 32, 24)
    assert (b.name, b.dtype, b.shape, b.offset, b.nbytes) == ("b", STORED["BF16"], (4,), len(data) - 8, 8)
    assert a.source is source
    assert header.metadata == {"format": "pt", "note": "é"}
    assert header.nbytes == len(data)
    assert read_header(PipeSource(io.BytesIO(data))).nbytes == len(data)


def test_order_is_that_of_the_data(tmp_path: Path) -> None:
    header = read_header(write(tmp_path, packed(dict(reversed(HEALTHY.items())))))
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    table = {
        "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "last": {"dtype": "U8", "shape": [1], "data_offsets": [4, 5]},
    }
    header = read_header(write(tmp_path, packed(table, 5)))
    assert [(t.name, t.shape, t.nbytes) for t in header.tensors] == [
        ("scalar", (), 4),
        ("none", (0, 7), 0),
        ("last", (1,), 1),
    ]


def test_no_tensors_and_null_metadata(tmp_path: Path) -> None:
    assert read_header(write(tmp_path, packed({"__metadata__": None}, 0))).tensors == ()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:3f\nsize 269060552\n"
PAST = 1000
FOREIGN = {
    "empty": (b"", "the file is empty (0 bytes); the download or copy was cut short: do it again"),
    "short": (b"abc", "the file has 3 bytes, less than the 8 of a header length; download or copy it again"),
    "lfs": (LFS, "is a Git LFS pointer to a file of 269060552 bytes; fetch the file with git lfs pull"),
    "html": (
        b"\n<!DOCTYPE html><html>",
        "is an HTML page: the download failed or needs a login; download it again",
    ),
    "zip": (
        b"PK\x03\x04\x00\x00\x08\x08\x00\x00data",
        "is a PyTorch zip file with a pickle inside, which is not opened; convert it to safetensors",
    ),
    "pickle": (
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",
        "is a pickle, which is not opened; convert it to safetensors",
    ),
    "gguf": (
        b"GGUF\x03\x00\x00\x00\x05\x00",
        "is a GGUF file, not safetensors; give it a name that ends in .gguf",
    ),
    "hdf5": (b"\x89HDF\r\n\x1a\n\x00", "is an HDF5 file, not safetensors; convert it to safetensors"),
    "index": (
        b'{\n  "metadata": {}}',
        "is a JSON text, not safetensors; of a sharded model give the folder, not its index",
    ),
    "link": (
        b"../../blobs/aaaa1111",
        "is the text of a symbolic link, as a copy without links leaves it; copy the file it names",
    ),
    "list": (packed(b'["F32"]'), f"the header is no JSON object but another JSON value; {AGAIN}"),
    "utf8": (packed(b'{"\xff":1}'), f"the header is not UTF-8 (its byte 2); {AGAIN}"),
    "deep": (packed(b'{"a":' + b"[" * 200_000), f"the header is JSON nested too deeply; {AGAIN}"),
    "nan": (packed(b'{"a":NaN}'), f"the header is not valid JSON (NaN is no JSON number); {AGAIN}"),
    "nothing": (
        packed(b""),
        f"the header is not valid JSON (Expecting value: line 1 column 1 (char 0)); {AGAIN}",
    ),
}


@pytest.mark.parametrize(("data", "text"), FOREIGN.values(), ids=FOREIGN)
def test_other_files_are_told_by_their_content(tmp_path: Path, data: bytes, text: str) -> None:
    # The header reader adds the name, the JSON reader the words "the header".
    assert faults(write(tmp_path, data)) == [f"x: {text}"]
    assert faults(PipeSource(io.BytesIO(data), name="x")) == [f"x: {text}"]


def test_length_that_looks_like_a_pickle_is_a_length(tmp_path: Path) -> None:
    text = json.dumps(HEALTHY).encode().ljust(0x280)
    data = packed(text)
    assert data.startswith(b"\x80\x02")
    assert len(read_header(write(tmp_path, data)).tensors) == 2
    data = packed(b"[]".ljust(0x280))
    assert faults(write(tmp_path, data)) == [f"x: the header is no JSON object but another JSON value; {AGAIN}"]


def test_a_tensor_inside_another_makes_no_hole(tmp_path: Path) -> None:
    inside = {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}
    assert faults(write(tmp_path, packed({**HEALTHY, "i": inside}))) == [f"x: 'a' and 'i' overlap by 4 bytes; {AGAIN}"]


def test_absurd_lengths(tmp_path: Path) -> None:
    far = (2**63).to_bytes(8, "little") + b"{}"
    text = f"x: the header claims {2**63} bytes, the file has 10 bytes; the download was cut short: do it again"
    assert faults(write(tmp_path, far)) == [text]
    text = f"x: the header claims {2**63} bytes, more than the 100000000 that the format allows; {AGAIN}"
    assert faults(PipeSource(io.BytesIO(far), name="x")) == [text]


def test_limit_holds_in_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    with open(path, "r+b") as file:
        file.truncate(200_000_000)
    text = f"x: the header claims 100000001 bytes, more than the 100000000 that the format allows; {AGAIN}"
    assert faults(FileSource(path, name="x")) == [text]


def test_length_past_the_end_of_a_pipe() -> None:
    data = packed(HEALTHY)[:50]
    text = f"x: truncated: {len(packed(HEALTHY, 0)) - 50} bytes missing; download or copy it again"
    assert faults(PipeSource(io.BytesIO(data), name="x")) == [text]


OTHER = {"dtype": "F32", "shape": [2, 3]}
TWICE = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
PAIR = "are no pair of ascending integers"
ONCE = "does not have dtype, shape and data_offsets once each"
SIZES = "is no list of integers from 0 up"
TABLE = {
    "twice": (packed(TWICE, 2), ["the header names 'a' twice"]),
    "hole": (changed("b", data_offsets=[28, 36]) + bytes(4), ["hole of 4 bytes between 'a' and 'b'"]),
    "hole first": (packed({"b": HEALTHY["b"]}), ["hole of 24 bytes between the header and 'b'"]),
    "overlap": (
        changed("b", data_offsets=[20, 28])[:-4],
        ["'a' and 'b' overlap by 4 bytes"],
    ),
    "trailing": (packed(HEALTHY, 40), ["8 bytes follow the last tensor, which no tensor owns"]),
    "mismatch": (changed("a", shape=[2, 4]), ["'a': F32 [2, 4] needs 32 bytes, its data_offsets hold 24"]),
    "wraps": (
        changed("a", shape=[2**62, 4, 6]),
        [f"'a': F32 [{2**62}, 4, 6] needs {2**62 * 96} bytes, its data_offsets hold 24"],
    ),
    "negative": (changed("a", shape=[-2, -3]), [f"'a': shape '[-2, -3]' {SIZES}"]),
    "bool": (changed("a", shape=[True, 6]), [f"'a': shape '[True, 6]' {SIZES}"]),
    "float": (changed("a", shape=[2.0, 3]), [f"'a': shape '[2.0, 3]' {SIZES}"]),
    "no list": (changed("a", shape=6), [f"'a': shape '6' {SIZES}"]),
    "too large": (changed("a", shape=[2**64, 0]), [f"'a': shape '[{2**64}, 0]' {SIZES}"]),
    "axes": (changed("a", shape=[1] * 65), ["'a' has 65 axes, more than 64"]),
    "half a byte": (changed("a", dtype="F4", shape=[3]), ["'a': F4 [3] fills no whole number of bytes"]),
    "triple": (packed({"a": {**OTHER, "data_offsets": [0, 1, 2]}}, 0), [f"'a': data_offsets '[0, 1, 2]' {PAIR}"]),
    "backward": (packed({"a": {**OTHER, "data_offsets": [24, 0]}}, 0), [f"'a': data_offsets '[24, 0]' {PAIR}"]),
    "bools": (
        packed({"a": {**OTHER, "data_offsets": [False, True]}}, 0),
        [f"'a': data_offsets '[False, True]' {PAIR}"],
    ),
    "no offsets": (packed({"a": OTHER}, 0), [f"'a' {ONCE}"]),
    "no object": (packed({"a": 1}, 0), [f"'a' {ONCE}"]),
    "shape twice": (packed(b'{"a":{"shape":[],"shape":[1],"dtype":"U8","data_offsets":[0,1]}}', 0), [f"'a' {ONCE}"]),
    "metadata": (packed({"__metadata__": [], **HEALTHY}), ["__metadata__ is no JSON object"]),
    "metadata number": (
        packed({"__metadata__": {"n": 1}, **HEALTHY}),
        ["__metadata__: the value of 'n' is no text"],
    ),
    "metadata twice": (
        packed(b'{"__metadata__":{"n":"1","n":"2"}}', 0),
        ["__metadata__ names the key 'n' twice"],
    ),
    "surrogate": (
        packed(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0),
        ["the name '\\ud800' holds half a surrogate pair, which is no text"],
    ),
    "control": (
        packed({"e\n\x1b[31m": {**OTHER, "data_offsets": 0}}, 0),
        [f"'e\\n\\x1b[31m': data_offsets '0' {PAIR}"],
    ),
    "two at once": (
        changed("a", shape=[7])[:-1],
        [
            "'a': F32 [7] needs 28 bytes, its data_offsets hold 24",
            "truncated: 1 bytes missing of {size}; the download or copy was cut short: do it again",
        ],
    ),
}


@pytest.mark.parametrize(("data", "texts"), TABLE.values(), ids=TABLE)
def test_faults_of_the_table(tmp_path: Path, data: bytes, texts: list[str]) -> None:
    wanted = [f"x: {text}".format(size=len(data) + 1) if "again" in text else f"x: {text}; {AGAIN}" for text in texts]
    assert faults(write(tmp_path, data)) == wanted
    on_a_pipe = [text for text in wanted if "truncated" not in text and "follow the last" not in text]
    if on_a_pipe:
        assert faults(PipeSource(io.BytesIO(data), name="x")) == on_a_pipe


def test_unknown_dtype_names_the_near_one(tmp_path: Path) -> None:
    text = "x: 'a' has the dtype 'F33', which is not known (did you mean 'F32'?); save it in another one"
    assert faults(write(tmp_path, changed("a", dtype="F33"))) == [text]
    text = "x: 'a' has the dtype '[1]', which is not known; save it in another one"
    assert faults(write(tmp_path, changed("a", dtype=[1]))) == [text]


def test_many_faults_are_counted(tmp_path: Path) -> None:
    table = {f"t{n}": {"dtype": "F128", "shape": [], "data_offsets": [n, n + 1]} for n in range(5000)}
    texts = faults(write(tmp_path, packed(table, 5000)))
    assert len(texts) == 11
    assert texts[-1] == "x: ... and 4990 more"


def test_a_hole_filled_by_a_faulty_tensor_is_no_hole(tmp_path: Path) -> None:
    assert len(faults(write(tmp_path, changed("a", dtype="?")))) == 1


def test_long_names_are_cut() -> None:
    assert shown("x" * 1000) == "'" + "x" * 200 + "...'"


def test_repeated_keys_are_kept() -> None:
    value = parse_json(b'{"a":1,"b":{"c":2},"a":3}', "x")
    assert value == [("a", 1), ("b", [("c", 2)]), ("a", 3)]
    assert value.repeated == ["a"]  # type: ignore[attr-defined]


def test_header_bytes_are_golden() -> None:
    start, offsets = header_bytes([("a", STORED["F32"], (2, 3)), ("b", STORED["U8"], ())], {})
    text = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"b":{"dtype":"U8","shape":[],"data_offsets":[24,25]}}   '
    )
    assert start == len(text).to_bytes(8, "little") + text
    assert len(start) % 8 == 0
    assert offsets == [len(start), len(start) + 24]


def test_header_bytes_equal_the_library() -> None:
    arrays = {"a": np.zeros((2, 3), np.float32), "é": np.ones(4, np.float32)}
    entries = [(name, STORED["F32"], array.shape) for name, array in arrays.items()]
    start, _ = header_bytes(entries, {"format": "np"})
    assert start + b"".join(map(bytes, arrays.values())) == safetensors.numpy.save(arrays, {"format": "np"})


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "u8": rng.integers(0, 255, 3).astype(np.uint8),
        "w": rng.normal(size=(3, 5)).astype(np.float32),
        "h": rng.normal(size=(2, 2)).astype(np.float16),
        "none": np.zeros((0, 4), np.int64),
        "scalar": np.float64(2.5).reshape(()),
    }
    names = {"uint8": "U8", "float32": "F32", "float16": "F16", "int64": "I64", "float64": "F64"}
    entries = [(name, STORED[names[array.dtype.name]], array.shape) for name, array in arrays.items()]
    start, offsets = header_bytes(entries, {"note": "kept"})
    data = bytearray(start)
    for array, offset in zip(arrays.values(), offsets, strict=True):
        assert len(data) == offset
        data += array.tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    read = safetensors.numpy.load_file(path)
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"note": "kept", "format": "pt"}
    assert read_header(FileSource(path)).nbytes == len(data)


@pytest.mark.parametrize("name", STORED)
def test_the_library_knows_every_dtype(name: str) -> None:
    dtype = STORED[name]
    start, _ = header_bytes([("a", dtype, (8, 3))], {})
    ((_, entry),) = safetensors.deserialize(start + bytes(dtype.nbytes((8, 3))))
    assert (entry["dtype"], entry["shape"]) == (name, [8, 3])


def test_two_tensors_of_one_name_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two tensors of the name 'a'"):
        header_bytes([("a", STORED["U8"], ()), ("a", STORED["U8"], ())], {})


# Rows that the planner decides; for the reader these files are sound.
SOUND = {
    "st_f8_block_scaled",
    "st_prefix_orig_mod",
    "st_lora_adapter",
    "st_missing_tensor",
    "st_unmapped_weight",
    "st_name_control_chars",
    "st_fused_qkv",
}


def _wild_rows() -> list[tuple[str, bool, str]]:
    if not WILD.is_dir():
        return []
    with open(WILD / "EXPECT.tsv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["file"].startswith("st_")]
    return [(r["file"], r["must"] == "error" and Path(r["file"]).stem not in SOUND, r["mention"]) for r in rows]


def check_wild(file: str, refused: bool, mention: str) -> None:
    source = FileSource(WILD / "files" / file)
    if not refused:
        assert read_header(source).nbytes == source.size
        return
    texts = faults(source)
    assert mention.lower() in "\n".join(texts).lower()
    assert all(text.startswith(source.name + ": ") and text.isprintable() for text in texts)


# Without the folder nothing is collected, so that a clone has no skipped tests.
test_wild: Callable[..., None] | None = None
if _wild_rows():
    test_wild = pytest.mark.parametrize(("file", "refused", "mention"), _wild_rows())(check_wild)
