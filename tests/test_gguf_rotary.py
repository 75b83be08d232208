"""Heads grow under rotary positions: a widened GGUF makes the log-probabilities of the narrow one in llama.cpp.

Families, ways (`spread`, `theta`, `frequencies`), modes and factors go round; prompts are long, so that every angle turns.
Guards take away one part of each way at a time. The bits of quantised q and k, the scalars and divisors made, and the keys
are computed here from what each way promises, not from the plan.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf_families
import numpy as np
import numpy.typing as npt
import pytest
from gguf_families import ENCODERS, FAMILIES, Family, Sizes
from gguf_oracle import GgufFile, read
from llama_cpp import difference, log_probabilities
from llama_cpp_embeddings import hidden_states
from models import by_factors
from test_gguf_lossless import PROMPTS as TEXTS
from test_gguf_lossless import cut, divergence, written

from widen_cli.convert import prepare
from widen_cli.dimensions import Copies, Growth, Laid, leaf_scales, scaled
from widen_cli.errors import WidenError
from widen_cli.jobs import Job, Report
from widen_cli.map_file import map_names, map_text
from widen_cli.maps import catalog_map, map_for_gguf
from widen_cli.options import Options
from widen_cli.plan import TensorPlan
from widen_cli.scales import Scale
from widen_cli.shards import output_shards
from widen_cli.writing import run

Kind = gguf.GGMLQuantizationType
Values = npt.NDArray[np.float32]

BOUND = 2e-4
CLEAR = 100 * BOUND
MODES = ("orthogonal", "copy", "sum", "quiet")

_DRAW = np.random.default_rng(5)
PROMPTS = [[int(token) for token in _DRAW.integers(3, gguf_families.VOCAB, length)] for length in (3, 21, 49)]


# Files.

_FREE = Sizes(hidden=36, heads=4, kv_heads=2, head=10)
_KEYS = {"attention.key_length": 10, "attention.value_length": 10}
_LLAMA = gguf_families._llama_like(bias=True, output_bias=False)


def _with_freqs(s: Sizes) -> gguf_families.Shapes:
    return _LLAMA(s) | {"rope_freqs.weight": (s.head // 2,)}


def _with_scales(s: Sizes) -> gguf_families.Shapes:
    return _LLAMA(s) | {f"blk.{layer}.attn_{name}.scale": (1,) for layer in range(s.layers) for name in "qk"}


LLAMA = Family("llama", _LLAMA, _FREE, metadata={**_KEYS, "rope.dimension_count": 10, "rope.freq_base": 500.0})
# A base and heads for which YaRN's ramp begins and ends between pairs.
_SCALED = {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64, "rope.freq_base": 100.0}
_WIDE_HEADS = {"attention.key_length": 20, "attention.value_length": 20, "rope.dimension_count": 20}
_YARN = {"rope.scaling.type": "yarn", **_SCALED}
_WINDOW = {
    "attention.key_length_swa": 10,
    "attention.value_length_swa": 10,
    "rope.dimension_count": 10,
    "rope.dimension_count_swa": 10,
}
OWN: dict[str, Family] = {
    "llama": LLAMA,
    "llama-plain": Family("llama", gguf_families._llama_like()),
    "llama-freqs": replace(LLAMA, tensors=_with_freqs),
    "llama-scales": replace(LLAMA, tensors=_with_scales),
    "llama-linear": replace(LLAMA, metadata={**LLAMA.metadata, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),  # type: ignore[dict-item]
    "llama-yarn": Family("llama", _LLAMA, replace(_FREE, head=20), metadata={**_WIDE_HEADS, **_YARN}),  # type: ignore[arg-type]
    "qwen2-yarn": Family("qwen2", _LLAMA, Sizes(hidden=40, heads=2, kv_heads=1, head=20), metadata=_YARN),  # type: ignore[arg-type]
    "deci": Family("deci", gguf_families._llama_like(), _FREE, metadata=_KEYS),  # type: ignore[arg-type]
    "phi2-whole": Family("phi2", FAMILIES["phi2"].tensors, FAMILIES["phi2"].sizes, gguf_families.LAYER, {"rope.dimension_count": 12}),
    "stablelm-whole": Family("stablelm", FAMILIES["stablelm"].tensors, FAMILIES["stablelm"].sizes, gguf_families.LAYER),
    "llama-longrope": replace(LLAMA, metadata={**LLAMA.metadata, "rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}),  # type: ignore[dict-item]
    # The layers with a window have keys of their own.
    "gemma2-window": replace(FAMILIES["gemma2"], metadata={**FAMILIES["gemma2"].metadata, "rope.freq_base_swa": 77.0, **_WINDOW}),
    "gemma3-window": replace(FAMILIES["gemma3"], metadata={**FAMILIES["gemma3"].metadata, "rope.freq_base_swa": 77.0, **_WINDOW}),
    # Every sixth layer sees all positions, under a base of its own.
    "gemma3-six": replace(FAMILIES["gemma3"], sizes=replace(_FREE, layers=6),
        metadata={**FAMILIES["gemma3"].metadata, "rope.freq_base": 300.0}),
}  # fmt: skip


def family_of(name: str) -> Family:
    return OWN.get(name) or FAMILIES[name]


def write(path: Path, family: Family, kinds: Mapping[str, Kind] | None = None) -> Path:
    """A family's file; `kinds` are the types of the tensors whose names a pattern is found in, F32 otherwise."""
    writer = gguf.GGUFWriter(path, family.architecture)
    for key, value in gguf_families._metadata(family).items():
        add: Any = writer.add_uint32
        for kind, method in ((bool, writer.add_bool), (float, writer.add_float32), (str, writer.add_string)):
            add = method if isinstance(value, kind) else add
        add(f"{family.architecture}.{key}", value)
    gguf_families._add_tokenizer(writer)
    for name, shape in family.tensors(family.sizes).items():
        values = gguf_families.drawn(name, shape)
        if name.endswith(".scale"):
            values = np.float32([0.6 if "attn_q" in name else 1.7])
        found = next((kind for pattern, kind in (kinds or {}).items() if re.search(pattern, name)), Kind.F32)
        if found == Kind.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, found), raw_dtype=found)
    return written(writer, path)


Narrow = Callable[[str], Path]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    folder = tmp_path_factory.mktemp("rotary")

    @cache
    def made(name: str) -> Path:
        return write(folder / f"{name}.gguf", family_of(name))

    return made


def planned(path: Path, out: Path, grow: str, **options: Any) -> Job:
    return prepare(Options(str(path), str(out), grow=by_factors(grow), **options))


def widen(path: Path, out: Path, grow: str, **options: Any) -> Report:
    return run(planned(path, out, grow, **options), lambda nbytes: None)


@cache
def outputs(path: Path, encoder: bool) -> npt.NDArray[np.float64]:
    return hidden_states(path, PROMPTS) if encoder else log_probabilities(path, PROMPTS)


def error(name: str, path: Path, wide: Path, job: Job) -> float:
    """The largest difference; an encoder's copies are compared each by itself, after their scale is taken off."""
    encoder = family_of(name).architecture in ENCODERS
    before = outputs(path, encoder)
    after = hidden_states(wide, PROMPTS) if encoder else log_probabilities(wide, PROMPTS)
    if encoder:
        before = np.repeat(before, job.plan.factors["hidden"], axis=1)
        after = after / float(job.plan.scales["hidden"])
    return difference(before, after)


def tied(name: str) -> bool:
    """Whether a head's size is hidden / heads, as the loader or the map has it."""
    found = map_for_gguf(family_of(name).architecture)
    assert found is not None
    return found.axes["head_dim"].computed


def growth(name: str, factor: int, mixed: bool = False) -> str:
    """Heads grow alone; `mixed`: more of them too, and the stream by another factor."""
    if tied(name):
        return (
            f"hidden={2 * factor},heads=2,kv_heads=2,head_dim={factor}"
            if mixed
            else f"hidden={factor},heads=1,head_dim={factor}"
        )
    return f"hidden=3,heads=2,kv_heads=2,head_dim={factor}" if mixed else f"head_dim={factor}"


# The function.

# Each in two modes a way: mixed growth by 2, and heads alone by 3.
TWICE = [
    *("llama", "llama-freqs", "llama-linear", "qwen2", "qwen3", "qwen3-biases", "gemma", "gemma2", "gemma3", "gemma3-six"),
    *("phi2", "phi2-packed", "phi2-whole", "phi3", "phi3-factors", "gptneox", "gptneox-serial", "falcon", "starcoder2"),
    *("stablelm", "stablelm-parallel", "command-r", "olmo2", "granite", "granite-biases", "granitemoe", "qwen2moe"),
    *("qwen3moe", "nomic-bert"),
]  # fmt: skip
WAYS = ("spread", "theta", "frequencies")
RUNS = [
    *(
        (name, way, MODES[(number + place) % 4], factor, factor == 2)
        for number, name in enumerate(TWICE)
        for place, (way, factor) in enumerate((way, factor) for way in WAYS for factor in (2, 3))
        if way != "frequencies" or family_of(name).architecture in ("llama", "granite", "granitemoe")
    ),
    # Deep ones, whose graphs depend on the number of layers, and variants.
    ("gemma2-27b", "spread", "orthogonal", 2, False),
    ("gemma3-27b", "theta", "copy", 2, False),
    ("command-r-plus", "spread", "sum", 2, False),
    ("command-r-plus", "theta", "quiet", 3, False),
    ("gemma-biases", "spread", "sum", 3, True),
    ("falcon-40b", "theta", "copy", 2, True),
    ("qwen3moe-derived", "theta", "sum", 2, True),
    ("stablelm-whole", "theta", "orthogonal", 3, True),
    ("llama-plain", "theta", "quiet", 2, False),
    ("deci", "spread", "copy", 2, True),
    ("deci", "frequencies", "orthogonal", 2, True),
    ("llama-scales", "spread", "orthogonal", 2, True),
    ("llama-longrope", "spread", "copy", 2, True),
    ("llama-longrope", "theta", "sum", 3, False),
    ("gemma2-window", "spread", "quiet", 2, True),
    ("gemma2-window", "theta", "copy", 3, False),
    ("gemma3-window", "spread", "copy", 3, False),
    ("gemma3-window", "theta", "orthogonal", 2, True),
    # YaRN leaves one way.
    ("llama-yarn", "theta", "orthogonal", 2, True),
    ("llama-yarn", "theta", "sum", 3, False),
    ("qwen2-yarn", "theta", "quiet", 2, True),
]


@pytest.mark.parametrize(("name", "way", "mode", "factor", "mixed"), RUNS)
def test_larger_heads_keep_the_function(
    narrow: Narrow, tmp_path: Path, name: str, way: str, mode: str, factor: int, mixed: bool
) -> None:
    wide = tmp_path / "wide.gguf"
    job = widen(narrow(name), wide, growth(name, factor, mixed), scaling=mode, rope=way).job
    found = error(name, narrow(name), wide, job)
    print(f"{name} {way} {mode} x{factor}: {found:.1e}")
    assert found <= BOUND


@pytest.mark.parametrize("way", WAYS)
def test_tiled_values_beside_any_way(narrow: Narrow, tmp_path: Path, way: str) -> None:
    """`--layout tile` is for what is not rotated."""
    wide = tmp_path / "wide.gguf"
    job = widen(narrow("llama"), wide, growth("llama", 2, True), rope=way, layout="tile").job
    assert error("llama", narrow("llama"), wide, job) <= BOUND


def test_every_map_with_ways_to_grow_heads_is_run() -> None:
    # OpenELM's heads, which differ from layer to layer, grow in test_layer_lists.
    run_here = {family_of(name).architecture for name, *_ in RUNS} | {"openelm"}
    maps = [catalog_map(name) for name in map_names() if name.endswith(".gguf")]
    assert [found.file for found in maps if found.rope and not run_here & {*found.gguf_architectures}] == []


# Guards: each way without one of its parts.

Edit = Callable[[Growth], Growth]


def edited(node: Growth, first_only: Edit) -> Growth:
    """The tree with another node for every one whose copies are zero."""
    if isinstance(node, Laid):
        return Laid(tuple(edited(part, first_only) for part in node.parts))
    if node.first_only:
        return first_only(node)
    return node if node.inner is None else replace(node, inner=edited(node.inner, first_only))


def run_with(job: Job, tensors: tuple[TensorPlan, ...]) -> None:
    """Carries out a job with other plans of its tensors."""
    plan = replace(job.plan, tensors=tensors)
    shards = output_shards(plan, job.checkpoint, job.options.input, job.options.output, None, False)
    run(replace(job, plan=plan, shards=shards), lambda nbytes: None)


def run_with_keys(job: Job, first_only: Edit) -> None:
    """Carries out a job with other rows of k where only the first copies were to be written; in `copy` nothing else is so."""
    changed = tuple(
        replace(plan, growth=tuple(edited(node, first_only) for node in plan.growth or ())) for plan in job.plan.tensors
    )
    assert changed != job.plan.tensors
    run_with(job, changed)


def filled(node: Growth) -> Growth:
    assert isinstance(node, Copies)
    return replace(node, first_only=False)


def unscaled(factor: int) -> Edit:
    def change(node: Growth) -> Growth:
        scale = next(leaf for leaf in leaf_scales(node))
        return scaled(node, scale / Scale.of(factor) ** Fraction(1, 2))

    return change


def put(path: Path, key: str, value: float) -> None:
    """Another value for a float key of a file, in place."""
    file = read(path, "r+")
    assert file.pairs[key][0] == gguf.GGUFValueType.FLOAT32
    file.data[file.places[key] :][:4] = np.frombuffer(struct.pack("<f", value), np.uint8)
    file.data.flush()  # type: ignore[attr-defined]


# One file of each architecture.
ONE_EACH = [
    *("llama", "llama-yarn", "qwen2", "qwen3-biases", "gemma", "gemma2", "gemma3", "phi2", "phi3-factors", "gptneox", "falcon"),
    *("starcoder2", "stablelm", "command-r", "olmo2", "granite", "granitemoe", "qwen2moe", "qwen3moe", "nomic-bert"),
]  # fmt: skip


def old_base(name: str, path: Path, factor: int, key: str = "rope.freq_base") -> None:
    """Takes the raised base of a file back."""
    key = f"{family_of(name).architecture}.{key}"
    put(path, key, float(read(path).number(key)) ** (1 / factor))


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_old_base_shows(narrow: Narrow, tmp_path: Path, name: str) -> None:
    wide = tmp_path / "wide.gguf"
    job = widen(narrow(name), wide, growth(name, 2), rope="theta").job
    # The layers of the short gemma3 are all of those with a window.
    old_base(name, wide, 2, "rope.freq_base_swa" if name == "gemma3" else "rope.freq_base")
    assert error(name, narrow(name), wide, job) > CLEAR


@pytest.mark.parametrize("key", ["rope.freq_base", "rope.freq_base_swa"])
def test_gemma3_has_two_bases(narrow: Narrow, tmp_path: Path, key: str) -> None:
    wide = tmp_path / "wide.gguf"
    job = widen(narrow("gemma3-six"), wide, "head_dim=2", rope="theta").job
    old_base("gemma3-six", wide, 2, key)
    assert error("gemma3-six", narrow("gemma3-six"), wide, job) > CLEAR


@pytest.mark.parametrize(
    ("name", "way"), [(name, WAYS[n % 2]) for n, name in enumerate(ONE_EACH) if "yarn" not in name]
)
def test_new_pairs_that_are_not_zero_show(narrow: Narrow, tmp_path: Path, name: str, way: str) -> None:
    """Every pair of k repeated as q's are: its copies turn by other angles."""
    wide = tmp_path / "wide.gguf"
    job = planned(narrow(name), wide, growth(name, 2), rope=way, scaling="copy")
    run_with_keys(job, filled)
    assert error(name, narrow(name), wide, job) > CLEAR


@pytest.mark.parametrize(
    "name", ["llama", "llama-yarn", "qwen3", "gemma3", "gptneox", "phi3-factors", "nomic-bert", "olmo2"]
)
def test_an_attention_that_is_not_scaled_shows(narrow: Narrow, tmp_path: Path, name: str) -> None:
    """The runtime divides by the root of the new head size."""
    wide = tmp_path / "wide.gguf"
    job = planned(narrow(name), wide, growth(name, 2), rope="theta", scaling="copy")
    run_with_keys(job, unscaled(2))
    assert error(name, narrow(name), wide, job) > CLEAR


@pytest.mark.parametrize("name", ["llama", "llama-freqs", "granite", "granite-biases"])
def test_plain_repeats_of_pairs_show(narrow: Narrow, tmp_path: Path, name: str) -> None:
    """`frequencies` with the divisors that the narrow file has, or none."""
    wide = tmp_path / "wide.gguf"
    job = widen(narrow(name), wide, growth(name, 2), rope="frequencies").job
    stored = read(narrow(name)).tensors.get("rope_freqs.weight")
    found = read(wide, "r+").tensors["rope_freqs.weight"].rows.view(np.float32)
    found[...] = 1 if stored is None else np.repeat(stored.values(), 2)
    assert error(name, narrow(name), wide, job) > CLEAR


# What is written.


def places(heads: int, size: int, factor: int, way: str, halves: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """For every new row of q or k the old one, and whether it is a first copy. Pairs are neighbours, or halves apart."""
    pairs = size // 2
    new = np.arange(factor * pairs)
    old, first = (new % pairs, new < pairs) if way == "theta" else (new // factor, new % factor == 0)
    if halves:
        old, first = np.concatenate([old, old + pairs]), np.concatenate([first, first])
    else:
        old, first = np.stack([2 * old, 2 * old + 1], 1).reshape(-1), np.repeat(first, 2)
    return (size * np.arange(heads)[:, None] + old).reshape(-1), np.tile(first, heads)


def scales_of(file: GgufFile) -> dict[str, np.float32]:
    return {
        name: tensor.rows.view(np.float32)[0, 0] for name, tensor in file.tensors.items() if name.endswith(".scale")
    }


_QUANTISED = Sizes(hidden=64, inner=64, heads=4, kv_heads=2, head=32)
_KEYS_32 = {"attention.key_length": 32, "attention.value_length": 32}
QUANTISED = {
    "llama": Family("llama", _LLAMA, _QUANTISED, metadata=_KEYS_32),
    "gemma": Family("gemma", _LLAMA, _QUANTISED, metadata=_KEYS_32),
}


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("name", "way"), [("llama", way) for way in WAYS] + [("gemma", "spread"), ("gemma", "theta")])
def test_quantised_rows_stay_bit_for_bit(tmp_path: Path, name: str, way: str, kind: Kind) -> None:
    """Old rows stand where the way wants them, zeros stand elsewhere, and one number a layer takes the factor."""
    family, factor = QUANTISED[name], 3
    path = write(tmp_path / "narrow.gguf", family, {r"attn_[qk]\.weight": kind})
    report = widen(path, tmp_path / "wide.gguf", "head_dim=3", rope=way, scaling="sum")
    old, new = read(path), read(tmp_path / "wide.gguf")
    s = family.sizes
    root = 3**-0.5 if way == "frequencies" else 3**0.5
    for layer in range(s.layers):
        for part, heads in (("q", s.heads), ("k", s.kv_heads)):
            index, first = places(heads, s.head, factor, way, name == "gemma")
            silent = ~first if part == "k" and way != "frequencies" else np.zeros_like(first)
            stem = f"blk.{layer}.attn_{part}"
            rows = old.tensors[f"{stem}.weight"].rows[index].copy()
            rows[silent] = 0
            assert new.tensors[f"{stem}.weight"].kind == kind
            assert np.array_equal(new.tensors[f"{stem}.weight"].rows, rows)
            # A bias comes after the number, so it is scaled itself.
            bias = old.tensors[f"{stem}.bias"].values()[0, index].astype(np.float64) * (root if part == "k" else 1)
            bias[silent] = 0
            assert np.array_equal(new.tensors[f"{stem}.bias"].values()[0], bias.astype(np.float32))
            assert report.counts[f"{stem}.weight"].rounded == 0
    names = list(new.tensors)
    scales = scales_of(new)
    assert scales == {f"blk.{layer}.attn_k.scale": np.float32(root) for layer in range(s.layers)}
    for scale in scales:
        assert new.tensors[scale].shape == (1,)
        assert names[names.index(scale) - 1] == scale.replace("scale", "weight")
    made = {"rope_freqs.weight"} if way == "frequencies" else set()
    assert set(names) == set(old.tensors) | set(scales) | made


@pytest.mark.parametrize(
    ("mode", "grow", "query", "key"),
    [
        ("copy", "head_dim=2", None, 2**0.5),
        ("quiet", "head_dim=2", None, 2**0.5),
        ("orthogonal", "head_dim=2", 2**0.25, 2**0.25),
        # What is read of a wider stream goes in with it; a power of two alone stays in the blocks.
        ("copy", "hidden=2,head_dim=2", None, 0.5 * 2**0.5),
        ("copy", "hidden=3,head_dim=2", 1 / 3, 2**0.5 / 3),
        ("orthogonal", "hidden=3,head_dim=3", 3**-0.25, 3**-0.25),
        ("sum", "hidden=3,head_dim=2", None, 2**0.5),
        ("copy", "head_dim=4", None, None),
        ("copy", "hidden=3,heads=2,kv_heads=2", 1 / 3, 1 / 3),
    ],
)
def test_one_number_takes_the_whole_factor(
    tmp_path: Path, mode: str, grow: str, query: float | None, key: float | None
) -> None:
    path = write(tmp_path / "narrow.gguf", QUANTISED["llama"], {r"attn_[qk]\.weight": Kind.Q8_0})
    report = widen(path, tmp_path / "wide.gguf", grow, scaling=mode)
    expected = {
        f"blk.{layer}.attn_{part}.scale": np.float32(factor)
        for layer in range(2)
        for part, factor in (("q", query), ("k", key))
        if factor is not None
    }
    assert scales_of(read(tmp_path / "wide.gguf")) == expected
    assert not any(report.counts[f"blk.{layer}.attn_{part}.weight"].rounded for layer in range(2) for part in "qk")


def test_numbers_that_are_stored_are_multiplied(tmp_path: Path) -> None:
    sizes = replace(_QUANTISED, layers=1)
    family = replace(QUANTISED["llama"], tensors=_with_scales, sizes=sizes)
    path = write(tmp_path / "narrow.gguf", family, {r"attn_[qk]\.weight": Kind.Q8_0})
    job = widen(path, tmp_path / "wide.gguf", "head_dim=3", scaling="sum").job
    new = read(tmp_path / "wide.gguf")
    key = np.float32(float(np.float32(1.7)) * 3**0.5)
    assert scales_of(new) == {"blk.0.attn_q.scale": np.float32(0.6), "blk.0.attn_k.scale": key}
    assert list(new.tensors) == list(read(path).tensors)
    assert error("llama", path, tmp_path / "wide.gguf", job) <= BOUND


def test_a_number_in_some_layers_alone(tmp_path: Path) -> None:
    """What the tool makes for a quantised layer beside one of floats can be widened again."""
    path = write(tmp_path / "narrow.gguf", QUANTISED["llama"], {r"blk\.0\.attn_[qk]\.weight": Kind.Q8_0})
    widen(path, tmp_path / "wide.gguf", "head_dim=3", scaling="sum")
    assert list(scales_of(read(tmp_path / "wide.gguf"))) == ["blk.0.attn_k.scale"]
    job = widen(
        tmp_path / "wide.gguf", tmp_path / "wider.gguf", "hidden=2,head_dim=2", scaling="sum", layout="tile"
    ).job
    assert error("llama", path, tmp_path / "wider.gguf", job) <= BOUND


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("rope.dimension_count_swa", 4, "rope.dimension_count_swa is 4"),
        ("attention.key_length_swa", 6, "attention.key_length_swa is 6"),
    ],
)
def test_heads_of_two_sizes_are_refused(tmp_path: Path, key: str, value: int, text: str) -> None:
    family = family_of("gemma2-window")
    path = write(tmp_path / "narrow.gguf", replace(family, metadata={**family.metadata, key: value}))
    with pytest.raises(WidenError, match="gemma2") as refused:
        widen(path, tmp_path / "wide.gguf", "head_dim=2")
    assert text in str(refused.value)


def _tiny_quantised(name: str) -> Family:
    """A family with rows and heads that fill blocks. In a second layer float32 noise would reach llama.cpp's rounding."""
    family = family_of(name)
    metadata = {key: 32 if key in _KEYS_32 else value for key, value in family.metadata.items()}
    metadata.pop("rope.dimension_count", None)
    sizes = replace(_QUANTISED, heads=2, kv_heads=1, layers=1, tied=family.sizes.tied)
    return replace(family, sizes=sizes, metadata=metadata)


@pytest.mark.parametrize(
    "name", ["llama", "llama-scales", "gemma", "gemma2", "qwen2", "granite-biases", "granitemoe", "qwen2moe"]
)
def test_the_numbers_count_in_llama_cpp(tmp_path: Path, name: str) -> None:
    """Every family whose map moves factors out of blocks. Set to what they were, the function is another one."""
    path = write(tmp_path / "narrow.gguf", _tiny_quantised(name), {r"attn_[qk]\.weight": Kind.Q8_0})
    wide = tmp_path / "wide.gguf"
    # Tiled, a wider stream has the same blocks, so llama.cpp rounds activations alike.
    job = widen(path, wide, growth(name, 2), scaling="quiet", rope="theta", layout="tile").job
    found = error(name, path, wide, job)
    print(f"{name}: {found:.1e}")
    assert found <= BOUND
    file, before = read(wide, "r+"), scales_of(read(path))
    scales = scales_of(file)
    assert "blk.0.attn_k.scale" in scales
    for scale in scales:
        file.tensors[scale].rows.view(np.float32)[...] = before.get(scale, 1)
    assert error(name, path, wide, job) > CLEAR


def test_stored_numbers_are_read_of_float_weights(narrow: Narrow, tmp_path: Path) -> None:
    """The guard of `llama-scales`: llama.cpp multiplies by them beside F32 weights too, where they stay as they are."""
    wide = tmp_path / "wide.gguf"
    job = widen(narrow("llama-scales"), wide, "head_dim=2").job
    file = read(wide, "r+")
    assert scales_of(file) == scales_of(read(narrow("llama-scales")))
    for scale in scales_of(file):
        file.tensors[scale].rows.view(np.float32)[...] = 1
    assert error("llama-scales", narrow("llama-scales"), wide, job) > CLEAR


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = cut(tmp_path_factory.mktemp("smollm") / "cut.gguf", False, {})
    yield path
    path.unlink()


@pytest.mark.parametrize("way", WAYS)
def test_larger_heads_of_a_real_quantised_model(smollm: Path, tmp_path: Path, way: str) -> None:
    """SmolLM2 in Q4_1. llama.cpp quantises activations, so what it says moves a little; without the numbers it moves far."""
    wide = tmp_path / "wide.gguf"
    report = widen(smollm, wide, "head_dim=2", rope=way)
    old, new = read(smollm), read(wide, "r+")
    rounded = {name for name, counts in report.counts.items() if counts.rounded}
    assert rounded == {name for name in new.tensors if name.endswith(".scale") or "rope_freqs" in name}
    for layer in range(3):
        for part, heads in (("q", 9), ("k", 3)):
            index, first = places(heads, 64, 2, way, halves=False)
            rows = old.tensors[f"blk.{layer}.attn_{part}.weight"].rows[index].copy()
            rows[~first if part == "k" and way != "frequencies" else []] = 0
            assert np.array_equal(new.tensors[f"blk.{layer}.attn_{part}.weight"].rows, rows)
    spoken = log_probabilities(smollm, TEXTS)
    found = divergence(spoken, log_probabilities(wide, TEXTS))
    for scale in scales_of(new):
        new.tensors[scale].rows.view(np.float32)[...] = 1
    broken = divergence(spoken, log_probabilities(wide, TEXTS))
    print(f"{way}: {found:.1e}, without numbers {broken:.1e}")
    assert found <= 5e-3
    assert broken > 4 * found
    wide.unlink()


@pytest.mark.parametrize("name", ["llama", "llama-freqs", "granite-biases"])
def test_divisors(narrow: Narrow, tmp_path: Path, name: str) -> None:
    """Copy k of pair j stands where the runtime's frequency is base**(-2 (r j + k) / (r d)), the old one being base**(-2 j / d)."""
    widen(narrow(name), tmp_path / "wide.gguf", growth(name, 3), rope="frequencies", scaling="copy")
    old, new = read(narrow(name)), read(tmp_path / "wide.gguf")
    base = float(family_of(name).metadata.get("rope.freq_base", 10000.0))
    size = family_of(name).sizes.head
    stored = old.tensors.get("rope_freqs.weight")
    before = np.ones(size // 2) if stored is None else stored.values()[0].astype(np.float64)
    wanted = before[:, None] * base ** (-2 * np.arange(3) / (3 * size))
    assert new.tensors["rope_freqs.weight"].kind == Kind.F32
    np.testing.assert_allclose(new.tensors["rope_freqs.weight"].values()[0], wanted.reshape(-1), rtol=1e-7)


# Keys.


def changes(old: GgufFile, new: GgufFile) -> dict[str, Any]:
    """The keys that changed or were added, without the architecture's name, by their new values."""
    found = [key for key in new.pairs if old.pairs.get(key) != new.pairs[key]]
    assert old.pairs.keys() <= new.pairs.keys()
    return {key.split(".", 1)[1]: new.number(key) for key in found}


SIZES = {"attention.key_length": 20, "attention.value_length": 20}


@pytest.mark.parametrize(
    ("name", "way", "grow", "expected"),
    [
        ("llama", "spread", "head_dim=2", {**SIZES, "rope.dimension_count": 20}),
        ("llama", "theta", "head_dim=2", {**SIZES, "rope.dimension_count": 20, "rope.freq_base": 250000.0}),
        ("llama", "frequencies", "head_dim=2", {**SIZES, "rope.dimension_count": 20}),
        ("llama", "theta", "heads=2,kv_heads=2", {"attention.head_count": 8, "attention.head_count_kv": 4}),
        ("llama-plain", "spread", "head_dim=2", {"attention.key_length": 12, "attention.value_length": 12}),
        ("llama-plain", "theta", "hidden=2,head_dim=2", {"embedding_length": 72, "rope.freq_base": 1e8}),
        ("qwen2", "spread", "hidden=2,head_dim=2", {"embedding_length": 72}),
        ("qwen2", "theta", "hidden=2,head_dim=2", {"embedding_length": 72, "rope.freq_base": 1e8}),
        ("gptneox", "theta", "head_dim=3", {"embedding_length": 108, "rope.dimension_count": 12, "rope.freq_base": 1e12}),
        ("gptneox-serial", "theta", "head_dim=3", {"embedding_length": 108, "rope.freq_base": 1e12}),
        ("gemma3", "spread", "head_dim=2", SIZES),
        ("gemma3", "theta", "head_dim=2", {**SIZES, "rope.freq_base": 1e8, "rope.freq_base_swa": 1e8}),
        ("gemma3-six", "theta", "head_dim=2", {**SIZES, "rope.freq_base": 9e4, "rope.freq_base_swa": 1e8}),
        ("granite", "spread", "head_dim=3", {"attention.key_length": 30, "attention.value_length": 30}),
        ("granite", "frequencies", "head_dim=2", {**SIZES, "attention.scale": 0.2}),
        ("granite", "frequencies", "head_dim=3", {"attention.key_length": 30, "attention.value_length": 30, "attention.scale": 0.4 / 3}),
        ("granite-biases", "frequencies", "head_dim=2", {"attention.key_length": 12, "attention.value_length": 12}),
    ],
)  # fmt: skip
def test_keys(narrow: Narrow, tmp_path: Path, name: str, way: str, grow: str, expected: dict[str, float]) -> None:
    """In `copy` no epsilon changes. Keys that are absent stay so where what their absence means is still right."""
    widen(narrow(name), tmp_path / "wide.gguf", grow, rope=way, scaling="copy")
    found = changes(read(narrow(name)), read(tmp_path / "wide.gguf"))
    assert {key: np.float32(value) for key, value in found.items()} == {
        key: np.float32(value) for key, value in expected.items()
    }


def test_the_scale_of_granite_counts(narrow: Narrow, tmp_path: Path) -> None:
    """The guard of its key: what the narrow file says is another function."""
    wide = tmp_path / "wide.gguf"
    job = widen(narrow("granite"), wide, "head_dim=2", rope="frequencies").job
    put(wide, "granite.attention.scale", 0.4)
    assert error("granite", narrow("granite"), wide, job) > CLEAR


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama-yarn", "qwen2-yarn"])
def test_a_raised_base_is_the_default(narrow: Narrow, tmp_path: Path, name: str) -> None:
    for out, options in (("a.gguf", {}), ("b.gguf", {"rope": "theta"})):
        widen(narrow(name), tmp_path / out, growth(name, 2), **options)
    assert read(tmp_path / "a.gguf").model == read(tmp_path / "b.gguf").model


# Refusals.


def refusal(path: Path, out: Path, grow: str, **options: Any) -> list[str]:
    with pytest.raises(WidenError) as caught:
        planned(path, out, grow, **options)
    assert not out.exists()
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("name", "way", "text"),
    [
        ("llama-yarn", "spread", "--rope spread: is not exact with this model's frequency scaling; these are: theta"),
        ("llama-yarn", "frequencies", "--rope frequencies: is not exact with this model's frequency scaling; these are: theta"),
        ("qwen2-yarn", "spread", "--rope spread: is not exact with this model's frequency scaling; these are: theta"),
        ("qwen2", "frequencies", "--rope frequencies: is not exact for 'qwen2'; these are: theta, spread"),
        ("gpt2", "spread", "--rope spread: 'gpt2' has no rotary positions; leave --rope out"),
        ("deepseek2", "theta", "--rope theta: is not exact for 'deepseek2'; none is"),
    ],
)  # fmt: skip
def test_ways_that_are_not_exact_are_refused(narrow: Narrow, tmp_path: Path, name: str, way: str, text: str) -> None:
    assert refusal(narrow(name), tmp_path / "wide.gguf", "hidden=2", rope=way) == [text]


def test_yarn_is_rightly_refused(narrow: Narrow, tmp_path: Path) -> None:
    """A map that lets it through makes another function: the ramp's ends do not go with the pairs."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(map_text("llama.gguf").replace('spread: rope.scaling.type != "yarn"', "spread: true"))
    wide = tmp_path / "wide.gguf"
    job = widen(narrow("llama-yarn"), wide, "head_dim=2", rope="spread", map=str(mine)).job
    assert error("llama-yarn", narrow("llama-yarn"), wide, job) > CLEAR


def test_a_base_that_float32_does_not_hold(narrow: Narrow, tmp_path: Path) -> None:
    (text,) = refusal(narrow("llama-plain"), tmp_path / "wide.gguf", "head_dim=10", rope="theta")
    assert text.endswith(
        "rope.freq_base 10000.0 to the power of 10 is too large for a float32; grow heads instead, or take --rope spread"
    )
    # 10000**9 fits.
    widen(narrow("llama-plain"), tmp_path / "wide.gguf", "head_dim=9", rope="theta")
    assert read(tmp_path / "wide.gguf").number("llama.rope.freq_base") == np.float32(1e36)
    # Where nothing is asked for, the next exact way is taken, which keeps the base.
    widen(narrow("llama-plain"), tmp_path / "other.gguf", "head_dim=10")
    assert "llama.rope.freq_base" not in read(tmp_path / "other.gguf").model[0]


@pytest.mark.parametrize("way", ["theta", "frequencies"])
@pytest.mark.parametrize("base", [0.0, -1.0])
def test_a_base_that_is_none(tmp_path: Path, base: float, way: str) -> None:
    path = write(tmp_path / "narrow.gguf", replace(LLAMA, metadata={**LLAMA.metadata, "rope.freq_base": base}))
    (text,) = refusal(path, tmp_path / "wide.gguf", "head_dim=2", rope=way)
    assert text.endswith(f"rope.freq_base is {base}, where a positive number is needed")


def test_a_base_that_is_stored_as_a_whole_number(tmp_path: Path) -> None:
    """llama.cpp does not load such a file; it is refused in words."""
    path = write(tmp_path / "narrow.gguf", replace(LLAMA, metadata={**LLAMA.metadata, "rope.freq_base": 500}))
    (text,) = refusal(path, tmp_path / "wide.gguf", "head_dim=2", rope="theta")
    assert "rope.freq_base" in text


@pytest.mark.parametrize(
    ("name", "grow", "text"),
    [
        ("llama", "head_dim=2,rotated=1", "head_dim == rotated"),
        ("llama", "head_dim=2,value_dim=1", "head_dim == value_dim"),
        ("gptneox", "rotated=2", "passed = head_dim - rotated"),
        ("qwen2", "hidden=1,head_dim=2", "head_dim = hidden / heads"),
        ("llama", "rotary=2", "--grow rotary: 'rotary' cannot grow"),
    ],
)
def test_parts_of_a_head_grow_together(narrow: Narrow, tmp_path: Path, name: str, grow: str, text: str) -> None:
    assert any(text in fault for fault in refusal(narrow(name), tmp_path / "wide.gguf", grow))
