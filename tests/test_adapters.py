"""A wide base with its wide adapter computes what the narrow base with the adapter does, seen through peft in float64."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from widen_cli.cli import cli
from widen_cli.config import ModelConfig
from widen_cli.convert import prepare
from widen_cli.demo import make_checkpoint
from widen_cli.dimensions import scaled
from widen_cli.dtypes import STORED, DType
from widen_cli.errors import WidenError
from widen_cli.jobs import Job
from widen_cli.maps import catalog_map
from widen_cli.options import Options
from widen_cli.plan import PlanRequest, TensorPlan
from widen_cli.plan.adapters import Adapter, Base, plan_adapter
from widen_cli.scales import ONE
from widen_cli.writing import run

EXACT = 1e-12
MODES = ("auto", "orthogonal", "copy", "sum", "quiet")
HEADS = "hidden=2,intermediate=3,heads=2"
MIXED = {
    "llama": "hidden=2,intermediate=3,heads=2,kv_heads=1",
    "gpt2": "hidden=3,intermediate=2,head_dim=3",
    "bert": HEADS,
}

ALL = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "key", "value", "dense"],
}
FAN = {"fan_in_fan_out": True}
LoraArguments = dict[str, Any]


def make_adapter(
    base: Path, folder: Path, dtype: torch.dtype = torch.float64, model_class: str | None = None, **config: Any
) -> Path:
    """An adapter of `base` made and saved by peft, every parameter it trains drawn at random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model_class is None:
            model = models.load(base, dtype)
        else:
            model = getattr(models.transformers, model_class).from_pretrained(base, dtype=dtype, num_labels=5)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **config), autocast_adapter_dtype=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in (parameter for parameter in adapted.parameters() if parameter.requires_grad):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(parameter * 0.7 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
        adapted.save_pretrained(folder)
    return folder


def outputs(
    base: Path, adapter: Path | None, dtype: torch.dtype = torch.float64, model_class: str | None = None
) -> models.Outputs:
    """What a base with an adapter computes, throughout in float64."""
    with models.Float64Throughout(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model_class is None:
            model: Any = models.load(base, dtype)
        else:
            kind = getattr(models.transformers, model_class)
            model = kind.from_pretrained(base, dtype=dtype, num_labels=5, attn_implementation="eager").eval()
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False).eval()
            assert not [name for name, value in model.named_parameters() if value.dtype != torch.float64]
        with torch.inference_mode():
            found = model(**models.fixed_inputs(model.config))
    return {name: value.double().numpy() for name, value in found.items() if isinstance(value, torch.Tensor)}


def widen(given: Path, out: Path, altered: Callable[[Job], Job] = lambda job: job, **options: Any) -> Path:
    run(altered(prepare(Options(str(given), str(out), **options))), lambda nbytes: None)
    return out


def error_of(
    folder: Path, variant: str | models.Variant, adapter: LoraArguments, options: dict[str, Any],
    altered: Callable[[Job], Job] = lambda job: job, model_class: str | None = None,
) -> float:  # fmt: skip
    """The relative error of wide base and wide adapter; an adapter that does nothing would prove nothing."""
    base = models.save(variant, folder / "base", torch.float64)
    small = make_adapter(base, folder / "adapter", model_class=model_class, **adapter)
    wide = widen(base, folder / "wide", **options)
    large = widen(small, folder / "wide_adapter", altered, base=str(base), **options)
    before = outputs(base, small, model_class=model_class)
    if model_class is None:
        assert models.relative_error(outputs(base, None), before) > 1e-3
    assert (large / "adapter_config.json").read_bytes() == (small / "adapter_config.json").read_bytes()
    assert sorted(path.name for path in large.iterdir()) == sorted(path.name for path in small.iterdir())
    return models.relative_error(before, outputs(wide, large, model_class=model_class))


def grown(family: str, growth: str) -> dict[str, Any]:
    return {"factor": int(growth)} if growth.isdigit() else {"grow": MIXED[family]}


@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("growth", ["2", "mixed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_every_matrix_under_every_scaling(tmp_path: Path, family: str, growth: str, scaling: str) -> None:
    variant = {"llama": "llama_gqa" if growth == "2" else "llama", "gpt2": "gpt2", "bert": "bert_classification"}[
        family
    ]
    adapter = {"target_modules": ALL[family], **(FAN if family == "gpt2" else {})}
    error = error_of(tmp_path, variant, adapter, {**grown(family, growth), "scaling": scaling})
    assert error <= EXACT


@pytest.mark.parametrize("way", ["theta", "spread"])
def test_every_matrix_of_larger_heads_under_rotary_positions(tmp_path: Path, way: str) -> None:
    options = {"grow": "hidden=2,heads=2,kv_heads=2,head_dim=3", "rope": way}
    assert error_of(tmp_path, "llama", {"target_modules": ALL["llama"]}, options) <= EXACT


def test_every_matrix_of_a_masked_model(tmp_path: Path) -> None:
    adapter = {"target_modules": [*ALL["bert"], "decoder"]}
    assert error_of(tmp_path, "bert_mlm_untied", adapter, {"factor": 2}) <= EXACT


KINDS: dict[str, tuple[str, LoraArguments]] = {
    "embedding and head": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "embedding of a tied model": ("llama_tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "head of a tied model": ("llama_tied", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings of GPT-2": ("gpt2", {"target_modules": ["c_attn", "wte", "wpe"], **FAN}),
    "embeddings of BERT": ("bert_mlm", {"target_modules": ["word_embeddings", "token_type_embeddings", "query"]}),
    "modules_to_save": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "input_layernorm"]}),
    "saved head of a tied model": ("llama_tied", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "saved embedding": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}),
    "task head": ("llama_classification", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    "all biases": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "bias": "all", **FAN}),
    "all biases and a norm": ("gpt2", {"target_modules": ["c_attn"], "bias": "all", "modules_to_save": ["ln_1"], **FAN}),
    "LoRA's biases": ("llama_biases", {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"}),
    "bias beside B": ("llama_biases", {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}),
    "rslora": ("llama", {"target_modules": ALL["llama"], "use_rslora": True, "lora_alpha": 3}),
    "ranks and alphas": (
        "llama",
        {"target_modules": ALL["llama"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 5}},
    ),
    "gated, tied, offset gains": ("gemma", {"target_modules": [*ALL["llama"], "embed_tokens"], "modules_to_save": ["norm"]}),
}  # fmt: skip
GEMMA = models.Variant("GemmaForCausalLM", {**models.LLAMA, "tie_word_embeddings": True, "head_dim": 6})


@pytest.mark.parametrize(
    "options", [{"factor": 2}, {"factor": 3, "scaling": "copy"}, {"factor": 2, "scaling": "quiet"}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    variant, adapter = KINDS[kind]
    assert error_of(tmp_path, GEMMA if variant == "gemma" else variant, adapter, options) <= EXACT


@pytest.mark.parametrize("layout", ["tile", "interleave"])
def test_copies_lie_as_those_of_the_base(tmp_path: Path, layout: str) -> None:
    assert error_of(tmp_path, "llama_mha", {"target_modules": ALL["llama"]}, {"factor": 2, "layout": layout}) <= EXACT


@pytest.mark.parametrize(
    ("variant", "model_class", "adapter"),
    [
        ("llama", "LlamaForSequenceClassification", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
        ("bert_mlm", "BertForTokenClassification", {"target_modules": ["query"], "task_type": "TOKEN_CLS"}),
        ("bert", "BertForSequenceClassification", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
        ("bert", "BertForTokenClassification", {"target_modules": ["query"], "task_type": "TOKEN_CLS"}),
    ],
)
@pytest.mark.parametrize("scaling", ["auto", "quiet"])
def test_task_head_that_the_base_lacks(
    tmp_path: Path, variant: str, model_class: str, adapter: LoraArguments, scaling: str
) -> None:
    options = {"factor": 2, "scaling": scaling}
    assert error_of(tmp_path, variant, adapter, options, model_class=model_class) <= EXACT


def test_bf16_is_bit_exact_and_carries_the_types(tmp_path: Path) -> None:
    base = models.save("llama", tmp_path / "base", torch.bfloat16)
    small = make_adapter(
        base, tmp_path / "adapter", torch.bfloat16, target_modules=ALL["llama"], modules_to_save=["norm"]
    )
    wide = widen(base, tmp_path / "wide", factor=2)
    job = prepare(Options(str(small), str(tmp_path / "wide_adapter"), base=str(base), factor=2))
    counts = run(job, lambda nbytes: None).total
    assert (job.plan.mode, counts.rounded, counts.overflowed) == ("copy", 0, 0)
    stored = load_file(tmp_path / "wide_adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert models.relative_error(outputs(base, small), outputs(wide, tmp_path / "wide_adapter")) <= EXACT


def test_auto_goes_by_the_base_and_not_by_the_adapter(tmp_path: Path) -> None:
    base = models.save("llama", tmp_path / "base", torch.bfloat16)
    small = make_adapter(base, tmp_path / "adapter", torch.float32, target_modules=["q_proj"])
    modes = {
        str(given): prepare(Options(str(given), str(tmp_path / "out"), **extra, factor=2)).plan.mode
        for given, extra in ((base, {}), (small, {"base": str(base)}))
    }
    assert len(set(modes.values())) == 1


def without_factors(side: str) -> Callable[[Job], Job]:
    """A job in which A, or B, keeps its trees and loses its factors."""

    def bare(tensor: TensorPlan) -> TensorPlan:
        if f".lora_{side}." not in tensor.source.name:
            return tensor
        return replace(tensor, growth=tuple(scaled(tree, ONE) for tree in tensor.growth or ()), scale=ONE)

    def altered(job: Job) -> Job:
        shards = tuple(
            replace(shard, tensors=tuple((bare(tensor), name, offset) for tensor, name, offset in shard.tensors))
            for shard in job.shards
        )
        return replace(job, shards=shards)

    return altered


@pytest.mark.parametrize("side", ["A", "B"])
def test_guard_goes_red_without_the_factors_of_one_side(tmp_path: Path, side: str) -> None:
    options = {"factor": 2, "scaling": "orthogonal"}
    error = error_of(tmp_path, "llama", {"target_modules": ALL["llama"]}, options, without_factors(side))
    assert error > 1e-3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("narrow") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return make_adapter(
        base, base.parent / "adapter", torch.float32, target_modules=["q_proj"], modules_to_save=["norm"]
    )


def changed(
    adapter: Path, folder: Path, config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
) -> Path:  # fmt: skip
    folder.mkdir()
    values = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**values, **(config or {})}))
    save_file(
        tensors(load_file(adapter / "adapter_model.safetensors")),
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
    return folder


def refusal(given: Path, base: Path, **options: Any) -> Sequence[str]:
    with pytest.raises(WidenError) as refused:
        prepare(Options(str(given), str(given.parent / "refused_out"), base=str(base), factor=2, **options))
    assert not (given.parent / "refused_out").exists()
    return refused.value.faults


@pytest.mark.parametrize("end", ["lora_A.default.weight", "lora_A.weight"])
def test_names_may_hold_the_adapters_own(adapter: Path, base: Path, tmp_path: Path, end: str) -> None:
    given = changed(adapter, tmp_path / "named", tensors=lambda found: {
        name.replace("lora_A.weight", end).replace("lora_B.weight", end.replace("A", "B")): value for name, value in found.items()
    })  # fmt: skip
    out = load_file(widen(given, tmp_path / "out", base=str(base), factor=2) / "adapter_model.safetensors")
    plain = load_file(widen(adapter, tmp_path / "plain", base=str(base), factor=2) / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj."
    assert np.array_equal(out[name + end], plain[name + "lora_A.weight"])


def test_a_file_becomes_a_file(adapter: Path, base: Path, tmp_path: Path) -> None:
    out = widen(adapter / "adapter_model.safetensors", tmp_path / "a.safetensors", base=str(base), factor=2)
    folder = widen(adapter, tmp_path / "folder", base=str(base), factor=2)
    assert out.read_bytes() == (folder / "adapter_model.safetensors").read_bytes()


def _first(found: dict[str, torch.Tensor], part: str, **renamed: Any) -> dict[str, torch.Tensor]:
    name = next(name for name in found if part in name)
    changed = dict(found)
    value = changed.pop(name)
    for key, make in renamed.items():
        changed[name.replace(part, key.replace("__", "."))] = make(value)
    return changed


SAME = torch.clone
REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tuple[str, ...]]] = {
    "DoRA by its config": ({"use_dora": True}, dict, ("use_dora", "DoRA", "merge")),
    "DoRA by its tensors": (
        {}, lambda found: _first(found, "lora_A.weight", lora_A__weight=SAME, lora_magnitude_vector=lambda a: torch.ones(36)),
        ("lora_magnitude_vector'", "DoRA", "merge"),
    ),
    "another kind": ({"peft_type": "IA3"}, dict, ("IA3", "LORA")),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, dict, ("pissa", "path_initial_model")),
    "packed experts": ({"target_parameters": ["experts.up"]}, dict, ("target_parameters", "merge")),
    "a layer too many": (
        {}, lambda found: _first(found, "layers.0.self_attn", layers__7__self_attn=SAME), ("layers.7.self_attn", "has no", "--base"),
    ),
    "A alone": ({}, lambda found: _first(found, "lora_B.weight"), ("lora_B is missing", "save the adapter anew")),
    "another width": (
        {}, lambda found: _first(found, "lora_A.weight", lora_A__weight=lambda a: torch.ones(4, 40)),
        ("[4, 40]", "[4, 36]", "another base"),
    ),
    "another rank in B": (
        {}, lambda found: _first(found, "lora_B.weight", lora_B__weight=lambda b: torch.ones(36, 5)), ("[36, 5]", "[36, 4]", "rank 4"),
    ),
    "a full tensor of another size": (
        {}, lambda found: _first(found, "model.norm.weight", model__norm__weight=lambda g: torch.ones(40)),
        ("[40]", "[36]", "another base"),
    ),
    "integers": ({}, lambda found: _first(found, "lora_A.weight", lora_A__weight=lambda a: a.int()), ("I32", "floating-point")),
    "no LoRA at all": ({}, lambda found: {"base_model.model.model.norm.weight": torch.ones(36)}, ("--base is for LoRA", "leave it out")),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_name_file_and_fault_and_what_to_do(adapter: Path, base: Path, tmp_path: Path, kind: str) -> None:
    config, tensors, mentions = REFUSED[kind]
    faults = refusal(changed(adapter, tmp_path / "odd", config, tensors), base)
    assert all(fault.startswith(str(tmp_path / "odd")) for fault in faults)
    assert any(all(mention in fault for mention in mentions) for fault in faults), faults


def test_a_base_that_is_another_is_one_fault(adapter: Path, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_checkpoint(other)
    (fault,) = refusal(adapter, other)
    count, width = len(load_file(adapter / "adapter_model.safetensors")), 48
    start = f"{adapter}: {count} of {count} tensors do not fit; the first: tensor 'base_model.model."
    assert fault.startswith(start)
    assert fault.endswith(f"; it belongs to another base than {other}: give that with --base")
    assert f"{width}]" in fault


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"experts": 4}, "--experts: an adapter stays one of its dense base; leave --base or --experts out"),
        ({"grow": "heads=2@0"}, "--grow heads=2@0: an adapter grows alike in all layers; leave @... out"),
    ],
)
def test_what_an_adapter_cannot_become(
    adapter: Path, base: Path, tmp_path: Path, asked: dict[str, Any], text: str
) -> None:
    with pytest.raises(WidenError) as refused:
        prepare(Options(str(adapter), str(tmp_path / "out"), base=str(base), **asked))
    assert str(refused.value) == text


def test_head_whose_meaning_the_class_decides_is_refused_without_a_task(base: Path, tmp_path: Path) -> None:
    bert = models.save("bert", tmp_path / "bert")
    given = make_adapter(
        bert, tmp_path / "given", torch.float32, "BertForTokenClassification", target_modules=["query"], modules_to_save=["classifier"]
    )  # fmt: skip
    faults = refusal(given, bert)
    assert any("classifier.weight' [5, 36]: the base lacks it" in fault and "task_type" in fault for fault in faults), (
        faults
    )


@dataclass(frozen=True)
class Header:
    name: str
    dtype: DType
    shape: tuple[int, ...]


def test_base_of_block_scaled_fp8_gives_the_factors_in_its_grids() -> None:
    config = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 9,
    }
    matrices = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layer = "model.layers.0."
    plain = [
        Header("model.embed_tokens.weight", STORED["F32"], (9, 256)),
        Header("lm_head.weight", STORED["F32"], (9, 256)),
    ]
    gains = ["model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm"]
    plain += [Header(f"{name}.weight", STORED["F32"], (256,)) for name in gains]
    plans = []
    for kind in ("F32", "F8_E4M3"):
        base = [*plain, *(Header(f"{layer}{name}.weight", STORED[kind], (256, 256)) for name in matrices)]
        if kind != "F32":
            base += [Header(f"{layer}{name}.weight_scale_inv", STORED["F32"], (2, 2)) for name in matrices]
        given = [Header(f"base_model.model.{layer}{name}.lora_A.weight", STORED["F32"], (4, 256)) for name in matrices]
        given += [Header(f"base_model.model.{layer}{name}.lora_B.weight", STORED["F32"], (256, 4)) for name in matrices]
        request = PlanRequest(
            "base", grow={"hidden": 2, "intermediate": 3, "heads": 2, "kv_heads": 2}, scaling="copy", layout="tile"
        )
        narrow = Base(catalog_map("llama"), base, ModelConfig(config, "config.json"), request)
        plans.append(plan_adapter(Adapter("adapter", given, {}), narrow).tensors)
    assert [(tensor.scales, tensor.shape) for tensor in plans[0]] == [
        (tensor.scales, tensor.shape) for tensor in plans[1]
    ]
    assert any(not scale.is_one for tensor in plans[1] for scale in tensor.scales)


def test_no_output_may_hit_the_base(adapter: Path, base: Path) -> None:
    with pytest.raises(WidenError, match="is the input"):
        prepare(Options(str(adapter), str(base), base=str(base), factor=2, force=True))


def test_an_adapter_without_its_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    for given in (adapter, adapter / "adapter_model.safetensors"):
        result = CliRunner().invoke(cli, [str(given), str(tmp_path / "out"), "--map", "llama"])
        assert result.exit_code == 1
        assert "merge it into its base first, or give its base with --base" in result.stderr


def test_command_line_says_where_the_adapter_fits(adapter: Path, base: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, [str(adapter), str(tmp_path / "out"), "--base", str(base), "--factor", "2"])
    assert result.exit_code == 0, result.stderr
    assert "base_model_name_or_path" in result.stderr
    assert "scaling orthogonal" in result.stderr
