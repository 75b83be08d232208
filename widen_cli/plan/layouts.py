"""Where the copies go: side by side (interleave), or an axis as a whole after itself (tile), as quantised blocks allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from widen_cli.errors import WidenError
from widen_cli.plan.result import TensorPlan
from widen_cli.plan.trees import block_reasons

LAYOUTS = ("auto", "interleave", "tile")
FAULTS_SHOWN = 8
TILE = "; use --layout tile"


@dataclass(frozen=True)
class Arrangement:
    """The tensors' plans in the layout taken, and in words why it is not the usual one."""

    layout: str
    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...] = ()


def arrange(asked: str, planned: Callable[[str], tuple[TensorPlan, ...]], uneven: str | None, file: str) -> Arrangement:
    """The plans in the layout asked for; for `auto` interleaved, and tiled where blocks do not allow that.

    `planned` makes the plans in a layout, `uneven` says why heads cannot be tiled, if so. Raises WidenError with every
    tensor whose blocks cannot be widened so, for `auto` in neither way.
    """
    if asked == "tile":
        return _tiled(planned, uneven, "as asked", file)
    tensors = planned("interleave")
    reasons = block_reasons(tensors)
    if not reasons:
        return Arrangement("interleave", tensors)
    # Where no reason speaks of the layout, what the other one lacks is beside the point.
    cured = uneven is None or any(reason.endswith(TILE) for reason in reasons)
    if asked == "interleave" or not cured:
        raise WidenError(*(f"{file}: {reason}" for reason in reasons[:FAULTS_SHOWN]))
    why = reasons[0].removesuffix(TILE)
    return _tiled(planned, uneven, f"because {why}", file)


def _tiled(planned: Callable[[str], tuple[TensorPlan, ...]], uneven: str | None, why: str, file: str) -> Arrangement:
    if uneven is not None:
        raise WidenError(f"{file}: layout tile, {why}: {uneven}")
    tensors = planned("tile")
    if reasons := block_reasons(tensors):
        raise WidenError(*(f"{file}: {reason}" for reason in reasons[:FAULTS_SHOWN]))
    return Arrangement("tile", tensors, (f"layout tile, {why}",))
