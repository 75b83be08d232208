"""`--rope pairs` and `frequencies`: copies of rotary pairs under the runtime's own frequencies, which is another function, and
under numbers that give them the old ones, which is the same. And fractions, whole and odd, in every layout of pairs.

The two ways write the same tensors. So what `pairs` is off by is what frequencies do, and at position 0, where nothing turns,
it is exact; both are seen here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner
from gguf_oracle import read
from llama_cpp import difference, log_probabilities
from safetensors.torch import load_file
from test_gguf_rotary import BOUND, PROMPTS, family_of, write
from test_rotary import (
    CLEAR,
    EXACT,
    NTK,
    Narrow,
    as_published,
    config_of,
    dynamic,
    error,
    narrow,
    planned,
    rewritten,
    widen,
)

from widen_cli.cli import cli
from widen_cli.collapse.run import collapse
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

assert narrow  # a fixture, used by name

ALLOWED = {"rope": "pairs", "allow_approximate": True}
SLOWER = "--rope pairs: copies of a pair turn more slowly than the pair, which changes the function; --allow-approximate takes that"


def grown(name: str, factor: object) -> str:
    tied = (
        "gpt_neox",
        "stablelm",
        "persimmon",
        "falcon_7b",
        "phi_qk_norm",
        "phi3_partial",
        "gptj",
        "codegen",
        "modernbert",
    )
    return f"hidden={factor},head_dim={factor}" if name in tied else f"head_dim={factor}"


# Numbers that the config had not.

LISTED = [
    *(("llama-plain", 3), ("llama-linear", 2), ("llama-llama3", 3), ("qwen3", 2), ("cohere", 3), ("glm", 2), ("phi_qk_norm", 2)),
    *(("gpt_neox", 2), ("stablelm", 3), ("persimmon", 2), ("falcon_7b", 3), ("deepseek_v3", 2), ("nomic_bert", 2), ("llava", 2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "factor"), LISTED)
def test_numbers_keep_the_function(narrow: Narrow, tmp_path: Path, name: str, factor: int) -> None:
    job = widen(narrow(name), tmp_path / "wide", grown(name, factor), rope="frequencies")
    assert not job.plan.approximate
    assert error(name, narrow(name), tmp_path / "wide", job) <= EXACT


@pytest.mark.parametrize("name", ["llama-plain", "llama-linear", "llama-llama3"])
def test_numbers_in_configs_of_transformers_4(narrow: Narrow, tmp_path: Path, name: str) -> None:
    source = narrow(name, as_published)
    job = widen(source, tmp_path / "wide", "head_dim=2", rope="frequencies")
    found = config_of(tmp_path / "wide")
    assert "rope_parameters" not in found
    assert found["rope_scaling"].get("type", found["rope_scaling"].get("rope_type")) == "longrope"
    assert error(name, source, tmp_path / "wide", job) <= EXACT
    # Grown again, it has numbers.
    again = widen(tmp_path / "wide", tmp_path / "wider", "head_dim=2", rope="frequencies")
    assert error(name, source, tmp_path / "wider", again) <= EXACT


# Without them.

COPIED = [
    *("llama-plain", "llama-linear", "llama-llama3", "llama-yarn", "llama-longrope-long", "qwen3", "gemma3_text"),
    *("gpt_neox", "glm", "gptj"),
]


def one_token(config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[5], [7]])}


@pytest.mark.parametrize("name", COPIED)
def test_pairs_are_exact_where_nothing_turns(narrow: Narrow, tmp_path: Path, name: str) -> None:
    job = widen(narrow(name), tmp_path / "wide", grown(name, 2), **ALLOWED)
    assert job.plan.approximate == "--rope pairs"
    before, after = (
        models.outputs(folder, torch.float64, inputs=one_token) for folder in (narrow(name), tmp_path / "wide")
    )
    assert models.relative_error(before, after) <= EXACT
    found = error(name, narrow(name), tmp_path / "wide", job)
    print(f"{name} x2: {found:.2g}")
    assert CLEAR < found < 2
    assert not verify(Options(str(narrow(name)), str(tmp_path / "wide")), lambda nbytes: None).differences


def test_pairs_and_frequencies_write_the_same_tensors(narrow: Narrow, tmp_path: Path) -> None:
    source = narrow("qwen3")
    widen(source, tmp_path / "pairs", "head_dim=2", **ALLOWED)
    widen(source, tmp_path / "listed", "head_dim=2", rope="frequencies")
    one, other = (load_file(tmp_path / way / "model.safetensors") for way in ("pairs", "listed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert config_of(tmp_path / "pairs")["rope_parameters"] == config_of(source)["rope_parameters"]

    def with_numbers(config: dict[str, Any]) -> None:
        config["rope_parameters"] = config_of(tmp_path / "listed")["rope_parameters"]

    rewritten(tmp_path / "pairs", with_numbers)
    assert models.relative_error(
        *(models.outputs(folder, torch.float64) for folder in (source, tmp_path / "pairs"))
    ) <= EXACT  # fmt: skip


def test_what_a_user_is_told(narrow: Narrow, tmp_path: Path) -> None:
    source, wide = str(narrow("llama-plain")), str(tmp_path / "wide")
    given = ["convert", source, wide, "--grow", "head_dim=2x", "--rope", "pairs"]
    refused = CliRunner().invoke(cli, given)
    assert refused.exit_code == 1
    assert f"{SLOWER}, and --rope theta or spread or frequencies keeps it" in refused.stderr
    told = CliRunner().invoke(cli, [*given, "--allow-approximate", "--depth", "drop:0"])
    assert "approximate, by --depth drop:0; --rope pairs;" in told.stderr
    said = CliRunner().invoke(cli, [*given, "--allow-approximate", "--force", "--dry-run", "--json"])
    plan = json.loads(said.stdout)["plan"] if "plan" in json.loads(said.stdout) else json.loads(said.stdout)
    assert plan["function_exact"] is False
    assert any(
        note.startswith("of 2 copies of a rotary pair the first turns as before and the others more slowly (0.215 of the old frequency)")
        for note in plan["notes"]
    )  # fmt: skip


def test_pairs_are_folded_back(narrow: Narrow, tmp_path: Path) -> None:
    source = narrow("qwen3")
    for way in (ALLOWED, {"rope": "frequencies"}):
        widen(source, tmp_path / "wide", "head_dim=4", scaling="copy", force=True, **way)
        collapse(Options(str(tmp_path / "wide"), str(tmp_path / "back"), force=True), None, lambda nbytes: None, print)
        assert config_of(tmp_path / "back") == config_of(source)
        old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
        for name in old:
            torch.testing.assert_close(new[name], old[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rope": "pairs"}, f"--rope pairs: cannot be had, not even approximately: {NTK}; grow heads instead"),
        (ALLOWED, f"--rope pairs: cannot be had, not even approximately: {NTK}; grow heads instead"),
        ({"rope": "frequencies"}, "--rope frequencies: is not exact with this model's frequency scaling; none is"),
    ],
)
def test_dynamic_scaling_is_refused(narrow: Narrow, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(WidenError) as caught:
        planned(narrow("llama-plain", dynamic), tmp_path / "wide", "head_dim=2", **options)
    assert str(caught.value) == text


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_pairs_in_llama_cpp(tmp_path: Path, name: str) -> None:
    """A prompt of one token is at position 0, where nothing turns."""
    path, wide = write(tmp_path / "narrow.gguf", family_of(name)), tmp_path / "wide.gguf"
    asked = Options(str(path), str(wide), grow="head_dim=2x", rope="pairs", scaling="copy")
    with pytest.raises(WidenError) as caught:
        prepare(asked)
    assert str(caught.value).startswith(SLOWER)
    run(prepare(replace(asked, allow_approximate=True)), lambda nbytes: None)
    still, far = (
        difference(log_probabilities(path, prompts), log_probabilities(wide, prompts))
        for prompts in ([[5], [9]], PROMPTS)
    )
    print(f"{name} x2: {still:.1e} at position 0, {far:.1e} behind it")
    assert still <= BOUND
    assert far > 10 * BOUND
    key = f"{family_of(name).architecture}.rope.freq_base"
    assert read(path).pairs.get(key) == read(wide).pairs.get(key)
    assert not verify(Options(str(path), str(wide)), lambda nbytes: None).differences


@pytest.mark.parametrize(("name", "factor"), [("llama", "7/5"), ("qwen3", "12/5"), ("gemma3", "12/5"), ("phi2", "5/2")])
def test_fractions_in_llama_cpp(tmp_path: Path, name: str, factor: str) -> None:
    path, wide = write(tmp_path / "narrow.gguf", family_of(name)), tmp_path / "wide.gguf"
    grow = f"hidden={factor},head_dim={factor}" if name == "phi2" else f"head_dim={factor}"
    run(prepare(Options(str(path), str(wide), grow=grow)), lambda nbytes: None)
    found = difference(log_probabilities(path, PROMPTS), log_probabilities(wide, PROMPTS))
    print(f"{name} x{factor}: {found:.1e}")
    assert found <= BOUND


# Fractions: the old pairs in front under a raised base.

FRACTIONS = [
    ("llama-plain", "5/3"), ("llama-linear", "3/2"), ("llama-llama3", "5/2"), ("llama-yarn", "3/2"), ("llama-yarn", "5/2"),
    ("llama-longrope-long", "5/2"), ("qwen3", "7/5"), ("qwen3", "12/5"), ("gemma3_text", "12/5"), ("cohere", "7/3"),
    ("glm", "7/3"), ("gpt_neox", "4/3"), ("deepseek_v3", "5/2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "factor"), FRACTIONS)
def test_fractions(narrow: Narrow, tmp_path: Path, name: str, factor: str) -> None:
    job = widen(narrow(name), tmp_path / "wide", grown(name, factor))
    found = error(name, narrow(name), tmp_path / "wide", job)
    print(f"{name} x{factor}: {found:.1e}")
    assert found <= EXACT
