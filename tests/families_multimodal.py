"""Models that see or hear beside reading: the language model grows with what writes into its stream, the tower stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from families import Family, larger_heads
from models import BATCH, LLAMA, VOCAB, Variant, fixed_inputs
from transformers import PreTrainedConfig

_SMALL = ("o_proj", "down_proj", "linear_2", "proj.weight")
_GROWN = ("hidden=2,intermediate=3,heads=2,kv_heads=1", "hidden=3")
_SQUARE = ("hidden=2,intermediate=3,heads=2,kv_heads=1", "hidden=3,heads=3,kv_heads=3")
_MIXED = "hidden=2,intermediate=3,heads=4,kv_heads=2,head_dim=3"
_SQUARE_HEADS = "hidden=6,intermediate=2,heads=2,kv_heads=2,head_dim=3"
_TIED = {"tie_word_embeddings": True}
_IMAGE = VOCAB - 1
_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 6,
}
_CLIP = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 12}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "head_dim": 8}
_INTERN = {**_TOWER, "image_size": [12, 12], "patch_size": [6, 6], "model_type": "internvl_vision"}
_LLAMA = {**LLAMA, "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
_GEMMA = {**_LLAMA, "head_dim": 10}
_GEMMA3 = {**_GEMMA, "model_type": "gemma3_text", "query_pre_attn_scalar": 7, "sliding_window": 16}
_SECTIONS = {"mrope_section": [1, 1, 1], "rope_type": "default", "rope_theta": 1000.0}
_QWEN_TOWER = {
    "depth": 1,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2 = {**LLAMA, "rope_parameters": _SECTIONS}
_QWEN2_VL = {**_QWEN_TOWER, "embed_dim": 16, "hidden_size": 36, "mlp_ratio": 2}
_QWEN2_5_VL = {
    **_QWEN_TOWER,
    "hidden_size": 16,
    "intermediate_size": 20,
    "out_hidden_size": 36,
    "window_size": 8,
    "fullatt_block_indexes": [0],
}
_QWEN3_VL = {
    **_QWEN_TOWER,
    "hidden_size": 16,
    "intermediate_size": 20,
    "out_hidden_size": 36,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def _seen(count: int, shape: tuple[int, ...], key: str = "pixel_values", **more: Any) -> Any:
    """The fixed inputs of the language model, with `count` image tokens in each row, and what is seen in each of them."""

    def inputs(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
        found = fixed_inputs(config.text_config)
        ids = found["input_ids"].masked_fill(found["input_ids"] == _IMAGE, 5)
        ids[:, 20 : 20 + count] = _IMAGE
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        told = {name: torch.tensor(value) for name, value in more.items()}
        kinds = {"mm_token_type_ids": (ids == _IMAGE).int()} if "image_grid_thw" in more else {}
        return {**found, "input_ids": ids, key: pixels, **told, **kinds}

    return inputs


def _variant(model_class: str, config: Mapping[str, Any], inputs: Any) -> Variant:
    return Variant(model_class, config, inputs, _SMALL)


_FOUR = _seen(4, (BATCH, 3, 12, 12))
_ONE = _seen(1, (BATCH, 3, 12, 12))
_PATCHES = _seen(4, (BATCH * 16, 96), image_grid_thw=[[1, 4, 4]] * BATCH)
_EAR = {
    "model_type": "qwen2_audio_encoder",
    "num_mel_bins": 8,
    "d_model": 24,
    "encoder_layers": 1,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 30,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "max_source_positions": 8,
}
_LLAVA = {"text_config": _LLAMA, "vision_config": _CLIP, "image_token_index": _IMAGE, "vision_feature_layer": -1}

FAMILIES: tuple[Family, ...] = (
    Family(
        "gemma3",
        {
            "gemma3": _variant(
                "Gemma3ForConditionalGeneration",
                {
                    "text_config": _GEMMA3,
                    "vision_config": _SIGLIP,
                    "image_token_index": _IMAGE,
                    "mm_tokens_per_image": 1,
                },
                _ONE,
            ),
            "gemma3_untied": _variant(
                "Gemma3ForConditionalGeneration",
                {
                    "text_config": {**_GEMMA3, "final_logit_softcapping": 3.0},
                    "vision_config": _SIGLIP,
                    "image_token_index": _IMAGE,
                    "mm_tokens_per_image": 1,
                    "tie_word_embeddings": False,
                },
                _ONE,
            ),
        },
        _GROWN,
        heads=larger_heads("gemma3", mixed=_MIXED),
    ),
    Family(
        "paligemma",
        {
            "paligemma": _variant(
                "PaliGemmaForConditionalGeneration",
                {
                    "text_config": {**_GEMMA, "model_type": "gemma"},
                    "vision_config": _SIGLIP,
                    "image_token_index": _IMAGE,
                    "projection_dim": 36,
                },
                _FOUR,
            ),
            "paligemma2": _variant(
                "PaliGemmaForConditionalGeneration",
                {
                    "text_config": {**_GEMMA3, "model_type": "gemma2", "attn_logit_softcapping": 4.0},
                    "vision_config": _SIGLIP,
                    "image_token_index": _IMAGE,
                    "projection_dim": 36,
                },
                _FOUR,
            ),
        },
        _GROWN,
        heads=larger_heads("paligemma", "paligemma2", mixed=_MIXED),
    ),
    Family(
        "llava_next",
        {
            "llava_next": _variant(
                "LlavaNextForConditionalGeneration",
                {**_LLAVA, "image_grid_pinpoints": [[12, 12]]},
                _seen(10, (BATCH, 2, 3, 12, 12), image_sizes=[[12, 12]] * BATCH),
            ),
            "llava_onevision": _variant(
                "LlavaOnevisionForConditionalGeneration",
                {
                    "text_config": {**_LLAMA, "model_type": "qwen2"},
                    "vision_config": _SIGLIP,
                    "image_token_index": _IMAGE,
                    "image_grid_pinpoints": [[12, 12]],
                },
                _seen(10, (BATCH, 2, 3, 12, 12), image_sizes=[[12, 12]] * BATCH),
            ),
            "vipllava": _variant(
                "VipLlavaForConditionalGeneration",
                {**_LLAVA, "vision_feature_layers": [-2, -1], "vision_feature_layer": [-2, -1]},
                _FOUR,
            ),
            "idefics3": _variant(
                "Idefics3ForConditionalGeneration",
                {
                    "text_config": {**_LLAMA, **_TIED},
                    "vision_config": {**_TOWER, "model_type": "idefics3_vision"},
                    "image_token_id": _IMAGE,
                    "scale_factor": 2,
                    "tie_word_embeddings": True,
                },
                _seen(1, (BATCH, 1, 3, 12, 12)),
            ),
            "smolvlm": _variant(
                "SmolVLMForConditionalGeneration",
                {
                    "text_config": _LLAMA,
                    "vision_config": {**_TOWER, "model_type": "smolvlm_vision"},
                    "image_token_id": _IMAGE,
                    "scale_factor": 2,
                },
                _seen(1, (BATCH, 1, 3, 12, 12)),
            ),
            "internvl": _variant(
                "InternVLForConditionalGeneration",
                {
                    "text_config": {**_LLAMA, "model_type": "qwen2"},
                    "vision_config": _INTERN,
                    "image_token_id": _IMAGE,
                },
                _seen(1, (BATCH, 3, 12, 12)),
            ),
            "internvl3_5": _variant(
                "InternVLForConditionalGeneration",
                {
                    "text_config": {**_LLAMA, "model_type": "qwen3", "head_dim": 10},
                    "vision_config": _INTERN,
                    "image_token_id": _IMAGE,
                },
                _seen(1, (BATCH, 3, 12, 12)),
            ),
            "qwen2_audio": _variant(
                "Qwen2AudioForConditionalGeneration",
                {"text_config": {**_LLAMA, "model_type": "qwen2"}, "audio_config": _EAR, "audio_token_index": _IMAGE},
                _seen(4, (BATCH, 8, 16), "input_features", feature_attention_mask=[[1] * 16] * BATCH),
            ),
            "voxtral": _variant(
                "VoxtralForConditionalGeneration",
                {
                    "text_config": _LLAMA,
                    "audio_config": {**_EAR, "model_type": "voxtral_encoder", "encoder_ffn_dim": 48},
                    "audio_token_id": _IMAGE,
                },
                _seen(4, (BATCH, 8, 16), "input_features"),
            ),
        },
        _GROWN,
        heads={"llava_next": ("head_dim=2",)},
    ),
    Family(
        "mistral3",
        {
            "mistral3": _variant(
                "Mistral3ForConditionalGeneration",
                {
                    "text_config": {**_LLAMA, "model_type": "mistral", "head_dim": 10},
                    "vision_config": _PIXTRAL,
                    "image_token_index": _IMAGE,
                    "spatial_merge_size": 2,
                    "tie_word_embeddings": False,
                },
                _seen(1, (BATCH, 3, 12, 12), image_sizes=[[12, 12]] * BATCH),
            ),
        },
        _GROWN,
        heads={"mistral3": ("head_dim=2",)},
        refused=dict.fromkeys(("orthogonal", "sum"), "one rms_norm_eps serves the norms of"),
    ),
    Family(
        "qwen2_vl",
        {
            "qwen2_vl": _variant(
                "Qwen2VLForConditionalGeneration",
                {"text_config": _QWEN2, "vision_config": _QWEN2_VL, "image_token_id": _IMAGE},
                _PATCHES,
            )
        },
        _SQUARE,
        heads=larger_heads("qwen2_vl", mixed=_SQUARE_HEADS, tied=True),
    ),
    Family(
        "qwen2_5_vl",
        {
            "qwen2_5_vl": _variant(
                "Qwen2_5_VLForConditionalGeneration",
                {"text_config": _QWEN2, "vision_config": _QWEN2_5_VL, "image_token_id": _IMAGE},
                _PATCHES,
            ),
            "qwen2_5_vl_tied": _variant(
                "Qwen2_5_VLForConditionalGeneration",
                {"text_config": _QWEN2, "vision_config": _QWEN2_5_VL, "image_token_id": _IMAGE, **_TIED},
                _PATCHES,
            ),
        },
        _SQUARE,
        heads=larger_heads("qwen2_5_vl", mixed=_SQUARE_HEADS, tied=True),
    ),
    Family(
        "qwen3_vl",
        {
            "qwen3_vl": _variant(
                "Qwen3VLForConditionalGeneration",
                {
                    "text_config": {
                        **_QWEN2,
                        "head_dim": 12,
                        "rope_parameters": {**_SECTIONS, "mrope_section": [3, 1, 2]},
                    },
                    "vision_config": _QWEN3_VL,
                    "image_token_id": _IMAGE,
                },
                _PATCHES,
            ),
        },
        _GROWN,
        heads=larger_heads("qwen3_vl", mixed=_MIXED),
    ),
)
