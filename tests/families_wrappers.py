"""Models of two others: an encoder and a decoder that reads it, each with a config of its own."""

from __future__ import annotations

from typing import Any

import torch
from families import Family
from models import BATCH, BERT, EPS, POSITIONS, VIT, VOCAB, Variant
from transformers import PreTrainedConfig

_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": 36,
    "n_layer": 3,
    "n_head": 2,
    "layer_norm_epsilon": EPS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_BERT = {**BERT, "model_type": "bert"}
_DECODER = {**_BERT, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 44}
# RoBERTa's positions begin behind the padding token.
_ROBERTA = {**BERT, "model_type": "roberta", "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1}
_VIT = {**VIT, "model_type": "vit"}
_SMALL = ("output.dense", "c_proj")
_EPSILON = "one decoder.layer_norm_eps serves the norms of decoder_hidden and transformed"
_GROWTHS = (
    "hidden=2,intermediate=3,heads=2,decoder_hidden=2,decoder_intermediate=5,decoder_heads=2",
    "hidden=3,intermediate=2",
    "hidden=4,heads=2,decoder_hidden=4,decoder_heads=4",
)


def _heard(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Texts for encoder and decoder, one row of the former padded."""
    draw = torch.Generator().manual_seed(31)
    tokens = torch.randint(2, VOCAB, (BATCH, POSITIONS), generator=draw)
    mask = torch.ones_like(tokens)
    mask[1, POSITIONS - 5 :] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(2, VOCAB, (BATCH, 40), generator=draw),
    }


def _seen(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Pictures for the encoder."""
    draw = torch.Generator().manual_seed(32)
    pixels = torch.randn((BATCH, 3, 16, 16), generator=draw, dtype=torch.float64)
    return {"pixel_values": pixels, "decoder_input_ids": torch.randint(2, VOCAB, (BATCH, 40), generator=draw)}


def _pair(encoder: dict[str, Any], decoder: dict[str, Any], vision: bool = False) -> Variant:
    config = {"encoder": encoder, "decoder": {**decoder, "is_decoder": True, "add_cross_attention": True}}
    model_class = "VisionEncoderDecoderModel" if vision else "EncoderDecoderModel"
    return Variant(model_class, config, _seen if vision else _heard, _SMALL)


def _refused(*variants: str) -> dict[str, str]:
    return {f"{variant}:{mode}": _EPSILON for variant in variants for mode in ("orthogonal", "sum")}


FAMILIES: tuple[Family, ...] = (
    Family(
        "encoder-decoder",
        {
            "bert2gpt2": _pair(_BERT, _GPT2),
            "bert2bert": _pair(_BERT, _DECODER),
            "bert2gpt2_projected": _pair(
                {**_BERT, "hidden_act": "relu"}, {**_GPT2, "n_embd": 40, "n_inner": 50, "scale_attn_weights": False}
            ),
            "bert2bert_projected": _pair(_BERT, {**_DECODER, "hidden_size": 40, "tie_word_embeddings": False}),
            "roberta2roberta": _pair(_ROBERTA, {**_ROBERTA, "num_hidden_layers": 3}),
        },
        _GROWTHS,
        refused=_refused("bert2bert", "bert2bert_projected", "roberta2roberta"),
        impossible={"hidden=2,decoder_hidden=4": "needs hidden == decoder_hidden"},
    ),
    Family(
        "vision-encoder-decoder",
        {
            "vit2gpt2": _pair(_VIT, _GPT2, vision=True),
            "vit2gpt2_projected": _pair(_VIT, {**_GPT2, "n_embd": 40}, vision=True),
            "vit2bert": _pair({**_VIT, "qkv_bias": False}, _DECODER, vision=True),
        },
        _GROWTHS,
        refused=_refused("vit2bert"),
    ),
)
