"""Where the copies go: side by side (interleave), or an axis as a whole after itself (tile), as quantised blocks allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from widen_cli.errors import WidenError, printable
from widen_cli.formulas import Formula, UnknownValueError
from widen_cli.plan.in_layers import InLayer, grown_most
from widen_cli.plan.match import Match
from widen_cli.plan.partial import shared_keys
from widen_cli.plan.result import TensorPlan
from widen_cli.plan.sizes import Sizes
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


def side_by_side(match: Match, kinds: Sequence[InLayer]) -> str | None:
    """Why copies cannot be laid axis after axis in this model, whatever its weights are stored as; None where they can.

    `kinds` are what grows in every kind of layer; heads of which some stand once more have their places anyway.
    """
    sizes, factors = kinds[0].sizes, grown_most(kinds)
    architecture = sizes.architecture
    counted = dict.fromkeys((*architecture.growth.heads, *shared_keys(architecture).values()))
    for kind in kinds[1:] or kinds:
        heads = [axis for axis in counted if kind.sizes.known.get(axis) != 1]
        if len({kind.factors[axis] for axis in heads}) > 1 and not {*heads} & {*kind.filling.partials}:
            return f"{' and '.join(heads)} have to grow by one factor, or heads would read others' keys"
    for axis in (axis for axis in architecture.axes.values() if axis.grouped is not None and factors[axis.name] > 1):
        if _taken_together(sizes, axis.grouped):
            return f"the model takes neighbours along {axis.name} together, so their copies have to stand side by side"
    for item in match.matched:
        for name in item.numbers:
            if factors[name] > 1:
                return f"'{printable(item.tensor.name)}' is numbered by {name}, whose copies have neighbouring numbers"
    return None


def _taken_together(sizes: Sizes, condition: Formula | None) -> bool:
    """Whether a condition holds, or cannot be known."""
    try:
        return condition is not None and bool(sizes.evaluate(condition))
    except (UnknownValueError, ValueError):
        return True


def arrange(
    asked: str,
    planned: Callable[[str], tuple[TensorPlan, ...]],
    uneven: str | None,
    file: str,
    anyhow: bool = False,
) -> Arrangement:
    """The plans in the layout asked for; for `auto` interleaved, and tiled where blocks do not allow that.

    `planned` makes the plans in a layout, `uneven` says why heads cannot be tiled, if so. Raises WidenError with every
    tensor whose blocks cannot be widened so, for `auto` in neither way. `anyhow`: what is asked for is not judged by blocks.
    """
    if anyhow and asked != "auto":
        return Arrangement(asked, planned(asked))
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
