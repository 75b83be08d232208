"""A stream four times as wide, the new part zero: what growth trees can say beyond repeats, bit for bit in llama.cpp.

RMSNorm divides by the root of the mean square. Over four times as many values, three quarters of them zero, that root is
half as large if the epsilon is a quarter; gains of one half undo it. All factors are powers of two and all new blocks zero,
so no bit of any log-probability may move.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_oracle import read
from llama_cpp import LogProbabilities, log_probabilities
from test_gguf_lossless import EPS, PROMPTS, SMOLLM

from widen_cli.convert import prepare
from widen_cli.dimensions import Copies, Growth
from widen_cli.jobs import Job
from widen_cli.options import Options
from widen_cli.plan import TensorPlan
from widen_cli.plan.result import ConfigChange
from widen_cli.scales import Scale
from widen_cli.shards import output_shards
from widen_cli.writing import run

HIDDEN = 576
GAINS = ("attn_norm.weight", "ffn_norm.weight", "output_norm.weight")


def padded(node: Growth) -> Growth:
    """The stream behind three quarters of zeros: a block of Q4_1 has no code for zero, so they stand in blocks of their own."""
    if (node.old, node.new) != (HIDDEN, 4 * HIDDEN):
        return node
    return Copies(1, 4, first_only=True, inner=Copies(HIDDEN))


def padded_plan(plan: TensorPlan) -> TensorPlan:
    assert plan.growth is not None
    scale = Scale.of(2) ** -1 if plan.source.name.endswith(GAINS) else Scale()
    return replace(plan, growth=tuple(padded(node) for node in plan.growth), scale=scale)


def padded_job(out: Path) -> Job:
    """The plan of a run that repeats the stream, with other trees, other factors and another epsilon."""
    job = prepare(Options(str(SMOLLM), str(out), grow="hidden=4", scaling="copy", layout="tile", threads=2))
    old = job.checkpoint.config.get("attention.layer_norm_rms_epsilon")
    epsilon = ConfigChange("attention.layer_norm_rms_epsilon", old, old / 4, "exact")
    plan = replace(job.plan, tensors=tuple(map(padded_plan, job.plan.tensors)), config=(*job.plan.config, epsilon))
    shards = output_shards(plan, job.checkpoint, str(SMOLLM), str(out), None, False)
    return replace(job, plan=plan, shards=shards)


@pytest.fixture(scope="module")
def wide() -> Iterator[Path]:
    """SmolLM2, its largest file in these tests: gone behind them."""
    with tempfile.TemporaryDirectory() as folder:
        report = run(padded_job(Path(folder, "wide.gguf")), lambda nbytes: None)
        assert report.total.rounded == 0
        yield Path(folder, "wide.gguf")


@pytest.fixture(scope="module")
def spoken() -> LogProbabilities:
    return log_probabilities(SMOLLM, PROMPTS[:2])


def test_old_values_and_zeros(wide: Path) -> None:
    """Rows and blocks of the old file, bit for bit, and nothing but zero bytes beside them."""
    old, new = read(SMOLLM), read(wide)
    assert new.number("llama.embedding_length") == 4 * HIDDEN
    assert list(new.tensors) == list(old.tensors)
    for name, tensor in old.tensors.items():
        rows, columns = (
            4 if size == HIDDEN else 1 for size in (tensor.shape[0] if len(tensor.shape) > 1 else 1, tensor.shape[-1])
        )
        if "attn_q.weight" in name or "attn_output" in name:
            rows, columns = (1, 4) if "attn_q" in name else (4, 1)  # its heads make as many values as the stream has
        expected = np.zeros((rows * len(tensor.rows), columns * tensor.rows.shape[1]), np.uint8)
        values = tensor.rows if not name.endswith(GAINS) else (tensor.values() / 2).view(np.uint8)
        expected[: len(tensor.rows), : tensor.rows.shape[1]] = values
        assert np.array_equal(new.tensors[name].rows, expected), name


def test_no_bit_moves_in_llama_cpp(wide: Path, spoken: LogProbabilities) -> None:
    assert np.array_equal(log_probabilities(wide, PROMPTS[:2]), spoken)


def test_the_old_epsilon_moves_some(wide: Path, spoken: LogProbabilities) -> None:
    file = read(wide, "r+")
    kept = bytes(file.data[file.places[EPS] :][:4])
    old = read(SMOLLM).number(EPS)
    assert struct.unpack("<f", kept)[0] == old / 4
    try:
        file.data[file.places[EPS] :][:4] = np.frombuffer(struct.pack("<f", old), np.uint8)
        assert not np.array_equal(log_probabilities(wide, PROMPTS[:2]), spoken)
    finally:
        file.data[file.places[EPS] :][:4] = np.frombuffer(kept, np.uint8)
