"""What a plan offers where what was asked for rounds values, or keeps no function: other growths, and the model without its ties."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from widen_cli.errors import WidenError
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.result import Plan


class NoScalingError(WidenError):
    """No scaling keeps the function under the growth that was asked for."""


def exact_alone(architecture: ArchitectureMap, asked: Iterable[str], plan: Callable[[dict[str, int]], Plan]) -> str:
    """What to say of the width axes that grow exactly by themselves, where what was asked for does not; nothing of none.

    `asked` are the axes that were named, `plan` makes the plan of another growth.
    """
    others = [axis for axis in architecture.growth.width[1:] if {*asked} != {axis}]
    kept = []
    for axis in others:
        with suppress(WidenError):
            plan({axis: 2})
            kept.append(axis)
    return f"; {' and '.join(kept)} can grow, as by --grow {','.join(f'{axis}=2x' for axis in kept)}" if kept else ""


def with_offer(plan: Plan, untied_plan: Callable[[], Plan]) -> Plan:
    """The plan with a note where it rounds values and that of the untied model would not."""
    try:
        exact = untied_plan().exact
    except WidenError:
        return plan
    note = (
        "a tied weight takes a factor that rounds; with --untie, which writes it twice, nothing is rounded for certain"
    )
    return replace(plan, notes=(*plan.notes, note)) if exact else plan
