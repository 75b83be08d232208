"""Tiny random checkpoints made with transformers, and the comparison of two of them.

Every parameter is drawn at random, no gain is 1 and no bias 0, embeddings are small against eps, and the inputs read
every row of the vocabulary, the positions and the token types: a fault anywhere in a widened file shows in the outputs.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 97
POSITIONS = 64
BATCH = 3
EPS = 4e-3

Outputs = dict[str, np.ndarray]


def by_factors(grow: str | None) -> str | None:
    """What --grow takes, with every plain number as a factor: of tiny models `heads=3` could be a size too."""
    return grow and re.sub(r"=([0-9]+)(?=,|$)", r"=\1x", grow)


@dataclass(frozen=True)
class Variant:
    """One kind of checkpoint: a transformers model class, the arguments of its config, and inputs other than tokens.

    `small` are parts of the names of matrices that write into the stream, drawn small so that an epsilon shows.
    """

    model_class: str
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[transformers.PreTrainedConfig], dict[str, torch.Tensor]] | None = None
    small: tuple[str, ...] = ("o_proj", "down_proj", "c_proj", "output.dense")

    def make_config(self) -> transformers.PreTrainedConfig:
        return getattr(transformers, self.model_class).config_class(**self.config)


BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "layer_norm_eps": EPS,
}
VIT = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "image_size": 16,
    "patch_size": 4,
    "layer_norm_eps": EPS,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": 36,
    "n_layer": 2,
    "n_head": 3,
    "layer_norm_epsilon": EPS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": EPS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LABELS = {"num_labels": 5}
_TIED = {"tie_word_embeddings": True}

VARIANTS: dict[str, Variant] = {
    "bert": Variant("BertModel", BERT),
    "bert_mlm": Variant("BertForMaskedLM", BERT),
    "bert_mlm_untied": Variant("BertForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    "bert_pretraining": Variant("BertForPreTraining", BERT),
    "bert_classification": Variant("BertForSequenceClassification", {**BERT, **_LABELS}),
    "bert_relu": Variant("BertModel", {**BERT, "hidden_act": "relu"}),
    "bert_token_classification": Variant("BertForTokenClassification", {**BERT, **_LABELS}),
    "bert_qa": Variant("BertForQuestionAnswering", BERT),
    "gpt2": Variant("GPT2LMHeadModel", _GPT2),
    "gpt2_base": Variant("GPT2Model", _GPT2),
    "gpt2_untied": Variant("GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False}),
    "gpt2_inner": Variant("GPT2LMHeadModel", {**_GPT2, "n_inner": 50}),
    "gpt2_unscaled": Variant("GPT2LMHeadModel", {**_GPT2, "scale_attn_weights": False}),
    "gpt2_layer_scaled": Variant("GPT2LMHeadModel", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2_classification": Variant("GPT2ForSequenceClassification", {**_GPT2, **_LABELS}),
    "llama": Variant("LlamaForCausalLM", LLAMA),
    "llama_tied": Variant("LlamaForCausalLM", {**LLAMA, **_TIED}),
    "llama_base": Variant("LlamaModel", LLAMA),
    "llama_biases": Variant("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama_mha": Variant("LlamaForCausalLM", {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama_gqa": Variant("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "llama_headdim": Variant("LlamaForCausalLM", {**LLAMA, "hidden_size": 48, "head_dim": 10}),
    "llama3_rope": Variant("LlamaForCausalLM", {**LLAMA, "rope_parameters": _LLAMA3_ROPE}),
    "llama_classification": Variant("LlamaForSequenceClassification", {**LLAMA, **_LABELS}),
    "mistral": Variant("MistralForCausalLM", {**LLAMA, "hidden_size": 48, "head_dim": 10, "sliding_window": 16}),
    "mistral_tied": Variant("MistralForCausalLM", {**LLAMA, **_TIED}),
    "qwen2": Variant("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "qwen2_tied": Variant("Qwen2ForCausalLM", {**LLAMA, **_TIED, "hidden_size": 48, "head_dim": 10}),
}


def build(variant: str | Variant, dtype: torch.dtype = torch.float32, seed: int = 0) -> transformers.PreTrainedModel:
    """A model of the variant; its parameters depend on their names, the seed and nothing else."""
    described = VARIANTS[variant] if isinstance(variant, str) else variant
    model = getattr(transformers, described.model_class)(described.make_config())
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_drawn(model, name, parameter, seed, described.small))
    return model


def _drawn(
    model: torch.nn.Module, name: str, parameter: torch.Tensor, seed: int, small: tuple[str, ...]
) -> torch.Tensor:
    """Random values fit for the parameter's role: an active attention, and a stream that eps can disturb."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    module = model.get_submodule(name.rpartition(".")[0])
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if parameter.ndim == 1 and "Norm" in type(module).__name__ and name.endswith("weight"):
        return 1 + 0.3 * (2 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1)
    if isinstance(module, torch.nn.Embedding):
        return 0.05 * noise
    if parameter.ndim == 1:
        return 0.1 * noise
    return (0.05 if any(word in name for word in small) else 0.25) * noise


def save(
    variant: str, folder: Path | str, dtype: torch.dtype = torch.float32, seed: int = 0, **save_arguments: Any
) -> Path:
    """Writes the variant with `save_pretrained` (safetensors); `save_arguments` go there, as `max_shard_size`."""
    build(variant, dtype, seed).save_pretrained(folder, **save_arguments)
    return Path(folder)


def load(folder: Path | str, dtype: torch.dtype, model_class: str | None = None) -> transformers.PreTrainedModel:
    """The folder's model with eager attention. A weight that is not taken from the file is an error.

    `model_class` names a transformers class; without it the first of the config's `architectures` is used.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    kind = getattr(transformers, model_class or config["architectures"][0])
    model, info = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    troubles = {problem: found for problem, found in info.items() if found}
    if troubles:
        raise AssertionError(f"{folder} is not what {kind.__name__} loads: {troubles}")
    return model.eval()


def outputs(
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    model_class: str | None = None,
    *,
    throughout: bool = True,
    inputs: Callable[[transformers.PreTrainedConfig], dict[str, torch.Tensor]] | None = None,
) -> Outputs:
    """All logits, or the last hidden state and the pooled vector, for one fixed batch, as float64 arrays.

    With `dtype=torch.float64` the whole computation is done in float64 (see `Float64Throughout`); `throughout=False`
    keeps the float32 islands of transformers.
    """
    with Float64Throughout() if dtype == torch.float64 and throughout else nullcontext():
        model = load(folder, dtype, model_class)
        # Experts one by one in plain torch: the grouped product knows no float64.
        model.config._experts_implementation = "eager"
        with torch.inference_mode():
            found = model(**(inputs or fixed_inputs)(model.config))
    return {name: value.double().numpy() for name, value in found.items() if isinstance(value, torch.Tensor)}


def fixed_inputs(config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Three rows that fill all positions and hold every token: one without padding, one padded right, one left."""
    length = min(POSITIONS, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(20)
    pad = config.pad_token_id or 0
    words = torch.tensor([token for token in range(config.vocab_size) if token != pad])
    repeats = -(-BATCH * length // len(words))
    shuffled = torch.cat([words[torch.randperm(len(words), generator=generator)] for _ in range(repeats)])
    ids = shuffled[: BATCH * length].reshape(BATCH, length)
    mask = torch.ones_like(ids)
    mask[1, length - 5 :] = 0
    mask[2, :7] = 0
    ids = ids.masked_fill(mask == 0, pad)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.randint(config.type_vocab_size, ids.shape, generator=generator)
    return inputs


def relative_error(narrow: Outputs, wide: Outputs, scale: float | Mapping[str, float] = 1.0) -> float:
    """The largest max|difference| / max|narrow| over all outputs; NaN if an output holds NaN.

    An output whose last axis grew is first folded back: the mean over r neighbours divided by its scale. The spread
    inside the groups counts as an error too. A plain `scale` is that of `last_hidden_state`; the pooled vector stands
    behind a tanh, so its scale is 1 unless a mapping from output names says otherwise.
    """
    if narrow.keys() != wide.keys():
        raise AssertionError(f"outputs differ: {sorted(narrow)} against {sorted(wide)}")
    scales = scale if isinstance(scale, Mapping) else {"last_hidden_state": scale}
    errors = [_output_error(narrow[name], wide[name], scales.get(name, 1.0)) for name in narrow]
    return float(np.max(errors))


def _output_error(narrow: np.ndarray, wide: np.ndarray, scale: float) -> float:
    largest = np.abs(narrow).max()
    if narrow.shape == wide.shape:
        return float(np.abs(wide - narrow).max() / largest)
    copies, left = divmod(wide.shape[-1], narrow.shape[-1])
    if left or wide.shape[:-1] != narrow.shape[:-1]:
        raise AssertionError(f"{wide.shape} is no widening of {narrow.shape}")
    groups = wide.reshape(*narrow.shape, copies) / scale
    folded = groups.mean(axis=-1)
    return float(max(np.abs(folded - narrow).max(), np.abs(groups - folded[..., None]).max()) / largest)


class Float64Throughout(TorchFunctionMode):
    """Within this context every request for float32 is one for float64.

    transformers computes RMSNorm, softmax and the rotary tables in float32 even inside a float64 model, which hides
    everything below 1e-7. Entered around loading and running, comparisons reach 1e-13.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*widened, **named)
