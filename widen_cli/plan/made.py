"""Tensors that the input lacks and the wide model needs: factors that quantised blocks cannot take, numbers that divide frequencies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from widen_cli.dimensions import Copies
from widen_cli.map_rules import ArchitectureMap, name_pattern
from widen_cli.plan.result import Ones, TensorPlan
from widen_cli.scales import Scale


def with_scalars(
    architecture: ArchitectureMap, plans: Sequence[TensorPlan], known: Collection[str] | None = None
) -> tuple[TensorPlan, ...]:
    """The plans with factors that block scales would round moved into the scalars that the runtime multiplies by.

    A scalar that is stored is multiplied; one that is not is made and stands behind its weight. `known` are those that took
    factors, where it is known.
    """
    moved: dict[str, Scale] = {}
    result: list[TensorPlan] = []
    names = {plan.source.name for plan in plans}
    for plan in plans:
        found = _scalar(architecture.scalars, plan, known)
        if found is None:
            result.append(plan)
            continue
        scalar, pattern = found
        (factor,) = plan.scales
        result.append(plan.without_factors)
        if scalar in names:
            moved[scalar] = factor
        else:
            result.append(TensorPlan(Ones(scalar, (1,)), (scalar,), pattern, Ones.dtype, (Copies(1),), factor))
    return tuple(
        replace(plan, scale=plan.scale * moved[plan.source.name]) if plan.source.name in moved else plan
        for plan in result
    )


def _scalar(scalars: Mapping[str, str], plan: TensorPlan, known: Collection[str] | None) -> tuple[str, str] | None:
    """The scalar that takes a weight's factor, its name and pattern: for blocks whose scales would be rounded, if there is one."""
    if len(plan.scales) != 1 or plan.scales[0].is_power_of_two or (known is None and plan.dtype.kind != "blocks"):
        return None
    for weight, scalar in scalars.items():
        if found := name_pattern(weight).fullmatch(plan.source.name):
            name = scalar
            for part in found.groups():
                name = name.replace("*", part, 1)
            return (name, scalar) if known is None or name in known else None
    return None


def scaled_scalars(architecture: ArchitectureMap, plans: Iterable[TensorPlan]) -> tuple[str, ...]:
    """The scalars that take a factor, made or stored."""
    patterns = {*architecture.scalars.values()}
    return tuple(plan.source.name for plan in plans if plan.pattern in patterns and not plan.scale.is_one)


def with_divisors(
    plans: Sequence[TensorPlan], name: str, pairs: int, divisors: tuple[float, ...]
) -> tuple[TensorPlan, ...]:
    """The plans with the tensor that divides the frequencies of `pairs` old pairs, made first of all where it is not stored."""
    stored = [plan.source.name for plan in plans]
    if name in stored:
        return tuple(replace(plan, copy_factors=divisors) if plan.source.name == name else plan for plan in plans)
    growth = (Copies(pairs, len(divisors)),)
    made = TensorPlan(Ones(name, (pairs,)), (name,), name, Ones.dtype, growth, copy_factors=divisors)
    return (made, *plans)
