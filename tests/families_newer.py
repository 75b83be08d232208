"""Families that follow from others by inheritance, one or two variants each."""

from __future__ import annotations

from typing import Any

import torch
from families import Family, larger_heads
from families_encoders import FAMILIES as ENCODERS
from models import BATCH, BERT, LLAMA, POSITIONS, VIT, Variant
from transformers import PreTrainedConfig

_SMALL = ("o_proj", "down_proj", "w2")
_MIXED = "hidden=2,intermediate=3,heads=4,kv_heads=2,head_dim=3"
_GROWN = ("hidden=2,intermediate=3,heads=2,kv_heads=1", "hidden=3")
_TIED = {"tie_word_embeddings": True}
_BASE: dict[str, Any] = {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {
    **_BASE,
    "num_key_value_heads": 3,
    "moe_intermediate_size": 22,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.3,
}
_MOE_GROWN = ("hidden=2,intermediate=3,expert_intermediate=5,heads=2,kv_heads=1", "expert_intermediate=3")


def _variant(model_class: str, base: dict[str, Any], **changes: Any) -> Variant:
    return Variant(model_class, {**base, **changes}, small=_SMALL)


def _pixels(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    size = (BATCH, 3, config.image_size, config.image_size)
    return {"pixel_values": torch.randn(size, generator=torch.Generator().manual_seed(26), dtype=torch.float64)}


_PEGASUS = next(family for family in ENCODERS if family.name == "pegasus")
_BLENDERBOT = _PEGASUS.variants["pegasus"]
_ROBERTA = {**BERT, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_BERT_GROWN = ("hidden=2,intermediate=3,heads=2", "hidden=2,head_dim=2")
_DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
_LABELS = {"num_labels": 5}
_TRANSFORM_EPS = "one layer_norm_eps serves the norms of hidden and transformed"

FAMILIES: tuple[Family, ...] = (
    Family(
        "arcee",
        {"arcee": _variant("ArceeForCausalLM", _BASE, attention_bias=True, mlp_bias=True)},
        _GROWN,
        heads=larger_heads("arcee", mixed=_MIXED),
    ),
    Family(
        "seed_oss",
        {"seed_oss": _variant("SeedOssForCausalLM", _BASE, head_dim=10, attention_out_bias=True)},
        _GROWN,
        heads=larger_heads("seed_oss", mixed=_MIXED),
    ),
    Family(
        "apertus",
        {"apertus": _variant("ApertusForCausalLM", _BASE)},
        _GROWN,
        heads=larger_heads("apertus", mixed=_MIXED),
    ),
    Family(
        "ernie4_5",
        {"ernie4_5": _variant("Ernie4_5ForCausalLM", _BASE, **_TIED, head_dim=10, use_bias=True)},
        _GROWN,
        heads=larger_heads("ernie4_5", mixed=_MIXED),
    ),
    Family(
        "helium",
        {"helium": _variant("HeliumForCausalLM", _BASE, head_dim=6)},
        ("hidden=2,intermediate=3,heads=2,kv_heads=1", "intermediate=3"),
        heads={"helium": ("hidden=2,head_dim=2", "hidden=6,intermediate=2,heads=2,kv_heads=2,head_dim=3")},
    ),
    Family(
        "olmo3",
        {
            "olmo3": _variant(
                "Olmo3ForCausalLM", _BASE, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
            )
        },
        _GROWN,
        heads=larger_heads("olmo3", mixed=_MIXED),
    ),
    Family(
        "dots1",
        {"dots1": _variant("Dots1ForCausalLM", _MOE)},
        _MOE_GROWN,
        heads=larger_heads("dots1", mixed=_MIXED),
    ),
    Family(
        "glm4_moe",
        {
            "glm4_moe": _variant("Glm4MoeForCausalLM", _MOE, head_dim=12, attention_bias=True),
            "glm4_moe_normed": _variant("Glm4MoeForCausalLM", _MOE, head_dim=12, use_qk_norm=True),
        },
        _MOE_GROWN,
        heads=larger_heads("glm4_moe", "glm4_moe_normed", mixed=_MIXED),
    ),
    Family(
        "phimoe",
        {
            "phimoe": _variant(
                "PhimoeForCausalLM",
                _BASE,
                num_local_experts=3,
                num_experts_per_tok=2,
                attention_bias=True,
                lm_head_bias=True,
            )
        },
        _GROWN,
        heads=larger_heads("phimoe", mixed=_MIXED),
    ),
    Family(
        "hunyuan_v1_dense",
        {"hunyuan_v1_dense": _variant("HunYuanDenseV1ForCausalLM", _BASE, head_dim=10, attention_bias=True)},
        _GROWN,
        impossible={"head_dim=2": "rotary"},
    ),
    Family(
        "longformer",
        {
            "longformer": Variant(
                "LongformerForSequenceClassification", {**_ROBERTA, **_LABELS, "attention_window": 8}
            ),
            "longformer_base": Variant("LongformerModel", {**_ROBERTA, "attention_window": 8}),
        },
        _BERT_GROWN,
    ),
    Family(
        "big_bird",
        {
            "big_bird": Variant("BigBirdModel", {**BERT, "attention_type": "original_full", "use_bias": False}),
            "big_bird_mlm": Variant("BigBirdForMaskedLM", {**BERT, "attention_type": "original_full"}),
        },
        _BERT_GROWN,
        refused={f"big_bird_mlm:{mode}": _TRANSFORM_EPS for mode in ("orthogonal", "sum")},
    ),
    Family(
        "ernie",
        {"ernie": Variant("ErnieForSequenceClassification", {**BERT, **_LABELS, "use_task_id": True})},
        _BERT_GROWN,
    ),
    Family(
        "layoutlm",
        {"layoutlm": Variant("LayoutLMModel", {**BERT, "max_2d_position_embeddings": 16})},
        _BERT_GROWN,
    ),
    Family(
        "blenderbot",
        {
            "blenderbot": Variant(
                "BlenderbotForConditionalGeneration", _BLENDERBOT.config, _BLENDERBOT.inputs, _BLENDERBOT.small
            )
        },
        _PEGASUS.growths[:2],
        refused=_PEGASUS.refused,
    ),
    Family(
        "deit",
        {
            "deit": Variant("DeiTForImageClassificationWithTeacher", {**VIT, **_LABELS}, _pixels),
            "deit_base": Variant("DeiTModel", VIT, _pixels),
        },
        _BERT_GROWN,
    ),
    Family(
        "dinov2",
        {
            "dinov2": Variant("Dinov2ForImageClassification", {**_DINO, **_LABELS}, _pixels),
            "dinov2_registers": Variant(
                "Dinov2WithRegistersForImageClassification", {**_DINO, **_LABELS, "num_register_tokens": 3}, _pixels
            ),
        },
        ("hidden=2,heads=2", "hidden=2,head_dim=2"),
    ),
)
