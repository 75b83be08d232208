"""More layers together with experts, ranges of layers and numbered heads, in one run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families_encoders
import gguf_families
import gguf_oracle
import models
import numpy as np
import pytest
import sweeping_gguf
import sweeping_layers
import sweeping_packed
import torch
from click.testing import CliRunner
from llama_cpp import log_probabilities
from sweeping import Sweep, interrupted_after, trials
from sweeping_gguf import GgufSweep
from sweeping_layers import LayeredSweep
from sweeping_packed import PackedSweep
from test_depth import PROMPTS, deepen

from widen_cli.cli import cli
from widen_cli.collapse import collapse
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

WHISPER = next(
    family.variants["whisper"] for family in families_encoders.FAMILIES if "whisper" in family.variants
)  # fmt: skip


def cross_attentions(folder: Path, pairs: list[list[int]]) -> list[np.ndarray]:
    """What the named heads of the decoder attend to, as Whisper's timestamps are made of it."""
    with models.Float64Throughout():
        model = models.load(folder, torch.float64)
        assert WHISPER.inputs is not None
        with torch.inference_mode():
            found = model(**WHISPER.inputs(model.config), output_attentions=True).cross_attentions
    return [found[layer][:, head].numpy() for layer, head in pairs]


@pytest.mark.parametrize(
    "asked",
    [
        {"depth": ("decoder:+1@0",), "grow": "hidden=2,decoder_heads=2,encoder_heads=2"},
        {"grow": "hidden=2,decoder_heads=2,encoder_heads=2", "layout": "tile"},
        {"grow": "hidden=2,decoder_heads=4/3,encoder_heads=4/3"},
    ],
    ids=["deep", "tiled", "fraction"],
)
def test_alignment_heads_follow(asked: dict[str, Any], tmp_path: Path) -> None:
    models.build(WHISPER, torch.float64).save_pretrained(tmp_path / "narrow")
    told = tmp_path / "narrow/generation_config.json"
    pairs = [[0, 1], [1, 4], [1, 5]]
    told.write_text(json.dumps({"alignment_heads": pairs, "suppress_tokens": [5]}))
    deepen(tmp_path / "narrow", tmp_path / "wide", *asked.pop("depth", ()), **asked)
    values = json.loads((tmp_path / "wide/generation_config.json").read_text())
    assert values["suppress_tokens"] == [5]
    assert values["alignment_heads"] != pairs or "layout" in asked
    before = cross_attentions(tmp_path / "narrow", pairs)
    for old, new in zip(before, cross_attentions(tmp_path / "wide", values["alignment_heads"]), strict=True):
        assert np.abs(old - new).max() <= 1e-12
    collapse(Options(str(tmp_path / "wide"), str(tmp_path / "back")), None, lambda nbytes: None, print)
    assert json.loads((tmp_path / "back/generation_config.json").read_text()) == json.loads(told.read_text())
    wrong = [[layer, (head + 2) % 6] for layer, head in pairs]
    assert np.abs(before[0] - cross_attentions(tmp_path / "narrow", wrong)[0]).max() > 1e-4


def test_layers_that_predict_further_stay_behind(tmp_path: Path) -> None:
    source = gguf_families.write("glm4moe-further", tmp_path / "narrow.gguf")
    job = deepen(source, tmp_path / "deep.gguf", "2x", factor=2)
    written = {name for tensor in job.plan.tensors for name in tensor.names}
    assert {name.split(".")[1] for name in written if ".nextn." in name} == {"4"}
    assert job.config.get("block_count") == 5
    one, other = (log_probabilities(path, PROMPTS) for path in (source, tmp_path / "deep.gguf"))
    assert np.abs(one - other).max() <= 2e-4
    assert not verify(Options(str(source), str(tmp_path / "deep.gguf")), lambda nbytes: None).differences
    folded = collapse(
        Options(str(tmp_path / "deep.gguf"), str(tmp_path / "back.gguf")), None, lambda nbytes: None, print
    )
    old, new = (gguf_oracle.read(tmp_path / name) for name in ("narrow.gguf", "back.gguf"))
    assert (list(old.pairs.items()), list(old.tensors)) == (list(new.pairs.items()), list(new.tensors))
    exact = old.tensors.keys() - {*folded.inexact}
    assert len(exact) > 5
    assert all(np.array_equal(old.tensors[name].rows, new.tensors[name].rows) for name in exact)


def test_a_random_few_of_all_in_one_run(tmp_path: Path) -> None:
    """A small part of what `python tests/sweeping.py` tries."""
    sweep = Sweep(tmp_path)
    outcomes = [sweep.outcome(trial) for trial in trials(4, 30)]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert sum(not outcome.refused for outcome in outcomes) >= 5


def test_a_random_few_in_quantised_types(tmp_path: Path) -> None:
    """And of `python tests/sweeping_packed.py` (MXFP4, FP8), `sweeping_gguf.py` (blocks of 4 to 8 bits in llama.cpp) and
    `sweeping_layers.py` (models whose layers differ)."""
    packed, blocks, layers = PackedSweep(tmp_path), GgufSweep(tmp_path), LayeredSweep(tmp_path)
    outcomes = [packed.outcome(trial) for trial in sweeping_packed.trials(3, 12)]
    outcomes += [blocks.outcome(trial) for trial in sweeping_gguf.trials(3, 16)]
    outcomes += [layers.outcome(trial) for trial in sweeping_layers.trials(1, 16)]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert sum(not outcome.refused for outcome in outcomes) >= 12


def test_heads_that_are_none_of_the_models_are_refused(tmp_path: Path) -> None:
    models.build(WHISPER, torch.float64).save_pretrained(tmp_path / "narrow")
    told = tmp_path / "narrow/generation_config.json"
    told.write_text(json.dumps({"alignment_heads": [[0, 6]]}))
    with pytest.raises(WidenError) as refused:
        prepare(
            Options(str(tmp_path / "narrow"), str(tmp_path / "wide"), grow="hidden=2,decoder_heads=2,encoder_heads=2")
        )
    assert str(refused.value) == (
        f"{told}: alignment_heads holds [0, 6], which is no [layer, head] of the model; correct it, or take it out"
    )


def test_experts_and_layers_in_one_run_through_pipes_and_any_threads(tmp_path: Path) -> None:
    """The head that is written of the embedding's bytes once more among them: of a pipe they are held."""
    models.build("llama_tied", torch.float64).save_pretrained(tmp_path / "narrow", max_shard_size="1GB")
    asked: dict[str, Any] = {"experts": 4, "slices": 2, "factor": 2, "untie": True}
    job = deepen(tmp_path / "narrow", tmp_path / "wide", "2x", threads=1, **asked)
    assert job.plan.grown.startswith("layers 2 -> 4, 4 experts made of a dense llama, hidden x2")
    one, other = (models.outputs(tmp_path / name, torch.float64) for name in ("narrow", "wide"))
    assert models.relative_error(one, other) <= 1e-12
    assert not verify(Options(str(tmp_path / "narrow"), str(tmp_path / "wide")), lambda nbytes: None).differences
    written = (tmp_path / "wide/model.safetensors").read_bytes()
    deepen(tmp_path / "narrow", tmp_path / "threads", "2x", threads=4, **asked)
    assert (tmp_path / "threads/model.safetensors").read_bytes() == written
    given = ["--depth", "2x", "--experts", "4", "--slices", "2", "--factor", "2", "--untie"]
    piped = CliRunner().invoke(
        cli,
        ["convert", "-", f"{tmp_path}/piped/", "--config", str(tmp_path / "narrow/config.json"), *given],
        (tmp_path / "narrow/model.safetensors").read_bytes(),
    )
    assert piped.exit_code == 0, piped.output
    assert (tmp_path / "piped/model.safetensors").read_bytes() == written


def test_what_follows_an_axis_that_follows_grows_too(tmp_path: Path) -> None:
    """Heads take hidden along, and an ELECTRA without projection has the embedding's size equal to that: it was refused."""
    (electra,) = (
        family.variants["electra_unprojected"]
        for family in families_encoders.FAMILIES
        if "electra_unprojected" in family.variants
    )
    models.build(electra, torch.float64).save_pretrained(tmp_path / "narrow")
    job = prepare(Options(str(tmp_path / "narrow"), str(tmp_path / "wide"), grow="heads=2x"))
    job.checkpoint.close()
    assert {axis: job.plan.factors[axis] for axis in ("heads", "hidden", "embedding", "intermediate")} == {
        "heads": 2, "hidden": 2, "embedding": 2, "intermediate": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "asked"),
    [("qwen3", {"experts": 4, "factor": 2}), ("llama", {"grow": "intermediate=2x@1-2,heads=2x,kv_heads=2x"})],
)
def test_gguf_with_experts_or_ranges_of_layers(name: str, asked: dict[str, Any], tmp_path: Path) -> None:
    family = gguf_families.FAMILIES.get(name) or gguf_families.Family("llama", gguf_families._llama_like())
    source = gguf_families.write_family(family, tmp_path / "narrow.gguf")
    deepen(source, tmp_path / "deep.gguf", "+1@0", **asked)
    one, other = (log_probabilities(path, PROMPTS) for path in (source, tmp_path / "deep.gguf"))
    assert np.abs(one - other).max() <= 2e-4
    assert not verify(Options(str(source), str(tmp_path / "deep.gguf")), lambda nbytes: None).differences


@pytest.mark.parametrize("asked", [{"factor": 2}, {"experts": 4}], ids=["width", "experts"])
def test_an_interrupted_run_of_both_goes_on(asked: dict[str, Any], tmp_path: Path) -> None:
    models.build("llama", torch.float64).save_pretrained(tmp_path / "narrow")
    deepen(tmp_path / "narrow", tmp_path / "whole", "2x", max_shard_size="60KB", **asked)
    options = Options(
        str(tmp_path / "narrow"), str(tmp_path / "out"), depth=("2x",), max_shard_size="60KB", threads=1, **asked
    )
    with pytest.raises(KeyboardInterrupt):
        run(prepare(options), interrupted_after(300_000))
    report = run(prepare(replace(options, resume=True)), lambda nbytes: None)
    assert report.notes[0].startswith("resumed: ")
    whole, out = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "out"))
    assert whole == out
