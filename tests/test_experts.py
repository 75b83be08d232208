"""Dense models made mixtures of experts (--experts): the function is kept, in transformers and llama.cpp, and a fault shows."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf_families
import models
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from llama_cpp import log_probabilities
from safetensors.numpy import load_file, save_file
from test_maps import faults

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job
from widen_cli.maps import load_map
from widen_cli.options import Options
from widen_cli.writing import run

EXACT = 1e-13  # relative to the largest output, in float64 throughout
CLEAR = 1e-4  # a fault has to show
BOUND = 2e-4  # log-probabilities in llama.cpp, in float32

_LLAMA = models.LLAMA
VARIANTS = {
    "llama": models.VARIANTS["llama"],
    "tied": models.VARIANTS["llama_tied"],
    "base": models.VARIANTS["llama_base"],
    "biases": models.VARIANTS["llama_biases"],
    "question": models.Variant("LlamaForQuestionAnswering", _LLAMA),
    "mistral": models.VARIANTS["mistral"],
    "qwen2": models.VARIANTS["qwen2"],
    "windowed": models.Variant("Qwen2ForCausalLM", {**_LLAMA, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": models.Variant("Qwen3ForCausalLM", {**_LLAMA, "hidden_size": 40, "head_dim": 10, "attention_bias": True}),
    "qwen3_labels": models.Variant("Qwen3ForSequenceClassification", {**_LLAMA, "head_dim": 10, "num_labels": 5}),
}


class Dense:
    """The dense checkpoints, in float64, and what they compute; each is saved and run once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = cache(self._folder)
        self.outputs = cache(self._outputs)

    def _folder(self, name: str) -> Path:
        models.build(VARIANTS[name], torch.float64).save_pretrained(self.root / name)
        return self.root / name

    def _outputs(self, name: str) -> models.Outputs:
        return models.outputs(self.folder(name), torch.float64)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return Dense(tmp_path_factory.mktemp("dense"))


def convert(source: Path, target: Path | str, **asked: Any) -> Job:
    job = prepare(Options(str(source), str(target), **asked))
    run(job, lambda nbytes: None)
    return job


def refusal(source: Path, **asked: Any) -> list[str]:
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(source), f"{source}-refused", **asked))
    return [fault.replace(str(source), "IN") for fault in caught.value.faults]


def error(dense: Dense, name: str, folder: Path, job: Job) -> float:
    plan = job.plan
    scale = float(plan.scales[plan.output]) if plan.output in plan.scales else 1.0
    return models.relative_error(dense.outputs(name), models.outputs(folder, torch.float64), scale)


@pytest.mark.parametrize(
    ("name", "kind", "asked"),
    [
        ("llama", "MixtralForCausalLM", {"experts": 4}),
        ("llama", "MixtralForCausalLM", {"experts": 5, "top_k": 1, "router": "zero"}),
        ("llama", "MixtralForCausalLM", {"experts": 3, "top_k": 3, "factor": 2, "scaling": "orthogonal"}),
        ("llama", "MixtralForCausalLM", {"experts": 10, "top_k": 5, "slices": 5, "grow": "intermediate=3,hidden=2"}),
        ("llama", "MixtralForCausalLM", {"experts": 4, "top_k": 4, "slices": 2, "router": "zero", "scaling": "sum"}),
        ("llama", "Qwen2MoeForCausalLM", {"experts": 4, "slices": 2, "top_k": 2, "upcycle": "qwen2_moe"}),
        ("tied", "MixtralForCausalLM", {"experts": 4, "factor": 3, "untie": True}),
        ("base", "MixtralModel", {"experts": 2, "factor": 2}),
        ("mistral", "MixtralForCausalLM", {"experts": 4, "grow": "hidden=2,heads=2,head_dim=2"}),
        ("qwen2", "Qwen2MoeForCausalLM", {"experts": 4, "top_k": 1}),
        ("qwen2", "Qwen2MoeForCausalLM", {"experts": 6, "top_k": 4, "slices": 2, "factor": 2}),
        ("qwen3", "Qwen3MoeForCausalLM", {"experts": 4, "top_k": 3}),
        ("qwen3", "Qwen3MoeForCausalLM", {"experts": 8, "slices": 2, "factor": 2, "scaling": "quiet"}),
        ("qwen3_labels", "Qwen3MoeForSequenceClassification", {"experts": 2, "top_k": 1}),
    ],
)
def test_the_function_is_kept(dense: Dense, tmp_path: Path, name: str, kind: str, asked: dict[str, Any]) -> None:
    job = convert(dense.folder(name), tmp_path / "wide", **asked)
    assert json.loads((tmp_path / "wide/config.json").read_text())["architectures"] == [kind]
    assert error(dense, name, tmp_path / "wide", job) <= EXACT


def chosen(folder: Path) -> list[tuple[int, ...]]:
    """The experts that work for each token of the fixed batch, layer by layer."""
    found: list[tuple[int, ...]] = []
    model = models.load(folder, torch.float64)
    model.config._experts_implementation = "eager"
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(
                lambda module, given, out: found.extend(map(tuple, out[2].sort().values.tolist()))
            )
    with torch.inference_mode():
        model(**models.fixed_inputs(model.config))
    return found


def test_tokens_choose_different_experts_and_whole_copies_of_slices(dense: Dense, tmp_path: Path) -> None:
    convert(dense.folder("llama"), tmp_path / "copies", experts=4)
    assert len(set(chosen(tmp_path / "copies"))) >= 4
    convert(dense.folder("llama"), tmp_path / "slices", experts=8, slices=2, top_k=4)
    found = set(chosen(tmp_path / "slices"))
    copies = [(2 * n, 2 * n + 1) for n in range(4)]
    assert len(found) >= 4
    assert found <= {one + other for one in copies for other in copies}


def test_an_expert_has_a_slice_and_the_shared_one_is_silent(dense: Dense, tmp_path: Path) -> None:
    convert(dense.folder("qwen2"), tmp_path / "wide", experts=4, slices=2, top_k=2)
    old, new = (load_file(folder / "model.safetensors") for folder in (dense.folder("qwen2"), tmp_path / "wide"))
    layer = "model.layers.1.mlp."
    for number in range(4):
        rows = slice(0, 25) if number % 2 == 0 else slice(25, 50)
        for part in ("gate_proj", "up_proj"):
            assert np.array_equal(new[f"{layer}experts.{number}.{part}.weight"], old[f"{layer}{part}.weight"][rows])
        down = 2 * old[f"{layer}down_proj.weight"][:, rows]
        assert np.array_equal(new[f"{layer}experts.{number}.down_proj.weight"], down)
    router = new[f"{layer}gate.weight"]
    assert np.array_equal(router[0], router[1])
    assert np.array_equal(router[2], router[3])
    assert not np.array_equal(router[1], router[2])
    assert abs(router.std() - 0.02) < 0.005
    assert np.array_equal(new[f"{layer}shared_expert.gate_proj.weight"], old[f"{layer}gate_proj.weight"])
    assert not new[f"{layer}shared_expert.down_proj.weight"].any()
    assert new[f"{layer}shared_expert_gate.weight"].all()


def test_the_config_is_that_of_the_new_kind(dense: Dense, tmp_path: Path) -> None:
    convert(dense.folder("qwen2"), tmp_path / "wide", experts=6, slices=2, top_k=4)
    old, new = (
        json.loads((folder / "config.json").read_text()) for folder in (dense.folder("qwen2"), tmp_path / "wide")
    )
    changed = {key: value for key, value in new.items() if value != old.get(key, ...)}
    assert old.keys() <= new.keys()
    assert changed == {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "head_dim": 6,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 25,
        "shared_expert_intermediate_size": 50,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", ("rope_parameters", "max_position_embeddings", "head_dim", "sliding_window")),
        ("mistral", ("rope_parameters", "rms_norm_eps", "max_position_embeddings")),
        ("qwen2", ("rope_parameters", "use_sliding_window", "layer_types", "attention_dropout")),
    ],
)
def test_what_the_config_leaves_out_means_what_it_did(
    dense: Dense, tmp_path: Path, name: str, keys: tuple[str, ...]
) -> None:
    """The classes' defaults differ: Mixtral's base is 1e6, its epsilon 1e-5, its kv heads are 8."""
    shutil.copytree(dense.folder(name), tmp_path / "sparse")
    config = json.loads((tmp_path / "sparse/config.json").read_text())
    sparse = {key: value for key, value in config.items() if key not in keys}
    (tmp_path / "sparse/config.json").write_text(json.dumps(sparse))
    convert(tmp_path / "sparse", tmp_path / "wide", experts=3)
    narrow, wide = (models.outputs(tmp_path / each, torch.float64) for each in ("sparse", "wide"))
    assert models.relative_error(narrow, wide) <= EXACT


def test_kv_heads_that_the_config_leaves_out_are_written(tmp_path: Path) -> None:
    models.build(models.VARIANTS["llama_mha"], torch.float64).save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense/config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "num_key_value_heads"}))
    convert(tmp_path / "dense", tmp_path / "wide", experts=2)
    narrow, wide = (models.outputs(tmp_path / each, torch.float64) for each in ("dense", "wide"))
    assert models.relative_error(narrow, wide) <= EXACT


def _edited(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name] = np.ascontiguousarray(change(weights[name]))
    save_file(weights, path, {"format": "pt"})


def _configured(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


_EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"
_ROUTER = "model.layers.1.mlp.gate.weight"
GUARDS: dict[str, Callable[[Path], None]] = {
    "one expert of one layer": lambda folder: _edited(folder, _EXPERT.format(2), lambda weight: 1.5 * weight),
    "the factor on a slice": lambda folder: _edited(folder, _EXPERT.format(3), lambda weight: weight / 2),
    "one row of the router": lambda folder: _edited(folder, _ROUTER, lambda rows: rows[[3, 1, 2, 0]]),
    "a shared expert that writes": lambda folder: _edited(
        folder, "model.layers.1.mlp.shared_expert.down_proj.weight", lambda weight: weight + 0.05
    ),
    "weights that do not sum to 1": lambda folder: _configured(folder, norm_topk_prob=False),
    "half a copy": lambda folder: _configured(folder, num_experts_per_tok=1),
    "layers left dense": lambda folder: _configured(folder, rms_norm_eps=2e-3),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_fault_shows(dense: Dense, tmp_path: Path, guard: str) -> None:
    job = convert(dense.folder("qwen2"), tmp_path / "wide", experts=4, slices=2, top_k=2)
    GUARDS[guard](tmp_path / "wide")
    assert error(dense, "qwen2", tmp_path / "wide", job) > CLEAR


# What is refused, in which words.

_NO_ZERO = (
    "--router zero: ties all experts, and which 4 of 8 a runtime then takes is its own affair, so they need not be the slices "
    "of whole copies; give --router random, or --top-k 8"
)
_NO_BIAS = (
    "IN/config.json: attention_bias is True, and no 'mixtral' can be made of that: Mixtral's attention has no biases"
)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("llama", {"experts": 4, "top_k": 5}, ["--top-k 5: there are 4 experts; give as many or fewer"]),
        (
            "llama",
            {"experts": 4, "slices": 3},
            ["--experts 4: are no whole copies of 3 slices; give a multiple of --slices"],
        ),
        (
            "llama",
            {"experts": 8, "slices": 2, "top_k": 3},
            [
                "--top-k 3: takes no whole copies of 2 slices, whose sum alone is the dense layer; "
                "give a multiple of --slices"
            ],
        ),
        ("llama", {"experts": 8, "slices": 2, "router": "zero"}, [_NO_ZERO]),
        (
            "llama",
            {"experts": 6, "slices": 3},
            [
                f"--slices 3: does not divide 50 of 'model.layers.{layer}.mlp.{part}_proj.weight'; give another number"
                for layer in (0, 1)
                for part in ("down", "gate", "up")
            ],
        ),
        (
            "biases",
            {"experts": 4, "top_k": 5},
            [
                "--top-k 5: there are 4 experts; give as many or fewer",
                _NO_BIAS,
                "IN/config.json: mlp_bias is True, and no 'mixtral' can be made of that: Mixtral's experts have no biases",
            ],
        ),
        (
            "windowed",
            {"experts": 4},
            [
                "IN/config.json: use_sliding_window is True, and no 'qwen2_moe' can be made of that: Qwen2-MoE's window is in "
                "other layers"
            ],
        ),
        (
            "question",
            {"experts": 4},
            [
                "IN/config.json: architectures says LlamaForQuestionAnswering, and 'mixtral' is made of *Model, *ForCausalLM, "
                "*ForSequenceClassification, *ForTokenClassification alone"
            ],
        ),
        (
            "qwen2",
            {"experts": 4, "upcycle": "qwen_moe"},
            ["--upcycle qwen_moe: is nothing that a dense 'qwen2' can become (did you mean 'qwen2_moe'?); it can become qwen2_moe"],
        ),
        (
            "qwen2",
            {"experts": 4, "upcycle": "mixtral"},
            ["--upcycle mixtral: is nothing that a dense 'qwen2' can become; it can become qwen2_moe"],
        ),
        (
            "llama",
            {"top_k": 2, "router": "zero"},
            ["--top-k, --router: says how experts are made, and --experts does not say that they are"],
        ),
    ],
)  # fmt: skip
def test_what_is_refused(dense: Dense, name: str, asked: dict[str, Any], expected: list[str]) -> None:
    assert refusal(dense.folder(name), **asked) == expected


def test_a_family_that_becomes_nothing_is_told_which_do(tmp_path: Path) -> None:
    models.build(models.VARIANTS["gpt2"], torch.float32).save_pretrained(tmp_path / "gpt2")
    (fault,) = refusal(tmp_path / "gpt2", experts=4)
    assert fault == (
        "IN: --experts: no map says what a dense 'gpt2' becomes; those of llama, mistral, qwen2, qwen3 can be upcycled, and a "
        "map of your own can say it for others ('upcycle', docs/maps.md)"
    )


def test_weights_alone_have_no_config_to_rewrite(dense: Dense, tmp_path: Path) -> None:
    shutil.copy(dense.folder("llama") / "model.safetensors", tmp_path / "alone.safetensors")
    (fault,) = refusal(tmp_path / "alone.safetensors", experts=4)
    assert fault == "IN: --experts needs the model's config, which is rewritten; give it with --config"


def test_a_quantised_config_is_refused(dense: Dense, tmp_path: Path) -> None:
    shutil.copytree(dense.folder("llama"), tmp_path / "fp8")
    _configured(tmp_path / "fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    (fault,) = refusal(tmp_path / "fp8", experts=4)
    assert fault == (
        "IN/config.json: quantization_config speaks of the dense weights by name; dequantise the model first, then give --experts"
    )


# The record, and the ways in and out.


def widen_ckpt(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False)


def test_the_record_derives_every_byte_again(dense: Dense, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    asked = ("--experts", 4, "--slices", 2, "--seed", 7, "--grow", "hidden=2", "--dtype", "BF16", "--verify")
    made = widen_ckpt(dense.folder("llama"), wide, *asked)
    assert made.exit_code == 0, made.stderr
    assert "mixtral, 4 experts made of a dense llama, hidden x2, " in made.stderr
    found = widen_ckpt("verify", dense.folder("llama"), wide)
    assert found.exit_code == 0, found.stderr
    other = widen_ckpt("verify", dense.folder("llama"), wide, "--experts", 4, "--slices", 2, "--seed", 8)
    name = "model.layers.0.block_sparse_moe.gate.weight"
    assert other.exit_code == 3
    assert f"{wide}: {name}: " in other.stderr
    _configured(wide, num_experts_per_tok=1)
    broken = widen_ckpt("verify", dense.folder("llama"), wide)
    assert broken.exit_code == 3
    assert "num_experts_per_tok: should be 4, is 1" in broken.stderr


def test_experts_can_be_widened_later(dense: Dense, tmp_path: Path) -> None:
    convert(dense.folder("llama"), tmp_path / "experts", experts=4)
    job = convert(tmp_path / "experts", tmp_path / "wide", factor=2)
    assert error(dense, "llama", tmp_path / "wide", job) <= EXACT
    assert widen_ckpt("verify", tmp_path / "experts", tmp_path / "wide").exit_code == 0


def test_a_pipe_and_shards_give_the_same_bytes(dense: Dense, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a pipe, which passes once, each dense weight is held while its experts are written, and no longer."""
    source, asked = dense.folder("llama"), {"experts": 8, "slices": 2, "top_k": 4, "factor": 2}
    convert(source, tmp_path / "whole", **asked)
    convert(source, tmp_path / "sharded", **asked, max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    whole = load_file(tmp_path / "whole/model.safetensors")
    parts: dict[str, Any] = {}
    for path in (tmp_path / "sharded").glob("*.safetensors"):
        parts |= load_file(path)
    assert {name: value.tobytes() for name, value in parts.items()} == {n: v.tobytes() for n, v in whole.items()}

    class Stdin:
        buffer = io.BytesIO((source / "model.safetensors").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin)
    job = prepare(Options("-", f"{tmp_path}/piped/", config=str(source / "config.json"), **asked))
    run(job, lambda nbytes: None)
    assert (tmp_path / "piped/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    held = [tensor.source._shared._held for tensor in job.checkpoint.tensors if hasattr(tensor.source, "_shared")]
    assert held
    assert set(held) == {None}


def test_a_run_with_another_router_is_not_gone_on_with(dense: Dense, tmp_path: Path) -> None:
    def identity(**asked: Any) -> str:
        job = prepare(Options(str(dense.folder("llama")), str(tmp_path / "wide"), max_shard_size="100KB", **asked))
        job.checkpoint.close()
        assert job.identity is not None
        return job.identity.made

    assert identity(experts=4) == identity(experts=4)
    assert len({identity(experts=4), identity(experts=4, seed=1), identity(experts=4, router="zero")}) == 3


def test_a_seed_is_a_router_for_ever(dense: Dense, tmp_path: Path) -> None:
    """The numbers are made by words of 64 bits alone, so they depend on no version of numpy and no machine."""
    convert(dense.folder("llama"), tmp_path / "wide", experts=4, seed=3, dtype="F32")
    router = load_file(tmp_path / "wide/model.safetensors")["model.layers.0.block_sparse_moe.gate.weight"]
    assert router.shape == (4, 36)
    assert hashlib.sha256(router.tobytes()).hexdigest() == ROUTER
    assert abs(router).max() < 0.02 * 3**0.5


ROUTER = "574994572c08bc275a93fae0375adacb82289856c3dcb10c5041f4c05f6c3b9a"


# GGUF, in llama.cpp.

_DRAW = np.random.default_rng(3)
PROMPTS = [[int(token) for token in _DRAW.integers(3, gguf_families.VOCAB, length)] for length in (1, 5, 17, 33)]
_S = gguf_families.Sizes
_EVEN = {"hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "head": 16}
GGUF = {
    "llama": gguf_families.Family("llama", gguf_families._llama_like(), _S(inner=50)),
    "biases": gguf_families.Family("llama", gguf_families._granite, _S()),
    "qwen2": gguf_families.Family("qwen2", gguf_families._llama_like(bias=True), _S(tied=False)),
    "qwen2-tied": gguf_families.Family("qwen2", gguf_families._llama_like(bias=True)),
    "qwen3": gguf_families.FAMILIES["qwen3"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return cache(lambda name: gguf_families.write_family(GGUF[name], folder / f"{name}.gguf"))


@cache
def logs(path: Path) -> Any:
    return log_probabilities(path, PROMPTS)


def distance(narrow: Path, wide: Path) -> float:
    return float(np.abs(logs(narrow) - log_probabilities(wide, PROMPTS)).max())


@pytest.mark.parametrize(
    ("name", "architecture", "asked"),
    [
        ("llama", "llama", {"experts": 4}),
        ("llama", "llama", {"experts": 6, "slices": 2, "top_k": 4, "factor": 2}),
        ("qwen2", "qwen2moe", {"experts": 3, "router": "zero"}),
        ("qwen2-tied", "qwen2moe", {"experts": 4, "slices": 2, "untie": True}),
        ("qwen3", "qwen3moe", {"experts": 4, "top_k": 1, "grow": "hidden=2,expert_intermediate=3"}),
    ],
)
def test_llama_cpp_computes_the_same(
    files: Callable[[str], Path], tmp_path: Path, name: str, architecture: str, asked: dict[str, Any]
) -> None:
    wide = tmp_path / "wide.gguf"
    convert(files(name), wide, **asked)
    assert distance(files(name), wide) <= BOUND
    fields = gguf.GGUFReader(wide).fields
    assert fields["general.architecture"].contents() == architecture
    assert fields[f"{architecture}.expert_count"].contents() == asked["experts"]
    assert widen_ckpt("verify", files(name), wide).exit_code == 0


def test_a_fault_shows_in_llama_cpp(files: Callable[[str], Path], tmp_path: Path) -> None:
    """One expert of four, whose down projection is doubled in one layer."""
    wide = tmp_path / "wide.gguf"
    convert(files("llama"), wide, experts=4)
    found = next(one for one in gguf.GGUFReader(wide).tensors if one.name == "blk.1.ffn_down_exps.weight")
    values = np.array(found.data)
    values[1] *= 2
    data = wide.read_bytes()
    start = int(found.data_offset)
    (tmp_path / "broken.gguf").write_bytes(data[:start] + values.tobytes() + data[start + values.nbytes :])
    assert distance(files("llama"), tmp_path / "broken.gguf") > 2 * BOUND


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_experts_are_the_dense_blocks(tmp_path: Path, kind: str) -> None:
    """Blocks are laid anew as they stand; the factor 2 of a slice goes into the block scales of the down projection."""
    family = gguf_families.Family("llama", gguf_families._llama_like(), _S(**_EVEN))
    path = gguf_families.write_family(family, tmp_path / "dense.gguf", gguf.GGMLQuantizationType[kind])
    wide = tmp_path / "wide.gguf"
    job = convert(path, wide, experts=4, slices=2, top_k=2)
    assert not any(tensor.exactness == "rounds" for tensor in job.plan.tensors)
    old, new = ({one.name: one for one in gguf.GGUFReader(each).tensors} for each in (path, wide))
    gate, down = (
        gguf.quants.dequantize(old[f"blk.1.ffn_{part}.weight"].data, gguf.GGMLQuantizationType[kind])
        for part in ("gate", "down")
    )
    gates, downs = (
        gguf.quants.dequantize(new[f"blk.1.ffn_{part}_exps.weight"].data, gguf.GGMLQuantizationType[kind])
        for part in ("gate", "down")
    )
    assert np.array_equal(gates, np.stack([gate[:64], gate[64:]] * 2))
    assert np.array_equal(downs, np.stack([2 * down[:, :64], 2 * down[:, 64:]] * 2))
    assert new["blk.1.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert np.isfinite(log_probabilities(wide, PROMPTS[:1])).all()
    assert refusal(path, experts=8, slices=8)[0] == (
        "--slices 8: does not divide 128 of 'blk.0.ffn_down.weight' in blocks of 32; give another number"
    )


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        (
            "qwen2",
            {"experts": 4, "top_k": 2},
            [
                "--top-k 2: the runtime of 'qwen2moe' does not make the weights of chosen experts sum to 1, so the function is kept "
                "where all work; give --top-k 4, or leave it out"
            ],
        ),
        (
            "qwen2-tied",
            {"experts": 4},
            ["IN: 'qwen2moe' needs a tensor 'output.weight', which this model has tied; give --untie"],
        ),
        (
            "biases",
            {"experts": 4},
            [
                f"IN: tensor 'blk.{layer}.ffn_{part}.bias' has no place in 'llama'"
                for layer in (0, 1)
                for part in ("gate", "up", "down")
            ],
        ),
    ],
)
def test_what_a_gguf_cannot_say(
    files: Callable[[str], Path], name: str, asked: dict[str, Any], expected: list[str]
) -> None:
    assert refusal(files(name), **asked) == expected


# The section of the maps.

MINE = """\
extends: mixtral
architecture: mine
match: {model_type: [mine]}
upcycle:
  from: {lama: {}}
  axis: intermediate
  sizes: {num_local_experts: experts, num_experts_per_tok: topk}
  weights:
    model.layers.*.mlp.gate_proj.weight: model.layers.*.block_sparse_moe.experts.*.w1.wait
  routers: [model.layers.*.block_sparse_moe.gate.weight]
  refuses: [{if: atention_bias, why: there is none}]
"""


def test_a_maps_mistakes_are_told_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    assert faults(tmp_path / "mine.yaml") == [
        "mine.yaml:7:60: 'topk' is none of experts, top_k, slice, whole (did you mean 'top_k'?)",
        "mine.yaml:7:3: no config key is said to hold 'top_k'",
        "mine.yaml:7:3: no config key is said to hold 'slice'",
        "mine.yaml:5:10: there is no map 'lama' (did you mean 'llama'?)",
        "mine.yaml:9:42: 'model.layers.*.block_sparse_moe.experts.*.w1.wait' is no tensor of this map (did you mean "
        "'model.layers.*.block_sparse_moe.experts.*.w1.weight'?)",
        "mine.yaml:11:18: 'atention_bias' is no axis, space or config key of this map (did you mean 'attention_bias'?)",
    ]


def test_a_map_of_ones_own_says_what_dense_models_become(dense: Dense, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    section = load_map(Path(__file__).parents[1] / "configs/mixtral.yaml").merged["upcycle"]
    section = {**section, "from": {"qwen3": {}}, "refuses": []}
    own.write_text(f"extends: mixtral\narchitecture: own\nupcycle: {json.dumps(section)}\n")
    assert refusal(dense.folder("llama"), experts=2, upcycle=str(own)) == [
        f"{own}: does not say that a dense 'llama' becomes this ('upcycle', docs/maps.md)"
    ]
    section["from"] = {"llama": {}}
    own.write_text(f"extends: mixtral\narchitecture: own\nupcycle: {json.dumps(section)}\n")
    job = convert(dense.folder("llama"), tmp_path / "wide", experts=2, upcycle=str(own))
    assert job.plan.architecture == "own"
    assert error(dense, "llama", tmp_path / "wide", job) <= EXACT
