"""Models of layers of several kinds: attention among convolutions, state spaces and linear attention."""

from __future__ import annotations

from typing import Any

from families import Family, larger_heads
from models import EPS, LLAMA, Variant

_SMALL = ("o_proj", "out_proj", "down_proj", "w2", "output_linear")
_GROWN = ("hidden=2,intermediate=3,heads=2,kv_heads=1", "hidden=3,intermediate=2")
_MIXED = "hidden=2,intermediate=3,heads=4,kv_heads=2,head_dim=3"
_BASE: dict[str, Any] = {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}
_LFM2 = {
    **{key: value for key, value in _BASE.items() if key != "rms_norm_eps"},
    "norm_eps": EPS,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 10,
}
_SSM = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}
_BIASED = {"attention_bias": True, "mlp_bias": True, "projectors_bias": True, "mamba_proj_bias": True}
_FALCON_H1 = {
    **_BASE,
    **_SSM,
    "mamba_d_ssm": 48,
    "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 0.9,
    "embedding_multiplier": 1.5,
}
_GRANITE = {
    **_BASE,
    **_SSM,
    "mamba_expand": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 3,
    "shared_intermediate_size": 40,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.3,
    "embedding_multiplier": 1.5,
}
_QWEN3_NEXT = {
    **_BASE,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}


def _variant(model_class: str, base: dict[str, Any], **changes: Any) -> Variant:
    return Variant(model_class, {**base, **changes}, small=_SMALL)


FAMILIES: tuple[Family, ...] = (
    Family(
        "lfm2",
        {
            "lfm2": _variant("Lfm2ForCausalLM", _LFM2),
            "lfm2_biased": _variant(
                "Lfm2ForCausalLM",
                _LFM2,
                conv_bias=True,
                tie_word_embeddings=True,
                head_dim=10,
                block_auto_adjust_ff_dim=False,
            ),
            "lfm2_multiplied": _variant("Lfm2Model", _LFM2, block_ffn_dim_multiplier=1.3),
        },
        _GROWN,
        heads=larger_heads("lfm2", mixed=_MIXED),
    ),
    Family(
        "falcon_h1",
        {
            "falcon_h1": _variant("FalconH1ForCausalLM", _FALCON_H1),
            "falcon_h1_normed": _variant(
                "FalconH1ForCausalLM", _FALCON_H1, mamba_rms_norm=True, mamba_n_groups=3, **_BIASED
            ),
            "falcon_h1_normed_behind": _variant(
                "FalconH1Model", _FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False
            ),
        },
        (
            "hidden=2,intermediate=3,heads=2,kv_heads=1,ssm=3,ssm_heads=3",
            "hidden=3,ssm=2,ssm_dim=2",
        ),
        refused={
            f"{variant}:{mode}": "one rms_norm_eps serves the norms of"
            for variant in ("falcon_h1_normed", "falcon_h1_normed_behind")
            for mode in ("orthogonal", "sum")
        },
        heads=larger_heads("falcon_h1", mixed=_MIXED),
    ),
    Family(
        "granitemoehybrid",
        {
            "granitemoehybrid": _variant("GraniteMoeHybridForCausalLM", _GRANITE, position_embedding_type="rope"),
            "granitemoehybrid_nope": _variant(
                "GraniteMoeHybridForCausalLM", _GRANITE, tie_word_embeddings=True, attention_bias=True, mamba_n_groups=3
            ),
            "granitemoehybrid_dense": _variant("GraniteMoeHybridModel", _GRANITE, num_local_experts=0),
            "granitemoehybrid_attention": _variant(
                "GraniteMoeHybridForCausalLM",
                _GRANITE,
                num_local_experts=0,
                position_embedding_type="rope",
                layer_types=["full_attention", "full_attention"],
            ),
        },
        (
            "hidden=2,intermediate=3,shared=2,heads=2,kv_heads=1,ssm_heads=2",
            "hidden=3,ssm_dim=3",
        ),
        refused={
            f"{variant}:{mode}": "one rms_norm_eps serves the norms of"
            for variant in ("granitemoehybrid", "granitemoehybrid_nope", "granitemoehybrid_dense")
            for mode in ("orthogonal", "sum")
        },
        heads={"granitemoehybrid": ("head_dim=2",)},
    ),
    Family(
        "qwen3_next",
        {
            "qwen3_next": _variant("Qwen3NextForCausalLM", _QWEN3_NEXT),
            "qwen3_next_dense": _variant(
                "Qwen3NextModel", _QWEN3_NEXT, mlp_only_layers=[0], attention_bias=True, linear_num_key_heads=4
            ),
        },
        ("hidden=2,intermediate=3,expert_intermediate=2,heads=2,kv_heads=1", "hidden=3,shared_intermediate=3"),
        refused=dict.fromkeys(("orthogonal", "sum"), "one rms_norm_eps serves the norms of"),
        heads=larger_heads("qwen3_next", mixed=_MIXED),
    ),
)
