"""An independent oracle: LLaMA, GPT-2 and BERT widened with np.repeat in float64, straight from the law.

It shares no code with the tool and is meant to be read beside design section 2: a weight is repeated along its grown
axes and multiplied by s of the space it writes and by 1/(r*s) of the space it reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Arrays = dict[str, np.ndarray]
Config = dict[str, Any]

# The axes a space lies on. `attended` has the scale of `value`, `branch` is what a norm hands to a sub-layer,
# `pooled` stands behind a tanh or a GELU, `final` feeds the head (or is the output of a bare model).
SPACES = {
    "fixed": (),
    "stream": ("hidden",),
    "branch": ("hidden",),
    "final": ("hidden",),
    "pooled": ("hidden",),
    "unit": ("intermediate",),
    "query": ("heads", "head_dim"),
    "key": ("kv_heads", "head_dim"),
    "value": ("kv_heads", "head_dim"),
    "attended": ("heads", "head_dim"),
}

# Name pattern: (space read, spaces written). Vectors read nothing; three written spaces are packed side by side.
LLAMA = {
    r"embed_tokens\.weight": ("fixed", "stream"),
    r"(input|post_attention)_layernorm\.weight": ("fixed", "branch"),
    r"q_proj\.weight": ("branch", "query"),
    r"k_proj\.weight": ("branch", "key"),
    r"v_proj\.weight": ("branch", "value"),
    r"o_proj\.weight": ("attended", "stream"),
    r"(gate|up)_proj\.weight": ("branch", "unit"),
    r"down_proj\.weight": ("unit", "stream"),
    r"(^|model\.)norm\.weight": ("fixed", "final"),
    r"(lm_head|score)\.weight": ("final", "fixed"),
}
GPT2 = {
    r"w[tp]e\.weight": ("fixed", "stream"),
    r"ln_[12]\.weight": ("fixed", "branch"),
    r"attn\.c_attn\.weight": ("branch", "query", "key", "value"),
    r"attn\.c_proj\.weight": ("attended", "stream"),
    r"mlp\.c_fc\.weight": ("branch", "unit"),
    r"mlp\.c_proj\.weight": ("unit", "stream"),
    r"ln_f\.weight": ("fixed", "final"),
    r"(lm_head|score)\.weight": ("final", "fixed"),
}
BERT = {
    r"_embeddings\.weight": ("fixed", "stream"),
    r"(embeddings|output)\.LayerNorm\.weight": ("fixed", "stream"),
    r"self\.query\.weight": ("stream", "query"),
    r"self\.key\.weight": ("stream", "key"),
    r"self\.value\.weight": ("stream", "value"),
    r"attention\.output\.dense\.weight": ("attended", "stream"),
    r"intermediate\.dense\.weight": ("stream", "unit"),
    r"\d\.output\.dense\.weight": ("unit", "stream"),
    r"(pooler|transform)\.dense\.weight": ("stream", "pooled"),
    r"transform\.LayerNorm\.weight": ("fixed", "final"),
    r"decoder\.weight": ("final", "fixed"),
    r"predictions\.weight": ("fixed", "fixed"),
    r"seq_relationship\.weight": ("pooled", "fixed"),
}
# (rules, config keys of the axes, key of eps, whether the heads are tied unless the config says otherwise)
_MODERN_KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
_GPT2_KEYS = {"hidden": "n_embd", "intermediate": "n_inner", "heads": "n_head"}
FAMILIES = {
    "llama": (LLAMA, _MODERN_KEYS, "rms_norm_eps", False),
    "gpt2": (GPT2, _GPT2_KEYS, "layer_norm_epsilon", True),
    "bert": (BERT, {axis: _MODERN_KEYS[axis] for axis in ("hidden", "intermediate", "heads")}, "layer_norm_eps", True),
}


@dataclass
class Law:
    """Sizes and growth of every axis, and the scale of every space."""

    sizes: dict[str, int]
    growth: dict[str, int]
    scales: dict[str, float]

    def repeated(self, array: np.ndarray, axis: int, space: str) -> np.ndarray:
        """`array` with one stored axis repeated in place, heads and positions inside a head each by their factor."""
        names = SPACES[space]
        if not names:
            return array
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        array = array.reshape(*before, *(self.sizes[name] for name in names), *after)
        for offset, name in enumerate(names):
            array = np.repeat(array, self.growth[name], axis + offset)
        return array.reshape(*before, -1, *after)

    def factor(self, reads: str, writes: str) -> float:
        copies = math.prod(self.growth[axis] for axis in SPACES[reads])
        return self.scales[writes] / (copies * self.scales[reads])

    def widened(self, array: np.ndarray, reads: str, writes: tuple[str, ...], reads_first: bool) -> np.ndarray:
        """One tensor; `reads_first` says that it is stored as [read, written] (Embedding, Conv1D)."""
        if array.ndim == 1:
            reads = "fixed"
        elif not reads_first:
            return self.widened(array.T, reads, writes, True).T
        else:
            array = self.repeated(array, 0, reads)
        parts = np.split(array, len(writes), axis=-1)
        grown = [
            self.repeated(part, part.ndim - 1, space) * self.factor(reads, space)
            for part, space in zip(parts, writes, strict=True)
        ]
        return np.concatenate(grown, axis=-1)


def law_of(config: Config, growth: Mapping[str, int], mode: str) -> Law:
    """The axes' sizes from the config and the scales of `copy` (all free ones 1) or `orthogonal` (1/sqrt r)."""
    _, keys, _, tied_default = FAMILIES[config["model_type"]]
    sizes = {axis: config.get(key) for axis, key in keys.items()}
    sizes["kv_heads"] = sizes.get("kv_heads") or sizes["heads"]
    sizes["intermediate"] = sizes["intermediate"] or 4 * sizes["hidden"]
    sizes["head_dim"] = config.get("head_dim") or sizes["hidden"] // sizes["heads"]
    r = {"kv_heads": growth["heads"], "head_dim": 1, **growth}

    stream = {"copy": 1.0, "orthogonal": r["hidden"] ** -0.5}[mode]
    value = {"copy": 1.0, "orthogonal": (r["kv_heads"] * r["head_dim"]) ** -0.5}[mode]
    # q.k sums r copies; the softmax divides by sqrt(r * d), or by nothing in an unscaled GPT-2.
    match = r["head_dim"] ** (-0.25 if config.get("scale_attn_weights", True) else -0.5)
    scales = dict.fromkeys(SPACES, 1.0) | {"stream": stream, "branch": stream, "final": stream}
    scales |= {"query": match, "key": match, "value": value, "attended": value}
    has_head = re.search("ForCausalLM|LMHead|ForMaskedLM|ForPreTraining", config["architectures"][0])
    if has_head and config.get("tie_word_embeddings", tied_default):
        scales["final"] = 1 / (r["hidden"] * stream)
    return Law(sizes, r, scales)


def widened_config(config: Config, law: Law) -> Config:
    """The config of the wide model: sizes, and eps times the square of the scale of what the norms read."""
    _, keys, eps, _ = FAMILIES[config["model_type"]]
    grown = {key: law.sizes[axis] * law.growth[axis] for axis, key in keys.items()}
    if "head_dim" in config:
        grown["head_dim"] = law.sizes["head_dim"] * law.growth["head_dim"]
    return config | grown | {eps: config[eps] * law.scales["stream"] ** 2}


def widen(tensors: Arrays, config: Config, growth: Mapping[str, int], mode: str) -> tuple[Arrays, Config]:
    """Wide tensors and config. `growth` has `hidden`, `intermediate`, `heads`, and if wanted `kv_heads`, `head_dim`."""
    law = law_of(config, growth, mode)
    rules = dict(FAMILIES[config["model_type"]][0])
    pooled = config["architectures"][0].endswith("SequenceClassification")
    rules[r"^classifier\.weight"] = ("pooled" if pooled else "stream", "fixed")
    rules[r"^qa_outputs\.weight"] = ("stream", "fixed")
    wide = {}
    for name, array in tensors.items():
        pattern = re.sub("bias$", "weight", name)
        reads, *writes = next(rule for known, rule in rules.items() if re.search(known + "$", pattern))
        conv1d = config["model_type"] == "gpt2" and bool(re.search(r"\.c_\w+\.weight$", name))
        stored = reads == "fixed" or conv1d
        wide[name] = np.ascontiguousarray(law.widened(array.astype(np.float64), reads, tuple(writes), stored))
    return wide, widened_config(config, law)


def read(folder: Path) -> tuple[Arrays, Config]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def write(folder: Path, tensors: Arrays, config: Config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
