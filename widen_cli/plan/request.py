"""What is asked of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from widen_cli.plan.factors import Factor
from widen_cli.plan.filling import COPY
from widen_cli.plan.layer_growth import LayerGrowth
from widen_cli.plan.splits import Asked
from widen_cli.plan.wishes import Wish
from widen_cli.plan.written import WrittenTypes
from widen_cli.scales import Scale


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for and, in `settings`, said of the model; `file` is the input's name in messages.

    `root` stands in front of all tensor names that the map knows. `times` are factors of their own on
    tensors, by name; `layers` is what grows in some layers only. `approximate`: another function may come of it. With
    `gradients` the plan says what becomes of these too.

    `back`: of a model that was made before, whose types may be others since: they do not rule out the layout that was taken.
    `scalars` are the tensors that took factors in place of weights then, None where that is not known. `alone`: a growth that
    is only tried, for an offer.
    """

    file: str
    factor: int | None = None
    grow: Mapping[str, Wish | Factor] = field(default_factory=dict)
    scaling: str = "auto"
    types: WrittenTypes = field(default_factory=WrittenTypes)
    settings: dict[str, Any] = field(default_factory=dict)
    layout: str = "auto"
    rope: str | None = None
    approximate: bool = False
    root: str = ""
    untie: bool = False
    times: dict[str, Scale] = field(default_factory=dict)
    layers: tuple[LayerGrowth, ...] = ()
    fill: str = COPY
    seed: int = 0
    split: Asked = field(default_factory=Asked)
    back: bool = False
    scalars: frozenset[str] | None = None
    alone: bool = False
    gradients: bool = False
