"""The promise, family by family: a widened GGUF makes the log-probabilities of the narrow one in llama.cpp.

All modes are function-exact for all these files; which growths are refused, and in what words, stands at the end.
"""

from __future__ import annotations

import re
import struct
from functools import cache
from pathlib import Path

import gguf
import gguf_families
import numpy as np
import numpy.typing as npt
import pytest
from gguf_families import ENCODERS, FAMILIES
from llama_cpp import log_probabilities
from llama_cpp_embeddings import hidden_states
from models import by_factors

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job
from widen_cli.map_file import map_names
from widen_cli.maps import catalog_map, map_for_gguf
from widen_cli.options import Options
from widen_cli.writing import run

BOUND = 2e-4
# A fault has to stand clear of the bound, so that the bound means something.
CLEAR = 5 * BOUND
MODES = ("orthogonal", "copy", "sum", "quiet")

# Prompts that reach every position's angle and most of the vocabulary.
_DRAW = np.random.default_rng(3)
PROMPTS = [[int(token) for token in _DRAW.integers(3, gguf_families.VOCAB, length)] for length in (1, 2, 5, 9, 17, 33)]

# Growths of different factors on every axis that has its own. Where llama.cpp takes the attention's width for the hidden
# size, heads and hidden grow together.
_TIED = "hidden=2,intermediate=3,heads=2"
_FREE = "hidden=2,intermediate=3,heads=3,kv_heads=1"
_HEAD_DIM = "hidden=6,intermediate=2,heads=3,kv_heads=3,head_dim=2"
MIXED = {
    "qwen3": _FREE,
    "qwen3-biases": "hidden=3,intermediate=2,heads=2,kv_heads=1",
    "gemma": _FREE,
    "gemma2": _FREE,
    "gemma2-27b": "hidden=2,intermediate=3",
    "gemma3": _FREE,
    "gemma3-27b": "hidden=4,heads=2",
    "gemma3-untied": "hidden=1,heads=2,kv_heads=2",
    "granite": _FREE,
    "granite-biases": "hidden=3,intermediate=2,kv_heads=2",
    "granitemoe": "hidden=2,intermediate=3,shared_intermediate=5,heads=1",
    "gpt2": _HEAD_DIM,
    "bert": _HEAD_DIM,
    "bloom": "hidden=3,intermediate=2,head_dim=3",
    "qwen2moe": "hidden=2,expert_intermediate=3,shared_intermediate=5,heads=2,kv_heads=2",
    "qwen3moe": "hidden=2,expert_intermediate=3,heads=2,kv_heads=2",
    "qwen3moe-derived": "hidden=2,intermediate=3,expert_intermediate=3,heads=3",
    "glm4moe": "hidden=2,intermediate=5,expert_intermediate=3,heads=2,kv_heads=2",
    "deepseek2": "hidden=2,intermediate=5,expert_intermediate=3,heads=3",
    "deepseek2-lite": "hidden=3,heads=2",
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("narrow")
    return {name: gguf_families.write(name, folder / f"{name}.gguf") for name in FAMILIES}


def widened(path: Path, out: Path, mode: str, grow: str | None) -> Job:
    job = prepare(Options(str(path), str(out), factor=None if grow else 2, grow=by_factors(grow), scaling=mode))
    run(job, lambda nbytes: None)
    return job


@cache
def outputs(path: Path, encoder: bool) -> npt.NDArray[np.float64]:
    return hidden_states(path, PROMPTS) if encoder else log_probabilities(path, PROMPTS)


def error(name: str, path: Path, wide: Path, job: Job) -> float:
    """The largest difference; an encoder's copies are compared each by itself, after their scale is taken off."""
    encoder = FAMILIES[name].architecture in ENCODERS
    before, after = outputs(path, encoder), outputs(wide, encoder)
    if encoder:
        before = np.repeat(before, job.plan.factors["hidden"], axis=1)
        after = after / float(job.plan.scales["hidden"])
    assert before.shape == after.shape
    return float(np.abs(after - before).max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_factor_two_keeps_the_function(narrow: dict[str, Path], tmp_path: Path, name: str, mode: str) -> None:
    wide = tmp_path / "wide.gguf"
    job = widened(narrow[name], wide, mode, None)
    assert error(name, narrow[name], wide, job) <= BOUND


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_growth_keeps_the_function(narrow: dict[str, Path], tmp_path: Path, name: str, mode: str) -> None:
    wide = tmp_path / "wide.gguf"
    job = widened(narrow[name], wide, mode, MIXED.get(name, _TIED))
    assert error(name, narrow[name], wide, job) <= BOUND


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fault_shows(narrow: dict[str, Path], tmp_path: Path, name: str) -> None:
    """The guard: the narrow epsilon, or one matrix of the last layer off by the root of 2, and the bound is passed by far."""
    wide = tmp_path / "wide.gguf"
    job = widened(narrow[name], wide, "orthogonal", None)
    data = wide.read_bytes()
    faults = {
        "epsilon": _with_old_epsilon(data, name),
        "ffn": _scaled(data, wide, "ffn_down"),
        "attention": _scaled(data, wide, "attn_output.weight"),
    }
    for fault, faulty in faults.items():
        broken = tmp_path / f"{fault}.gguf"
        broken.write_bytes(faulty)
        assert error(name, narrow[name], broken, job) > CLEAR, fault


def _with_old_epsilon(data: bytes, name: str) -> bytes:
    family = FAMILIES[name]
    key = f"{family.architecture}.{family.epsilon}".encode()
    start = data.index(key) + len(key) + 4  # behind the value's type
    assert struct.unpack_from("<f", data, start)[0] == pytest.approx(gguf_families.EPS / 2)
    return data[:start] + struct.pack("<f", gguf_families.EPS) + data[start + 4 :]


def _scaled(data: bytes, path: Path, part: str) -> bytes:
    found = next(tensor for tensor in gguf.GGUFReader(path).tensors if f"blk.1.{part}" in tensor.name)
    start, values = int(found.data_offset), np.asarray(found.data, np.float32) * np.float32(2**0.5)
    return data[:start] + values.tobytes() + data[start + values.nbytes :]


def test_every_map_is_proved() -> None:
    mapped = {name for file in map_names() if file.endswith(".gguf") for name in catalog_map(file).gguf_architectures}
    # LLaMA's map has tests of its own, deci's has test_gguf_layers, openelm's has test_layer_lists.
    assert mapped == {family.architecture for family in FAMILIES.values()} | {"llama", "deci", "openelm"}
    assert all(map_for_gguf(name) is not None for name in mapped)


REFUSED = {
    "heads are tied to hidden": ("gpt2", "hidden=1,heads=2", "does not go with head_dim = hidden / heads"),
    "a head's size is tied to hidden": ("qwen2", "hidden=1,head_dim=2", "does not go with head_dim = hidden / heads"),
    "hidden larger than its heads": (
        "phi3",
        "hidden=3,heads=1,head_dim=2",
        "does not go with head_dim = hidden / heads",
    ),
    "a part of a head": (
        "gptneox",
        "hidden=2,head_dim=2,rotated=1",
        "does not go with head_dim = hidden / heads and passed =",
    ),
    "keys larger than values": ("qwen3", "head_dim=2,value_dim=1", "head_dim == value_dim"),
    "Gemma's keys larger than values": ("gemma", "head_dim=2,value_dim=1", "head_dim == value_dim"),
    "Gemma 2's keys larger than values": ("gemma2", "head_dim=2,value_dim=1", "head_dim == value_dim"),
    "Gemma 3's keys larger than values": ("gemma3", "head_dim=2,value_dim=1", "head_dim == value_dim"),
    "more of a head rotated than it has": ("falcon", "rotated=2", "head_dim == rotated"),
    "rotated beyond StarCoder's heads": ("starcoder2", "rotated=2", "head_dim == rotated"),
    "rotated beyond an encoder's heads": ("nomic-bert", "rotated=2", "head_dim == rotated"),
    "a rotated part of a latent's head": ("deepseek2", "rotary_dim=2", "'rotary_dim' cannot grow"),
    "Gemma's quotient of widths": ("gemma3-27b", "hidden=3,heads=2", "block_count != 62 or hidden % heads == 0"),
    "ALiBi": ("bloom", "hidden=2,heads=2", "ALiBi's slopes depend on the number of heads"),
    "a latent's rank": ("deepseek2", "latent_rank=2", "'latent_rank' cannot grow"),
    "heads that kv heads do not divide": ("falcon-40b", "kv_heads=3", "heads % kv_heads == 0"),
}


@pytest.mark.parametrize(("name", "grow", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_grow_is_refused(
    narrow: dict[str, Path], tmp_path: Path, name: str, grow: str, reason: str
) -> None:
    with pytest.raises(WidenError, match=re.escape(reason)):
        widened(narrow[name], tmp_path / "wide.gguf", "auto", grow)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_larger_values_take_the_heads_with_them(narrow: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Their loaders read what comes of the values in heads as large as the keys'."""
    wide = tmp_path / "wide.gguf"
    job = widened(narrow[name], wide, "auto", "value_dim=2")
    assert error(name, narrow[name], wide, job) <= BOUND


def test_norms_on_the_single_heads_of_stablelm_are_refused(tmp_path: Path) -> None:
    path = gguf_families.write("stablelm-heads", tmp_path / "narrow.gguf")
    assert log_probabilities(path, PROMPTS).shape == (len(PROMPTS), gguf_families.VOCAB)
    with pytest.raises(WidenError, match=r"unknown tensor 'blk\.0\.attn_q_norm\.weight'"):
        widened(path, tmp_path / "wide.gguf", "auto", None)
