"""LLaMA-like families: RMS or layer norms in front of attention and gated FFN, rotary positions, experts."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from families import Family, larger_heads
from models import EPS, LLAMA, VOCAB, Variant, fixed_inputs

_SMALL = ("o_proj", "down_proj", "w2", "output_linear")
_MIXED = "hidden=2,intermediate=3,heads=4,kv_heads=2,head_dim=3"
_MIXED_TIED = "hidden=6,intermediate=2,heads=2,kv_heads=2,head_dim=3"
_UNTIED = {"tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}
_LABELS = {"num_labels": 5}
_BASE: dict[str, Any] = {**LLAMA, "bos_token_id": 1, "eos_token_id": 2}
_GROWN = (
    "hidden=2,intermediate=3,heads=2,kv_heads=1",
    "intermediate=3",
    "heads=2,kv_heads=2",
    "hidden=3",
)


def _variant(model_class: str, base: dict[str, Any], **changes: Any) -> Variant:
    return Variant(model_class, {**base, **changes}, small=_SMALL)


_NO_EPS = {key: value for key, value in _BASE.items() if key != "rms_norm_eps"}


def _with_image(config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The fixed inputs of the language model, with four image tokens in each row."""
    inputs = fixed_inputs(config.text_config)
    image = config.image_token_index
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == image, 5)
    ids[:, 20:24] = image
    pixels = torch.randn(len(ids), 3, 12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {**inputs, "input_ids": ids, "pixel_values": pixels}


def _llava(model_class: str, **changes: Any) -> Variant:
    return Variant(model_class, {**_LLAVA, **changes}, inputs=_with_image, small=(*_SMALL, "linear_2"))


_QWEN3 = {**_BASE, "hidden_size": 40, "head_dim": 10}
_GEMMA = {**_BASE, "head_dim": 10}
_GEMMA2 = {**_GEMMA, "query_pre_attn_scalar": 7, "sliding_window": 16, "attn_logit_softcapping": 2.0}
_GEMMA3N = {
    **_GEMMA,
    "num_hidden_layers": 5,
    "intermediate_size": [50, 30, 50, 22, 26],
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 14,
    "laurel_rank": 7,
    "activation_sparsity_pattern": [0.5, 0.0, 0.7, 0.0, 0.0],
    "altup_num_inputs": 3,
    "final_logit_softcapping": 3.0,
}
GEMMA3N = _variant("Gemma3nForCausalLM", _GEMMA3N, **_TIED)
_GEMMA2_CAPS = {"final_logit_softcapping": 3.0}
_MIXTRAL = {**_BASE, "num_local_experts": 3, "num_experts_per_tok": 2}
_QWEN2_MOE = {
    **_BASE,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
}
_QWEN3_MOE = {**_BASE, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 22}
_OLMOE = {**_BASE, "num_experts": 3, "num_experts_per_tok": 2}
_GRANITE = {
    **_BASE,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}
_COHERE = {**_NO_EPS, "layer_norm_eps": EPS, "logit_scale": 0.3}
_GLM = {**_BASE, "head_dim": 12}
_SMOLLM3 = {**_BASE, "no_rope_layers": [1, 0]}
_EXAONE4 = {**_BASE, "sliding_window": 16, "sliding_window_pattern": 2}
_NEMOTRON = {**_NO_EPS, "norm_eps": EPS, "head_dim": 8}
_GPT_OSS = {**_BASE, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 16}
_MLA = {
    **_BASE,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
}
_MINICPM3 = {**_MLA, "dim_model_base": 10, "scale_emb": 3, "scale_depth": 0.9}
_DEEPSEEK = {
    **_MLA,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.3,
    "n_group": 2,
    "topk_group": 1,
}
_MLA_ALONE = ("query_rank=2,latent_rank=3", "value_dim=2", "intermediate=3", "heads=2")
_TEXT = {**_BASE, "model_type": "llama"}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 6,
    "projection_dim": 12,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_LLAVA = {"text_config": _TEXT, "vision_config": _CLIP, "image_token_index": VOCAB - 1, "vision_feature_layer": -1}
_GRANITEMOE = {**_GRANITE, "num_local_experts": 3, "num_experts_per_tok": 2}

FAMILIES: tuple[Family, ...] = (
    Family(
        "qwen3",
        {
            "qwen3": _variant("Qwen3ForCausalLM", _QWEN3),
            "qwen3_tied": _variant("Qwen3ForCausalLM", _QWEN3, **_TIED, num_key_value_heads=1),
            "qwen3_biases": _variant("Qwen3ForCausalLM", _QWEN3, attention_bias=True, num_key_value_heads=6),
            "qwen3_sliding": _variant(
                "Qwen3ForCausalLM", _QWEN3, use_sliding_window=True, sliding_window=16, max_window_layers=1
            ),
            "qwen3_base": _variant("Qwen3Model", _QWEN3),
            "qwen3_classification": _variant("Qwen3ForSequenceClassification", _QWEN3, **_LABELS),
            "qwen3_qa": _variant("Qwen3ForQuestionAnswering", _QWEN3),
        },
        _GROWN,
        heads=larger_heads("qwen3", "qwen3_biases", mixed=_MIXED),
    ),
    Family(
        "gemma",
        {
            "gemma": _variant("GemmaForCausalLM", _GEMMA, **_TIED),
            "gemma_untied": _variant("GemmaForCausalLM", _GEMMA, attention_bias=True),
            "gemma_mqa": _variant("GemmaForCausalLM", _GEMMA, **_TIED, num_key_value_heads=1, hidden_size=40),
            "gemma_base": _variant("GemmaModel", _GEMMA, **_TIED),
            "gemma_classification": _variant("GemmaForSequenceClassification", _GEMMA, **_TIED, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("gemma", "gemma_untied", mixed=_MIXED),
    ),
    Family(
        "gemma2",
        {
            "gemma2": _variant("Gemma2ForCausalLM", _GEMMA2, **_TIED, **_GEMMA2_CAPS),
            "gemma2_untied": _variant("Gemma2ForCausalLM", _GEMMA2, attention_bias=True),
            "gemma2_uncapped": _variant(
                "Gemma2ForCausalLM", _GEMMA2, **_TIED, attn_logit_softcapping=None, final_logit_softcapping=None
            ),
            "gemma2_base": _variant("Gemma2Model", _GEMMA2, **_TIED),
            "gemma2_classification": _variant("Gemma2ForSequenceClassification", _GEMMA2, **_TIED, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("gemma2", mixed=_MIXED),
    ),
    Family(
        "gemma3_text",
        {
            "gemma3_text": _variant("Gemma3ForCausalLM", _GEMMA2, **_TIED, sliding_window_pattern=2),
            "gemma3_text_untied": _variant("Gemma3ForCausalLM", _GEMMA2, **_GEMMA2_CAPS, attention_bias=True),
            "gemma3_text_base": _variant("Gemma3TextModel", _GEMMA2, **_TIED),
            "gemma3_text_classification": _variant("Gemma3TextForSequenceClassification", _GEMMA2, **_TIED, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("gemma3_text", "gemma3_text_untied", mixed=_MIXED),
    ),
    Family(
        "gemma3n_text",
        {
            "gemma3n_text": GEMMA3N,
            "gemma3n_text_untied": _variant(
                "Gemma3nForCausalLM",
                {
                    **_GEMMA3N,
                    "attention_bias": True,
                    "num_kv_shared_layers": 0,
                    "num_key_value_heads": 6,
                    "altup_num_inputs": 2,
                },
            ),
        },
        ("hidden=2,intermediate=3,heads=2,kv_heads=1,per_layer=2,laurel=3", "hidden=3,intermediate=2"),
        refused=dict.fromkeys(("orthogonal", "sum"), "the norm of lifted has its epsilon 1e-05 in the code"),
        heads={"gemma3n_text": ("head_dim=2", "head_dim=3,intermediate=2")},
        notes="Where hidden grows, copy and quiet are exact; the code's own epsilon rules the others out.",
    ),
    Family(
        "mixtral",
        {
            "mixtral": _variant("MixtralForCausalLM", _MIXTRAL),
            "mixtral_tied": _variant("MixtralForCausalLM", _MIXTRAL, **_TIED, head_dim=10, num_key_value_heads=2),
            "mixtral_sliding": _variant("MixtralForCausalLM", _MIXTRAL, sliding_window=16, num_key_value_heads=6),
            "mixtral_base": _variant("MixtralModel", _MIXTRAL),
            "mixtral_classification": _variant("MixtralForSequenceClassification", _MIXTRAL, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("mixtral", "mixtral_tied", mixed=_MIXED),
    ),
    Family(
        "qwen2_moe",
        {
            "qwen2_moe": _variant("Qwen2MoeForCausalLM", _QWEN2_MOE),
            "qwen2_moe_tied": _variant("Qwen2MoeForCausalLM", _QWEN2_MOE, **_TIED, norm_topk_prob=True),
            "qwen2_moe_mixed": _variant("Qwen2MoeForCausalLM", _QWEN2_MOE, mlp_only_layers=[0]),
            "qwen2_moe_unbiased": _variant("Qwen2MoeForCausalLM", _QWEN2_MOE, qkv_bias=False, num_key_value_heads=1),
            "qwen2_moe_base": _variant("Qwen2MoeModel", _QWEN2_MOE),
        },
        (
            "hidden=2,intermediate=2,expert_intermediate=3,shared_intermediate=5,heads=2,kv_heads=1",
            "expert_intermediate=3",
            "shared_intermediate=3",
            "heads=2,kv_heads=2",
            "hidden=3",
        ),
        heads=larger_heads("qwen2_moe", mixed=_MIXED),
    ),
    Family(
        "qwen3_moe",
        {
            "qwen3_moe": _variant("Qwen3MoeForCausalLM", _QWEN3_MOE, head_dim=10),
            "qwen3_moe_tied": _variant("Qwen3MoeForCausalLM", _QWEN3_MOE, **_TIED, norm_topk_prob=True),
            "qwen3_moe_mixed": _variant("Qwen3MoeForCausalLM", _QWEN3_MOE, mlp_only_layers=[1], attention_bias=True),
            "qwen3_moe_base": _variant("Qwen3MoeModel", _QWEN3_MOE),
        },
        (
            "hidden=2,intermediate=2,expert_intermediate=3,heads=2,kv_heads=1",
            "expert_intermediate=3",
            "heads=2,kv_heads=2",
            "hidden=3",
        ),
        heads=larger_heads("qwen3_moe", "qwen3_moe_mixed", mixed=_MIXED),
    ),
    Family(
        "olmo",
        {
            "olmo": _variant("OlmoForCausalLM", _NO_EPS),
            "olmo_clipped": _variant("OlmoForCausalLM", _NO_EPS, clip_qkv=0.8),
            "olmo_biases": _variant("OlmoForCausalLM", _NO_EPS, attention_bias=True, num_key_value_heads=6),
            "olmo_base": _variant("OlmoModel", _NO_EPS),
            "olmo_classification": _variant("OlmoForSequenceClassification", _NO_EPS, **_LABELS),
        },
        ("hidden=2,intermediate=3,heads=2,kv_heads=1", "hidden=3,intermediate=2"),
        refused=dict.fromkeys(("orthogonal", "sum"), "the norm of hidden has its epsilon 1e-05 in the code"),
        heads=larger_heads("olmo", mixed=_MIXED),
        notes="Tied embeddings are refused in every mode but with --untie: no gain of a last norm could take the head's factor.",
    ),
    Family(
        "olmo2",
        {
            "olmo2": _variant("Olmo2ForCausalLM", _BASE),
            "olmo2_tied": _variant("Olmo2ForCausalLM", _BASE, **_TIED, num_key_value_heads=1),
            "olmo2_biases": _variant("Olmo2ForCausalLM", _BASE, attention_bias=True, num_key_value_heads=6),
            "olmo2_base": _variant("Olmo2Model", _BASE),
            "olmo2_classification": _variant("Olmo2ForSequenceClassification", _BASE, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("olmo2", "olmo2_biases", mixed=_MIXED),
    ),
    Family(
        "olmoe",
        {
            "olmoe": _variant("OlmoeForCausalLM", _OLMOE),
            "olmoe_tied": _variant("OlmoeForCausalLM", _OLMOE, **_TIED, num_key_value_heads=1, norm_topk_prob=True),
            "olmoe_clipped": _variant("OlmoeForCausalLM", _OLMOE, clip_qkv=0.8, attention_bias=True),
            "olmoe_base": _variant("OlmoeModel", _OLMOE),
        },
        ("hidden=2,intermediate=3,heads=2,kv_heads=1", "intermediate=3", "hidden=3"),
        heads=larger_heads("olmoe", mixed=_MIXED_TIED, tied=True),
    ),
    Family(
        "granite",
        {
            "granite": _variant("GraniteForCausalLM", _GRANITE, **_TIED),
            "granite_untied": _variant("GraniteForCausalLM", _GRANITE, attention_bias=True, mlp_bias=True),
            "granite_base": _variant("GraniteModel", _GRANITE, num_key_value_heads=1),
        },
        _GROWN,
        heads=larger_heads("granite", mixed=_MIXED),
    ),
    Family(
        "granitemoe",
        {
            "granitemoe": _variant("GraniteMoeForCausalLM", _GRANITEMOE, **_TIED),
            "granitemoe_untied": _variant("GraniteMoeForCausalLM", _GRANITEMOE, attention_bias=True),
            "granitemoe_base": _variant("GraniteMoeModel", _GRANITEMOE, num_key_value_heads=1),
        },
        _GROWN,
        heads=larger_heads("granitemoe", mixed=_MIXED),
    ),
    Family(
        "cohere",
        {
            "cohere": _variant("CohereForCausalLM", _COHERE, **_TIED),
            "cohere_untied": _variant("CohereForCausalLM", _COHERE, attention_bias=True, num_key_value_heads=6),
            "cohere_normed": _variant("CohereForCausalLM", _COHERE, **_TIED, use_qk_norm=True),
            "cohere_normed_biases": _variant("CohereForCausalLM", _COHERE, use_qk_norm=True, attention_bias=True),
            "cohere_base": _variant("CohereModel", _COHERE),
        },
        _GROWN,
        heads=larger_heads("cohere", "cohere_normed_biases", mixed=_MIXED),
    ),
    Family(
        "cohere2",
        {
            "cohere2": _variant("Cohere2ForCausalLM", _COHERE, **_TIED, sliding_window=16, sliding_window_pattern=2),
            "cohere2_untied": _variant("Cohere2ForCausalLM", _COHERE, attention_bias=True, num_key_value_heads=6),
            "cohere2_base": _variant("Cohere2Model", _COHERE),
        },
        ("hidden=2,intermediate=3,heads=2,kv_heads=1", "intermediate=3", "hidden=3"),
        heads=larger_heads("cohere2", mixed=_MIXED),
    ),
    Family(
        "glm",
        {
            "glm": _variant("GlmForCausalLM", _GLM),
            "glm_tied": _variant("GlmForCausalLM", _GLM, **_TIED, num_key_value_heads=1),
            "glm_unbiased": _variant("GlmForCausalLM", _GLM, attention_bias=False, partial_rotary_factor=1.0),
            "glm_base": _variant("GlmModel", _GLM),
            "glm_classification": _variant("GlmForSequenceClassification", _GLM, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("glm", "glm_unbiased", mixed=_MIXED),
    ),
    Family(
        "glm4",
        {
            "glm4": _variant("Glm4ForCausalLM", _GLM),
            "glm4_tied": _variant("Glm4ForCausalLM", _GLM, **_TIED, num_key_value_heads=1),
            "glm4_unbiased": _variant("Glm4ForCausalLM", _GLM, attention_bias=False, num_key_value_heads=6),
            "glm4_base": _variant("Glm4Model", _GLM),
        },
        _GROWN,
        heads=larger_heads("glm4", mixed=_MIXED),
    ),
    Family(
        "smollm3",
        {
            "smollm3": _variant("SmolLM3ForCausalLM", _SMOLLM3, **_TIED),
            "smollm3_untied": _variant("SmolLM3ForCausalLM", _SMOLLM3, attention_bias=True, mlp_bias=True),
            "smollm3_sliding": _variant("SmolLM3ForCausalLM", _SMOLLM3, use_sliding_window=True, sliding_window=16),
            "smollm3_base": _variant("SmolLM3Model", _SMOLLM3, num_key_value_heads=1),
            "smollm3_qa": _variant("SmolLM3ForQuestionAnswering", _SMOLLM3),
        },
        _GROWN,
        heads=larger_heads("smollm3", mixed=_MIXED),
    ),
    Family(
        "exaone4",
        {
            "exaone4": _variant("Exaone4ForCausalLM", _EXAONE4),
            "exaone4_tied": _variant("Exaone4ForCausalLM", _EXAONE4, **_TIED, num_key_value_heads=1),
            "exaone4_full": _variant(
                "Exaone4ForCausalLM", _BASE, sliding_window=None, layer_types=["full_attention"] * 2
            ),
            "exaone4_base": _variant("Exaone4Model", _EXAONE4),
            "exaone4_classification": _variant("Exaone4ForSequenceClassification", _EXAONE4, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("exaone4", "exaone4_full", mixed=_MIXED),
    ),
    Family(
        "nemotron",
        {
            "nemotron": _variant("NemotronForCausalLM", _NEMOTRON),
            "nemotron_tied": _variant("NemotronForCausalLM", _NEMOTRON, **_TIED, num_key_value_heads=1),
            "nemotron_biases": _variant("NemotronForCausalLM", _NEMOTRON, attention_bias=True, mlp_bias=True),
            "nemotron_gelu": _variant("NemotronForCausalLM", _NEMOTRON, hidden_act="gelu"),
            "nemotron_base": _variant("NemotronModel", _NEMOTRON),
            "nemotron_classification": _variant("NemotronForSequenceClassification", _NEMOTRON, **_LABELS),
        },
        _GROWN,
        heads=larger_heads("nemotron", "nemotron_biases", mixed=_MIXED),
    ),
    Family(
        "gpt_oss",
        {
            "gpt_oss": _variant("GptOssForCausalLM", _GPT_OSS),
            "gpt_oss_tied": _variant("GptOssForCausalLM", _GPT_OSS, **_TIED, swiglu_limit=0.8, num_key_value_heads=1),
            "gpt_oss_unbiased": _variant(
                "GptOssForCausalLM",
                _GPT_OSS,
                attention_bias=False,
                num_key_value_heads=6,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            ),
            "gpt_oss_base": _variant("GptOssModel", _GPT_OSS),
            "gpt_oss_classification": _variant("GptOssForSequenceClassification", _GPT_OSS, **_LABELS),
        },
        _GROWN,
        # Its own scaling is YaRN, which leaves one way.
        heads={"gpt_oss": ("head_dim=2",), "gpt_oss_unbiased": ("head_dim=2", _MIXED)},
    ),
    Family(
        "minicpm3",
        {
            "minicpm3": _variant("MiniCPM3ForCausalLM", _MINICPM3, **_TIED),
            "minicpm3_untied": _variant("MiniCPM3ForCausalLM", _MINICPM3, attention_bias=True, mlp_bias=True),
            "minicpm3_direct": _variant("MiniCPM3ForCausalLM", _MINICPM3, **_TIED, q_lora_rank=None),
            "minicpm3_base": _variant("MiniCPM3Model", _MINICPM3),
        },
        ("hidden=2,intermediate=3,heads=4,query_rank=3,latent_rank=2", *_MLA_ALONE),
        heads=larger_heads("minicpm3", "minicpm3_direct", mixed="hidden=2,intermediate=3,heads=4,head_dim=3"),
    ),
    Family(
        "deepseek_v2",
        {
            "deepseek_v2": _variant("DeepseekV2ForCausalLM", _DEEPSEEK),
            "deepseek_v2_tied": _variant("DeepseekV2ForCausalLM", _DEEPSEEK, **_TIED, q_lora_rank=None),
            "deepseek_v2_biases": _variant("DeepseekV2ForCausalLM", _DEEPSEEK, attention_bias=True, mlp_bias=True),
            "deepseek_v2_grouped": _variant("DeepseekV2ForCausalLM", _DEEPSEEK, topk_method="group_limited_greedy"),
            "deepseek_v2_base": _variant("DeepseekV2Model", _DEEPSEEK),
        },
        ("hidden=2,intermediate=3,expert_intermediate=5,heads=4,query_rank=3", *_MLA_ALONE, "expert_intermediate=3"),
        heads=larger_heads("deepseek_v2", "deepseek_v2_tied", mixed="hidden=2,intermediate=3,heads=4,head_dim=3"),
    ),
    Family(
        "deepseek_v3",
        {
            "deepseek_v3": _variant("DeepseekV3ForCausalLM", _DEEPSEEK),
            "deepseek_v3_tied": _variant("DeepseekV3ForCausalLM", _DEEPSEEK, **_TIED, q_lora_rank=None),
            "deepseek_v3_biases": _variant("DeepseekV3ForCausalLM", _DEEPSEEK, attention_bias=True),
            "deepseek_v3_halves": _variant("DeepseekV3ForCausalLM", _DEEPSEEK, rope_interleave=False),
            "deepseek_v3_base": _variant("DeepseekV3Model", _DEEPSEEK),
            "deepseek_v3_classification": _variant("DeepseekV3ForSequenceClassification", _DEEPSEEK, **_LABELS),
        },
        ("hidden=2,intermediate=3,expert_intermediate=5,heads=4,query_rank=3", *_MLA_ALONE, "expert_intermediate=3"),
        heads=larger_heads("deepseek_v3", "deepseek_v3_halves", mixed="hidden=2,intermediate=3,heads=4,head_dim=3"),
    ),
    Family(
        "llava",
        {
            "llava": _llava("LlavaForConditionalGeneration"),
            "llava_tied": _llava("LlavaForConditionalGeneration", text_config={**_TEXT, **_TIED}),
            "llava_mistral": _llava(
                "LlavaForConditionalGeneration",
                text_config={**_TEXT, "model_type": "mistral", "head_dim": 10, "sliding_window": 16},
                multimodal_projector_bias=False,
            ),
            "llava_qwen2": _llava(
                "LlavaForConditionalGeneration",
                text_config={**_TEXT, "model_type": "qwen2"},
                vision_config=_SIGLIP,
                vision_feature_select_strategy="full",
            ),
            "llava_layers": _llava("LlavaForConditionalGeneration", vision_feature_layer=[-2, -1]),
            "llava_base": _llava("LlavaModel"),
            "llava_relu": _llava(
                "LlavaForConditionalGeneration",
                text_config={**_TEXT, "hidden_act": "relu"},
                projector_hidden_act="relu",
            ),
        },
        _GROWN,
        heads=larger_heads("llava", "llava_mistral", mixed=_MIXED),
    ),
)
