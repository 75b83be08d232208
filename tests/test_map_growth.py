"""Maps of a few lines, each with one way for axes to be tied or laws to be stated, planned from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from widen_cli.config import ModelConfig
from widen_cli.dtypes import STORED, DType
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
