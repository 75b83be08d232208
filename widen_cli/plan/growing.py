"""What a request makes grow: the factor of every axis, and whether attention gets more heads or larger ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from widen_cli.config import ModelConfig
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.equalities import equalities
from widen_cli.plan.factors import is_whole
from widen_cli.plan.growth import AxisGrowth, axis_growth, position_axes, position_calls
from widen_cli.plan.match import Match
from widen_cli.plan.partial import Partials, partial_axes
from widen_cli.plan.request import PlanRequest
from widen_cli.plan.rotary import Rotary, rotary_default, rotary_fraction, rotary_method, why_none
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.spaces import config_condition
from widen_cli.plan.wishes import wished


@dataclass(frozen=True)
class Growing:
    """The factor of every axis, how heads grow under rotary positions, where copies go that are no whole number, and whether the
    stored types decide if there are more heads or larger ones."""

    growth: AxisGrowth
    rotary: Rotary
    partials: Partials
    by_types: bool


def growing(
    architecture: ArchitectureMap, match: Match, sizes: Sizes, config: ModelConfig, request: PlanRequest
) -> Growing:
    """What the request makes grow. Raises WidenError with every axis that cannot grow so."""
    grown = factors_asked(architecture, match, sizes, config, request)
    return replace(grown, partials=partial_axes(architecture, sizes, grown.growth.factors, grown.rotary.axes))


def factors_asked(
    architecture: ArchitectureMap, match: Match, sizes: Sizes, config: ModelConfig, request: PlanRequest
) -> Growing:
    """The same without the places of copies, for which `sizes` need not be the old ones."""
    stored = [item.rule for item in match.matched]
    calls = list(position_calls(architecture, stored, lambda node: config_condition(architecture, config, node)))
    positions = position_axes(architecture, calls)
    method = rotary_method(architecture, config, request.rope, request.approximate)
    fixed = {kind: axes for kind, axes in positions.items() if kind != "rope" or method is None}
    by_types, by_heads = _by_heads(architecture, match, positions, request)
    equal = equalities(architecture, sizes)
    why = why_none(architecture, config)
    asked = wished(architecture, sizes, request.grow)
    growth = axis_growth(architecture, request.factor, asked, by_heads, fixed, equal, why, sizes.known)
    axes = frozenset(axis for kind, axis in calls if kind == "rope")
    factor = max((growth.factors[axis] for axis in axes), default=1)
    if not is_whole(factor):
        method = rotary_fraction(architecture, config, request.rope, factor)
    elif request.rope is None:
        method = rotary_default(architecture, config, method, factor)
    rotary = Rotary(method or "", axes, factor)
    return Growing(growth, rotary, {}, by_types)


def _by_heads(
    architecture: ArchitectureMap, match: Match, positions: dict[str, set[str]], request: PlanRequest
) -> tuple[bool, bool]:
    """Whether the types decide how attention grows by default, and whether it does by more heads, if it can: under rotary
    positions, and for less than 32 bits.

    The factor that a larger head size needs, r**(-1/4), would be rounded in half precision.
    """
    growth, types = architecture.growth, request.types
    head_dim = growth.head_dim
    if head_dim is None or {head_dim, *growth.with_head_dim} & positions.get("rope", set()):
        return False, True
    if not growth.heads or any(axis in positions.get("alibi", set()) for axis in growth.heads):
        return False, False
    open_still = not {*growth.heads, head_dim} & request.grow.keys()
    return open_still, any(types.cast(item.tensor.dtype).bits < 32 for item in match.matched)
