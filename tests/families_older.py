"""Decoders before and beside LLaMA: GPT-NeoX, Phi, Falcon, OPT, GPT-J, BLOOM and their kin, and the recurrent ones."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import transformers
from families import MODES, Family, larger_heads
from models import EPS, POSITIONS, VOCAB, Variant, fixed_inputs

_LABELS = {"num_labels": 5}
_SMALL = ("dense.weight", "dense_4h_to_h", "out_proj", "o_proj", "fc2", "fc_out", "c_proj", "down_proj")
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_NEOX = {**_BASE, "layer_norm_eps": EPS, "rotary_pct": 0.5}
GPT_NEOX = Family(
    "gpt_neox",
    {
        "gpt_neox": Variant("GPTNeoXForCausalLM", _NEOX, small=_SMALL),
        "gpt_neox_tied": Variant("GPTNeoXForCausalLM", {**_NEOX, "tie_word_embeddings": True}, small=_SMALL),
        "gpt_neox_sequential": Variant(
            "GPTNeoXForCausalLM",
            {**_NEOX, "use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "relu"},
            small=_SMALL,
        ),
        "gpt_neox_no_bias": Variant("GPTNeoXForCausalLM", {**_NEOX, "attention_bias": False}, small=_SMALL),
        "gpt_neox_base": Variant("GPTNeoXModel", _NEOX, small=_SMALL),
        "gpt_neox_classification": Variant("GPTNeoXForSequenceClassification", {**_NEOX, **_LABELS}, small=_SMALL),
        "gpt_neox_tokens": Variant("GPTNeoXForTokenClassification", {**_NEOX, **_LABELS}, small=_SMALL),
        "gpt_neox_qa": Variant("GPTNeoXForQuestionAnswering", _NEOX, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3", "intermediate=3", "heads=3"),
    impossible={"hidden=3,heads=2": "head_dim"},
    heads=larger_heads(
        "gpt_neox", "gpt_neox_sequential", mixed="hidden=6,intermediate=2,heads=2,head_dim=3", tied=True
    ),
)

_PHI = {**_BASE, "num_attention_heads": 6, "num_key_value_heads": 3, "layer_norm_eps": EPS, "hidden_size": 48}
PHI = Family(
    "phi",
    {
        "phi": Variant("PhiForCausalLM", _PHI, small=_SMALL),
        "phi_tied": Variant("PhiForCausalLM", {**_PHI, "tie_word_embeddings": True}, small=_SMALL),
        "phi_mha": Variant("PhiForCausalLM", {**_PHI, "num_key_value_heads": None}, small=_SMALL),
        "phi_qk_norm": Variant("PhiForCausalLM", {**_PHI, "qk_layernorm": True}, small=_SMALL),
        "phi_head_dim": Variant("PhiForCausalLM", {**_PHI, "head_dim": 12}, small=_SMALL),
        "phi_base": Variant("PhiModel", {**_PHI, "qk_layernorm": True, "hidden_act": "relu"}, small=_SMALL),
        "phi_classification": Variant("PhiForSequenceClassification", {**_PHI, **_LABELS}, small=_SMALL),
        "phi_tokens": Variant("PhiForTokenClassification", {**_PHI, **_LABELS}, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3,heads=2,kv_heads=1", "intermediate=3", "hidden=3,heads=3,kv_heads=3"),
    heads={
        **larger_heads("phi", "phi_head_dim", mixed="hidden=2,intermediate=3,heads=4,kv_heads=2,head_dim=3"),
        "phi_qk_norm": ("hidden=2,head_dim=2",),
    },
)

_PHI3 = {**_BASE, "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": EPS}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 2.5, 4.0],
    "partial_rotary_factor": 1.0,
}
PHI3 = Family(
    "phi3",
    {
        "phi3": Variant("Phi3ForCausalLM", _PHI3),
        "phi3_tied": Variant("Phi3ForCausalLM", {**_PHI3, "tie_word_embeddings": True}),
        "phi3_partial": Variant("Phi3ForCausalLM", {**_PHI3, "hidden_size": 48, "partial_rotary_factor": 0.5}),
        "phi3_longrope": Variant(
            "Phi3ForCausalLM", {**_PHI3, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 32}
        ),
        "phi3_mha": Variant("Phi3ForCausalLM", {**_PHI3, "num_attention_heads": 3, "num_key_value_heads": None}),
        "phi3_head_dim": Variant("Phi3ForCausalLM", {**_PHI3, "hidden_size": 48, "head_dim": 10, "sliding_window": 16}),
        "phi3_base": Variant("Phi3Model", _PHI3),
        "phi3_classification": Variant("Phi3ForSequenceClassification", {**_PHI3, **_LABELS}),
        "phi3_tokens": Variant("Phi3ForTokenClassification", {**_PHI3, **_LABELS}),
    },
    growths=("hidden=2,intermediate=3,heads=2,kv_heads=1", "intermediate=3", "heads=2,hidden=2"),
    heads=larger_heads("phi3", "phi3_partial", mixed="hidden=2,intermediate=3,heads=4,kv_heads=2,head_dim=3"),
)


def _tokens(config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The fixed batch for a config that names no `max_position_embeddings`."""
    sizes = {"max_position_embeddings": POSITIONS, "pad_token_id": config.pad_token_id, "vocab_size": config.vocab_size}
    return fixed_inputs(SimpleNamespace(**sizes))


_FALCON = {
    **{key: value for key, value in _BASE.items() if key != "intermediate_size"},
    "num_attention_heads": 6,
    "ffn_hidden_size": 50,
    "layer_norm_epsilon": EPS,
}
_FALCON_40B = {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3}
_FALCON_RW = {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True}
FALCON = Family(
    "falcon",
    {
        "falcon_7b": Variant("FalconForCausalLM", _FALCON, small=_SMALL),
        "falcon_untied": Variant("FalconForCausalLM", {**_FALCON, "tie_word_embeddings": False}, small=_SMALL),
        "falcon_4h": Variant("FalconForCausalLM", {**_FALCON, "ffn_hidden_size": None}, small=_SMALL),
        "falcon_40b": Variant("FalconForCausalLM", _FALCON_40B, small=_SMALL),
        "falcon_11b": Variant(
            "FalconForCausalLM", {**_FALCON_40B, "num_ln_in_parallel_attn": 1, "bias": True}, small=_SMALL
        ),
        "falcon_rotary_mha": Variant("FalconForCausalLM", _FALCON_RW, small=_SMALL),
        "falcon_base": Variant("FalconModel", {**_FALCON_40B, "activation": "relu"}, small=_SMALL),
        "falcon_classification": Variant("FalconForSequenceClassification", {**_FALCON, **_LABELS}, small=_SMALL),
        "falcon_tokens": Variant("FalconForTokenClassification", {**_FALCON_40B, **_LABELS}, small=_SMALL),
        "falcon_qa": Variant("FalconForQuestionAnswering", _FALCON, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3,heads=2,kv_heads=2", "intermediate=3", "heads=3,kv_heads=3"),
    heads=larger_heads(
        "falcon_7b",
        "falcon_40b",
        "falcon_rotary_mha",
        mixed="hidden=6,intermediate=2,heads=2,kv_heads=2,head_dim=3",
        tied=True,
    ),
)
FALCON_GROUPS = Family(
    "falcon_groups",
    {"falcon_groups": Variant("FalconForCausalLM", _FALCON_40B, small=_SMALL)},
    growths=("hidden=2,heads=2,kv_heads=1,intermediate=3", "heads=6,kv_heads=2"),
    heads={"falcon_groups": ("hidden=2,head_dim=2",)},
)
FALCON_RW = Family(
    "falcon_rw",
    {"falcon_rw": Variant("FalconForCausalLM", {**_FALCON_RW, "alibi": True}, small=_SMALL)},
    growths=("intermediate=3",),
    refused={f"falcon_rw:{mode}:factor=2": "alibi(heads)" for mode in MODES},
    impossible={
        "hidden=2,heads=2,kv_heads=2": "ALiBi",
        "hidden=2,heads=1,kv_heads=1": "; intermediate can grow, as by --grow intermediate=2x",
    },
    notes="ALiBi's slopes depend on the heads and are divided by sqrt(head_dim), so only the FFN grows.",
)

_OPT = {
    **{key: value for key, value in _BASE.items() if key != "intermediate_size"},
    "ffn_dim": 50,
    "dropout": 0.0,
}
_EPS_IN_CODE = {"orthogonal": "1e-05", "sum": "1e-05"}


def _narrow_stream(*variants: str) -> dict[str, str]:
    """What only a wider stream asks for stands in no way of a wider FFN."""
    return {f"{variant}:{mode}:intermediate=3": "" for variant in variants for mode in MODES}


OPT = Family(
    "opt",
    {
        "opt": Variant("OPTForCausalLM", _OPT, small=_SMALL),
        "opt_untied": Variant("OPTForCausalLM", {**_OPT, "tie_word_embeddings": False}, small=_SMALL),
        "opt_gelu": Variant(
            "OPTForCausalLM", {**_OPT, "activation_function": "gelu", "enable_bias": False}, small=_SMALL
        ),
        "opt_no_gain": Variant(
            "OPTForCausalLM",
            {**_OPT, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
            small=_SMALL,
        ),
        "opt_no_gain_tied": Variant("OPTForCausalLM", {**_OPT, "layer_norm_elementwise_affine": False}, small=_SMALL),
        "opt_post_norm_tied": Variant("OPTForCausalLM", {**_OPT, "do_layer_norm_before": False}, small=_SMALL),
        "opt_post_norm": Variant(
            "OPTForCausalLM", {**_OPT, "do_layer_norm_before": False, "tie_word_embeddings": False}, small=_SMALL
        ),
        "opt_base": Variant("OPTModel", _OPT, small=_SMALL),
        "opt_classification": Variant("OPTForSequenceClassification", {**_OPT, **_LABELS}, small=_SMALL),
        "opt_qa": Variant("OPTForQuestionAnswering", _OPT, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3", "hidden=2,heads=2,embed=2", "embed=3,heads=3", "intermediate=3"),
    refused={
        **_EPS_IN_CODE,
        **{f"opt_no_gain_tied:{mode}": "s(hidden) = 1" for mode in MODES},
        **{f"opt_post_norm_tied:{mode}": "s(hidden) = 1" for mode in MODES},
        **_narrow_stream(
            "opt",
            "opt_untied",
            "opt_gelu",
            "opt_no_gain",
            "opt_no_gain_tied",
            "opt_post_norm_tied",
            "opt_post_norm",
            "opt_base",
            "opt_classification",
            "opt_qa",
        ),
    },
    impossible={"hidden=2,embed=3": "needs embed == hidden"},
)
_OPT_350M = {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24}
OPT_PROJECTED = Family(
    "opt_projected",
    {
        "opt_350m": Variant("OPTForCausalLM", _OPT_350M, small=_SMALL),
        "opt_350m_untied": Variant("OPTForCausalLM", {**_OPT_350M, "tie_word_embeddings": False}, small=_SMALL),
        "opt_350m_pre_norm": Variant("OPTForCausalLM", {**_OPT_350M, "do_layer_norm_before": True}, small=_SMALL),
        "opt_350m_base": Variant("OPTModel", _OPT_350M, small=_SMALL),
        "opt_350m_qa": Variant("OPTForQuestionAnswering", _OPT_350M, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3,embed=5", "hidden=2", "hidden=3,heads=3"),
    refused=_EPS_IN_CODE,
    impossible={"hidden=2,embed=3": "embed != hidden"},
)

_GPT_NEO = {
    **{key: value for key, value in _BASE.items() if key not in ("num_hidden_layers", "num_attention_heads")},
    "num_layers": 2,
    "num_heads": 3,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "layer_norm_epsilon": EPS,
}
_WIDTHS = ("hidden=2,intermediate=3", "intermediate=3", "heads=3", "hidden=2,heads=1", "hidden=6,heads=2")
GPT_NEO = Family(
    "gpt_neo",
    {
        "gpt_neo": Variant("GPTNeoForCausalLM", _GPT_NEO, small=_SMALL),
        "gpt_neo_untied": Variant(
            "GPTNeoForCausalLM", {**_GPT_NEO, "tie_word_embeddings": False, "intermediate_size": None}, small=_SMALL
        ),
        "gpt_neo_base": Variant("GPTNeoModel", {**_GPT_NEO, "activation_function": "relu"}, small=_SMALL),
        "gpt_neo_classification": Variant("GPTNeoForSequenceClassification", {**_GPT_NEO, **_LABELS}, small=_SMALL),
        "gpt_neo_tokens": Variant("GPTNeoForTokenClassification", {**_GPT_NEO, **_LABELS}, small=_SMALL),
        "gpt_neo_qa": Variant("GPTNeoForQuestionAnswering", _GPT_NEO, small=_SMALL),
    },
    growths=_WIDTHS,
)

_GPTJ = {
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": 36,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 50,
    "rotary_dim": 6,
    "layer_norm_epsilon": EPS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPTJ = Family(
    "gptj",
    {
        "gptj": Variant("GPTJForCausalLM", _GPTJ, small=_SMALL),
        "gptj_tied": Variant("GPTJForCausalLM", {**_GPTJ, "tie_word_embeddings": True, "n_inner": None}, small=_SMALL),
        "gptj_base": Variant("GPTJModel", {**_GPTJ, "activation_function": "relu"}, small=_SMALL),
        "gptj_classification": Variant("GPTJForSequenceClassification", {**_GPTJ, **_LABELS}, small=_SMALL),
        "gptj_qa": Variant("GPTJForQuestionAnswering", _GPTJ, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3", "intermediate=3", "heads=3"),
    heads=larger_heads("gptj", mixed="hidden=6,intermediate=2,heads=2,head_dim=3", tied=True),
)

_BLOOM = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "n_layer": 2,
    "n_head": 3,
    "layer_norm_epsilon": EPS,
    "pad_token_id": 0,
}
BLOOM = Family(
    "bloom",
    {
        "bloom": Variant("BloomForCausalLM", _BLOOM, _tokens, _SMALL),
        "bloom_untied": Variant("BloomForCausalLM", {**_BLOOM, "tie_word_embeddings": False}, _tokens, _SMALL),
        "bloom_residual_of_norm": Variant(
            "BloomForCausalLM", {**_BLOOM, "apply_residual_connection_post_layernorm": True}, _tokens, _SMALL
        ),
        "bloom_base": Variant("BloomModel", _BLOOM, _tokens, _SMALL),
        "bloom_classification": Variant("BloomForSequenceClassification", {**_BLOOM, **_LABELS}, _tokens, _SMALL),
        "bloom_tokens": Variant("BloomForTokenClassification", {**_BLOOM, **_LABELS}, _tokens, _SMALL),
        "bloom_qa": Variant("BloomForQuestionAnswering", _BLOOM, _tokens, _SMALL),
    },
    growths=("hidden=3", "hidden=2,heads=1"),
    impossible={"heads=2": "ALiBi", "hidden=4,heads=2": "ALiBi"},
)

_MPT = {
    "vocab_size": VOCAB,
    "d_model": 36,
    "n_layers": 2,
    "n_heads": 3,
    "max_seq_len": POSITIONS,
    "layer_norm_epsilon": EPS,
    "pad_token_id": 0,
}
MPT = Family(
    "mpt",
    {
        "mpt": Variant("MptForCausalLM", _MPT, _tokens, _SMALL),
        "mpt_untied": Variant("MptForCausalLM", {**_MPT, "tie_word_embeddings": False}, _tokens, _SMALL),
        "mpt_softmax_scale": Variant(
            "MptForCausalLM", {**_MPT, "attn_config": {"softmax_scale": 0.3}}, _tokens, _SMALL
        ),
        "mpt_clip": Variant(
            "MptForCausalLM", {**_MPT, "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3}}, _tokens, _SMALL
        ),
        "mpt_clip_unscaled": Variant("MptForCausalLM", {**_MPT, "attn_config": {"clip_qkv": 1.0}}, _tokens, _SMALL),
        "mpt_base": Variant("MptModel", _MPT, _tokens, _SMALL),
        "mpt_classification": Variant("MptForSequenceClassification", {**_MPT, **_LABELS}, _tokens, _SMALL),
        "mpt_tokens": Variant("MptForTokenClassification", {**_MPT, **_LABELS}, _tokens, _SMALL),
        "mpt_qa": Variant("MptForQuestionAnswering", _MPT, _tokens, _SMALL),
    },
    growths=("hidden=3", "hidden=2,heads=1"),
    refused={f"mpt_clip_unscaled:{mode}": "clamp acts on query" for mode in MODES},
    impossible={"heads=2": "ALiBi"},
)

_BIGCODE = {key: value for key, value in _GPTJ.items() if key != "rotary_dim"}
_HEADWISE = {**_BIGCODE, "multi_query": False}
GPT_BIGCODE = Family(
    "gpt_bigcode",
    {
        "gpt_bigcode": Variant("GPTBigCodeForCausalLM", _BIGCODE, small=_SMALL),
        "gpt_bigcode_mha": Variant("GPTBigCodeForCausalLM", _HEADWISE, small=_SMALL),
        "gpt_bigcode_untied": Variant(
            "GPTBigCodeForCausalLM", {**_BIGCODE, "tie_word_embeddings": False, "n_inner": None}, small=_SMALL
        ),
        "gpt_bigcode_unscaled": Variant(
            "GPTBigCodeForCausalLM", {**_HEADWISE, "scale_attn_weights": False}, small=_SMALL
        ),
        "gpt_bigcode_base": Variant("GPTBigCodeModel", {**_BIGCODE, "activation_function": "relu"}, small=_SMALL),
        "gpt_bigcode_classification": Variant(
            "GPTBigCodeForSequenceClassification", {**_BIGCODE, **_LABELS}, small=_SMALL
        ),
        "gpt_bigcode_tokens": Variant("GPTBigCodeForTokenClassification", {**_BIGCODE, **_LABELS}, small=_SMALL),
    },
    growths=_WIDTHS,
)

_STARCODER2 = {**_BASE, "num_attention_heads": 6, "num_key_value_heads": 3, "norm_epsilon": EPS}
STARCODER2 = Family(
    "starcoder2",
    {
        "starcoder2": Variant("Starcoder2ForCausalLM", _STARCODER2),
        "starcoder2_untied": Variant("Starcoder2ForCausalLM", {**_STARCODER2, "tie_word_embeddings": False}),
        "starcoder2_no_bias": Variant(
            "Starcoder2ForCausalLM", {**_STARCODER2, "use_bias": False, "sliding_window": 16}
        ),
        "starcoder2_head_dim": Variant("Starcoder2ForCausalLM", {**_STARCODER2, "hidden_size": 48, "head_dim": 10}),
        "starcoder2_base": Variant("Starcoder2Model", {**_STARCODER2, "hidden_act": "relu"}),
        "starcoder2_classification": Variant("Starcoder2ForSequenceClassification", {**_STARCODER2, **_LABELS}),
        "starcoder2_tokens": Variant("Starcoder2ForTokenClassification", {**_STARCODER2, **_LABELS}),
    },
    growths=("hidden=2,intermediate=3,heads=2,kv_heads=1", "intermediate=3", "hidden=2", "heads=2"),
    heads=larger_heads("starcoder2", mixed="hidden=2,intermediate=3,heads=4,kv_heads=2,head_dim=3"),
)

_STABLELM = {**_BASE, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "layer_norm_eps": EPS}
_STABLELM_12B = {**_STABLELM, "qk_layernorm": True, "use_parallel_residual": True}
STABLELM = Family(
    "stablelm",
    {
        "stablelm": Variant("StableLmForCausalLM", _STABLELM),
        "stablelm_12b": Variant("StableLmForCausalLM", _STABLELM_12B),
        "stablelm_bias": Variant("StableLmForCausalLM", {**_STABLELM, "use_qkv_bias": True}),
        "stablelm_tied": Variant("StableLmForCausalLM", {**_STABLELM, "tie_word_embeddings": True}),
        "stablelm_12b_bias": Variant("StableLmForCausalLM", {**_STABLELM_12B, "use_qkv_bias": True}),
        "stablelm_mha": Variant(
            "StableLmForCausalLM", {**_STABLELM, "num_key_value_heads": 6, "partial_rotary_factor": 0.5}
        ),
        "stablelm_base": Variant("StableLmModel", _STABLELM_12B),
        "stablelm_classification": Variant("StableLmForSequenceClassification", {**_STABLELM, **_LABELS}),
        "stablelm_tokens": Variant("StableLmForTokenClassification", {**_STABLELM, **_LABELS}),
    },
    growths=(
        "hidden=2,intermediate=3,heads=2,kv_heads=1",
        "intermediate=3",
        "heads=2,kv_heads=2",
        "hidden=6,heads=6,kv_heads=3",
    ),
    heads=larger_heads(
        "stablelm", "stablelm_base", mixed="hidden=6,intermediate=2,heads=2,kv_heads=2,head_dim=3", tied=True
    ),
)

_CODEGEN = {
    **{key: value for key, value in _GPTJ.items() if key != "rotary_dim"},
    "n_head": 8,
    "n_embd": 48,
    "rotary_dim": 4,
}
CODEGEN = Family(
    "codegen",
    {
        "codegen": Variant("CodeGenForCausalLM", _CODEGEN, small=_SMALL),
        "codegen_tied": Variant("CodeGenForCausalLM", {**_CODEGEN, "tie_word_embeddings": True}, small=_SMALL),
        "codegen_4h": Variant("CodeGenForCausalLM", {**_CODEGEN, "n_inner": None, "n_head": 4}, small=_SMALL),
        "codegen_base": Variant("CodeGenModel", {**_CODEGEN, "activation_function": "relu"}, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3", "intermediate=3", "heads=3"),
    heads=larger_heads("codegen", mixed="hidden=6,intermediate=2,heads=2,head_dim=3", tied=True),
)

_PERSIMMON = {**_BASE, "layer_norm_eps": EPS}
PERSIMMON = Family(
    "persimmon",
    {
        "persimmon": Variant("PersimmonForCausalLM", _PERSIMMON, small=_SMALL),
        "persimmon_tied": Variant(
            "PersimmonForCausalLM", {**_PERSIMMON, "tie_word_embeddings": True, "qk_layernorm": False}, small=_SMALL
        ),
        "persimmon_relu": Variant("PersimmonForCausalLM", {**_PERSIMMON, "hidden_act": "relu"}, small=_SMALL),
        "persimmon_base": Variant("PersimmonModel", {**_PERSIMMON, "hidden_act": "gelu"}, small=_SMALL),
        "persimmon_classification": Variant(
            "PersimmonForSequenceClassification", {**_PERSIMMON, **_LABELS}, small=_SMALL
        ),
        "persimmon_tokens": Variant("PersimmonForTokenClassification", {**_PERSIMMON, **_LABELS}, small=_SMALL),
    },
    growths=("hidden=2,intermediate=3", "intermediate=3", "heads=3"),
    heads=larger_heads("persimmon", "persimmon_tied", mixed="hidden=6,intermediate=2,heads=2,head_dim=3", tied=True),
)

_MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "state_size": 5,
    "num_hidden_layers": 2,
    "time_step_rank": 3,
    "layer_norm_epsilon": EPS,
    "pad_token_id": 0,
}
MAMBA = Family(
    "mamba",
    {
        "mamba": Variant("MambaForCausalLM", _MAMBA, _tokens, _SMALL),
        "mamba_untied": Variant(
            "MambaForCausalLM",
            {**_MAMBA, "tie_word_embeddings": False, "use_bias": True, "use_conv_bias": False},
            _tokens,
            _SMALL,
        ),
        "mamba_relu": Variant(
            "MambaForCausalLM", {**_MAMBA, "hidden_act": "relu", "time_step_rank": "auto"}, _tokens, _SMALL
        ),
        "mamba_base": Variant("MambaModel", _MAMBA, _tokens, _SMALL),
    },
    growths=("hidden=2,intermediate=3", "intermediate=3", "hidden=3"),
)

_MAMBA2 = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_heads": 6,
    "head_dim": 12,
    "n_groups": 2,
    "state_size": 5,
    "num_hidden_layers": 2,
    "chunk_size": 16,
    "layer_norm_epsilon": EPS,
    "pad_token_id": 0,
}
_SHARED = {"orthogonal": "one layer_norm_epsilon serves", "sum": "one layer_norm_epsilon serves"}
MAMBA2 = Family(
    "mamba2",
    {
        "mamba2": Variant("Mamba2ForCausalLM", _MAMBA2, _tokens, _SMALL),
        "mamba2_tied": Variant(
            "Mamba2ForCausalLM",
            {**_MAMBA2, "tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False},
            _tokens,
            _SMALL,
        ),
        "mamba2_base": Variant("Mamba2Model", {**_MAMBA2, "n_groups": 1}, _tokens, _SMALL),
    },
    growths=("hidden=2,heads=2", "hidden=3", "heads=3,head_dim=2"),
    refused=_SHARED,
    impossible={"hidden=2,heads=3": "--grow hidden=2,heads=3: 'mamba2' needs expand * hidden == heads * head_dim"},
)
MAMBA2_RELU = Family(
    "mamba2_relu",
    {"mamba2_relu": Variant("Mamba2ForCausalLM", {**_MAMBA2, "hidden_act": "relu"}, _tokens, _SMALL)},
    growths=("hidden=2,heads=2", "hidden=6,heads=3,head_dim=2"),
    notes="What passes a ReLU may be scaled, so the gated norm can read the stream's scale.",
)

_RWKV = {
    "vocab_size": VOCAB,
    "context_length": POSITIONS,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": EPS,
    "rescale_every": 1,
    "pad_token_id": 0,
}
_RWKV_SMALL = ("attention.output", "feed_forward.value")
RWKV = Family(
    "rwkv",
    {
        "rwkv": Variant("RwkvForCausalLM", _RWKV, small=_RWKV_SMALL),
        "rwkv_tied": Variant("RwkvForCausalLM", {**_RWKV, "tie_word_embeddings": True}, small=_RWKV_SMALL),
        "rwkv_4h": Variant(
            "RwkvForCausalLM", {**_RWKV, "intermediate_size": None, "rescale_every": 0}, small=_RWKV_SMALL
        ),
        "rwkv_base": Variant("RwkvModel", _RWKV, small=_RWKV_SMALL),
    },
    growths=("hidden=2,intermediate=3", "attention=3", "intermediate=3"),
    refused={**_EPS_IN_CODE, **_narrow_stream("rwkv", "rwkv_tied", "rwkv_4h", "rwkv_base")},
    impossible={"hidden=2,attention=3": "needs attention == hidden"},
)

_JAMBA = {
    **_BASE,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": EPS,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 5,
    "mamba_dt_rank": 3,
}
JAMBA = Family(
    "jamba",
    {
        "jamba": Variant("JambaForCausalLM", _JAMBA, small=_SMALL),
        "jamba_tied": Variant(
            "JambaForCausalLM",
            {**_JAMBA, "tie_word_embeddings": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
            small=_SMALL,
        ),
        "jamba_base": Variant("JambaModel", {**_JAMBA, "mamba_dt_rank": "auto", "hidden_act": "relu"}, small=_SMALL),
        "jamba_classification": Variant("JambaForSequenceClassification", {**_JAMBA, **_LABELS}, small=_SMALL),
    },
    growths=(
        "hidden=2,intermediate=3,heads=2,kv_heads=1",
        "intermediate=3",
        "hidden=3",
        "hidden=2,heads=4,kv_heads=2,head_dim=3",
    ),
)


def _with_encoder(config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The fixed batch and the states of an encoder, which a wide decoder gets side by side and as they are."""
    states = torch.randn(3, 7, 36, generator=torch.Generator().manual_seed(21), dtype=torch.float64)
    wide = states.repeat_interleave(config.n_embd // 36, dim=-1)
    return {**fixed_inputs(config), "encoder_hidden_states": wide}


_GPT2 = {**{key: value for key, value in _GPTJ.items() if key != "rotary_dim"}, "add_cross_attention": True}
GPT2_CROSS = Family(
    "gpt2_cross",
    {
        "gpt2_cross": Variant("GPT2LMHeadModel", _GPT2, _with_encoder),
        "gpt2_cross_unscaled": Variant(
            "GPT2LMHeadModel",
            {**_GPT2, "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": None},
            _with_encoder,
        ),
        "gpt2_cross_base": Variant("GPT2Model", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}, _with_encoder),
    },
    growths=_WIDTHS,
)

FAMILIES: tuple[Family, ...] = (
    GPT_NEOX,
    PHI,
    PHI3,
    FALCON,
    FALCON_GROUPS,
    FALCON_RW,
    OPT,
    OPT_PROJECTED,
    GPT_NEO,
    GPTJ,
    BLOOM,
    MPT,
    GPT_BIGCODE,
    STARCODER2,
    STABLELM,
    CODEGEN,
    PERSIMMON,
    GPT2_CROSS,
    MAMBA,
    MAMBA2,
    MAMBA2_RELU,
    RWKV,
    JAMBA,
)
