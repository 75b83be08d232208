"""Quantised blocks written as numbers, and what a GGUF's metadata says of the model as a whole.

Numbers are compared bit for bit with those of gguf-py's codecs, repeated and scaled here by the law of test_gguf_lossless;
counts and labels with those that gguf-py makes of the wide file's tensors.
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_families
import numpy as np
import numpy.typing as npt
import pytest
from gguf.utility import size_label
from gguf_families import FAMILIES, Family
from gguf_oracle import GgufFile, Stored, read
from llama_cpp import difference, log_probabilities
from models import by_factors
from safetensors.numpy import save_file
from test_gguf_lossless import (
    DOUBLED,
    KINDS,
    NUMBERS,
    TRIPLED,
    Law,
    Tiny,
    add_keys,
    command,
    divergence,
    law_of,
    matrix,
    tensors_of,
    write_tiny,
    written,
)
from test_gguf_lossless import TENSORS as SPACES_OF

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.gguf.header import gguf_header_bytes, read_gguf_header
from widen_cli.gguf.types import GGUF_TYPES
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.sources import FileSource
from widen_cli.writing import run

Kind = gguf.GGMLQuantizationType
Meta = gguf.GGUFValueType
Array = npt.NDArray[Any]

FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
BLOCKS = [kind for kind in KINDS if kind not in FLOATS]
NUMPY = {"F32": np.float32, "F16": np.float16}
EMBEDDING = "token_embd.weight"


def widen(path: Path, out: Path, grow: str, **options: Any) -> Report:
    return run(prepare(Options(str(path), str(out), grow=by_factors(grow), threads=2, **options)), lambda nbytes: None)


def products(name: str, tensor: Stored, law: Law) -> Array:
    """A tensor's values times their factor in double precision, not yet repeated."""
    written_by, reads = spaces(name)
    factor = law.factor(written_by, reads if len(tensor.shape) > 1 else None)
    values: Array = tensor.values().reshape(tensor.shape).astype(np.float64)
    return values * factor.numerator / factor.denominator


def spaces(name: str) -> tuple[str, str | None]:
    return next(found for pattern, found in SPACES_OF.items() if re.fullmatch(pattern, name))


def repeated(name: str, values: Array, law: Law) -> Array:
    """Its copies beside each other; silent ones, which are read by nobody, are zero."""
    written_by, reads = spaces(name)
    if values.ndim == 1:
        return law.spread(values, written_by)
    outer, inner = (reads, written_by) if name == EMBEDDING else (written_by, reads)
    assert outer is not None
    assert inner is not None
    rows = law.spread(values.swapaxes(-1, -2), outer).swapaxes(-1, -2)
    return law.spread(rows, inner, inner in law.silent)


def same_bits(one: Array, other: Array) -> bool:
    """Of zeros, either sign: blocks of zeros have some of both."""
    assert one.dtype == other.dtype
    return one.shape == other.shape and (one + 0).tobytes() == (other + 0).tobytes()


def numbers(tensor: Stored) -> Array:
    kind = {Kind.F32: np.float32, Kind.F16: np.float16}[tensor.kind]
    return tensor.rows.view(kind).reshape(tensor.shape)


def check_numbers(path: Path, out: Path, report: Report, written_in: Mapping[str, str]) -> None:
    """Every tensor of the types in `written_in` ('' for the others) has the values of its law, rounded once and counted."""
    old, new = read(path), read(out)
    law = law_of(old, report.job, tiled=False)
    assert list(new.tensors) == list(old.tensors)
    for name, tensor in old.tensors.items():
        found = new.tensors[name]
        asked = "F32" if len(tensor.shape) == 1 else written_in.get(name, written_in.get("", "F32"))
        assert found.kind == Kind[asked], name
        exact = products(name, tensor, law)
        rounded = exact.astype(NUMPY[asked])
        assert same_bits(numbers(found), repeated(name, rounded, law)), name
        counts = report.counts[name]
        assert (counts.values, counts.overflowed) == (exact.size, 0)
        assert counts.rounded == np.count_nonzero(rounded.astype(np.float64) != exact), name


# Every type.


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("asked", ["F32", "F16"])
def test_every_type_as_numbers(kind: Kind, asked: str, tmp_path: Path) -> None:
    """Numbers need no tiles, whatever a type's blocks are like."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(kind,), layers=1))
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED, scaling="sum", dequantize=asked)
    assert not any(note.startswith("layout") for note in report.job.plan.notes)
    check_numbers(narrow, tmp_path / "wide.gguf", report, {"": asked})
    if asked == "F32":
        assert report.total.rounded == 0


@pytest.mark.parametrize(
    ("mode", "grow", "asked", "experts"),
    [
        ("sum", TRIPLED, "F32", 0),
        ("quiet", TRIPLED, "F16", 0),
        ("copy", DOUBLED, "F16", 4),
        ("quiet", DOUBLED, "F32", 4),
    ],
)
def test_numbers_in_any_mode(mode: str, grow: str, asked: str, experts: int, tmp_path: Path) -> None:
    """Factors that are no powers of two, silent copies, experts, whose router is F32 before and after."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q5_K, Kind.IQ4_NL), experts=experts))
    report = widen(narrow, tmp_path / "wide.gguf", grow, scaling=mode, dequantize=asked)
    router = {f"blk.{layer}.ffn_gate_inp.weight": "F32" for layer in range(2)}
    check_numbers(narrow, tmp_path / "wide.gguf", report, {"": asked, **router})


def test_the_number_of_codecs_is_known() -> None:
    """A type that gguf-py learns is to be taken up, one that it loses to be refused."""
    codecs = {kind.name for kind in gguf.quants._type_traits} - {"BF16"}
    assert codecs == {kind.name for kind in BLOCKS}
    without = {name for name, kind in GGUF_TYPES.items() if kind.block > 1} - codecs
    assert without == {"Q8_1", "Q8_K", "Q1_0", "Q2_0"}


def retyped(path: Path, out: Path, name: str, kind: str) -> Path:
    """A file with one tensor of another type, all data zero."""
    header = read_gguf_header(FileSource(path))
    entries = [
        (tensor.name, GGUF_TYPES[kind] if tensor.name == name else tensor.type, tensor.shape)
        for tensor in header.tensors
    ]
    data, offsets = gguf_header_bytes(header.values, entries, header.alignment)
    _, last, shape = entries[-1]
    end = offsets[-1] + last.nbytes(shape)
    out.write_bytes(data + bytes(end + -end % 32 - len(data)))
    return out


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "Q1_0", "Q2_0"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("blk.0.ffn_up.weight", {"dequantize": "F32"}),
        ("blk.0.ffn_up.weight", {"dequantize": "F16", "embedding_type": "F32"}),
        (EMBEDDING, {"embedding_type": "F16"}),
    ],
)
def test_types_without_a_codec_are_refused(kind: str, name: str, options: dict[str, str], tmp_path: Path) -> None:
    made = write_tiny(tmp_path / "made.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1))
    narrow = retyped(made, tmp_path / "narrow.gguf", name, kind)
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(narrow), str(tmp_path / "wide.gguf"), grow=DOUBLED, **options))  # type: ignore[arg-type]
    (text,) = caught.value.faults
    assert text.endswith(
        f"tensor '{name}': {kind}: gguf-py cannot dequantise it; leave --dequantize and --embedding-type out"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.gguf", "narrow.gguf"]


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K"])
def test_types_without_a_codec_may_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    made = write_tiny(tmp_path / "made.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1))
    narrow = retyped(made, tmp_path / "narrow.gguf", "blk.0.ffn_up.weight", kind)
    widen(narrow, tmp_path / "wide.gguf", DOUBLED, scaling="sum", embedding_type="F32")
    wide = {tensor.name: tensor.type.name for tensor in read_gguf_header(FileSource(tmp_path / "wide.gguf")).tensors}
    assert (wide["blk.0.ffn_up.weight"], wide[EMBEDDING]) == (kind, "F32")


@pytest.mark.parametrize(
    ("stored", "asked", "becomes"),
    [
        (Kind.F16, "F32", Kind.F32),
        (Kind.BF16, "F32", Kind.F32),
        (Kind.F32, "F32", Kind.F32),
        (Kind.F16, "F16", Kind.F16),
        (Kind.BF16, "F16", Kind.BF16),
        (Kind.F32, "F16", Kind.F32),
    ],
)
def test_matrices_of_floats(stored: Kind, asked: str, becomes: Kind, tmp_path: Path) -> None:
    """Narrower floats are widened, so that a model is of one type; none is made narrower."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(stored,), layers=1))
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED, scaling="sum", dequantize=asked)
    kinds = {name: tensor.kind for name, tensor in read(tmp_path / "wide.gguf").tensors.items()}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {becomes}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {Kind.F32}
    if becomes == Kind.F32:
        check_numbers(narrow, tmp_path / "wide.gguf", report, {"": "F32"})


def test_what_half_precision_does_not_hold(tmp_path: Path) -> None:
    """It becomes infinite, and is counted."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1))
    file = read(narrow, "r+").tensors["blk.0.ffn_up.weight"]
    file.rows[3, :2] = np.frombuffer(np.float16(1000).tobytes(), np.uint8)
    large = np.abs(file.values()) > 65519
    assert large.any()
    report = widen(narrow, tmp_path / "wide.gguf", "heads=2,kv_heads=2,hidden=2", scaling="sum", dequantize="F16")
    counts = report.counts["blk.0.ffn_up.weight"]
    assert counts.overflowed == np.count_nonzero(large)
    wide = numbers(read(tmp_path / "wide.gguf").tensors["blk.0.ffn_up.weight"])
    assert np.isinf(wide).sum() == 2 * counts.overflowed


def test_numbers_in_llama_cpp(tmp_path: Path) -> None:
    """The dequantised wide model says what a narrow one of the same numbers says, to the bound of F32."""
    tiny = Tiny(kinds=(Kind.Q4_K, Kind.IQ3_S, Kind.Q8_0))
    narrow = write_tiny(tmp_path / "narrow.gguf", tiny)
    writer = gguf.GGUFWriter(tmp_path / "plain.gguf", "llama")
    add_keys(writer, tiny)
    for name, tensor in read(narrow).tensors.items():
        writer.add_tensor(name, tensor.values().reshape(tensor.shape))
    spoken = log_probabilities(written(writer, tmp_path / "plain.gguf"), NUMBERS)
    widen(narrow, tmp_path / "wide.gguf", TRIPLED, scaling="orthogonal", dequantize="F32")
    assert difference(spoken, log_probabilities(tmp_path / "wide.gguf", NUMBERS)) <= 2e-4
    widen(narrow, tmp_path / "half.gguf", DOUBLED, dequantize="F16")
    assert divergence(spoken, log_probabilities(tmp_path / "half.gguf", NUMBERS)) <= 1e-5


# The embedding alone.


@pytest.mark.parametrize("asked", ["F32", "F16"])
def test_the_embedding_alone(asked: str, tmp_path: Path) -> None:
    """All else has the bytes of a run without."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q4_K, Kind.Q6_K), untied=True))
    options: dict[str, Any] = {"scaling": "sum", "layout": "interleave"}
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED, embedding_type=asked, **options)
    widen(narrow, tmp_path / "other.gguf", DOUBLED, **options)
    old, new, other = (read(tmp_path / name) for name in ("narrow.gguf", "wide.gguf", "other.gguf"))
    differing = [name for name, tensor in new.tensors.items() if tensor.kind != other.tensors[name].kind]
    assert differing == [EMBEDDING]
    assert all(
        np.array_equal(new.tensors[name].rows, other.tensors[name].rows) for name in new.tensors if name != EMBEDDING
    )
    assert new.pairs == other.pairs
    law = law_of(old, report.job, tiled=False)
    exact = products(EMBEDDING, old.tensors[EMBEDDING], law).astype(NUMPY[asked])
    assert same_bits(numbers(new.tensors[EMBEDDING]), repeated(EMBEDDING, exact, law))


@pytest.mark.parametrize(("all_else", "embedding"), [("F16", "F32"), ("F32", "F16")])
def test_the_embedding_has_the_last_word(all_else: str, embedding: str, tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q4_1,), untied=True))
    report = widen(
        narrow, tmp_path / "wide.gguf", DOUBLED, scaling="sum", dequantize=all_else, embedding_type=embedding
    )
    check_numbers(narrow, tmp_path / "wide.gguf", report, {"": all_else, EMBEDDING: embedding})


@pytest.mark.parametrize(("stored", "becomes"), [(Kind.F32, Kind.F32), (Kind.F16, Kind.F16), (Kind.BF16, Kind.BF16)])
def test_an_embedding_of_floats_is_not_made_narrower(stored: Kind, becomes: Kind, tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(stored,), layers=1))
    widen(narrow, tmp_path / "wide.gguf", DOUBLED, embedding_type="F16")
    assert read(tmp_path / "wide.gguf").tensors[EMBEDDING].kind == becomes


@pytest.mark.parametrize(
    ("name", "tables"),
    [("gpt2-untied", {EMBEDDING, "position_embd.weight"}), ("bert", {EMBEDDING, "position_embd.weight", "token_types.weight"})],
)  # fmt: skip
def test_every_table_that_is_looked_up_is_an_embedding(name: str, tables: set[str], tmp_path: Path) -> None:
    """Positions and token types too; not the head, which is read as a matrix."""
    family = replace(
        FAMILIES[name], sizes=replace(FAMILIES[name].sizes, hidden=64, inner=64, heads=2, kv_heads=2, head=32)
    )
    narrow = write_blocks(tmp_path / "narrow.gguf", family)
    widen(narrow, tmp_path / "wide.gguf", "hidden=2", scaling="copy", embedding_type="F16")
    old, new = read(narrow), read(tmp_path / "wide.gguf")
    assert {key for key, tensor in new.tensors.items() if tensor.kind != old.tensors[key].kind} == tables
    assert {new.tensors[key].kind for key in tables} == {Kind.F16}


def write_blocks(path: Path, family: Family) -> Path:
    """A family's file with all matrices in Q8_0."""
    writer = gguf.GGUFWriter(path, family.architecture)
    for key, value in gguf_families._metadata(family).items():
        add: Any = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add = writer.add_float32 if isinstance(value, float) else add
        add(f"{family.architecture}.{key}", value)
    for name, shape in family.tensors(family.sizes).items():
        values = gguf_families.drawn(name, shape)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, Kind.Q8_0), raw_dtype=Kind.Q8_0)
    return written(writer, path)


# The metadata.


def write_described(path: Path, tiny: Tiny, general: Mapping[str, Any]) -> Path:
    """A tiny model with keys about it as a whole: whole numbers in 64 bits but the file type, texts as texts."""
    writer = gguf.GGUFWriter(path, tiny.architecture)
    for key, value in general.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif key == "general.file_type":
            writer.add_uint32(key, value)
        else:
            writer.add_uint64(key, value)
    add_keys(writer, tiny)
    draw = np.random.default_rng(7)
    for name, shape in tensors_of(tiny):
        if len(shape) == 1 or "gate_inp" in name:
            writer.add_tensor(name, draw.random(shape).astype(np.float32) + 1)
        else:
            writer.add_tensor(name, matrix(tiny.kinds[0], shape, draw), raw_dtype=tiny.kinds[0])
    return written(writer, path)


def described(file: GgufFile) -> dict[str, Any]:
    """What the whole-model keys of a file say."""
    found: dict[str, Any] = {}
    for key, (kind, raw) in file.pairs.items():
        if key in GENERAL:
            found[key] = raw[8:].decode() if kind == Meta.STRING else int.from_bytes(raw, "little")
    return found


def counted_by_gguf_py(file: GgufFile, path: Path) -> tuple[int, int, int, int]:
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in file.tensors.items():
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), 4 * math.prod(tensor.shape))
    return writer.get_total_parameter_count()


GENERAL = {"general.parameter_count": 1, "general.size_label": "1K", "general.file_type": 15}


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("asked", [None, "F32", "F16"])
def test_what_is_said_of_the_whole_model(experts: int, asked: str | None, tmp_path: Path) -> None:
    tiny = Tiny(kinds=(Kind.Q4_1,), experts=experts, biases=not experts)
    narrow = write_described(tmp_path / "narrow.gguf", tiny, GENERAL)
    widen(narrow, tmp_path / "wide.gguf", DOUBLED, dequantize=asked)
    old, new = read(narrow), read(tmp_path / "wide.gguf")
    counts = counted_by_gguf_py(new, tmp_path / "none.gguf")
    assert counts[3] == experts
    assert counts[0] == sum(math.prod(tensor.shape) for tensor in new.tensors.values())
    file_type = {
        None: GENERAL["general.file_type"],
        "F32": gguf.LlamaFileType.ALL_F32,
        "F16": gguf.LlamaFileType.MOSTLY_F16,
    }
    assert described(new) == {
        "general.parameter_count": counts[0],
        "general.size_label": size_label(*counts),
        "general.file_type": file_type[asked],
    }
    assert size_label(*counts) != size_label(*counted_by_gguf_py(old, tmp_path / "none.gguf"))
    assert list(new.pairs) == list(old.pairs)
    assert all(new.pairs[key][0] == old.pairs[key][0] for key in old.pairs)


@pytest.mark.parametrize(("stored", "asked"), [(Kind.BF16, "F16"), (Kind.F32, "F16"), (Kind.F32, "F32")])
def test_what_changes_no_type_is_told(stored: Kind, asked: str, tmp_path: Path) -> None:
    narrow = write_described(tmp_path / "narrow.gguf", Tiny(kinds=(stored,)), {"general.file_type": 32})
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED, dequantize=asked, embedding_type=asked)
    assert described(read(tmp_path / "wide.gguf")) == {"general.file_type": 32}
    why = "no tensor it is for holds quantised blocks or narrower numbers, so it has no effect"
    told = [text for text in report.job.warnings if text.endswith("no effect")]
    assert told == [f"--dequantize {asked.lower()}: {why}", f"--embedding-type {asked.lower()}: {why}"]


@pytest.mark.parametrize("key", GENERAL)
def test_keys_that_are_absent_stay_so(key: str, tmp_path: Path) -> None:
    narrow = write_described(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q4_1,)), {key: GENERAL[key]})
    widen(narrow, tmp_path / "wide.gguf", DOUBLED, dequantize="F16")
    assert set(described(read(tmp_path / "wide.gguf"))) == {key}
    assert list(read(tmp_path / "wide.gguf").pairs) == list(read(narrow).pairs)


@pytest.mark.parametrize("key", ["general.parameter-count", "llama.parameter_count"])
def test_other_names_of_the_count(key: str, tmp_path: Path) -> None:
    narrow = write_described(tmp_path / "narrow.gguf", Tiny(), {key: 3})
    widen(narrow, tmp_path / "wide.gguf", DOUBLED)
    new = read(tmp_path / "wide.gguf")
    total = sum(math.prod(tensor.shape) for tensor in new.tensors.values())
    assert new.pairs[key] == (Meta.UINT64, struct.pack("<Q", total))


@pytest.mark.parametrize("key", ["general.parameter_count", "general.file_type"])
def test_a_key_of_another_type_is_no_traceback(key: str, tmp_path: Path) -> None:
    """Such as a text, or a count in 32 bits that the wide model's does not fit in."""
    narrow = write_described(tmp_path / "narrow.gguf", Tiny(layers=1), {key: "many"})
    try:
        widen(narrow, tmp_path / "wide.gguf", DOUBLED, dequantize="F32")
    except WidenError as error:
        assert key in str(error)  # noqa: PT017
    else:
        assert key in read(tmp_path / "wide.gguf").pairs


def test_made_tensors_count(tmp_path: Path) -> None:
    narrow = write_described(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q8_0,)), GENERAL)
    widen(narrow, tmp_path / "wide.gguf", "head_dim=2", scaling="sum")
    new = read(tmp_path / "wide.gguf")
    assert sum(name.endswith("attn_k.scale") for name in new.tensors) == 2
    assert described(new)["general.parameter_count"] == counted_by_gguf_py(new, tmp_path / "none.gguf")[0]


def test_parts_say_it_once(tmp_path: Path) -> None:
    """Counts are those of all parts; the first one's metadata is the model's."""
    narrow = write_described(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q4_1,), layers=3), GENERAL)
    for out, size in (("whole.gguf", None), ("wide.gguf", "4MB")):
        widen(narrow, tmp_path / out, DOUBLED, dequantize="F16", max_shard_size=size)
    parts = [read(path) for path in sorted(tmp_path.glob("wide-*.gguf"))]
    assert len(parts) > 2
    whole = described(read(tmp_path / "whole.gguf"))
    assert whole["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    assert [described(part) for part in parts] == [whole, *({} for _ in parts[1:])]
    kinds = {name: tensor.kind for part in parts for name, tensor in part.tensors.items()}
    assert kinds == {name: tensor.kind for name, tensor in read(tmp_path / "whole.gguf").tensors.items()}


# The command line.


@pytest.mark.parametrize("option", ["--dequantize", "--embedding-type"])
def test_a_safetensors_model_has_another_option(option: str, tmp_path: Path) -> None:
    save_file({"embed": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    given: dict[str, Any] = {option.strip("-").replace("-", "_"): "F32"}
    options = Options(str(tmp_path / "model.safetensors"), str(tmp_path / "out.safetensors"), **given)
    with pytest.raises(WidenError) as caught:
        prepare(options)
    expected = f"{option} f32: is for a GGUF; --dtype sets the type of a safetensors model's weights"
    assert expected in caught.value.faults
    assert not (tmp_path / "out.safetensors").exists()


def test_a_gguf_keeps_its_types_otherwise(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1))
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(narrow), str(tmp_path / "wide.gguf"), dtype="F16"))
    assert caught.value.faults == (
        "--dtype F16: a GGUF keeps its types; --dequantize f32 or f16 writes numbers, and llama.cpp's own tools quantise",
    )


def test_what_the_file_itself_says_counts(tmp_path: Path) -> None:
    """--set tells what is not known; against a GGUF's own keys the wide file would be of another model."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny())
    eps = "attention.layer_norm_rms_epsilon"
    settings = (f"{eps}=0.1", "rope.freq_base=77", "block_count=0", "general.size_label=9B", "attention.head_count=4")
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(narrow), str(tmp_path / "wide.gguf"), factor=2, settings=settings))
    stated = {"rope.freq_base": ("77", "10000.0"), "block_count": ("0", "2")}
    faults = [
        f"--set {key}={said}: the file itself says {found}, and a runtime goes by that; leave it out"
        for key, (said, found) in stated.items()
    ]
    assert faults == [text for text in caught.value.faults if text.startswith(("--set rope", "--set block"))]
    assert any(text.startswith(f"--set {eps}=0.1: the file itself says ") for text in caught.value.faults)
    assert any(
        text.startswith("--set general.size_label: 'llama' has no such config key") for text in caught.value.faults
    )
    assert not any("head_count=4" in text for text in caught.value.faults)


def test_a_pipe_is_held_to_the_bytes_of_a_file(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny())
    data = narrow.read_bytes()
    header = read_gguf_header(FileSource(narrow))
    end = max(tensor.offset + tensor.nbytes for tensor in header.tensors)
    for given, told in (
        (data + b"x", "standard input: there are bytes after the last tensor; make or download the file again\n"),
        (data[:90000], f"standard input: truncated: {end - 90000} bytes missing; download or copy it again\n"),
    ):
        run = [sys.executable, "-m", "widen_cli", "-", "wide.gguf"]
        done = subprocess.run(run, cwd=tmp_path, input=given, capture_output=True)
        assert (done.returncode, done.stderr.decode()) == (1, told)
        assert not (tmp_path / "wide.gguf").exists()


def test_types_on_the_command_line(tmp_path: Path) -> None:
    """In either case; others are wrong usage."""
    write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q8_0,), layers=1, untied=True))
    done = command(tmp_path, "narrow.gguf", "wide.gguf", "--dequantize", "f16", "--embedding-type", "F32")
    assert done.returncode == 0, done.stderr
    kinds = {name: tensor.kind for name, tensor in read(tmp_path / "wide.gguf").tensors.items()}
    assert (kinds[EMBEDDING], kinds["output.weight"], kinds["output_norm.weight"]) == (Kind.F32, Kind.F16, Kind.F32)
    done = command(tmp_path, "narrow.gguf", "other.gguf", "--dequantize", "q4_0")
    assert (done.returncode, (tmp_path / "other.gguf").exists()) == (2, False)
