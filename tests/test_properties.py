"""Properties: whatever model, growth, header or map is drawn, the outcome is what the law and independent readers say, or an error."""

from __future__ import annotations

import io
import json
import math
import random
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import gguf_bytes
import ml_dtypes
import mutations
import numpy as np
import pytest
import reference
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from widen_cli.config import parse_settings
from widen_cli.convert import prepare
from widen_cli.dtypes import STORED
from widen_cli.errors import WidenError
from widen_cli.gguf.header import read_gguf_header
from widen_cli.jobs import Job
from widen_cli.map_file import map_names, map_text
from widen_cli.maps import map_from_text
from widen_cli.options import Options
from widen_cli.plan.wishes import parse_grow
from widen_cli.safetensors_file import header_bytes, read_header
from widen_cli.sharding import parse_size
from widen_cli.sources import FileSource, PipeSource
from widen_cli.verification import verify
from widen_cli.writing import run

# One folder serves all examples of a test; each writes its own file anew.
BRIEFLY = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
# What may be lost of a value where it is multiplied and rounded: an ulp.
FLOATS = {
    "F64": (np.float64, 2.0**-52),
    "F32": (np.float32, 2.0**-23),
    "F16": (np.float16, 2.0**-10),
    "BF16": (ml_dtypes.bfloat16, 2.0**-7),
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def widened(given: Path, out: Path, **options: Any) -> Job:
    """Converts, and has the tool derive its result once more."""
    asked = Options(str(given), str(out), force=True, threads=1, **options)
    job = prepare(asked)
    run(job, lambda nbytes: None)
    assert verify(replace(asked, force=False), lambda nbytes: None).differences == ()
    return job


# Random models.


@dataclass(frozen=True)
class Drawn:
    """A random LLaMA, how it grows, and in which mode."""

    config: dict[str, Any]
    dtype: str
    growth: dict[str, int]
    scaling: str


@st.composite
def llamas(draw: st.DrawFn) -> Drawn:
    small = st.integers(1, 3)
    kv_heads, group, head_dim = draw(small), draw(small), 2 * draw(small)
    more_kv, more_groups = draw(small), draw(st.integers(1, 2))
    sizes = {
        "vocab_size": draw(st.integers(1, 9)),
        "hidden_size": kv_heads * group * draw(small),
        "intermediate_size": draw(st.integers(1, 9)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.booleans()),
    }
    growth = {
        # The library wants hidden to be a multiple of heads.
        "hidden": more_kv * more_groups * draw(st.integers(1, 2)),
        "intermediate": draw(st.integers(1, 4)),
        "heads": more_kv * more_groups,
        "kv_heads": more_kv,
    }
    return Drawn(
        LLAMA | sizes,
        draw(st.sampled_from(list(FLOATS))),
        growth,
        draw(st.sampled_from(["copy", "orthogonal", "sum", "quiet", "auto"])),
    )


def llama_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    vocab, hidden, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    rows, kv_rows = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield f"{at}self_attn.q_proj.weight", (rows, hidden)
        yield f"{at}self_attn.k_proj.weight", (kv_rows, hidden)
        yield f"{at}self_attn.v_proj.weight", (kv_rows, hidden)
        yield f"{at}self_attn.o_proj.weight", (hidden, rows)
        yield f"{at}mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}mlp.up_proj.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)


def numbers(shape: tuple[int, ...], seed: int = 5) -> np.ndarray:
    """Values between 1 and 2 with a sign: no rounding of theirs, nor of a thousandth, is a subnormal of half precision."""
    drawn = np.random.default_rng([seed, *shape])
    return drawn.uniform(1, 2, shape) * drawn.choice([-1.0, 1.0], shape)


@BRIEFLY
@given(drawn=llamas())
def test_what_is_written_is_what_was_planned_and_what_the_law_says(drawn: Drawn, tmp_path: Path) -> None:
    dtype, ulp = FLOATS[drawn.dtype]
    narrow = {name: numbers(shape).astype(dtype) for name, shape in llama_shapes(drawn.config)}
    folder = reference.write(tmp_path / "narrow", narrow, drawn.config)
    grow = ",".join(f"{axis}={factor}x" for axis, factor in drawn.growth.items())
    job = widened(folder, tmp_path / "wide", grow=grow, scaling=drawn.scaling)
    file = tmp_path / "wide" / "model.safetensors"
    assert file.stat().st_size == job.nbytes
    found = load_file(file)
    assert {name: array.shape for name, array in found.items()} == {
        name: tensor.shape for tensor in job.plan.tensors for name in tensor.names
    }
    assert {array.dtype for array in found.values()} == {np.dtype(dtype)}
    law = "copy" if drawn.scaling in ("sum", "quiet", "auto") else drawn.scaling
    wide, config = reference.widen(narrow, drawn.config, drawn.growth, law)
    assert {name: array.shape for name, array in found.items()} == {name: array.shape for name, array in wide.items()}
    written = json.loads((tmp_path / "wide" / "config.json").read_text())
    eps = written.pop("rms_norm_eps"), config.pop("rms_norm_eps")
    assert written == config
    if drawn.scaling == law:
        assert eps[0] == pytest.approx(eps[1])
    # Under `orthogonal` some scales are free, and theirs need not be those of the reference.
    for name, array in wide.items() if drawn.scaling == "copy" else ():
        assert np.allclose(found[name].astype(np.float64), array, rtol=2 * ulp, atol=0), name


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@BRIEFLY
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    inner=st.integers(1, 3),
    growth=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    scaling=st.sampled_from(["auto", "copy", "sum", "quiet"]),
)
def test_a_gguf_is_written_as_planned_and_keeps_its_types(
    kinds: list[str], heads: tuple[int, int], inner: int, growth: tuple[int, int, int], scaling: str, tmp_path: Path
) -> None:
    hidden, inner = 64, 32 * inner
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    sizes = {"block_count": 1, "embedding_length": hidden, "feed_forward_length": inner, "context_length": 8}
    sizes |= {"attention.head_count": heads[0], "attention.head_count_kv": heads[1]}
    for key, size in sizes.items():
        writer.add_uint32(f"llama.{key}", size)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_tokenizer_model("llama")
    kv_rows = hidden // heads[0] * heads[1]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (7, hidden), "output_norm.weight": (hidden,)}
    shapes |= {f"blk.0.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}.weight": (kv_rows, hidden) for name in "kv"}
    shapes |= {f"blk.0.attn_{name}.weight": (hidden, hidden) for name in ("q", "output")}
    shapes |= {f"blk.0.ffn_{name}.weight": (inner, hidden) for name in ("gate", "up")}
    shapes |= {"blk.0.ffn_down.weight": (hidden, inner)}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else kinds[number % 3]]
        writer.add_tensor(name, quantize(numbers(shape).astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    asked = dict(zip(("hidden", "intermediate", "heads"), growth, strict=True)) | {"kv_heads": growth[2]}
    # What the file does not state is hidden / heads: heads grow in number, and where hidden grows by more, in size too.
    asked["hidden"] = asked["heads"] * asked["hidden"]
    grow = ",".join(f"{axis}={factor}x" for axis, factor in asked.items())
    job = widened(tmp_path / "in.gguf", tmp_path / "out.gguf", grow=grow, scaling=scaling)
    assert (tmp_path / "out.gguf").stat().st_size == job.nbytes
    old, new = (gguf.GGUFReader(tmp_path / name) for name in ("in.gguf", "out.gguf"))
    planned = {name: tensor for tensor in job.plan.tensors for name in tensor.names}
    types = {tensor.name: tensor.tensor_type for tensor in old.tensors}
    for tensor in new.tensors:
        assert tuple(int(size) for size in tensor.shape[::-1]) == planned[tensor.name].shape
        # A factor that blocks cannot take may have a tensor of its own.
        assert tensor.tensor_type == types.get(tensor.name, gguf.GGMLQuantizationType.F32)
        assert tensor.n_bytes == planned[tensor.name].dtype.nbytes(planned[tensor.name].shape)
    assert {tensor.name for tensor in new.tensors} == planned.keys()
    for key, axis in (("embedding_length", "hidden"), ("feed_forward_length", "intermediate")):
        assert new.fields[f"llama.{key}"].contents() == sizes[key] * asked[axis]


# Headers.

TINY = """\
architecture: tiny
match: {model_type: [tiny], gguf: [tiny]}
axes:
  vocab:  {key: vocab_size, fixed: true}
  hidden: {key: hidden_size}
config: {eps: 1e-3}
growth: {width: [hidden]}
spaces: {final: "norm(hidden, eps)"}
tensors:
  embed.weight: vocab -> hidden
  norm.weight:  -> final
  head.weight:  vocab <- final
"""
SHAPES = {"embed.weight": (3, 4), "norm.weight": (4,), "head.weight": (3, 4)}


def doubled(name: str, array: np.ndarray) -> np.ndarray:
    """The law for TINY under `copy`."""
    return np.repeat(array, 2, axis=-1) / (2 if name == "head.weight" else 1)


def refusal(error: WidenError, name: str) -> None:
    assert error.faults
    for fault in error.faults:
        assert fault.startswith(name), fault
        assert fault.isprintable()


def flipped(data: bytes, length: int) -> Iterator[bytes]:
    for at in range(length):
        for bit in range(8):
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def flip(given: Path, out: Path, read: Any) -> bool:
    """Converts a file with a changed bit; False where it was refused, in words that name it."""
    try:
        with closing(FileSource(given, given.name)) as source:
            read(source)  # most are refused here, before a map is read
        job = prepare(
            Options(
                str(given), str(out), factor=2, scaling="copy", force=True, threads=1, recorded_map=TINY,
                recorded_map_alone=True,
            )
        )  # fmt: skip
    except WidenError as error:
        refusal(error, "in." if str(error).startswith("in.") else str(given))
        return False
    run(job, lambda nbytes: None)
    return True


def test_every_bit_of_a_safetensors_header(tmp_path: Path) -> None:
    """An error, or what the library reads of the input is in the output as the law says."""
    data = save({name: numbers(shape).astype(np.float32) for name, shape in SHAPES.items()}, {"format": "pt"})
    given, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    length = 8 + int.from_bytes(data[:8], "little")
    taken = 0
    for changed in flipped(data, length):
        given.write_bytes(changed)
        if flip(given, out, read_header):
            taken += 1
            narrow, wide = load_file(given), load_file(out)
            assert narrow.keys() == wide.keys() == SHAPES.keys()
            for name, array in narrow.items():
                assert np.array_equal(wide[name], doubled(name, array).astype(array.dtype), equal_nan=True)
    assert 10 < taken < length, "the text of the metadata is free, and hardly anything else"


def test_every_bit_of_a_gguf_header(tmp_path: Path) -> None:
    pairs = [gguf_bytes.pair("general.architecture", 8, gguf_bytes.text("tiny"))]
    pairs += [gguf_bytes.u32("tiny.hidden_size", 4)]
    offsets = {"embed.weight": 0, "norm.weight": 64, "head.weight": 96}
    table = [gguf_bytes.tensor(name, shape[::-1], 0, offsets[name]) for name, shape in SHAPES.items()]
    start = gguf_bytes.gguf(pairs, table)
    values = {name: numbers(shape).astype(np.float32).tobytes() for name, shape in SHAPES.items()}
    data = start + b"".join(part + bytes(-len(part) % 32) for part in values.values())
    given, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    taken = 0
    for changed in flipped(data, len(start)):
        given.write_bytes(changed)
        if flip(given, out, read_gguf_header):
            taken += 1
            narrow, wide = (
                {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors} for path in (given, out)
            )
            assert narrow.keys() == wide.keys() == SHAPES.keys()
            for name, array in narrow.items():
                assert np.array_equal(wide[name], doubled(name, array).astype(array.dtype), equal_nan=True)
    assert 10 < taken < len(start), "names of keys are free"


def test_the_flips_can_fail(tmp_path: Path) -> None:
    """A guard: the law does not hold of a file whose tables have changed places."""
    tensors = {name: numbers(shape).astype(np.float32) for name, shape in SHAPES.items()}
    (tmp_path / "in.safetensors").write_bytes(save(tensors))
    assert flip(tmp_path / "in.safetensors", tmp_path / "out.safetensors", read_header)
    wide = load_file(tmp_path / "out.safetensors")
    assert np.array_equal(wide["head.weight"], doubled("head.weight", tensors["head.weight"]))
    assert not np.array_equal(wide["head.weight"], doubled("embed.weight", tensors["head.weight"]))


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
TABLES = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(sorted(STORED)), st.lists(st.integers(0, 4), max_size=3)), max_size=5
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=TABLES, metadata=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text('aé\n\0"')))
def test_any_header_that_is_written_reads_back_here_and_in_the_library(
    table: dict[str, tuple[str, list[int]]], metadata: dict[str, str], tmp_path: Path
) -> None:
    whole = {name: entry for name, entry in table.items() if STORED[entry[0]].bits * math.prod(entry[1]) % 8 == 0}
    entries = [(name, STORED[dtype], tuple(shape)) for name, (dtype, shape) in whole.items()]
    start, _ = header_bytes(entries, metadata)
    data = start + bytes(sum(dtype.nbytes(shape) for _, dtype, shape in entries))
    header = read_header(PipeSource(io.BytesIO(data)))
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == {
        name: (dtype, shape) for name, dtype, shape in entries
    }
    assert header.metadata.items() >= metadata.items()
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", "np") as opened:
        views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        assert {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()} == {
            name: (dtype.name, list(shape)) for name, dtype, shape in entries
        }


HEALTHY = save(
    {"a": np.ones((2, 3), np.float16), "b": np.ones((4,), np.float32), "c": np.ones((), np.int8)}, {"x": "y"}
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.randoms(use_true_random=False))
def test_a_header_is_taken_only_if_the_library_takes_it_too(drawn: random.Random, tmp_path: Path) -> None:
    data = mutations.mutate(drawn, "x.safetensors", HEALTHY)
    (tmp_path / "x.safetensors").write_bytes(data)
    try:
        with closing(FileSource(tmp_path / "x.safetensors", "x")) as source:
            tensors = read_header(source).tensors
    except WidenError as error:
        refusal(error, "x: ")
        return
    try:
        with safe_open(tmp_path / "x.safetensors", "np") as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            known = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except SafetensorError as error:
        raise AssertionError(f"taken, and refused by the library: {error}") from None
    assert {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in tensors} == known


# Maps and options.


@settings(deadline=None, max_examples=120)
@given(name=st.sampled_from(map_names()), drawn=st.randoms(use_true_random=False))
def test_a_changed_map_is_a_map_or_faults_with_their_places(name: str, drawn: random.Random) -> None:
    text = mutations.mutate(drawn, "x.yaml", map_text(name).encode()).decode("utf-8", "replace")
    try:
        map_from_text(text, "mine.yaml")
    except WidenError as error:
        for fault in error.faults:
            assert re.match(r"(mine\.yaml|configs/[^:]+|[\w.-]+\.yaml):\d+:\d+: .", fault), fault
            assert all(line.isprintable() for line in fault.splitlines()), fault


@given(text=st.text('hidden=23,_ ²\n\x1b0.GiBé[]{}":\ud800', max_size=24))
def test_any_text_of_an_option_is_read_or_refused(text: str) -> None:
    for parse, option in ((parse_grow, "--grow"), (parse_size, "--max-shard-size"), (_setting, "--set")):
        try:
            found = parse(text)
        except WidenError as error:
            refusal(error, option)
            continue
        assert found or text == ""
    if set(text) <= set("hidden=23,"):
        expected = _as_grow(text)
        assert expected is None or {axis: wish.number for axis, wish in parse_grow(text).items()} == expected


def _setting(text: str) -> dict[str, Any]:
    return parse_settings((text,))


def _as_grow(text: str) -> dict[str, int] | None:
    """What a list of axes and factors says, None for a text that is none."""
    pairs = [re.fullmatch(r"([a-z]+)=([0-9]{1,4})", piece) for piece in text.split(",")]
    if not all(pairs) or len({pair[1] for pair in pairs if pair}) < len(pairs):
        return None
    return {pair[1]: int(pair[2]) for pair in pairs if pair}
