"""Adapters of models whose modules have other names in memory than their weights have in the file, made and run by peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import families_encoders
import families_llama
import families_multimodal
import families_newer
import families_older
import families_wrappers
import models
import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.maps import catalog_map
from widen_cli.options import Options
from widen_cli.plan import Plan
from widen_cli.writing import run

MODULES = (
    families_encoders, families_llama, families_older, families_wrappers, families_newer, families_multimodal
)  # fmt: skip
VARIANTS = {
    name: variant for module in MODULES for family in module.FAMILIES for name, variant in family.variants.items()
}
EXACT = 1e-11
TABLES = (torch.nn.Linear, torch.nn.Embedding)


def adapted(base: Path, folder: Path, words: tuple[str, ...], **config: Any) -> set[str]:
    """Saves an adapter of all matrices and tables in whose names one of the words stands, and gives their names."""
    model = models.load(base, torch.float64)
    names = {name for name, module in model.named_modules() if isinstance(module, TABLES)}
    names = {name for name in names if any(word in name for word in words)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=sorted(names), **config)
        wrapped = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in (parameter for parameter in wrapped.parameters() if parameter.requires_grad):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(parameter * 0.7 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
        wrapped.save_pretrained(folder, save_embedding_layers=False)
    return names


def outputs(base: Path, adapter: Path | None, variant: models.Variant) -> models.Outputs:
    with models.Float64Throughout(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = models.load(base, torch.float64)
        model.config._experts_implementation = "eager"
        inputs = (variant.inputs or models.fixed_inputs)(model.config)
        if adapter is not None:
            wrapped = peft.PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
            model = wrapped.eval().base_model.model
        with torch.inference_mode():
            found = model(**inputs)
    return {name: value.double().numpy() for name, value in found.items() if isinstance(value, torch.Tensor)}


def widen(given: Path, out: Path, growth: str, **options: Any) -> Plan:
    job = prepare(Options(str(given), str(out), grow=models.by_factors(growth), **options))
    run(job, lambda nbytes: None)
    return job.plan


def error(variant: models.Variant, narrow: tuple[Path, Path], wide: tuple[Path, Path], plan: Plan) -> float:
    before, after = outputs(*narrow, variant), outputs(*wide, variant)
    assert models.relative_error(outputs(narrow[0], None, variant), before) > 1e-3
    stated = plan.output_scales
    inner = {name: stated["last_hidden_state"] for name in after if name.endswith(".last_hidden_state")}
    return models.relative_error(before, after, inner | stated)


# The variant, what is adapted, how it grows, and what else peft is told.
CASES: dict[str, tuple[str, tuple[str, ...], str, dict[str, Any]]] = {
    "ViT": ("vit_classification", ("layers", "classifier"), "hidden=2,intermediate=3,head_dim=2", {"bias": "all"}),
    "ViT alone": ("vit", ("layers", "pooler"), "hidden=3,intermediate=2,heads=3,pooler=2", {}),
    "DINOv2": ("dinov2", ("encoder",), "hidden=2,heads=2", {"bias": "all"}),
    "packed q, k and v": (
        "nomic_bert_mlm", ("layers", "embeddings"), "hidden=2,intermediate=3,head_dim=2", {"modules_to_save": ["LayerNorm"]},
    ),
    "a head": ("gpt_neox", ("lm_head", "dense_4h_to_h"), "hidden=2,intermediate=3,heads=2", {}),
    "a tied head": ("gpt_neox_tied", ("lm_head", "dense_4h_to_h"), "hidden=2,intermediate=3,heads=2", {}),
    "three tables in one": ("t5", ("embed_tokens", "relative_attention_bias", "wi"), "hidden=2,heads=2,intermediate=3", {}),
    "MarianModel": ("marian_base", ("embed_tokens", "fc1"), "encoder_intermediate=3,decoder_intermediate=2", {}),
    "MPNet's positions": ("mpnet", ("relative_attention_bias", "intermediate"), "hidden=2,heads=2,intermediate=3", {}),
    "a whole router": ("phimoe", ("q_proj",), "hidden=2,intermediate=3,heads=2,kv_heads=1", {"modules_to_save": ["router"]}),
    "of two models": (
        "vit2gpt2_projected", ("encoder", "enc_to_dec_proj"), "hidden=2,intermediate=2,decoder_hidden=3,decoder_intermediate=2", {},
    ),
    "with a tower": ("llava", ("vision_tower", "language_model", "projector"), "hidden=2,intermediate=3,heads=2,kv_heads=1", {}),
    "LlavaModel": ("llava_base", ("vision_tower", "language_model", "projector"), "hidden=2,intermediate=3,heads=2,kv_heads=1", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_names_in_memory_are_those_of_the_file(tmp_path: Path, case: str) -> None:
    name, words, growth, config = CASES[case]
    variant = VARIANTS[name]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    models.build(variant, torch.float64).save_pretrained(base)
    assert adapted(base, adapter, words, **config)
    plan = widen(base, tmp_path / "wide", growth)
    widen(adapter, tmp_path / "wide_adapter", growth, base=str(base))
    found = error(variant, (base, adapter), (tmp_path / "wide", tmp_path / "wide_adapter"), plan)
    assert found <= EXACT


def test_guard_goes_red_where_a_part_is_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of q, k and v are one; under larger heads the key has zeros where the others have copies."""
    modules = catalog_map("nomic_bert").modules
    key, value = (f"nomic_bert.layers.*.self_attn.{letter}_proj" for letter in "kv")
    assert (modules[key].part, modules[value].part) == (1, 2)
    monkeypatch.setitem(modules, value, modules[key])
    variant, growth = VARIANTS["nomic_bert_mlm"], "hidden=2,head_dim=2"
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    models.build(variant, torch.float64).save_pretrained(base)
    adapted(base, adapter, ("v_proj",))
    plan = widen(base, tmp_path / "wide", growth)
    widen(adapter, tmp_path / "wide_adapter", growth, base=str(base))
    assert error(variant, (base, adapter), (tmp_path / "wide", tmp_path / "wide_adapter"), plan) > 1e-3


def test_a_wide_adapter_goes_back(tmp_path: Path) -> None:
    """The parts of a packed weight fold as they grew."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    models.build(VARIANTS["nomic_bert_mlm"], torch.float64).save_pretrained(base)
    adapted(base, adapter, ("layers",))
    growth = "hidden=2,intermediate=3,head_dim=2"
    widen(adapter, tmp_path / "wide", growth, base=str(base))
    command = [str(tmp_path / "wide"), str(tmp_path / "back"), "--base", str(base), "--grow", models.by_factors(growth)]
    result = CliRunner().invoke(cli, ["collapse", *command])
    assert result.exit_code == 0, result.stderr
    before, after = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("adapter", "back"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], rtol=1e-12, atol=0) for name in before)


def test_names_of_the_file_do_too(tmp_path: Path) -> None:
    """Older libraries call modules in memory as the file does: LoRA over the whole of a packed weight keeps its parts apart."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    models.build(VARIANTS["nomic_bert_mlm"], torch.float64).save_pretrained(base)
    adapted(base, adapter, ("q_proj",))
    stored = load_file(adapter / "adapter_model.safetensors")
    whole = {
        name.replace("nomic_bert.layers", "nomic_bert.encoder.layers").replace("self_attn.q_proj", "attn.Wqkv"): (
            value.repeat(3, 1) if "lora_B" in name else value
        )
        for name, value in stored.items()
    }
    save_file(whole, adapter / "adapter_model.safetensors", {"format": "pt"})
    widen(adapter, tmp_path / "wide", "hidden=2,head_dim=2", base=str(base))
    wide = load_file(tmp_path / "wide" / "adapter_model.safetensors")
    query, key, value = next(tensor for name, tensor in wide.items() if "lora_B" in name).chunk(3)
    assert query.shape == key.shape == value.shape == (72, 3)
    assert not (query == 0).any()
    assert (key == 0).all(dim=1).sum() == 36


def test_a_module_that_no_map_calls_so_is_refused(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    models.build(VARIANTS["nomic_bert_mlm"], torch.float64).save_pretrained(base)
    adapted(base, adapter, ("q_proj",))
    stored = load_file(adapter / "adapter_model.safetensors")
    odd = {name.replace("q_proj", "qkv_proj"): value for name, value in stored.items()}
    save_file(odd, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(WidenError) as refused:
        widen(adapter, tmp_path / "wide", "hidden=2", base=str(base))
    assert "the base has no 'nomic_bert.layers.0.self_attn.qkv_proj.weight'" in str(refused.value)
