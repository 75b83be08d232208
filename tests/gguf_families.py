"""Tiny random GGUF files of the families that llama.cpp runs, one for each way their tensors come, written with gguf-py.

Shapes are those that llama.cpp's loader asks for (src/models/*.cpp), rows first; nothing here is taken from the maps.
Gains are no 1, biases no 0, head counts odd where they can be, and the stream is small against the epsilon: faults show.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

VOCAB = 101
CONTEXT = 64
EPS = 4e-3
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"

Shapes = dict[str, tuple[int, ...]]
Value = int | float | bool


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model; `head` is the head size, hidden / heads unless the family lets it be free."""

    hidden: int = 36
    inner: int = 50
    heads: int = 6
    kv_heads: int = 3
    head: int = 6
    layers: int = 2
    tied: bool = True


@dataclass(frozen=True)
class Family:
    """A kind of file: its architecture, its sizes, metadata beside the usual, and the tensors that its loader asks for."""

    architecture: str
    tensors: Callable[[Sizes], Shapes]
    sizes: Sizes = field(default_factory=Sizes)
    epsilon: str = RMS
    metadata: Mapping[str, Value] = field(default_factory=dict)


def _norm(name: str, size: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (size,)}
    return shapes | {f"{name}.bias": (size,)} if bias else shapes


def _linear(name: str, out: int, size: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, size)}
    return shapes | {f"{name}.bias": (out,)} if bias else shapes


def _ends(s: Sizes, bias: bool = False, output_bias: bool = False) -> Shapes:
    head = {} if s.tied else _linear("output", VOCAB, s.hidden, output_bias)
    return {"token_embd.weight": (VOCAB, s.hidden)} | _norm("output_norm", s.hidden, bias) | head


def _attention(s: Sizes, bias: bool = False, output_bias: bool = False, packed: bool = False) -> Shapes:
    rows, kv_rows = s.heads * s.head, s.kv_heads * s.head
    out = _linear("attn_output", s.hidden, rows, output_bias)
    if packed:
        return _linear("attn_qkv", rows + 2 * kv_rows, s.hidden, bias) | out
    inner = _linear("attn_q", rows, s.hidden, bias) | _linear("attn_k", kv_rows, s.hidden, bias)
    return inner | _linear("attn_v", kv_rows, s.hidden, bias) | out


def _gated(s: Sizes, suffix: str = "", inner: int = 0, experts: int = 0) -> Shapes:
    inner, lead = inner or s.inner, (experts,) if experts else ()
    return {
        f"ffn_gate{suffix}.weight": (*lead, inner, s.hidden),
        f"ffn_up{suffix}.weight": (*lead, inner, s.hidden),
        f"ffn_down{suffix}.weight": (*lead, s.hidden, inner),
    }


def _plain(s: Sizes, bias: bool) -> Shapes:
    return _linear("ffn_up", s.inner, s.hidden, bias) | _linear("ffn_down", s.hidden, s.inner, bias)


def _layers(s: Sizes, *shapes: Shapes) -> Shapes:
    return {
        f"blk.{layer}.{name}": shape for layer in range(s.layers) for part in shapes for name, shape in part.items()
    }


def _norms(s: Sizes, *names: str, bias: bool = False) -> Shapes:
    return {name: shape for norm in names for name, shape in _norm(norm, s.hidden, bias).items()}


def _head_norms(s: Sizes) -> Shapes:
    return _norm("attn_q_norm", s.head, False) | _norm("attn_k_norm", s.head, False)


def _llama_like(bias: bool = False, output_bias: bool = False, head_norms: bool = False) -> Callable[[Sizes], Shapes]:
    def tensors(s: Sizes) -> Shapes:
        norms = _norms(s, "attn_norm", "ffn_norm") | (_head_norms(s) if head_norms else {})
        return _ends(s, output_bias=output_bias) | _layers(s, norms, _attention(s, bias), _gated(s))

    return tensors


def _post_normed(bias: bool = False, head_norms: bool = False) -> Callable[[Sizes], Shapes]:
    def tensors(s: Sizes) -> Shapes:
        norms = _norms(s, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        norms |= _head_norms(s) if head_norms else {}
        return _ends(s) | _layers(s, norms, _attention(s, bias), _gated(s))

    return tensors


def _phi3(factors: bool) -> Callable[[Sizes], Shapes]:
    def tensors(s: Sizes) -> Shapes:
        packed: Shapes = {"ffn_up.weight": (2 * s.inner, s.hidden), "ffn_down.weight": (s.hidden, s.inner)}
        rope: Shapes = {f"rope_factors_{kind}.weight": (2,) for kind in ("long", "short")} if factors else {}
        norms = _norms(s, "attn_norm", "ffn_norm")
        return rope | _ends(s) | _layers(s, norms, _attention(s, packed=True), packed)

    return tensors


def _gpt(
    *norms: str, bias: bool = True, packed: bool = True, output_bias: bool = False, **extra: int
) -> Callable[[Sizes], Shapes]:
    """GPT-2 and its kin: `extra` are tables beside the embedding, by their rows; 0 rows is a norm behind it."""

    def tensors(s: Sizes) -> Shapes:
        tables: Shapes = {f"{name}.weight": (rows, s.hidden) for name, rows in extra.items() if rows}
        for name, rows in extra.items():
            tables |= {} if rows else _norm(name, s.hidden, True)
        blocks = _layers(s, _norms(s, *norms, bias=True), _attention(s, bias, bias, packed), _plain(s, bias))
        return _ends(s, True, output_bias) | tables | blocks

    return tensors


def _stablelm(parallel: bool, heads: bool = False) -> Callable[[Sizes], Shapes]:
    def tensors(s: Sizes) -> Shapes:
        norms = _norms(s, "attn_norm", *(() if parallel else ("ffn_norm",)), bias=True)
        norms |= _single_heads(s) if heads else {}
        return _ends(s, True) | _layers(s, norms, _attention(s, not parallel), _gated(s))

    return tensors


def _single_heads(s: Sizes) -> Shapes:
    return {"attn_q_norm.weight": (s.heads, s.head), "attn_k_norm.weight": (s.kv_heads, s.head)}


def _command_r(s: Sizes) -> Shapes:
    single = _single_heads(s) if s.layers >= 64 else {}
    return _ends(s) | _layers(s, _norms(s, "attn_norm"), single, _attention(s), _gated(s))


def _olmo2(s: Sizes) -> Shapes:
    norms = _norms(s, "post_attention_norm", "post_ffw_norm")
    norms |= _norm("attn_q_norm", s.heads * s.head, False) | _norm("attn_k_norm", s.kv_heads * s.head, False)
    return _ends(s) | _layers(s, norms, _attention(s), _gated(s))


def _granite(s: Sizes) -> Shapes:
    """Every tensor that may be there beside the experts."""
    biases: Shapes = {"ffn_gate.bias": (s.inner,), "ffn_up.bias": (s.inner,), "ffn_down.bias": (s.hidden,)}
    blocks = _layers(s, _norms(s, "attn_norm", "ffn_norm"), _attention(s, True, True), _gated(s), biases)
    return _ends(s) | {"rope_freqs.weight": (s.head // 2,)} | blocks


EXPERTS, USED, EXPERT_INNER, SHARED_INNER = 5, 2, 14, 22
_ROUTED: dict[str, Value] = {"expert_count": EXPERTS, "expert_used_count": USED}
_MOE: dict[str, Value] = {**_ROUTED, "expert_feed_forward_length": EXPERT_INNER}
_SHARED: dict[str, Value] = {"expert_shared_feed_forward_length": SHARED_INNER}
_SIGMOID: dict[str, Value] = {"expert_gating_func": 2, "expert_weights_norm": True}


def _experts(s: Sizes, inner: int = EXPERT_INNER) -> Shapes:
    return _linear("ffn_gate_inp", EXPERTS, s.hidden) | _gated(s, "_exps", inner, EXPERTS)


def _qwen2moe(s: Sizes) -> Shapes:
    shared: Shapes = {"ffn_gate_inp_shexp.weight": (s.hidden,)}
    shared |= _gated(s, "_shexp", SHARED_INNER)
    return _ends(s) | _layers(s, _norms(s, "attn_norm", "ffn_norm"), _attention(s, True), _experts(s), shared)


def _granitemoe(s: Sizes) -> Shapes:
    shared = _gated(s, "_shexp", SHARED_INNER)
    return _ends(s) | _layers(s, _norms(s, "attn_norm", "ffn_norm"), _attention(s), _experts(s, s.inner), shared)


def _qwen3moe(inner: int) -> Callable[[Sizes], Shapes]:
    def tensors(s: Sizes) -> Shapes:
        norms = _norms(s, "attn_norm", "ffn_norm") | _head_norms(s)
        return _ends(s) | _layers(s, norms, _attention(s, inner != EXPERT_INNER), _experts(s, inner))

    return tensors


def _bert(packed: bool) -> Callable[[Sizes], Shapes]:
    def tensors(s: Sizes) -> Shapes:
        tables: Shapes = {"token_types.weight": (2, s.hidden), "position_embd.weight": (CONTEXT, s.hidden)}
        norms = _norms(s, "attn_output_norm", "layer_output_norm", bias=True)
        return _encoder_ends(s) | tables | _layers(s, norms, _attention(s, True, True, packed), _plain(s, True))

    return tensors


def _nomic_bert(s: Sizes) -> Shapes:
    norms = _norms(s, "attn_output_norm", "layer_output_norm", bias=True)
    tables: Shapes = {"token_types.weight": (2, s.hidden)}
    return _encoder_ends(s) | tables | _layers(s, norms, _attention(s, packed=True), _gated(s))


def _encoder_ends(s: Sizes) -> Shapes:
    return {"token_embd.weight": (VOCAB, s.hidden)} | _norm("token_embd_norm", s.hidden, True)


# A latent attention: the parts of a head that are rotated and not, the value's size, and the ranks.
ROTATED, PLAIN, VALUE, QUERY_RANK, LATENT_RANK = 4, 6, 5, 14, 16


def _deepseek2(lite: bool) -> Callable[[Sizes], Shapes]:
    def tensors(s: Sizes) -> Shapes:
        rows = s.heads * (PLAIN + ROTATED)
        queries = _linear("attn_q", rows, s.hidden)
        if not lite:
            queries = _linear("attn_q_a", QUERY_RANK, s.hidden) | _norm("attn_q_a_norm", QUERY_RANK, False)
            queries |= _linear("attn_q_b", rows, QUERY_RANK)
        latent: Shapes = {
            "attn_kv_a_mqa.weight": (LATENT_RANK + ROTATED, s.hidden),
            "attn_kv_a_norm.weight": (LATENT_RANK,),
            "attn_k_b.weight": (s.heads, LATENT_RANK, PLAIN),
            "attn_v_b.weight": (s.heads, VALUE, LATENT_RANK),
            "attn_output.weight": (s.hidden, s.heads * VALUE),
        }
        shared = _gated(s, "_shexp", 2 * EXPERT_INNER)
        routed = _experts(s) | shared | ({} if lite else {"exp_probs_b.bias": (EXPERTS,)})
        shapes = _ends(s) | _layers(s, _norms(s, "attn_norm", "ffn_norm"), queries, latent)
        for layer in range(s.layers):
            inner = _gated(s) if layer == 0 else routed
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in inner.items()}
        return shapes

    return tensors


def _glm4moe(further: int = 0) -> Callable[[Sizes], Shapes]:
    """GLM-4.5's: `further` of the layers stand behind the others and predict more tokens, with tensors of their own."""

    def tensors(s: Sizes) -> Shapes:
        norms = _norms(s, "attn_norm", "post_attention_norm")
        routed = _experts(s) | _gated(s, "_shexp", 2 * EXPERT_INNER) | {"exp_probs_b.bias": (EXPERTS,)}
        shapes = _ends(s) | _layers(s, norms, _attention(s, True))
        for layer in range(s.layers):
            inner = _gated(s) if layer == 0 else routed
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in inner.items()}
        for layer in range(s.layers - further, s.layers):
            own = _norms(s, "enorm", "hnorm", "shared_head_norm") | _linear("eh_proj", s.hidden, 2 * s.hidden)
            own |= _linear("embed_tokens", VOCAB, s.hidden) | _linear("shared_head_head", VOCAB, s.hidden)
            shapes |= {f"blk.{layer}.nextn.{name}": shape for name, shape in own.items()}
        return shapes

    return tensors


_GLM: dict[str, Value] = {
    **_MOE,
    **_SIGMOID,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_weights_scale": 6.0,
    "attention.key_length": 10,
    "attention.value_length": 10,
    "rope.dimension_count": 4,
}
_MLA: dict[str, Value] = _MOE | {
    "leading_dense_block_count": 1,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": QUERY_RANK,
    "attention.kv_lora_rank": LATENT_RANK,
    "attention.key_length": LATENT_RANK + ROTATED,
    "attention.value_length": LATENT_RANK,
    "attention.key_length_mla": PLAIN + ROTATED,
    "attention.value_length_mla": VALUE,
    "rope.dimension_count": ROTATED,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.5,
}
_GRANITE: dict[str, Value] = {"logit_scale": 1.5, "residual_scale": 0.7, "embedding_scale": 3.0}
_PARTLY: dict[str, Value] = {"rope.dimension_count": 4}
_FREE: dict[str, Value] = {"attention.key_length": 10, "attention.value_length": 10}
_FREE_HEADS = Sizes(hidden=36, heads=4, kv_heads=2, head=10)
_UNTIED = Sizes(tied=False)
_MHA = Sizes(heads=3, kv_heads=3, head=12)
_UNTIED_MHA = Sizes(heads=3, kv_heads=3, head=12, tied=False)
_TINY_64 = Sizes(layers=64)

FAMILIES: dict[str, Family] = {
    "qwen2": Family("qwen2", _llama_like(bias=True)),
    "qwen2-untied": Family("qwen2", _llama_like(bias=True, output_bias=True), _UNTIED),
    "qwen3": Family("qwen3", _llama_like(head_norms=True), _FREE_HEADS, metadata=_FREE),
    "qwen3-biases": Family("qwen3", _llama_like(bias=True, head_norms=True), _UNTIED),
    "gemma": Family("gemma", _llama_like(), _FREE_HEADS, metadata=_FREE),
    "gemma-biases": Family("gemma", _llama_like(bias=True)),
    "gemma2": Family("gemma2", _post_normed(), _FREE_HEADS, metadata={**_FREE, "attention.sliding_window": 8}),
    "gemma2-27b": Family("gemma2", _post_normed(bias=True), replace(_FREE_HEADS, layers=46), metadata=_FREE),
    "gemma3": Family("gemma3", _post_normed(head_norms=True), _FREE_HEADS, metadata={**_FREE, "attention.sliding_window": 8}),
    "gemma3-27b": Family("gemma3", _post_normed(True, True), replace(_FREE_HEADS, layers=62), metadata=_FREE),
    "gemma3-untied": Family("gemma3", _post_normed(head_norms=True), _UNTIED),
    "phi2": Family("phi2", _gpt("attn_norm", packed=False, output_bias=True), _UNTIED_MHA, LAYER, _PARTLY),
    "phi2-packed": Family("phi2", _gpt("attn_norm", output_bias=True), _UNTIED, LAYER, _PARTLY),
    "phi3": Family("phi3", _phi3(False), _UNTIED),
    "phi3-factors": Family("phi3", _phi3(True), Sizes(), RMS, {**_PARTLY, "rope.scaling.original_context_length": 16}),
    "gpt2": Family("gpt2", _gpt("attn_norm", "ffn_norm", position_embd=CONTEXT), _MHA, LAYER),
    "gpt2-untied": Family("gpt2", _gpt("attn_norm", "ffn_norm", position_embd=CONTEXT), _UNTIED_MHA, LAYER),
    "gptneox": Family("gptneox", _gpt("attn_norm", "ffn_norm"), _UNTIED_MHA, LAYER, {**_PARTLY, "use_parallel_residual": True}),
    "gptneox-serial": Family("gptneox", _gpt("attn_norm", "ffn_norm"), _UNTIED_MHA, LAYER, {"use_parallel_residual": False}),
    "falcon": Family("falcon", _gpt("attn_norm", bias=False), Sizes(kv_heads=1), LAYER),
    "falcon-40b": Family("falcon", _gpt("attn_norm", "attn_norm_2", bias=False), _UNTIED, LAYER),
    "bloom": Family("bloom", _gpt("attn_norm", "ffn_norm", token_embd_norm=0), _MHA, LAYER),
    "starcoder2": Family("starcoder2", _gpt("attn_norm", "ffn_norm", packed=False), Sizes(), LAYER),
    "stablelm": Family("stablelm", _stablelm(False), _UNTIED_MHA, LAYER, _PARTLY),
    "stablelm-parallel": Family("stablelm", _stablelm(True), _UNTIED, LAYER, _PARTLY),
    "command-r": Family("command-r", _command_r, Sizes(), LAYER, {"logit_scale": 0.5}),
    "command-r-plus": Family("command-r", _command_r, _TINY_64, LAYER, {"logit_scale": 0.5}),
    "olmo2": Family("olmo2", _olmo2, _UNTIED),
    "granite": Family("granite", _llama_like(), _FREE_HEADS, metadata={**_GRANITE, **_FREE, "attention.scale": 0.4}),
    "granite-biases": Family("granite", _granite, _UNTIED, metadata=_GRANITE),
    "granitemoe": Family("granitemoe", _granitemoe, _UNTIED, metadata={**_GRANITE, **_ROUTED, **_SHARED}),
    "qwen2moe": Family("qwen2moe", _qwen2moe, _UNTIED, metadata={**_MOE, **_SHARED}),
    "qwen3moe": Family("qwen3moe", _qwen3moe(EXPERT_INNER), _FREE_HEADS, metadata={**_MOE, **_FREE}),
    "qwen3moe-derived": Family("qwen3moe", _qwen3moe(25), _UNTIED, metadata=_ROUTED),
    "deepseek2": Family("deepseek2", _deepseek2(False), Sizes(heads=3, layers=3, tied=False), metadata={**_MLA, **_SIGMOID}),
    "deepseek2-lite": Family("deepseek2", _deepseek2(True), Sizes(heads=3, layers=27), metadata=_MLA),
    "glm4moe": Family("glm4moe", _glm4moe(), replace(_FREE_HEADS, layers=3), metadata=_GLM),
    "bert": Family("bert", _bert(packed=False), _MHA, LAYER),
    "bert-packed": Family("bert", _bert(packed=True), _MHA, LAYER),
    "nomic-bert": Family("nomic-bert", _nomic_bert, _MHA, LAYER),
}  # fmt: skip
# What llama.cpp runs and no map knows, or not in every scaling.
UNKNOWN = {
    "glm4moe-further": Family(
        "glm4moe", _glm4moe(1), replace(_FREE_HEADS, layers=3), metadata={**_GLM, "nextn_predict_layers": 1}
    ),
    "stablelm-heads": Family("stablelm", _stablelm(True, heads=True), _UNTIED, LAYER, _PARTLY),
}
ENCODERS = ("bert", "nomic-bert")


def write(name: str, path: Path) -> Path:
    """The named family's file, float32, the same at every call."""
    return write_family(FAMILIES.get(name) or UNKNOWN[name], path)


def write_family(family: Family, path: Path, kind: gguf.GGMLQuantizationType | None = None) -> Path:
    """A family's file; with a `kind` its matrices are quantised."""
    writer = gguf.GGUFWriter(str(path), family.architecture)
    for key, value in _metadata(family).items():
        add: Any = writer.add_uint32
        if isinstance(value, bool | float):
            add = writer.add_bool if isinstance(value, bool) else writer.add_float32
        add(f"{family.architecture}.{key}", value)
    _add_tokenizer(writer)
    for tensor, shape in family.tensors(family.sizes).items():
        values = drawn(tensor, shape)
        if kind is not None and len(shape) > 1:
            writer.add_tensor(tensor, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(family: Family) -> dict[str, Value]:
    s = family.sizes
    usual: dict[str, Value] = {
        "context_length": CONTEXT,
        "embedding_length": s.hidden,
        "feed_forward_length": s.inner,
        "block_count": s.layers,
        "attention.head_count": s.heads,
        "vocab_size": VOCAB,
        family.epsilon: EPS,
    }
    if s.kv_heads != s.heads:
        usual["attention.head_count_kv"] = s.kv_heads
    if family.architecture in ENCODERS:
        usual |= {"attention.causal": False}
    return usual | dict(family.metadata)


def write_arrays(path: Path, architecture: str, metadata: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """A GGUF of these values, under the architecture's name, and tensors, with a tokenizer."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list | tuple):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    _add_tokenizer(writer)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_type_count(2)


# ggml looks GELU up in a table of halves, so float32 noise makes steps of a thousandth: what is behind it stays small.
_SPREAD = {"attn_output": 0.05, "ffn_down": 0.01, "output": 0.05}


def drawn(tensor: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Random values fit for the tensor's role, by its name alone."""
    generator = np.random.default_rng(zlib.crc32(tensor.encode()))
    noise = generator.standard_normal(shape)
    if "norm" in tensor and tensor.endswith("weight"):
        values = 1 + 0.3 * generator.uniform(-1, 1, shape)
        # Norms behind a branch are small, and tiny in deep models: they must not amplify the steps of ggml's GELU table.
        values *= (0.1 if tensor.split(".")[1] in "01" else 0.02) if "post_" in tensor else 1
    elif "rope_f" in tensor:
        values = generator.uniform(1, 2, shape)
    elif "embd" in tensor or "token_types" in tensor:
        values = 0.05 * noise
    elif tensor.endswith("bias"):
        values = 0.1 * noise
    else:
        values = _SPREAD.get(tensor.split(".")[-2].removesuffix("_exps").removesuffix("_shexp"), 0.25) * noise
    return values.astype(np.float32)
