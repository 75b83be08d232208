"""Maps of a few lines, each with one way for axes to be tied or laws to be stated, planned from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from widen_cli.config import ModelConfig
from widen_cli.dtypes import STORED, DType
from widen_cli.errors import WidenError
from widen_cli.maps import load_map
from widen_cli.plan import Plan, PlanRequest, make_plan


@dataclass(frozen=True)
class Header:
    name: str
    dtype: DType
    shape: tuple[int, ...]


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Plans the checkpoint `tensors` (name: shape) under the map in `text`."""

    def plan(
        text: str,
        tensors: Mapping[str, Sequence[int]],
        config: Mapping[str, Any],
        *,
        grow: Mapping[str, int] | None = None,
        factor: int | None = None,
        scaling: str = "copy",
        dtype: str = "F32",
    ) -> Plan:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        headers = [Header(name, STORED[dtype], tuple(shape)) for name, shape in tensors.items()]
        request = PlanRequest("in", factor, dict(grow or {}), scaling)
        return make_plan(load_map(path), headers, ModelConfig(dict(config), "config.json"), request)

    return plan


def grown(plan: Plan) -> dict[str, int]:
    return {axis: factor for axis, factor in plan.factors.items() if factor != 1}


LONE_HEADS = """\
architecture: lone
axes:
  hidden:   {key: hidden}
  heads:    {key: heads, fixed: true}
  head_dim: {size: hidden / heads}
growth: {width: [hidden], heads: [], head_dim: head_dim}
spaces: {query: head_dim, key: head_dim, value: head_dim, scores: softmax(query @ key / sqrt(head_dim))}
tensors:
  qkv: (heads query | heads key | heads value) <- hidden
  out: hidden <- (heads value)
"""


@pytest.mark.parametrize("asked", [{"factor": 2}, {"grow": {"hidden": 2}}, {"grow": {"head_dim": 2}}])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_heads_that_never_grow_leave_the_head_size(planned: Callable[..., Plan], asked: Any, dtype: str) -> None:
    plan = planned(LONE_HEADS, {"qkv": [36, 12], "out": [12, 12]}, {"hidden": 12, "heads": 3}, dtype=dtype, **asked)
    assert grown(plan) == {"hidden": 2, "head_dim": 2}
    assert [tensor.shape for tensor in plan.tensors] == [(72, 24), (24, 24)]


NORMS = """\
architecture: norms
config: {eps: 1e-3, own_eps: 2e-3, head_eps: 3e-3}
axes:
  vocab:  {key: vocab, fixed: true}
  hidden: {key: hidden}
growth: {width: [hidden]}
output: final
spaces:
  unseen: norm(hidden, eps)          # no gain, and no weight reads it as it is
  told:   tanh(unseen)
  gained: norm(hidden, own_eps)
  final:  norm(hidden, head_eps)
tensors:
  embed:  vocab -> hidden
  own?:   -> gained
  head?:  vocab <- told
  last?:  vocab <- final
"""
SHAPES = {"embed": [7, 6]}


def epsilons(plan: Plan) -> dict[str, float]:
    return {change.key: change.new for change in plan.config if change.key.endswith("eps")}


@pytest.mark.parametrize(
    ("spaces", "tensors", "expected"),
    [
        # What a stored weight reads comes out of the norm; the model's output is there without a weight too.
        (None, {"head": [7, 6]}, {"eps": 5e-4, "head_eps": 1.5e-3}),
        (None, {}, {"head_eps": 1.5e-3}),
        # The gain is stored, so the norm is there; without it, it is not.
        (None, {"own": [6]}, {"own_eps": 1e-3, "head_eps": 1.5e-3}),
        # Nothing in the map could tell whether the norm is there: its law holds always.
        ("  told:   tanh(hidden)\n", {}, {"eps": 5e-4, "head_eps": 1.5e-3}),
        # Of `a if c else b` the branch that is taken counts.
        ("  told:   hidden if vocab == 7 else tanh(unseen)\n", {"head": [7, 6]}, {"head_eps": 1.5e-3}),
        ("  told:   hidden if vocab == 8 else tanh(unseen)\n", {"head": [7, 6]}, {"eps": 5e-4, "head_eps": 1.5e-3}),
    ],
)
def test_a_norm_counts_whether_or_not_a_tensor_names_its_output(
    planned: Callable[..., Plan], spaces: str | None, tensors: dict[str, list[int]], expected: dict[str, float]
) -> None:
    """The stream has 1/sqrt(2), so each epsilon that reads it is halved."""
    text = NORMS.replace("  told:   tanh(unseen)\n", spaces) if spaces else NORMS
    plan = planned(text, {**SHAPES, **tensors}, {"vocab": 7, "hidden": 6}, factor=2, scaling="orthogonal")
    assert str(plan.scales["hidden"]) == "1/sqrt(2)"
    assert epsilons(plan) == pytest.approx(expected)


NESTED = """\
architecture: nested
config: {text.act: relu, text.eps: 1e-3}
axes: {hidden: {key: text.hidden}, inner: {key: text.inner}}
growth: {width: [hidden, inner]}
spaces: {normed: "norm(hidden, text.eps)", unit: inner, acted: text.act(unit)}
tensors: {gain: -> normed, up: unit <- normed, down: hidden <- acted}
"""


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        # The source's tables: a ReLU lets 1/sqrt(2) through, a GELU keeps 1.
        ({"act": "relu"}, ["1/sqrt(2)", "1/2", "1/2"]),
        ({"act": "gelu"}, ["1/sqrt(2)", "1/sqrt(2)", "1/(2 sqrt(2))"]),
        ({}, ["1/sqrt(2)", "1/2", "1/2"]),
    ],
)
def test_an_activation_named_by_a_nested_key(
    planned: Callable[..., Plan], text: dict[str, str], factors: list[str]
) -> None:
    config = {"text": {"hidden": 6, "inner": 5, **text}}
    plan = planned(NESTED, {"gain": [6], "up": [5, 6], "down": [6, 5]}, config, factor=2, scaling="orthogonal")
    assert [str(tensor.scales[0]) for tensor in plan.tensors] == factors


TIED = """\
architecture: tied
config: {expand: 2, sharp: false}
axes:
  hidden:   {key: hidden}
  embed:    {key: embed, else: hidden}
  heads:    {key: heads}
  head_dim: {key: head_dim}
growth: {width: [hidden], heads: [heads], head_dim: head_dim}
requires: [embed == hidden, 'not sharp or expand * hidden == heads * head_dim', hidden % 3 == 0]
tensors: {up: hidden <- embed, mix: hidden <- (heads head_dim)}
"""
EQUAL = {"hidden": 6, "embed": 6, "heads": 3, "head_dim": 4, "sharp": True}
APART = {**EQUAL, "hidden": 12, "embed": 24}
EMBED, HEADS = "embed == hidden", "expand * hidden == heads * head_dim"


@pytest.mark.parametrize(
    ("config", "asked", "expected", "causes"),
    [
        # What is not asked for follows, from either side; attention by the way the family's default takes.
        (EQUAL, {"grow": {"hidden": 2}}, {"hidden": 2, "embed": 2, "head_dim": 2}, {"embed": EMBED, "head_dim": HEADS}),
        (EQUAL, {"grow": {"embed": 3}}, {"hidden": 3, "embed": 3, "head_dim": 3}, {"hidden": EMBED, "head_dim": HEADS}),
        (EQUAL, {"grow": {"heads": 2}}, {"hidden": 2, "embed": 2, "heads": 2}, {"hidden": HEADS, "embed": EMBED}),
        (EQUAL, {"factor": 2}, {"hidden": 2, "embed": 2, "head_dim": 2}, {"embed": EMBED}),
        (
            EQUAL,
            {"factor": 2, "grow": {"hidden": 6, "heads": 2}},
            {"hidden": 6, "embed": 6, "heads": 2, "head_dim": 3},
            {"embed": EMBED, "head_dim": HEADS},
        ),
        # An equation binds where it holds in the narrow model, and where nothing else meets the requirement.
        (APART, {"grow": {"hidden": 2}}, {"hidden": 2}, {}),
        ({**EQUAL, "sharp": False}, {"grow": {"hidden": 2}}, {"hidden": 2, "embed": 2}, {"embed": EMBED}),
    ],
)
def test_what_has_to_stay_equal_follows(
    planned: Callable[..., Plan], config: Any, asked: Any, expected: dict[str, int], causes: dict[str, str]
) -> None:
    shapes = {"up": [config["hidden"], config["embed"]], "mix": [config["hidden"], 12]}
    plan = planned(TIED, shapes, config, **asked)
    assert grown(plan) == expected
    assert set(plan.notes) == {f"{axis} grows {expected[axis]}x, since {text}" for axis, text in causes.items()}


def test_half_precision_follows_by_heads(planned: Callable[..., Plan]) -> None:
    plan = planned(TIED, {"up": [6, 6], "mix": [6, 12]}, EQUAL, grow={"hidden": 2}, dtype="BF16")
    assert grown(plan) == {"hidden": 2, "embed": 2, "heads": 2}


@pytest.mark.parametrize(
    ("grow", "message"),
    [
        (
            {"hidden": 2, "embed": 3},
            "--grow embed=3,hidden=2: 'tied' needs embed == hidden; give factors that keep both sides equal, or leave "
            "one out, so that it follows",
        ),
        (
            {"hidden": 2, "heads": 3},
            f"--grow hidden=2,heads=3: 'tied' needs {HEADS}; give factors that keep both sides equal, or leave one out, "
            "so that it follows",
        ),
    ],
)
def test_requests_that_contradict_an_equation(planned: Callable[..., Plan], grow: Any, message: str) -> None:
    with pytest.raises(WidenError) as caught:
        planned(TIED, {"up": [6, 6], "mix": [6, 12]}, EQUAL, grow=grow)
    assert caught.value.faults == (message,)


LAST = """\
architecture: last
prefixes: {model.: [""]}
repeats: {model.layers.*: layers}
config: {eps: 1e-3}
axes: {hidden: {key: hidden}, vocab: {key: vocab, fixed: true}}
growth: {width: [hidden]}
spaces: {final: "norm(hidden, eps)"}
tensors:
  model.layers.-1.norm: -> final
  model.layers.*.norm:  -> hidden
  head:                 vocab <- final
"""


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("config", [{"layers": 11}, {}])
def test_a_rule_for_the_last_layer(planned: Callable[..., Plan], prefix: str, config: dict[str, int]) -> None:
    """By the config's count, and where it says none by the highest number."""
    shapes = {f"{prefix}layers.{n}.norm": [6] for n in range(11)}
    plan = planned(LAST, {**shapes, "head": [7, 6]}, {"hidden": 6, "vocab": 7, **config}, factor=2, scaling="quiet")
    told = {tensor.source.name: str(tensor.scales[0]) for tensor in plan.tensors}
    assert told == {**dict.fromkeys(shapes, "1"), f"{prefix}layers.10.norm": "1/2", "head": "1"}


@pytest.mark.parametrize("absent", [3, 10])
def test_a_layer_that_is_missing_is_named(planned: Callable[..., Plan], absent: int) -> None:
    shapes = {f"model.layers.{n}.norm": [6] for n in range(11) if n != absent}
    with pytest.raises(WidenError) as caught:
        planned(LAST, {**shapes, "head": [7, 6]}, {"hidden": 6, "vocab": 7, "layers": 11}, factor=2)
    assert caught.value.faults == (
        f"in: tensor 'model.layers.{absent}.norm' is missing; the file is incomplete, or the config belongs to another model",
    )


def test_the_last_of_layers_that_nothing_counts(planned: Callable[..., Plan]) -> None:
    with pytest.raises(WidenError) as caught:
        planned(LAST.replace("repeats: {model.layers.*: layers}\n", ""), {}, {})
    assert caught.value.faults == (
        "small.yaml:8:3: 'repeats' does not count the layers of which 'model.layers.-1.norm' names the last",
    )
