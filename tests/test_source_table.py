"""The factors of the source (Su Jianlin, 2021) for a doubled width, in the plan and in the written values.

The numbers below are typed from the table of the article as design section 2 prints it, not computed by the law.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from widen_cli.convert import prepare
from widen_cli.jobs import Job
from widen_cli.options import Options
from widen_cli.scales import Scale
from widen_cli.writing import run


@dataclass(frozen=True)
class Factor:
    """A number of the table: as a person writes it, and in more digits than float64 has."""

    text: str
    number: np.longdouble


SQRT2 = np.sqrt(np.longdouble(2))
ROOT = Factor("1/sqrt(2)", 1 / SQRT2)
HALF = Factor("1/2", np.longdouble(1) / 2)
ONE = Factor("1", np.longdouble(1))
QUERY_WEIGHT = Factor("2^(-3/4)", np.sqrt(SQRT2) / 2)  # 2^(1/4)/2
QUERY_BIAS = Factor("2^(-1/4)", np.sqrt(SQRT2) / SQRT2)  # 2^(1/4)/sqrt2
GELU_OUT = Factor("1/(2 sqrt(2))", 1 / (2 * SQRT2))

# Group of the table: {pattern of names: factors}; several factors belong to equal parts of the output axis.
BERT = {
    "embedding, norm gain and bias, bias into the stream": {
        r"embeddings\..*_embeddings\.weight": [ROOT],
        r"LayerNorm\.(weight|bias)": [ROOT],
        r"attention\.output\.dense\.bias": [ROOT],
    },
    "query, key: head size doubled": {
        r"self\.(query|key)\.weight": [QUERY_WEIGHT],
        r"self\.(query|key)\.bias": [QUERY_BIAS],
    },
    "value, output projection: linear from stream to stream": {
        r"self\.value\.weight": [HALF],
        r"self\.value\.bias": [ROOT],
        r"attention\.output\.dense\.weight": [HALF],
    },
    # tanh is no homogeneous function, so the pooler's first half is that of a GELU layer.
    "pooler": {r"pooler\.dense\.weight": [ROOT], r"pooler\.dense\.bias": [ONE]},
}
GELU_FFN = {
    "GELU FFN, first layer": {
        r"\.intermediate\.dense\.weight": [ROOT],
        r"\.intermediate\.dense\.bias": [ONE],
    },
    # The article prints 1/2 for this bias: its erratum.
    "GELU FFN, second layer": {r"\d\.output\.dense\.weight": [GELU_OUT], r"\d\.output\.dense\.bias": [ROOT]},
}
RELU_FFN = {
    "ReLU FFN, first layer": {
        r"\.intermediate\.dense\.weight": [HALF],
        r"\.intermediate\.dense\.bias": [ROOT],
    },
    "ReLU FFN, second layer": {r"\d\.output\.dense\.weight": [HALF], r"\d\.output\.dense\.bias": [ROOT]},
}
GPT2 = {
    "embedding, norm gain and bias, bias into the stream": {
        r"w[tp]e\.weight": [ROOT],
        r"ln_[12f]\.(weight|bias)": [ROOT],
        r"c_proj\.bias": [ROOT],
    },
    "query, key, value packed": {
        r"attn\.c_attn\.weight": [QUERY_WEIGHT, QUERY_WEIGHT, HALF],
        r"attn\.c_attn\.bias": [QUERY_BIAS, QUERY_BIAS, ROOT],
    },
    "output projection": {r"attn\.c_proj\.weight": [HALF]},
    "GELU FFN, first layer": {r"mlp\.c_fc\.weight": [ROOT], r"mlp\.c_fc\.bias": [ONE]},
    "GELU FFN, second layer": {r"mlp\.c_proj\.weight": [GELU_OUT]},
}
TABLES = {
    "bert": BERT | GELU_FFN,
    "bert_relu": BERT | RELU_FFN,
    "gpt2": GPT2,
    # An untied head reads the final norm's output, r copies of x / sqrt 2, and writes logits that stay what they are.
    "gpt2_untied": GPT2 | {"head": {r"lm_head\.weight": [ROOT]}},
}
GROUPS = [(variant, group) for variant, table in TABLES.items() for group in table]


def doubled(variant: str, folder: Path) -> Job:
    models.save(variant, folder / "narrow", torch.float32)
    options = Options(
        input=str(folder / "narrow"),
        output=str(folder / "wide"),
        grow="hidden=2,intermediate=2,head_dim=2",
        scaling="orthogonal",
    )
    job = prepare(options)
    run(job, lambda nbytes: None)
    return job


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Every model of the tables, widened in float32 by the source's choices."""
    return {variant: doubled(variant, tmp_path_factory.mktemp(variant)) for variant in TABLES}


def planned(job: Job, pattern: str) -> dict[str, tuple[Scale, ...]]:
    return {t.source.name: t.scales for t in job.plan.tensors if re.search(f"{pattern}$", t.source.name)}


def expected(variant: str, name: str) -> list[Factor]:
    """The factors of a tensor's equal parts; every tensor stands in exactly one line of the table."""
    (found,) = [f for group in TABLES[variant].values() for p, f in group.items() if re.search(f"{p}$", name)]
    return found


@pytest.mark.parametrize(("variant", "group"), GROUPS, ids=[": ".join(pair) for pair in GROUPS])
def test_plan_has_the_factors_of_the_table(variant: str, group: str, jobs: dict[str, Job]) -> None:
    for pattern, factors in TABLES[variant][group].items():
        found = planned(jobs[variant], pattern)
        assert found, f"no tensor is called {pattern}"
        wanted = list(dict.fromkeys(factors))
        for name, scales in found.items():
            assert [str(scale) for scale in scales] == [factor.text for factor in wanted], name
            for scale, factor in zip(scales, wanted, strict=True):
                # Each of two nested roots is rounded to nearest: a unit in the last place at most.
                assert math.isclose(float(scale), factor.number, rel_tol=2.0**-52), name


@pytest.mark.parametrize("variant", TABLES)
def test_every_tensor_stands_in_the_table(variant: str, jobs: dict[str, Job]) -> None:
    for tensor in jobs[variant].plan.tensors:
        assert expected(variant, tensor.source.name)


@pytest.mark.parametrize(
    ("variant", "key"),
    [("bert", "layer_norm_eps"), ("bert_relu", "layer_norm_eps"), ("gpt2", "layer_norm_epsilon")],
)
def test_epsilon_is_halved(variant: str, key: str, jobs: dict[str, Job]) -> None:
    """It stands under the root, so it carries the square of the stream's 1/sqrt2."""
    (change,) = [change for change in jobs[variant].plan.config if change.key == key]
    assert (change.old, change.new) == (models.EPS, models.EPS / 2)


@pytest.mark.parametrize("variant", TABLES)
def test_written_values_are_the_table_times_the_narrow_ones(variant: str, jobs: dict[str, Job]) -> None:
    """Repeated along every grown axis, multiplied in long double and rounded once: also what no output can see."""
    options = jobs[variant].options
    narrow = load_file(Path(options.input) / "model.safetensors")
    wide = load_file(Path(options.output) / "model.safetensors")
    assert narrow.keys() == wide.keys()
    for name, array in narrow.items():
        factors = expected(variant, name)
        # GPT-2 packs along its last axis; elsewhere there is one part.
        parts = [
            part.astype(np.longdouble) * factor.number
            for part, factor in zip(np.split(array, len(factors), axis=-1), factors, strict=True)
        ]
        product = np.concatenate(parts, axis=-1).astype(np.float32)
        np.testing.assert_array_equal(wide[name], doubled_where_grown(product, wide[name].shape), err_msg=name)


def doubled_where_grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Every entry twice in a row along each axis that is twice as long; [x1,x2] inside a head is [x1,x1,x2,x2] too."""
    for axis, (old, new) in enumerate(zip(array.shape, shape, strict=True)):
        array = np.repeat(array, new // old, axis)
    return array


@pytest.mark.parametrize(
    ("variant", "name", "part"),
    [
        ("bert", "encoder.layer.1.attention.self.key.bias", slice(None)),
        ("gpt2", "transformer.h.1.attn.c_attn.bias", slice(36, 72)),
    ],
)
def test_key_bias_which_no_output_sees(variant: str, name: str, part: slice, jobs: dict[str, Job]) -> None:
    """The softmax removes what a key bias adds, so only the stored values tell whether it is right."""
    options = jobs[variant].options
    narrow = load_file(Path(options.input) / "model.safetensors")[name][part]
    wide = load_file(Path(options.output) / "model.safetensors")[name][2 * (part.start or 0) :][: 2 * len(narrow)]
    assert np.abs(narrow).min() > 0
    np.testing.assert_array_equal(wide, np.repeat((narrow.astype(np.float64) * 2.0**-0.25).astype(np.float32), 2))
    assert not np.array_equal(wide, np.repeat(narrow, 2))
