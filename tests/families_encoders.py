"""Encoders, encoder-decoders and vision models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from families import MODES, Family, larger_heads
from models import BATCH, BERT, EPS, POSITIONS, VIT, VOCAB, Variant, fixed_inputs
from transformers import PreTrainedConfig

_LABELS = {"num_labels": 5}
_UNTIED = {"tie_word_embeddings": False}

_BERT_GROWTHS = (
    "hidden=2,intermediate=3,heads=2",
    "hidden=3,intermediate=2,heads=3",
    "hidden=2,head_dim=2",
)
# Roberta's positions begin behind the padding token.
_ROBERTA = {**BERT, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_LITERAL = "in the code: s(hidden) = 1"
_TRANSFORM_EPS = "one layer_norm_eps serves the norms of hidden and transformed"


def _family(
    name: str,
    variants: Mapping[str, Variant],
    growths: tuple[str, ...],
    *,
    ffn: str = "intermediate=3",
    refused: Mapping[str, str] | None = None,
    impossible: Mapping[str, str] | None = None,
    heads: Mapping[str, tuple[str, ...]] | None = None,
) -> Family:
    """A family that grows in its FFN alone, too; that leaves the stream alone, so no mode is refused."""
    exact = {f"{variant}:{mode}:{ffn}": "" for variant in variants for mode in MODES}
    return Family(name, variants, (*growths, ffn), {**(refused or {}), **exact}, impossible or {}, heads or {})


def _both(word: str, *variants: str, modes: tuple[str, ...] = ("orthogonal", "sum")) -> dict[str, str]:
    """Refusals of modes that give the stream another scale, for single variants."""
    return {f"{variant}:{mode}": word for variant in variants for mode in modes}


def _roberta(model_type: str, prefix: str) -> Family:
    return _family(
        model_type,
        {
            model_type: Variant(f"{prefix}Model", _ROBERTA),
            f"{model_type}_mlm": Variant(f"{prefix}ForMaskedLM", _ROBERTA),
            f"{model_type}_mlm_untied": Variant(f"{prefix}ForMaskedLM", {**_ROBERTA, **_UNTIED}),
            f"{model_type}_classification": Variant(f"{prefix}ForSequenceClassification", {**_ROBERTA, **_LABELS}),
            f"{model_type}_token_classification": Variant(f"{prefix}ForTokenClassification", {**_ROBERTA, **_LABELS}),
            f"{model_type}_qa": Variant(f"{prefix}ForQuestionAnswering", _ROBERTA),
        },
        _BERT_GROWTHS,
        refused=_both(_TRANSFORM_EPS, f"{model_type}_mlm", f"{model_type}_mlm_untied"),
        impossible={"heads=2,hidden=1": "head_dim = hidden / heads"},
    )


def _choices(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Three questions with four answers each."""
    tokens = torch.randint(1, config.vocab_size, (3, 4, 20), generator=torch.Generator().manual_seed(21))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


_DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 36,
    "hidden_dim": 50,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": POSITIONS,
}
_LIN = ("out_lin", "lin2")
_ELECTRA = {**BERT, "embedding_size": 24}
_ELECTRA_GROWTHS = (
    "hidden=2,embedding=2,intermediate=3,heads=2",
    "hidden=3,embedding=3,intermediate=2,heads=3",
    "hidden=2,embedding=2,head_dim=2",
)
_APART = "hidden=3,embedding=2,intermediate=2,heads=3"  # one epsilon serves both
_EMBEDDING_EPS = "one layer_norm_eps serves the norms of hidden and words"
_ALBERT = {**BERT, "embedding_size": 24, "num_hidden_groups": 1}
_ROTARY_GROWTHS = ("hidden=2,intermediate=3,heads=2", "hidden=3,intermediate=2,heads=3")
_MODERNBERT = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": POSITIONS,
    "local_attention": 16,
    "global_attn_every_n_layers": 2,
    "norm_eps": EPS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
_MODERNBERT_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
_MODERNBERT_SMALL = (".Wo.", "out_proj", "o_proj", "down_proj")
_DEBERTA = {
    **BERT,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 8,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
_DECODER = {"is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": True}


def _encoded(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """What an encoder of the same family, widened in the same way, hands over: its epsilon tells the scale of its stream."""
    states = torch.randn((BATCH, 11, 36), generator=torch.Generator().manual_seed(22), dtype=torch.float64)
    wide = states.repeat_interleave(config.hidden_size // 36, -1) * math.sqrt(config.layer_norm_eps / EPS)
    return {**fixed_inputs(config), "encoder_hidden_states": wide}


def _tokens(config: PreTrainedConfig, length: int, seed: int) -> torch.Tensor:
    """Three rows that hold every token but the special ones, and one end of text each, as the classification heads need."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.arange(5, VOCAB).repeat(-(-BATCH * length // (VOCAB - 5)))[: BATCH * length]
    tokens = words[torch.randperm(len(words), generator=generator)].reshape(BATCH, length)
    tokens[:, 10] = config.eos_token_id
    return tokens


def _seq2seq(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """An encoder's tokens, one row of them padded right and one left, and a decoder's."""
    length = min(POSITIONS, getattr(config, "max_position_embeddings", POSITIONS))
    tokens, mask = _tokens(config, length, 23), torch.ones(BATCH, length, dtype=torch.long)
    mask[1, length - 5 :] = 0
    mask[2, :7] = 0
    tokens = tokens.masked_fill(mask == 0, config.pad_token_id)
    return {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": _tokens(config, length, 24)}


def _encoder_only(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    return {name: value for name, value in _seq2seq(config).items() if name != "decoder_input_ids"}


def _decoder_only(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(config, POSITIONS, 24), "use_cache": False}


_T5 = {
    "vocab_size": VOCAB,
    "d_model": 36,
    "d_kv": 10,
    "d_ff": 50,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 30,
    "layer_norm_epsilon": EPS,
}
_T5_11 = {**_T5, "feed_forward_proj": "gated-gelu"}
_T5_SMALL = (".o.", ".wo.", ".q.")  # scores are not divided, so a query as large as others would saturate them
_T5_GROWTHS = (
    "hidden=2,intermediate=3,heads=2",
    "hidden=3,intermediate=2,head_dim=2",
    "hidden=2",
    "heads=3",
    "head_dim=2",
)


def _t5(model_type: str, prefix: str, config: dict[str, Any]) -> Family:
    return _family(
        model_type,
        {
            model_type: Variant(f"{prefix}ForConditionalGeneration", config, _seq2seq, _T5_SMALL),
            f"{model_type}_relu": Variant(
                f"{prefix}ForConditionalGeneration", {**config, "feed_forward_proj": "relu"}, _seq2seq, _T5_SMALL
            ),
            f"{model_type}_silu": Variant(
                f"{prefix}ForConditionalGeneration", {**config, "feed_forward_proj": "gated-silu"}, _seq2seq, _T5_SMALL
            ),
            f"{model_type}_own_act": Variant(
                f"{prefix}ForConditionalGeneration",
                {**config, "feed_forward_proj": "relu", "dense_act_fn": "tanh"},
                _seq2seq,
                _T5_SMALL,
            ),
            f"{model_type}_unscaled": Variant(
                f"{prefix}ForConditionalGeneration", {**_T5_11, **_UNTIED}, _seq2seq, _T5_SMALL
            ),
            f"{model_type}_base": Variant(f"{prefix}Model", config, _seq2seq, _T5_SMALL),
            f"{model_type}_encoder": Variant(f"{prefix}EncoderModel", config, _encoder_only, _T5_SMALL),
            f"{model_type}_classification": Variant(
                f"{prefix}ForSequenceClassification", {**config, **_LABELS}, _seq2seq, _T5_SMALL
            ),
            f"{model_type}_token_classification": Variant(
                f"{prefix}ForTokenClassification", {**config, **_LABELS}, _encoder_only, _T5_SMALL
            ),
            f"{model_type}_qa": Variant(f"{prefix}ForQuestionAnswering", config, _seq2seq, _T5_SMALL),
        },
        _T5_GROWTHS,
    )


_BART = {
    "vocab_size": VOCAB,
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 46,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_SCALED = {"scale_embedding": True}
_RELU = {"activation_function": "relu"}
_BART_SMALL = ("out_proj", "fc2")
_BART_FFN = "encoder_intermediate=3,decoder_intermediate=2"
_BART_GROWTHS = (
    "hidden=2,encoder_intermediate=3,encoder_heads=2,decoder_heads=2",
    "hidden=3,decoder_intermediate=2,encoder_heads=3,decoder_heads=3",
    "hidden=2,head_dim=2",
    "hidden=6,head_dim=2,decoder_heads=3,encoder_heads=2",
)


def _bart(model_type: str, prefix: str, config: dict[str, Any], refused: Mapping[str, str]) -> Family:
    head = {**config, **_LABELS}
    return _family(
        model_type,
        {
            model_type: Variant(f"{prefix}ForConditionalGeneration", config, _seq2seq, _BART_SMALL),
            f"{model_type}_scaled": Variant(
                f"{prefix}ForConditionalGeneration", {**config, **_SCALED}, _seq2seq, _BART_SMALL
            ),
            f"{model_type}_untied": Variant(
                f"{prefix}ForConditionalGeneration", {**config, **_UNTIED}, _seq2seq, _BART_SMALL
            ),
            f"{model_type}_scaled_untied": Variant(
                f"{prefix}ForConditionalGeneration", {**config, **_SCALED, **_UNTIED, **_RELU}, _seq2seq, _BART_SMALL
            ),
            f"{model_type}_base": Variant(f"{prefix}Model", {**config, **_SCALED}, _seq2seq, _BART_SMALL),
            f"{model_type}_decoder": Variant(
                f"{prefix}ForCausalLM", {**config, **_SCALED, "is_decoder": True}, _decoder_only, _BART_SMALL
            ),
        }
        | (
            {
                f"{model_type}_classification": Variant(
                    f"{prefix}ForSequenceClassification", head, _seq2seq, _BART_SMALL
                ),
                f"{model_type}_qa": Variant(f"{prefix}ForQuestionAnswering", config, _seq2seq, _BART_SMALL),
            }
            if "BART" in prefix.upper()
            else {}
        ),
        _BART_GROWTHS,
        ffn=_BART_FFN,
        refused=refused,
    )


_MARIAN = {**_BART, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "activation_function": "swish"}
_NORM_LITERAL = {"orthogonal": "has its epsilon 1e-05 in the code", "sum": "has its epsilon 1e-05 in the code"}


_WHISPER = {
    "vocab_size": VOCAB,
    "num_mel_bins": 8,
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 46,
    "max_source_positions": 20,
    "max_target_positions": POSITIONS,
    "classifier_proj_size": 10,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_WHISPER_SMALL = (*_BART_SMALL, "conv2")


def _heard(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(25)
    size = (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": torch.randn(size, generator=generator, dtype=torch.float64)}


def _mel(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    return {**_heard(config), "decoder_input_ids": _tokens(config, POSITIONS, 24)}


_CLIP_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": POSITIONS,
    "layer_norm_eps": EPS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_CLIP_VISION = {**VIT, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 46}


def _pixels(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    size = getattr(config, "vision_config", config).image_size
    pixels = torch.randn((BATCH, 3, size, size), generator=torch.Generator().manual_seed(26), dtype=torch.float64)
    return {"pixel_values": pixels}


def _text(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    tokens = _tokens(getattr(config, "text_config", config), POSITIONS, 27)
    return {"input_ids": tokens, "attention_mask": (torch.arange(POSITIONS) < 60).long().expand_as(tokens)}


def _pairs(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    return _text(config) | _pixels(config)


_MPNET = {**_ROBERTA, "type_vocab_size": 1}

_ELECTRA_VARIANTS = {
    "electra": Variant("ElectraModel", _ELECTRA),
    "electra_generator": Variant("ElectraForMaskedLM", _ELECTRA),
    "electra_generator_untied": Variant("ElectraForMaskedLM", {**_ELECTRA, **_UNTIED}),
    "electra_discriminator": Variant("ElectraForPreTraining", _ELECTRA),
    "electra_classification": Variant("ElectraForSequenceClassification", {**_ELECTRA, **_LABELS}),
    "electra_token_classification": Variant("ElectraForTokenClassification", {**_ELECTRA, **_LABELS}),
    "electra_qa": Variant("ElectraForQuestionAnswering", _ELECTRA),
    "electra_choice": Variant("ElectraForMultipleChoice", _ELECTRA, _choices),
    "electra_choice_tanh": Variant("ElectraForMultipleChoice", {**_ELECTRA, "summary_activation": "tanh"}, _choices),
}
_ALBERT_VARIANTS = {
    "albert": Variant("AlbertModel", _ALBERT),
    "albert_mlm": Variant("AlbertForMaskedLM", _ALBERT),
    "albert_mlm_untied": Variant("AlbertForMaskedLM", {**_ALBERT, **_UNTIED}),
    "albert_groups": Variant("AlbertForPreTraining", {**_ALBERT, "num_hidden_groups": 2, "inner_group_num": 2}),
    "albert_classification": Variant("AlbertForSequenceClassification", {**_ALBERT, **_LABELS}),
    "albert_token_classification": Variant("AlbertForTokenClassification", {**_ALBERT, **_LABELS}),
    "albert_qa": Variant("AlbertForQuestionAnswering", _ALBERT),
}
FAMILIES: tuple[Family, ...] = (
    _roberta("roberta", "Roberta"),
    _roberta("xlm-roberta", "XLMRoberta"),
    _roberta("camembert", "Camembert"),
    _family(
        "distilbert",
        {
            "distilbert": Variant("DistilBertForMaskedLM", _DISTILBERT, small=_LIN),
            "distilbert_base": Variant("DistilBertModel", _DISTILBERT, small=_LIN),
            "distilbert_sinusoidal": Variant("DistilBertModel", {**_DISTILBERT, "sinusoidal_pos_embds": True}),
            "distilbert_untied": Variant("DistilBertForMaskedLM", {**_DISTILBERT, **_UNTIED}),
            "distilbert_classification": Variant("DistilBertForSequenceClassification", {**_DISTILBERT, **_LABELS}),
            "distilbert_token_classification": Variant("DistilBertForTokenClassification", {**_DISTILBERT, **_LABELS}),
            "distilbert_qa": Variant("DistilBertForQuestionAnswering", {**_DISTILBERT, "activation": "relu"}),
            "distilbert_choice": Variant("DistilBertForMultipleChoice", _DISTILBERT, _choices),
        },
        _BERT_GROWTHS,
        refused={"orthogonal": _LITERAL, "sum": _LITERAL},
    ),
    _family(
        "electra",
        _ELECTRA_VARIANTS,
        (*_ELECTRA_GROWTHS, _APART),
        refused={
            **{f"{variant}:orthogonal:{_APART}": _EMBEDDING_EPS for variant in _ELECTRA_VARIANTS},
            "sum": _EMBEDDING_EPS,
            **_both(_TRANSFORM_EPS, "electra_generator", "electra_generator_untied"),
        },
        impossible={"hidden=2,embedding=3,heads=2": "embedding != hidden"},
    ),
    _family(
        "electra-unprojected",
        {
            "electra_unprojected": Variant("ElectraModel", {**_ELECTRA, "embedding_size": 36}),
            "electra_unprojected_generator": Variant("ElectraForMaskedLM", {**_ELECTRA, "embedding_size": 36}),
        },
        _ELECTRA_GROWTHS,
        refused={"sum": _EMBEDDING_EPS, **_both(_TRANSFORM_EPS, "electra_unprojected_generator")},
        impossible={"hidden=2,embedding=3": "needs embedding == hidden"},
    ),
    _family(
        "albert",
        _ALBERT_VARIANTS,
        (*_ELECTRA_GROWTHS, _APART),
        refused={
            **{
                f"{variant}:orthogonal:{_APART}": "one layer_norm_eps serves the norms of words and hidden"
                for variant in _ALBERT_VARIANTS
            },
            "sum": "one layer_norm_eps serves the norms of words and hidden",
            **_both(
                "one layer_norm_eps serves the norms of words and transformed",
                "albert_mlm",
                "albert_mlm_untied",
                "albert_groups",
            ),
        },
    ),
    _family(
        "mpnet",
        {
            "mpnet": Variant("MPNetModel", _MPNET),
            "mpnet_mlm": Variant("MPNetForMaskedLM", _MPNET),
            "mpnet_mlm_untied": Variant("MPNetForMaskedLM", {**_MPNET, **_UNTIED}),
            "mpnet_classification": Variant("MPNetForSequenceClassification", _MPNET),
            "mpnet_token_classification": Variant("MPNetForTokenClassification", _MPNET),
            "mpnet_qa": Variant("MPNetForQuestionAnswering", _MPNET),
        },
        _BERT_GROWTHS,
        refused=_both(_TRANSFORM_EPS, "mpnet_mlm", "mpnet_mlm_untied"),
    ),
    _family(
        "modernbert",
        {
            "modernbert": Variant("ModernBertModel", _MODERNBERT, small=_MODERNBERT_SMALL),
            "modernbert_mlm": Variant("ModernBertForMaskedLM", _MODERNBERT, small=_MODERNBERT_SMALL),
            "modernbert_mlm_untied": Variant(
                "ModernBertForMaskedLM", {**_MODERNBERT, **_UNTIED, "decoder_bias": False}
            ),
            "modernbert_biases": Variant(
                "ModernBertForMaskedLM", {**_MODERNBERT, **_MODERNBERT_BIASES}, small=_MODERNBERT_SMALL
            ),
            "modernbert_biases_base": Variant("ModernBertModel", {**_MODERNBERT, **_MODERNBERT_BIASES}),
            "modernbert_classification": Variant(
                "ModernBertForSequenceClassification", {**_MODERNBERT, **_LABELS, "classifier_pooling": "mean"}
            ),
            "modernbert_token_classification": Variant(
                "ModernBertForTokenClassification", {**_MODERNBERT, **_LABELS, "classifier_activation": "relu"}
            ),
            "modernbert_qa": Variant("ModernBertForQuestionAnswering", _MODERNBERT),
        },
        _ROTARY_GROWTHS,
        refused={
            "sum": "one norm_eps serves the norms of words and hidden",
            **_both(
                "one norm_eps serves the norms of words and transformed",
                "modernbert_mlm",
                "modernbert_mlm_untied",
                "modernbert_biases",
                "modernbert_classification",
                "modernbert_qa",
            ),
        },
        heads=larger_heads(
            "modernbert", "modernbert_biases_base", mixed="hidden=6,intermediate=2,heads=2,head_dim=3", tied=True
        ),
    ),
    _family(
        "nomic_bert",
        {
            "nomic_bert": Variant("NomicBertModel", BERT, small=_MODERNBERT_SMALL),
            "nomic_bert_mlm": Variant("NomicBertForMaskedLM", BERT),
            "nomic_bert_classification": Variant("NomicBertForSequenceClassification", {**BERT, **_LABELS}),
            "nomic_bert_token_classification": Variant("NomicBertForTokenClassification", {**BERT, **_LABELS}),
        },
        _ROTARY_GROWTHS,
        refused=_both(_TRANSFORM_EPS, "nomic_bert_mlm"),
        heads=larger_heads("nomic_bert", mixed="hidden=2,intermediate=3,heads=4,head_dim=3"),
    ),
    _family(
        "deberta-v2",
        {
            "deberta": Variant("DebertaV2Model", _DEBERTA),
            "deberta_mlm": Variant("DebertaV2ForMaskedLM", _DEBERTA),
            "deberta_mlm_new": Variant("DebertaV2ForMaskedLM", {**_DEBERTA, "legacy": False}),
            "deberta_mlm_untied": Variant("DebertaV2ForMaskedLM", {**_DEBERTA, **_UNTIED}),
            "deberta_conv": Variant("DebertaV2Model", {**_DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu"}),
            "deberta_conv_groups": Variant("DebertaV2Model", {**_DEBERTA, "conv_kernel_size": 3, "conv_groups": 3}),
            "deberta_unshared": Variant("DebertaV2Model", {**_DEBERTA, "share_att_key": False, "norm_rel_ebd": "none"}),
            "deberta_head_size": Variant("DebertaV2Model", {**_DEBERTA, "attention_head_size": 12}),
            "deberta_absolute": Variant(
                "DebertaV2Model",
                {**_DEBERTA, "relative_attention": False, "position_biased_input": True, "type_vocab_size": 2},
            ),
            "deberta_classification": Variant("DebertaV2ForSequenceClassification", {**_DEBERTA, **_LABELS}),
            "deberta_token_classification": Variant("DebertaV2ForTokenClassification", {**_DEBERTA, **_LABELS}),
            "deberta_qa": Variant("DebertaV2ForQuestionAnswering", _DEBERTA),
        },
        _BERT_GROWTHS,
        refused={
            **_both(_TRANSFORM_EPS, "deberta_mlm", "deberta_mlm_new", "deberta_mlm_untied"),
            **_both("hidden + convolution is a sum", "deberta_conv", "deberta_conv_groups"),
            **_both(
                "one layer_norm_eps serves the norms of hidden and relative",
                "deberta",
                "deberta_head_size",
                "deberta_classification",
                "deberta_token_classification",
                "deberta_qa",
                modes=("sum",),
            ),
        },
        impossible={"hidden=3,heads=2": "heads * head_dim == hidden"},
    ),
    _family(
        "bert-decoder",
        {
            "bert_cross": Variant("BertModel", {**BERT, **_DECODER}, _encoded),
            "bert_cross_lm": Variant("BertLMHeadModel", {**BERT, **_DECODER}, _encoded),
            "roberta_cross": Variant("RobertaModel", {**_ROBERTA, **_DECODER}, _encoded),
        },
        _BERT_GROWTHS,
        refused=_both(_TRANSFORM_EPS, "bert_cross_lm"),
    ),
    _t5("t5", "T5", _T5),
    _t5("mt5", "MT5", _T5_11),
    _t5("umt5", "UMT5", _T5_11),
    _bart("bart", "Bart", _BART, _NORM_LITERAL),
    _bart("mbart", "MBart", _BART, _NORM_LITERAL),
    _bart("pegasus", "Pegasus", {**_BART, "pad_token_id": 0, "eos_token_id": 1}, _NORM_LITERAL),
    _family(
        "marian",
        {
            "marian_base": Variant("MarianModel", _MARIAN, _seq2seq, _BART_SMALL),
            "marian_base_scaled": Variant("MarianModel", {**_MARIAN, **_SCALED}, _seq2seq, _BART_SMALL),
            "marian_decoder": Variant("MarianForCausalLM", {**_MARIAN, "is_decoder": True}, _decoder_only, _BART_SMALL),
            "marian_apart": Variant(
                "MarianModel",
                {**_MARIAN, **_SCALED, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB},
                _seq2seq,
                _BART_SMALL,
            ),
        },
        _BART_GROWTHS,
        ffn=_BART_FFN,
        refused=_NORM_LITERAL,
    ),
    _family(
        "m2m_100",
        {
            "m2m_100": Variant("M2M100ForConditionalGeneration", _BART, _seq2seq, _BART_SMALL),
            "m2m_100_scaled": Variant(
                "M2M100ForConditionalGeneration", {**_BART, **_SCALED, **_UNTIED}, _seq2seq, _BART_SMALL
            ),
            "m2m_100_base": Variant("M2M100Model", {**_BART, **_SCALED}, _seq2seq, _BART_SMALL),
        },
        ("encoder_intermediate=3",),
        ffn=_BART_FFN,
        impossible={
            "hidden=2": "its positions are sinusoids computed at run time",
            "encoder_heads=2": "encoder_head_dim = hidden / encoder_heads",
        },
    ),
    _family(
        "whisper",
        {
            "whisper": Variant("WhisperForConditionalGeneration", _WHISPER, _mel, _WHISPER_SMALL),
            "whisper_untied": Variant(
                "WhisperForConditionalGeneration", {**_WHISPER, **_UNTIED, **_SCALED, **_RELU}, _mel, _WHISPER_SMALL
            ),
            "whisper_base": Variant("WhisperModel", _WHISPER, _mel, _WHISPER_SMALL),
            "whisper_audio": Variant("WhisperForAudioClassification", {**_WHISPER, **_LABELS}, _heard, _WHISPER_SMALL),
            "whisper_audio_weighted": Variant(
                "WhisperForAudioClassification",
                {**_WHISPER, **_LABELS, "use_weighted_layer_sum": True},
                _heard,
                _WHISPER_SMALL,
            ),
        },
        _BART_GROWTHS,
        ffn=_BART_FFN,
        refused={"orthogonal": "sounded + stream is a sum", "sum": "sounded + stream is a sum"},
    ),
    _family(
        "vit",
        {
            "vit": Variant("ViTModel", VIT, _pixels),
            "vit_pooler": Variant("ViTModel", {**VIT, "pooler_output_size": 30, "pooler_act": "gelu"}, _pixels),
            "vit_pooler_relu": Variant("ViTModel", {**VIT, "pooler_act": "leaky_relu"}, _pixels),
            "vit_classification": Variant("ViTForImageClassification", {**VIT, **_LABELS}, _pixels),
            "vit_no_bias": Variant("ViTForImageClassification", {**VIT, "qkv_bias": False}, _pixels),
            "vit_masked": Variant("ViTForMaskedImageModeling", {**VIT, "encoder_stride": 4}, _pixels),
        },
        ("hidden=2,intermediate=3,heads=2", "hidden=3,intermediate=2,heads=3,pooler=2", _BERT_GROWTHS[2]),
    ),
    _family(
        "clip_text_model",
        {
            "clip_text": Variant(
                "CLIPTextModelWithProjection", {**_CLIP_TEXT, "projection_dim": 20}, _text, _BART_SMALL
            ),
            "clip_text_gelu": Variant(
                "CLIPTextModelWithProjection",
                {**_CLIP_TEXT, "projection_dim": 20, "hidden_act": "gelu", "eos_token_id": 3},
                _text,
                _BART_SMALL,
            ),
        },
        _BERT_GROWTHS,
    ),
    _family(
        "clip_vision_model",
        {
            "clip_vision": Variant(
                "CLIPVisionModelWithProjection", {**_CLIP_VISION, "projection_dim": 20}, _pixels, _BART_SMALL
            )
        },
        _BERT_GROWTHS,
        refused={"sum": "one layer_norm_eps serves the norms of pixels and hidden"},
    ),
    _family(
        "clip",
        {
            "clip": Variant(
                "CLIPModel",
                {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION, "projection_dim": 20},
                _pairs,
                _BART_SMALL,
            ),
            "clip_classification": Variant(
                "CLIPForImageClassification",
                {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION},
                _pixels,
                _BART_SMALL,
            ),
        },
        (
            "hidden=2,intermediate=3,heads=2,vision_hidden=3,vision_intermediate=2,vision_heads=3",
            "hidden=2,head_dim=2,vision_intermediate=3,vision_hidden=2",
            "vision_hidden=3,vision_heads=3",
        ),
        ffn="intermediate=3,vision_intermediate=2",
        refused={"sum": "serves the norms of vision_pixels and vision_hidden"},
    ),
    _family(
        "siglip_text_model",
        {"siglip_text": Variant("SiglipTextModel", _CLIP_TEXT, _text, _BART_SMALL)},
        _BERT_GROWTHS,
    ),
    _family(
        "siglip_vision_model",
        {
            "siglip_vision": Variant(
                "SiglipVisionModel", {**_CLIP_VISION, "vision_use_head": False}, _pixels, _BART_SMALL
            ),
            "siglip_vision_pooled": Variant("SiglipVisionModel", _CLIP_VISION, _pixels, _BART_SMALL),
        },
        _BERT_GROWTHS,
    ),
    _family(
        "siglip",
        {
            "siglip": Variant(
                "SiglipModel",
                {"text_config": {**_CLIP_TEXT, "projection_size": 48}, "vision_config": _CLIP_VISION},
                _pairs,
                _BART_SMALL,
            ),
            "siglip_classification": Variant(
                "SiglipForImageClassification",
                {"text_config": {**_CLIP_TEXT, "projection_size": 48}, "vision_config": _CLIP_VISION},
                _pixels,
                _BART_SMALL,
            ),
        },
        (
            "hidden=2,intermediate=3,heads=2,vision_hidden=3,projection=3,vision_intermediate=2,vision_heads=3",
            "hidden=2,head_dim=2",
        ),
        ffn="intermediate=3,vision_intermediate=2",
        impossible={
            "vision_hidden=2,vision_heads=2,projection=1": "projection == vision_hidden",
            "vision_hidden=4/3,vision_heads=4/3": "texts and images are compared by vectors of length 1",
        },
    ),
)
