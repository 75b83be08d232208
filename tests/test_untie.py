"""--untie: weights that a model ties are written each by itself, with the factor that each needs, and run by transformers
and llama.cpp beside the narrow tied model."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path

import families_encoders
import families_llama
import families_multimodal
import families_older
import gguf
import gguf_families
import models
import numpy as np
import pytest
import test_adapters
import torch
from llama_cpp import LogProbabilities, log_probabilities
from models import Variant
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from widen_cli.collapse.run import collapse
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

EXACT = 1e-11  # relative to the largest output
GGUF_BOUND = 2e-4
PROMPTS = [[5, 9, 40, 7], [3], [11, 60, 8, 8, 90, 17, 23, 4]]
_FAMILIES = (*families_encoders.FAMILIES, *families_llama.FAMILIES, *families_older.FAMILIES)
_KNOWN = {**models.VARIANTS, **{name: variant for family in _FAMILIES for name, variant in family.variants.items()}}
_OLMO = _KNOWN["olmo_clipped"]
VARIANTS: dict[str, Variant] = {
    **_KNOWN,
    "olmo_tied_clip": Variant(
        _OLMO.model_class, {**_OLMO.config, "tie_word_embeddings": True}, _OLMO.inputs, _OLMO.small
    ),
}
# What is written beside the tables, and the growth: a tied head alone rules out the first two.
TWINS = {
    "olmo_tied_clip": ("hidden=3,intermediate=2,heads=2,kv_heads=2", ["lm_head.weight"]),
    "opt_no_gain_tied": ("hidden=3,intermediate=2,heads=3", ["lm_head.weight"]),
    "gemma": ("hidden=2,intermediate=3", ["lm_head.weight"]),
    "t5": ("hidden=3,intermediate=2,heads=2", ["lm_head.weight"]),
    "gpt2": ("hidden=2,intermediate=3,heads=2", ["lm_head.weight"]),
    "llama_tied": ("hidden=3,intermediate=2", ["lm_head.weight"]),
    "bert_mlm": ("hidden=2,intermediate=3,heads=2", ["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"]),
    "bart": (
        "hidden=2,encoder_intermediate=3,decoder_heads=2",
        ["lm_head.weight", "model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"],
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("untie")


@cache
def narrow(folders: Path, name: str) -> Path:
    models.build(VARIANTS[name], torch.float64).save_pretrained(folders / name)
    return folders / name


def widen(source: Path | str, target: Path, grow: str | None = None, **options: object) -> Job:
    asked = Options(
        str(source), str(target), factor=None if grow else 2, grow=models.by_factors(grow), untie=True, **options
    )  # type: ignore[arg-type]
    job = prepare(asked)
    run(job, lambda nbytes: None)
    return job


def error(name: str, source: Path, target: Path, job: Job) -> float:
    before, after = (models.outputs(at, torch.float64, inputs=VARIANTS[name].inputs) for at in (source, target))
    scale = float(job.plan.scales[job.plan.output]) if job.plan.output in job.plan.scales else 1.0
    return models.relative_error(before, after, {each: scale for each in before if "hidden" in each})


def same(source: Path, target: Path) -> bool:
    return not verify(Options(str(source), str(target)), lambda nbytes: None).differences


@pytest.mark.parametrize("name", TWINS)
def test_the_function_is_kept(folders: Path, tmp_path: Path, name: str) -> None:
    """And verify derives both weights again by what is recorded."""
    grow, twins = TWINS[name]
    source, target = narrow(folders, name), tmp_path / "wide"
    job = widen(source, target, grow)
    before, after = (load_file(at / "model.safetensors") for at in (source, target))
    assert sorted(after.keys() - before.keys()) == twins
    assert not before.keys() - after.keys()
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    assert error(name, source, target, job) <= EXACT
    assert same(source, target)


@pytest.mark.parametrize(("name", "head"), [("olmo_tied_clip", 1.0), ("t5", 2.0), ("gemma", 1.001)])
def test_a_wrong_head_shows(folders: Path, tmp_path: Path, name: str, head: float) -> None:
    """The guard: the head as the table stands (OLMo's takes 1/3), or off by a factor; comparison and verify see it."""
    source, target = narrow(folders, name), tmp_path / "wide"
    job = widen(source, target, TWINS[name][0])
    tensors = load_file(target / "model.safetensors")
    table = "model.embed_tokens.weight" if name == "olmo_tied_clip" else "lm_head.weight"
    tensors["lm_head.weight"] = tensors[table].clone() * head
    with safe_open(target / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    save_file(tensors, target / "model.safetensors", metadata)
    assert error(name, source, target, job) > 1e-4
    assert [d.name for d in verify(Options(str(source), str(target)), lambda n: None).differences] == ["lm_head.weight"]


REFUSED = {
    "auto": "no scaling keeps the function of this checkpoint, because ",
    "copy": "--scaling copy: not function-exact for this checkpoint, because ",
    "orthogonal": "--scaling orthogonal: not function-exact for this checkpoint, because ",
}


@pytest.mark.parametrize("mode", REFUSED)
def test_a_refusal_names_the_way_out(folders: Path, tmp_path: Path, mode: str) -> None:
    source = narrow(folders, "olmo_tied_clip")
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(source), str(tmp_path / "wide"), scaling=mode))
    assert REFUSED[mode] in str(caught.value)
    assert str(caught.value).endswith(
        "lm_head.weight is tied to model.embed_tokens.weight: one factor serves both; "
        "with --untie, which writes 'lm_head.weight' as a weight of its own, copy keeps the function"
    )


def test_where_a_tie_rounds_the_plan_says_so(tmp_path: Path) -> None:
    """T5 divides what its tied head reads by the root of d_model: 8 for 64, which is no longer whole for 128."""
    described = VARIANTS["t5"]
    wider = Variant(described.model_class, {**described.config, "d_model": 64}, described.inputs, described.small)
    models.build(wider, torch.bfloat16).save_pretrained(tmp_path / "narrow")
    asked = Options(str(tmp_path / "narrow"), str(tmp_path / "wide"), grow="hidden=2", dry_run=True)
    note = (
        "a tied weight takes a factor that rounds; with --untie, which writes it twice, nothing is rounded for certain"
    )
    plan = prepare(asked).plan
    assert (plan.exact, note in plan.notes) == (False, True)
    job = widen(tmp_path / "narrow", tmp_path / "wide", "hidden=2")
    assert (job.plan.exact, note in job.plan.notes) == (True, False)
    assert (
        "untied: 'lm_head.weight' is written as a weight of its own, beside 'shared.weight' whose values it has"
        in job.plan.notes
    )
    before, after = (
        models.outputs(at, torch.float64, inputs=wider.inputs)["logits"]
        for at in (tmp_path / "narrow", tmp_path / "wide")
    )
    assert np.abs(after - before).max() <= EXACT * np.abs(before).max()


def test_parts_have_the_head_in_their_index(folders: Path, tmp_path: Path) -> None:
    job = widen(narrow(folders, "gpt2"), tmp_path / "wide", max_shard_size="60KB")
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    stored = {name: part.name for part in (tmp_path / "wide").glob("*.safetensors") for name in load_file(part)}
    assert index["weight_map"] == stored
    assert "lm_head.weight" in stored
    assert len(set(stored.values())) > 2
    assert error("gpt2", narrow(folders, "gpt2"), tmp_path / "wide", job) <= EXACT
    assert same(narrow(folders, "gpt2"), tmp_path / "wide")


def test_a_pipe_gives_the_same_bytes(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embedding is held in memory: it is written twice, and a pipe passes once."""
    source = narrow(folders, "llama_tied")
    widen(source / "model.safetensors", tmp_path / "file.safetensors")
    with open(source / "model.safetensors") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        widen("-", tmp_path / "piped.safetensors", config=str(source / "config.json"))
    assert (tmp_path / "piped.safetensors").read_bytes() == (tmp_path / "file.safetensors").read_bytes()


def test_a_head_that_is_stored_already_stays(folders: Path, tmp_path: Path) -> None:
    """As in files of torch: the config alone has to say it. Where the two differ, the model is refused as before."""
    source = tmp_path / "narrow"
    shutil.copytree(narrow(folders, "llama_tied"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    job = widen(source, tmp_path / "wide", "hidden=3")
    assert error("llama_tied", source, tmp_path / "wide", job) <= EXACT
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        WidenError, match=r"the config ties 'lm_head.weight' to 'model.embed_tokens.weight', but their values"
    ):
        prepare(Options(str(source), str(tmp_path / "other"), untie=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "no weight of this model is tied to another; leave it out"),
        ("llama_base", "no weight of this model is tied to another; leave it out"),
        (
            "deberta_mlm_new",
            "what runs this model ties 'lm_predictions.lm_head.decoder.weight' to 'deberta.embeddings.word_embeddings.weight' "
            "in its code, and reads no weight of that name; leave it out",
        ),
    ],
)
def test_what_cannot_be_untied(folders: Path, tmp_path: Path, name: str, text: str) -> None:
    source = narrow(folders, name)
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(source), str(tmp_path / "wide"), untie=True))
    assert str(caught.value) == f"{source}: --untie: {text}"


def test_without_a_config_the_key_is_told(folders: Path, tmp_path: Path) -> None:
    shutil.copy(narrow(folders, "llama_tied") / "model.safetensors", tmp_path / "alone.safetensors")
    told = ("num_attention_heads=6", 'architectures=["LlamaForCausalLM"]', "tie_word_embeddings=true")
    job = prepare(
        Options(str(tmp_path / "alone.safetensors"), str(tmp_path / "wide.safetensors"), untie=True, settings=told)
    )
    assert (
        f"{tmp_path}/alone.safetensors: no config is written, and whatever loads the result needs "
        "tie_word_embeddings = false too" in job.warnings
    )


@pytest.mark.parametrize("name", ["olmo_tied_clip", "gemma"])
def test_adapters_of_an_untied_base(tmp_path: Path, name: str) -> None:
    """LoRA on the head alone, on the embedding alone, and between: each takes the factors of its own weight."""
    adapter = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    assert test_adapters.error_of(tmp_path, VARIANTS[name], adapter, {"factor": 2, "untie": True}) <= EXACT


def test_a_part_of_another_model_is_not_untied(folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "narrow"
    shutil.copytree(narrow(folders, "llama_tied"), source)
    tensors = load_file(source / "model.safetensors")
    save_file({f"part.{name}": tensor for name, tensor in tensors.items()}, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({"model_type": "more", "text_config": config}))
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(source), str(tmp_path / "wide"), untie=True))
    assert str(caught.value) == (
        f"{source}: --untie: the model is a part of another, whose class decides what is tied; leave it out"
    )


# GGUF.

_LLAMA = gguf_families.Family("llama", gguf_families.FAMILIES["gemma"].tensors)


def logs(path: Path) -> LogProbabilities:
    return log_probabilities(path, PROMPTS)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_gguf_gets_an_output_matrix(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gguf_families.FAMILIES, "llama", _LLAMA)  # type: ignore[arg-type]
    source, target = gguf_families.write(name, tmp_path / "narrow.gguf"), tmp_path / "wide.gguf"
    job = widen(source, target, "hidden=3,intermediate=2")
    names = [tensor.name for tensor in gguf.GGUFReader(target).tensors]
    assert "output.weight" in names
    assert np.abs(logs(target) - logs(source)).max() <= GGUF_BOUND
    assert same(source, target)
    data = bytearray(target.read_bytes())
    found = next(tensor for tensor in gguf.GGUFReader(target).tensors if tensor.name == "output.weight")
    rows = np.frombuffer(data, "<f4", found.n_elements, int(found.data_offset))
    rows *= np.float32(1.1)
    target.write_bytes(data)
    assert np.abs(logs(target) - logs(source)).max() > 20 * GGUF_BOUND
    assert not same(source, target)
    head = next(plan for plan in job.plan.tensors if plan.names == ("output.weight",))
    assert head.stored_name == "token_embd.weight"


@pytest.mark.parametrize("name", ["gemma", "gemma2", "command-r"])
def test_where_llama_cpp_takes_no_output_matrix(tmp_path: Path, name: str) -> None:
    source = gguf_families.write(name, tmp_path / "narrow.gguf")
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(source), str(tmp_path / "wide.gguf"), untie=True))
    assert str(caught.value) == (
        f"{source}: --untie: what runs this model ties 'output.weight' to 'token_embd.weight' in its code, "
        "and reads no weight of that name; leave it out"
    )


def test_the_way_back_leaves_the_weights_apart(folders: Path, tmp_path: Path) -> None:
    """Since they were written apart they are two weights, which training may have moved: the narrow model has both."""
    for name in ("llama_tied", "gpt2", "bart"):
        source, wide, back = narrow(folders, name), tmp_path / f"{name}-wide", tmp_path / f"{name}-back"
        job = widen(source, wide, scaling="copy")
        told: list[str] = []
        collapse(Options(str(wide), str(back), factor=None), None, lambda nbytes: None, told.append)
        found, expected = (load_file(at / "model.safetensors") for at in (back, source))
        assert (
            set(found) - set(expected) == {tensor.source.name for tensor in job.plan.tensors} - set(expected) != set()
        )
        # Heads of twice the size take a root of 2, which rounds.
        assert all(torch.allclose(found[each], expected[each], rtol=5e-16, atol=0) for each in expected)
        config = json.loads((back / "config.json").read_text())
        assert config == {**json.loads((source / "config.json").read_text()), "tie_word_embeddings": False}
        assert told == [f"{wide}: its weights were untied by --untie, and those of the narrow model stay so"]
        assert error(name, source, back, job) <= EXACT


def test_the_way_back_where_the_whole_model_says_what_is_tied(tmp_path: Path) -> None:
    """The key stands beside the part of the config that the map reads, and in the record under that place."""
    source, wide, back = tmp_path / "narrow", tmp_path / "wide", tmp_path / "back"
    variant = next(
        family.variants["paligemma2"] for family in families_multimodal.FAMILIES if "paligemma2" in family.variants
    )
    models.build(variant, torch.float64).save_pretrained(source)
    widen(source, wide, scaling="copy")
    collapse(Options(str(wide), str(back), factor=None), None, lambda nbytes: None, lambda text: None)
    config = json.loads((back / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    before, after = (models.outputs(one, torch.float64, inputs=variant.inputs) for one in (source, back))
    assert models.relative_error(before, after) <= EXACT
