"""The lossless check can fail: a correctly widened checkpoint, broken in one place, is far outside of the bound.

Narrow checkpoints are float32, as users have them; the bound is above what a rounding of every weight does there
(test_lossless measures at most 3e-6).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
import pytest
import reference
import torch

from widen_cli.convert import prepare
from widen_cli.jobs import Job
from widen_cli.options import Options
from widen_cli.writing import run

BOUND = 1e-5
CLEAR = 100 * BOUND

HEADS_ALONE = "hidden=2,intermediate=3,heads=2,kv_heads=1"
SHARED = "hidden=2,intermediate=3,heads=2"
HEAD_SIZE = "hidden=2,intermediate=3,head_dim=2"

Break = Callable[[reference.Arrays, reference.Config], None]


def eps_times(key: str, factor: float) -> Break:
    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        config[key] *= factor

    return break_it


def times(name: str, factor: float) -> Break:
    """One tensor, off by a factor."""

    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        tensors[name] = tensors[name] * np.float32(factor)

    return break_it


def all_times(pattern: str, factor: float) -> Break:
    """The same mistake in every layer."""

    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        names = [name for name in tensors if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            tensors[name] = tensors[name] * np.float32(factor)

    return break_it


def head_order_tiled(tensors: reference.Arrays, config: reference.Config) -> None:
    """[h1,h1,h2,h2] becomes [h1,h2,h1,h2] in q_proj and, consistently, in o_proj: the key heads no longer fit."""
    heads = config["num_attention_heads"]
    order = np.arange(heads).reshape(-1, 2).T.reshape(-1)
    for name, array in tensors.items():
        if name.endswith("q_proj.weight"):
            tensors[name] = array.reshape(heads, -1, array.shape[1])[order].reshape(array.shape)
        if name.endswith("o_proj.weight"):
            tensors[name] = array.reshape(len(array), heads, -1)[:, order].reshape(array.shape)


def key_tiled_inside_the_heads(tensors: reference.Arrays, config: reference.Config) -> None:
    """[x1,x1,x2,x2] becomes [x1,x2,x1,x2] in the keys, while the queries stay interleaved."""
    for name, array in tensors.items():
        if name.endswith("key.weight"):
            copies = array.reshape(config["num_attention_heads"], -1, 2, array.shape[1])
            tensors[name] = np.swapaxes(copies, 1, 2).reshape(array.shape)


def packed_by_heads(tensors: reference.Arrays, config: reference.Config) -> None:
    """[all q | all k | all v] becomes [q | k | v] of each head, as other families store it."""
    for name, array in tensors.items():
        if name.endswith("c_attn.weight"):
            split = array.reshape(len(array), 3, config["n_head"], -1)
            tensors[name] = np.swapaxes(split, 1, 2).reshape(array.shape)


def row_zeroed(name: str) -> Break:
    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][17] = 0

    return break_it


def element_negated(name: str) -> Break:
    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        tensors[name] = tensors[name].copy()
        largest = np.unravel_index(np.abs(tensors[name]).argmax(), tensors[name].shape)
        tensors[name][largest] *= -1

    return break_it


def theta_times(factor: float) -> Break:
    def break_it(tensors: reference.Arrays, config: reference.Config) -> None:
        config["rope_parameters"]["rope_theta"] *= factor

    return break_it


def new_heads_heard(tensors: reference.Arrays, config: reference.Config) -> None:
    """`quiet` gives new heads zero columns in the output projection; here each repeats its neighbour's."""
    for name, array in tensors.items():
        if name.endswith("o_proj.weight"):
            heads = array.reshape(len(array), config["num_attention_heads"] // 2, 2, -1).copy()
            assert not heads[:, :, 1].any()
            heads[:, :, 1] = heads[:, :, 0]
            tensors[name] = heads.reshape(array.shape)


EMBEDDING = "model.embed_tokens.weight"
BERT_OUT, GPT2_OUT = "encoder.layer.0.output.dense.bias", "transformer.h.0.mlp.c_proj.bias"
# What breaks: (variant, scaling mode, growth, the fault). Hidden is doubled everywhere: 1/sqrt2 is the stream's scale.
BROKEN: dict[str, tuple[str, str, str, Break]] = {
    "eps unscaled, llama": ("llama", "orthogonal", HEADS_ALONE, eps_times("rms_norm_eps", 2)),
    "eps unscaled, gpt2": ("gpt2", "orthogonal", SHARED, eps_times("layer_norm_epsilon", 2)),
    "eps unscaled, bert": ("bert", "orthogonal", SHARED, eps_times("layer_norm_eps", 2)),
    "eps doubled instead of halved": ("llama", "orthogonal", HEADS_ALONE, eps_times("rms_norm_eps", 4)),
    "eps times s instead of s squared": ("gpt2", "orthogonal", SHARED, eps_times("layer_norm_epsilon", 2**0.5)),
    "eps unscaled in sum": ("llama", "sum", "hidden=2,intermediate=2,heads=2", eps_times("rms_norm_eps", 1 / 4)),
    "query heads tiled, 6 over 3": ("llama", "copy", HEADS_ALONE, head_order_tiled),
    "query heads tiled, 6 over 2": ("llama_gqa", "copy", HEADS_ALONE, head_order_tiled),
    "key tiled inside the heads": ("bert", "orthogonal", HEAD_SIZE, key_tiled_inside_the_heads),
    "qkv packed by heads": ("gpt2", "copy", SHARED, packed_by_heads),
    "erratum of the source, bert": ("bert", "orthogonal", SHARED, times(BERT_OUT, 2**-0.5)),
    "erratum of the source, gpt2": ("gpt2", "orthogonal", SHARED, times(GPT2_OUT, 2**-0.5)),
    "erratum of the source, llama": (
        "llama_biases",
        "orthogonal",
        HEADS_ALONE,
        times("model.layers.1.mlp.down_proj.bias", 2**-0.5),
    ),
    "one norm gain unscaled, bert": (
        "bert",
        "orthogonal",
        SHARED,
        times("encoder.layer.0.output.LayerNorm.weight", 2**0.5),
    ),
    "one norm gain unscaled, gpt2": ("gpt2", "orthogonal", SHARED, times("transformer.h.1.ln_2.weight", 2**0.5)),
    "one norm gain unscaled, llama": (
        "llama",
        "orthogonal",
        HEADS_ALONE,
        times("model.layers.0.input_layernorm.weight", 2**0.5),
    ),
    "one norm bias unscaled": ("gpt2", "orthogonal", SHARED, times("transformer.h.0.ln_1.bias", 2**0.5)),
    "tied final norm undone, llama": ("llama_tied", "copy", HEADS_ALONE, times("model.norm.weight", 2)),
    "tied final norm undone, gpt2": ("gpt2", "copy", SHARED, all_times(r"ln_f\.", 2)),
    "tied final norm undone, bert": ("bert_mlm", "copy", SHARED, all_times(r"transform\.LayerNorm\.", 2)),
    "tied final beta alone undone": ("gpt2", "copy", SHARED, times("transformer.ln_f.bias", 2)),
    "one row of the embedding": ("llama", "copy", HEADS_ALONE, row_zeroed(EMBEDDING)),
    "one position": ("bert", "orthogonal", SHARED, row_zeroed("embeddings.position_embeddings.weight")),
    "one element of lm_head": ("llama", "copy", HEADS_ALONE, element_negated("lm_head.weight")),
    "one element of a matrix": (
        "qwen2",
        "orthogonal",
        HEADS_ALONE,
        element_negated("model.layers.0.mlp.up_proj.weight"),
    ),
    "rope_theta changed": ("llama", "copy", HEADS_ALONE, theta_times(1.1)),
    "rope_theta as for a larger head size": ("mistral", "copy", HEADS_ALONE, theta_times(10_000)),
    "value scaled by the heads' factor": ("qwen2", "copy", HEADS_ALONE, all_times(r"v_proj", 2**-0.5)),
    "key scaled as the query": ("bert", "orthogonal", HEAD_SIZE, all_times(r"self\.key\.weight", 2**0.25)),
    "new heads heard in quiet": ("llama", "quiet", HEADS_ALONE, new_heads_heard),
}


def widened(variant: str, mode: str, growth: str, folder: Path) -> Job:
    models.save(variant, folder / "narrow")
    job = prepare(
        Options(input=str(folder / "narrow"), output=str(folder / "wide"), grow=models.by_factors(growth), scaling=mode)
    )
    run(job, lambda nbytes: None)
    return job


def error(job: Job, narrow: models.Outputs, folder: Path) -> float:
    scales = job.plan.scales
    scale = float(scales["final"] if "final" in scales else scales["hidden"])
    return models.relative_error(narrow, models.outputs(folder, torch.float64), scale)


@pytest.mark.parametrize("name", BROKEN)
def test_fault_shows(name: str, tmp_path: Path) -> None:
    variant, mode, growth, break_it = BROKEN[name]
    job = widened(variant, mode, growth, tmp_path)
    narrow = models.outputs(tmp_path / "narrow", torch.float64)
    right = error(job, narrow, tmp_path / "wide")
    tensors, config = reference.read(tmp_path / "wide")
    break_it(tensors, config)
    contiguous = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    wrong = error(job, narrow, reference.write(tmp_path / "broken", contiguous, config))
    print(f"{name}: {right:.1e} -> {wrong:.1e}")
    assert right <= BOUND
    assert wrong > CLEAR


def test_rewriting_alone_breaks_nothing(tmp_path: Path) -> None:
    """What the faults are written with changes no byte of a tensor: the errors come from the faults."""
    job = widened("llama", "orthogonal", HEADS_ALONE, tmp_path)
    rewritten = reference.write(tmp_path / "rewritten", *reference.read(tmp_path / "wide"))
    narrow = models.outputs(tmp_path / "narrow", torch.float64)
    assert error(job, narrow, rewritten) == error(job, narrow, tmp_path / "wide")
