"""What a fold found, for people and for programs: how far the copies have moved apart, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from widen_cli.collapse.average import Distance
from widen_cli.collapse.run import Folded
from widen_cli.errors import printable
from widen_cli.plan.factors import Factor, is_whole

SHOWN = 12


def table(folded: Folded) -> list[str]:
    """The most moved tensors, a line each, and of what was added the most moved weights that were to write nothing; none where
    nothing has moved."""
    return [*_copies_table(folded.moved), *_added_table(folded)]


def _added_table(folded: Folded) -> list[str]:
    moved = sorted((one for one in folded.silent.items() if one[1].apart), key=lambda one: -one[1].relative)
    head = "how far added weights are from writing nothing: |w| / |the weight they were made of|, and the largest"
    return [head, *_rows(moved)] if moved else []


def _copies_table(moved: Sequence[tuple[str, Distance]]) -> list[str]:
    if not moved:
        return []
    head = "how far the copies are from what the narrow model widened would hold: |y - A x| / |y|, and the largest"
    return [head, *_rows(moved)]


def _rows(moved: Sequence[tuple[str, Distance]]) -> list[str]:
    rows = [(_number(one.relative), _number(one.largest), printable(name)) for name, one in moved[:SHOWN]]
    lines = [f"{relative:>10}  {largest:>10}  {name}" for relative, largest, name in rows]
    more = len(moved) - SHOWN
    return [*lines, f"... and {more} more tensors; --json gives all"] if more > 0 else lines


def summary(folded: Folded) -> str:
    """One line: what was folded, how far the copies are apart, what was rounded."""
    plan = folded.plan
    shrunk = [_shrunk(axis, plan.factors[axis]) for axis in plan.axes if plan.factors[axis] != 1]
    shrunk += [_shrunk_layers(each) for each in plan.layers]
    told = ", ".join([*folded.undone, *shrunk])
    how = "as recorded" if folded.recorded else "as said"
    return (
        f"{_shown(folded.options.output)}: {folded.architecture}, {told or 'nothing shrinks'}, {plan.mode}, {how}; "
        f"{_copies(folded)}; {_roundings(folded)}"
    )


def _shrunk_layers(said: str) -> str:
    """The way back of what some layers grew by, such as `intermediate=3/2x@8-15`."""
    axis, _, grown = said.partition("=")
    factor, _, layers = grown.partition("x@")
    return f"{_shrunk(axis, Fraction(factor))} in layer{'s' if '-' in layers else ''} {layers}"


def _shrunk(axis: str, factor: Factor) -> str:
    return f"{axis} /{factor}" if is_whole(factor) else f"{axis} x{1 / Fraction(factor)}"


def _copies(folded: Folded) -> str:
    number = len(folded.distances)
    if not folded.moved:
        return f"copies are alike in all {number} tensors that have any"
    whole = Distance.sum(list(folded.distances.values()))
    name, worst = folded.moved[0]
    return (
        f"copies have moved apart in {len(folded.moved)} of {number} tensors, by {_number(whole.relative)} in all, "
        f"most in '{printable(name)}' ({_number(worst.relative)})"
    )


def _roundings(folded: Folded) -> str:
    parts = [f"{folded.rounded} means were rounded" if folded.rounded else "no mean was rounded"]
    if folded.inexact:
        parts.append(
            f"the conversion rounded {len(folded.inexact)} tensors, whose last places may differ from the first model's"
        )
    if folded.uncertain:
        parts.append(
            f"small values of {len(folded.uncertain)} tensors may have been lost to their type in the conversion"
        )
    return "; ".join(parts)


def as_json(folded: Folded) -> dict[str, Any]:
    """The same as JSON values, of all tensors; a distance that is no finite number is null."""
    whole = Distance.sum(list(folded.distances.values()))
    return {
        "architecture": folded.architecture,
        "undone": list(folded.undone),
        "scaling": folded.plan.mode,
        "factors": folded.plan.named_factors,
        "layers": list(folded.plan.layers),
        "recorded": folded.recorded,
        "alike": not folded.moved,
        "distance": _finite(whole.relative),
        "tensors": {name: _values(folded, name) for name in folded.counts},
        "added_to_write_nothing": {
            name: {"distance": _finite(one.relative), "largest": _finite(one.largest)}
            for name, one in folded.silent.items()
        },
    }


def _values(folded: Folded, name: str) -> dict[str, Any]:
    found = folded.distances.get(name, Distance())
    return {
        "copied_values": found.values,
        "of_experts": name in folded.experts,
        "distance": _finite(found.relative),
        "largest": _finite(found.largest),
        "rounded": folded.counts[name].rounded,
        "rounded_by_conversion": name in folded.inexact,
        "small_values_uncertain": name in folded.uncertain,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _number(number: float) -> str:
    return f"{number:.3g}" if math.isfinite(number) else "not finite"


def _shown(output: str) -> str:
    return "standard output" if output == "-" else printable(output)
