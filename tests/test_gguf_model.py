"""A model in parts is read from any of them and written so that llama.cpp's naming and keys hold."""

from __future__ import annotations

import csv
import io
import os
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import gguf as library
import numpy as np
import pytest
from gguf_bytes import entries, gguf, pair, tensor, text, u32
from hypothesis import given
from hypothesis import strategies as st

from widen_cli.errors import WidenError
from widen_cli.gguf.header import TensorEntry, gguf_header_bytes, padded, read_gguf_header
from widen_cli.gguf.model import GgufModel, GgufPart, open_gguf, part_names, plan_parts
from widen_cli.gguf.types import GGUF_TYPES
from widen_cli.gguf.values import GgufValue, ValueType
from widen_cli.sources import HeldSource, PipeSource

WILD = Path(__file__).parents[2] / "shared" / "wild"
TOKENIZER = pair("tokenizer.ggml.model", 8, text("llama"))
F32 = GGUF_TYPES["F32"]


def split_keys(number: int, count: int, total: int) -> list[bytes]:
    return [
        pair("split.no", 2, struct.pack("<H", number)),
        pair("split.count", 2, struct.pack("<H", count)),
        pair("split.tensors.count", 5, struct.pack("<i", total)),
    ]


def three_parts() -> dict[str, bytes]:
    """Parts of 2, 0 and 1 tensors."""
    return {
        "m-00001-of-00003.gguf": gguf(
            [TOKENIZER, *split_keys(0, 3, 3), u32("n", 5)], [tensor("a", [8]), tensor("b", [8], offset=32)], 64
        ),
        "m-00002-of-00003.gguf": gguf(split_keys(1, 3, 3)),
        "m-00003-of-00003.gguf": gguf(split_keys(2, 3, 3), [tensor("c", [16])], 64),
    }


def write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def faults(path: Path) -> list[str]:
    """The faults, and that no descriptor stays open behind them."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WidenError) as caught:
        open_gguf(path)
    assert len(os.listdir("/proc/self/fd")) == before
    # Without the folder, which differs from run to run.
    return [text.replace(f"{path.parent}/", "").replace(str(path.parent), "folder") for text in caught.value.faults]


def contents(model: GgufModel) -> dict[str, bytes]:
    return {t.name: bytes(t.source.read(t.offset, t.nbytes)) for t in model.header.tensors}


def assembled(part: GgufPart, data: Sequence[bytes]) -> bytes:
    """The file that a part describes, written strictly forward."""
    file = bytearray(part.header)
    for number, offset, (end, zeros) in zip(part.tensors, part.offsets, part.gaps, strict=True):
        assert len(file) == offset
        file += data[number]
        assert len(file) == end
        file += bytes(zeros)
    assert len(file) == part.nbytes
    return bytes(file)


def test_one_file(tmp_path: Path) -> None:
    data = gguf([TOKENIZER], [tensor("a", [8])], 32)
    (path,) = write(tmp_path, {"m.gguf": data})
    model = open_gguf(path)
    assert (model.files, model.warnings) == ((path,), ())
    assert contents(model) == {"a": data[-32:]}
    assert model.header.values.keys() == {"tokenizer.ggml.model"}
    model.close()


@pytest.mark.parametrize("opened", range(3))
def test_any_part_opens_all(tmp_path: Path, opened: int) -> None:
    files = three_parts()
    paths = write(tmp_path, files)
    before = len(os.listdir("/proc/self/fd"))
    model = open_gguf(paths[opened])
    assert model.files == tuple(paths)
    assert model.warnings == ()
    header = model.header
    # Everything but the split.* keys, wherever they stand.
    assert [pair(key, value.type, value.raw) for key, value in header.values.items()] == [TOKENIZER, u32("n", 5)]
    assert [(t.name, Path(t.source.name).name) for t in header.tensors] == [
        ("a", "m-00001-of-00003.gguf"),
        ("b", "m-00001-of-00003.gguf"),
        ("c", "m-00003-of-00003.gguf"),
    ]
    ends = [data[-64:] for data in files.values()]
    assert contents(model) == {"a": ends[0][:32], "b": ends[0][32:], "c": ends[2]}
    assert header.nbytes == sum(len(data) for data in files.values())
    assert len(os.listdir("/proc/self/fd")) == before + 3
    model.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_missing_parts_are_named_together(tmp_path: Path) -> None:
    (path, *others) = write(tmp_path, three_parts())
    for other in others:
        other.unlink()
    there = "m-00001-of-00003.gguf is there; download it too"
    assert faults(path) == [f"m-0000{number}-of-00003.gguf: missing, {there}" for number in (2, 3)]


def test_many_missing_parts_are_counted(tmp_path: Path) -> None:
    (path,) = write(tmp_path, {"m-00001-of-00100.gguf": gguf(split_keys(0, 100, 0))})
    texts = faults(path)
    assert len(texts) == 11
    assert texts[-1] == "folder: ... and 89 more"


def test_damage_in_all_parts_is_told_together(tmp_path: Path) -> None:
    files = three_parts()
    paths = write(tmp_path, files | {"m-00003-of-00003.gguf": files["m-00003-of-00003.gguf"][:-1]})
    paths[1].unlink()
    paths[1].symlink_to("blob")
    dangling, cut = faults(paths[0])
    assert dangling.startswith("m-00002-of-00003.gguf: is a link to blob, which is missing")
    assert cut.startswith("m-00003-of-00003.gguf: truncated: 1 bytes missing")


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00002.gguf", "m-1-of-3.gguf"])
def test_a_part_under_another_name_is_told(tmp_path: Path, name: str) -> None:
    (path,) = write(tmp_path, {name: three_parts()["m-00001-of-00003.gguf"]})
    assert faults(path) == [f"{name}: is part 1 of 3, but its name is not *-00001-of-00003.gguf; rename it back"]


ANOTHER = "the parts are not of one model"
DISAGREEING = {
    "number": (split_keys(2, 3, 3), [f"split.no is 2, expected 1; {ANOTHER}"]),
    "count": (split_keys(1, 2, 3), [f"split.count is 2, expected 3; {ANOTHER}"]),
    "total": (split_keys(1, 3, 4), [f"split.tensors.count is 4, expected 3; {ANOTHER}"]),
    "absent": (
        [],
        [
            "split.no is absent; download the model again",
            "split.count is absent; download the model again",
            "split.tensors.count is absent; download the model again",
        ],
    ),
    "type": (
        [pair("split.no", 8, text("1")), *split_keys(1, 3, 3)[1:]],
        ["split.no is no whole number; download the model again"],
    ),
    "bool": (
        [pair("split.no", 7, b"\1"), *split_keys(1, 3, 3)[1:]],
        ["split.no is no whole number; download the model again"],
    ),
}


@pytest.mark.parametrize(("keys", "texts"), DISAGREEING.values(), ids=DISAGREEING)
def test_parts_that_disagree(tmp_path: Path, keys: list[bytes], texts: list[str]) -> None:
    paths = write(tmp_path, three_parts() | {"m-00002-of-00003.gguf": gguf(keys)})
    assert faults(paths[0]) == [f"m-00002-of-00003.gguf: {text}" for text in texts]


def test_tensors_that_the_parts_do_not_have_are_counted(tmp_path: Path) -> None:
    files = {
        "m-00001-of-00002.gguf": gguf(split_keys(0, 2, 2), [tensor("a", [0])]),
        "m-00002-of-00002.gguf": gguf(split_keys(1, 2, 2)),
    }
    wanted = [f"{name}: split.tensors.count is 2, expected 1; {ANOTHER}" for name in files]
    assert faults(write(tmp_path, files)[1]) == wanted


def test_a_tensor_in_two_parts_is_told(tmp_path: Path) -> None:
    files = {
        "m-00001-of-00002.gguf": gguf(split_keys(0, 2, 2), [tensor("a", [8])], 32),
        "m-00002-of-00002.gguf": gguf(split_keys(1, 2, 2), [tensor("a", [8])], 32),
    }
    told = "m-00002-of-00002.gguf: has 'a', which m-00001-of-00002.gguf has; download both again"
    assert faults(write(tmp_path, files)[0]) == [told]


def test_a_count_of_another_type_is_told(tmp_path: Path) -> None:
    (path,) = write(tmp_path, {"m.gguf": gguf([pair("split.count", 6, struct.pack("<f", 2.0))])})
    assert faults(path) == ["m.gguf: split.count is no whole number; download the model again"]


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_stays_as_it_is(tmp_path: Path, count: int) -> None:
    # gguf-split --merge leaves split.count = 0 and the two other keys.
    data = gguf([TOKENIZER, *split_keys(0, count, 1)], [tensor("a", [8])], 32)
    header = open_gguf(write(tmp_path, {"m.gguf": data})[0]).header
    assert gguf_header_bytes(header.values, entries(header), 32)[0] == data[:-32]


def test_metadata_of_later_parts_is_told_of(tmp_path: Path) -> None:
    files = three_parts()
    files["m-00002-of-00003.gguf"] = gguf([*split_keys(1, 3, 3), TOKENIZER, u32("n", 6), u32("more", 1)])
    path = write(tmp_path, files)[0]
    part = path.with_name("m-00002-of-00003.gguf")
    assert open_gguf(path).warnings == (f"{part}: 'n' and 1 more not used, the first part's metadata counts",)
    write(tmp_path, {part.name: gguf([*split_keys(1, 3, 3), u32("more", 1)])})
    assert open_gguf(path).warnings == (f"{part}: 'more' not used, the first part's metadata counts",)


def test_parts_have_alignments_of_their_own(tmp_path: Path) -> None:
    files = three_parts()
    keys = [*split_keys(2, 3, 3), u32("general.alignment", 128)]
    files["m-00003-of-00003.gguf"] = gguf(keys, [tensor("c", [16])], 128, alignment=128)
    model = open_gguf(write(tmp_path, files)[0])
    assert (model.header.alignment, model.warnings) == (32, ())
    assert contents(model)["c"] == bytes(range(1, 65))


def test_what_llama_cpp_does_not_load_is_told_of(tmp_path: Path) -> None:
    path = write(tmp_path, {"m.gguf": gguf([u32("general.alignment", 8)], alignment=8)})[0]
    assert open_gguf(path).warnings == (
        f"{path}: general.alignment is 8; llama.cpp needs 32 or more",
        f"{path}: has no tokenizer.ggml.model; llama.cpp does not load a model without a tokenizer",
    )
    write(tmp_path, {"m.gguf": gguf([pair("general.type", 8, text("adapter"))])})
    assert open_gguf(path).warnings == ()


def test_a_pipe() -> None:
    data = gguf([TOKENIZER], [tensor("a", [8])], 32)
    model = open_gguf(PipeSource(io.BytesIO(data)))
    assert (model.files, contents(model)) == ((), {"a": data[-32:]})
    model.close()
    part = PipeSource(io.BytesIO(three_parts()["m-00001-of-00003.gguf"]), "x")
    with pytest.raises(WidenError, match=r"^x: is one part of a split model; give the path of a part, not a pipe$"):
        open_gguf(part)


def test_names() -> None:
    assert part_names("wide.gguf", 2) == ["wide-00001-of-00002.gguf", "wide-00002-of-00002.gguf"]
    assert part_names("wide-00001-of-00009.gguf", 1) == ["wide-00001-of-00001.gguf"]
    assert part_names("wide", 1) == ["wide-00001-of-00001.gguf"]
    assert part_names("a\nb.gguf", 1) == ["a\nb-00001-of-00001.gguf"]


VALUES = {
    "general.architecture": GgufValue.of(ValueType.STRING, "llama"),
    "split.no": GgufValue.of(ValueType.U16, 0),
    "general.alignment": GgufValue.of(ValueType.U32, 64),
    "tokenizer.ggml.model": GgufValue.of(ValueType.STRING, "llama"),
    "tokenizer.ggml.tokens": GgufValue.of(ValueType.ARRAY, [f"t{number}" for number in range(50)], ValueType.STRING),
}
TABLE: list[TensorEntry] = [(f"t{number}", F32, (number, 10)) for number in range(1, 9)]
DATA = [bytes([number]) * type.nbytes(shape) for number, (_, type, shape) in enumerate(TABLE)]


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_what_fits_is_one_file(limit: int | None) -> None:
    (part,) = plan_parts(VALUES, TABLE, "wide.gguf", limit)
    start, offsets = gguf_header_bytes(VALUES, TABLE, 64)
    assert (part.name, part.header, part.offsets) == ("wide.gguf", start, tuple(offsets))
    assert part.nbytes == len(start) + sum(padded(len(data), 64) for data in DATA)


def test_parts_as_the_library_reads_them(tmp_path: Path) -> None:
    parts = plan_parts(VALUES, TABLE, "wide.gguf", 1400)
    assert len(parts) == 3
    kept = {key: value for key, value in VALUES.items() if key != "split.no"}
    for number, part in enumerate(parts):
        path = tmp_path / part.name
        path.write_bytes(assembled(part, DATA))
        assert part.name == f"wide-{number + 1:05d}-of-{len(parts):05d}.gguf"
        read = library.GGUFReader(path)
        fields = {key: field for key, field in read.fields.items() if not key.startswith("GGUF.")}
        for key, type, value in (
            ("split.no", library.GGUFValueType.UINT16, number),
            ("split.count", library.GGUFValueType.UINT16, len(parts)),
            ("split.tensors.count", library.GGUFValueType.INT32, len(TABLE)),
        ):
            assert (fields[key].types, fields.pop(key).contents()) == ([type], value)
        # The alignment in all parts, the rest of the metadata in the first.
        assert list(fields) == (list(kept) if number == 0 else ["general.alignment"])
        assert [tensor.name for tensor in read.tensors] == [TABLE[index][0] for index in part.tensors]
        for index, tensor_read in zip(part.tensors, read.tensors, strict=True):
            assert tensor_read.data.tobytes() == DATA[index]
    model = open_gguf(tmp_path / parts[-1].name)
    assert model.header.values == kept
    assert contents(model) == {name: data for (name, _, _), data in zip(TABLE, DATA, strict=True)}
    assert entries(model.header) == TABLE
    assert model.warnings == ()


@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 12000),
    st.sampled_from([32, 64, 256]),
)
def test_no_part_passes_the_limit_without_need(sizes: list[tuple[int, int]], limit: int, alignment: int) -> None:
    values = VALUES | {"general.alignment": GgufValue.of(ValueType.U32, alignment)}
    table: list[TensorEntry] = [(f"blk.{number}", F32, size) for number, size in enumerate(sizes)]
    parts = plan_parts(values, table, "wide.gguf", limit)
    assert [index for part in parts for index in part.tensors] == list(range(len(table)))
    data = [bytes(type.nbytes(shape)) for _, type, shape in table]
    for part in parts:
        assert len(assembled(part, data)) <= limit or len(part.tensors) <= 1
    if len(parts) > 1 and len(parts[0].tensors) == 1:
        # The metadata alone may pass the limit, but then no tensor goes with it.
        assert parts[0].nbytes <= limit
    assert [number for number, part in enumerate(parts) if not part.tensors] in ([], [0])
    for part, following in pairwise(parts):
        # Nor does a part end before it must: with the next tensor it would pass the limit.
        own = read_gguf_header(HeldSource("x", assembled(part, data))).values
        longer = [*part.tensors, following.tensors[0]]
        _, offsets = gguf_header_bytes(own, [table[index] for index in longer], alignment)
        assert offsets[-1] + padded(len(data[longer[-1]]), alignment) > limit


def test_more_parts_than_can_be_numbered() -> None:
    table: list[TensorEntry] = [(f"t{number}", F32, (1,)) for number in range(65535)]
    with pytest.raises(WidenError) as caught:
        plan_parts({}, table, "wide.gguf", 1)
    assert str(caught.value) == "--max-shard-size 1: 65536 files needed, 65535 can be numbered; give a larger size"


def test_parts_of_the_library_are_read(tmp_path: Path) -> None:
    writer = library.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_tokenizer_model("llama")
    arrays = {f"t{number}": np.full((number, 4), number, np.float32) for number in range(1, 6)}
    for name, content in arrays.items():
        writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_gguf(tmp_path / "m-00002-of-00003.gguf")
    assert len(model.files) == 3
    assert model.header.values.keys() == {"general.architecture", "tokenizer.ggml.model"}
    assert contents(model) == {name: content.tobytes() for name, content in arrays.items()}


def check_wild_model(file: str, must: str, mention: str) -> None:
    path = WILD / "files" / file
    if must == "error":
        with pytest.raises(WidenError) as caught:
            open_gguf(path)
        assert mention in str(caught.value)
        return
    model = open_gguf(path)
    assert [mention in warning for warning in model.warnings] == ([True] if must == "warn" else [])
    if "split" in file:
        # The parts hold what the undivided file holds.
        whole = open_gguf(WILD / "files" / "gg_ok.gguf")
        assert model.header.values == whole.header.values
        assert contents(model) == contents(whole)


def _wild_rows() -> list[tuple[str, str, str]]:
    if not WILD.is_dir():
        return []
    with open(WILD / "EXPECT.tsv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["file"].startswith("gg_")]
    return [(row["file"], row["must"], row["mention"]) for row in rows]


# Without the folder nothing is collected, so that a clone has no skipped tests.
test_wild: Callable[..., None] | None = None
if _wild_rows():
    test_wild = pytest.mark.parametrize(("file", "must", "mention"), _wild_rows())(check_wild_model)
