"""The plan for people, a line each tensor pattern, and for programs, an object each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from widen_cli.dimensions import Fill
from widen_cli.errors import printable
from widen_cli.plan.result import ROUNDS, ConfigChange, Plan, TensorPlan

PARTS_SHOWN = 8


def plan_text(plan: Plan) -> str:
    """The plan as a table: pattern, stored shape, new shape, factor, dtype, exactness, how many; then scales and config."""
    lines = [f"map {plan.architecture}: {plan.grown}", f"scaling {plan.mode}: {plan.why}"]
    lines += [f"approximate: {plan.approximate} changes the function"] if plan.approximate else []
    lines += [f"note: {note}" for note in plan.notes]
    lines += ["", *_columns(list(_tensor_rows(plan))), ""]
    scales = ", ".join(f"{space} {scale}" for space, scale in plan.scales.items() if not scale.is_one)
    lines.append(f"each copy of an activation holds, times the old one: {scales or 'nothing but 1'}")
    lines += [f"left out: {printable(name)}" for name in plan.dropped]
    lines += [
        f"config {change.key}: {_old(change)} -> {json.dumps(change.new)}  {change.exactness}" for change in plan.config
    ]
    return "\n".join(lines)


def _old(change: ConfigChange) -> str:
    return "(absent)" if change.old is None else json.dumps(change.old)


def _tensor_rows(plan: Plan) -> Iterator[list[str]]:
    rows: dict[tuple[str, ...], int] = {}
    for tensor in plan.tensors:
        key: tuple[str, ...] = (
            printable(tensor.pattern),
            "new" if tensor.made else str(list(tensor.stored[1])),
            "->",
            str(list(tensor.written[1])),
            factor_text(tensor),
            dtype_text(tensor),
            exactness_text(tensor),
        )
        rows[key] = rows.get(key, 0) + 1
    for key, number in rows.items():
        yield [*key, f"{number} tensors" if number > 1 else "1 tensor"]


def factor_text(tensor: TensorPlan) -> str:
    """The factors on a tensor's values, part by part where they differ."""
    if tensor.growth is None:
        return "copied"
    # Groups of heads of which some stand once more are many parts, with few factors.
    scales = tensor.part_scales if len(tensor.part_scales) <= PARTS_SHOWN else tensor.scales
    filled = "".join(words for fill, words in _FILLED.items() if fill in tensor.fills)
    parts = f", split ({tensor.split.way})" if tensor.split is not None else ""
    return "x " + " | ".join(str(scale) for scale in scales) + filled + parts


_FILLED = {Fill.ZERO: ", copies 0", Fill.MEAN: ", filled with the mean", Fill.RANDOM: ", filled at random"}


def exactness_text(tensor: TensorPlan) -> str:
    """How exactly a tensor is written; of what rounds, how many numbers and by how much of each."""
    if tensor.rounding is None:
        return tensor.exactness
    count, bits = tensor.rounding
    what = "block scales" if tensor.dtype.kind == "blocks" else "values"
    return f"{tensor.exactness} up to {count} {what} by 2^-{bits}"


def dtype_text(tensor: TensorPlan) -> str:
    old, new = tensor.stored[0], tensor.written[0]
    return new if old == new else f"{old} -> {new}"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: names as stored, factors as text and as float64."""
    return {
        "architecture": plan.architecture,
        "scaling": plan.mode,
        "why": plan.why,
        "factors": plan.named_factors,
        "layers": list(plan.layers),
        "scales": {space: {"text": str(scale), "value": float(scale)} for space, scale in plan.scales.items()},
        "function_exact": not plan.approximate,
        "bit_exact": _bit_exact(plan),
        "tensors": [_tensor_json(tensor) for tensor in plan.tensors],
        "left_out": list(plan.dropped),
        "config": [
            {"key": change.key, "old": change.old, "new": change.new, "exactness": change.exactness}
            for change in plan.config
        ],
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def _bit_exact(plan: Plan) -> str:
    words = {tensor.exactness for tensor in plan.tensors} | {change.exactness for change in plan.config}
    return "no" if ROUNDS in words else "yes" if words <= {"exact"} else "depends on values"


def _tensor_json(tensor: TensorPlan) -> dict[str, Any]:
    return {
        "source": tensor.stored_name,
        "names": list(tensor.names),
        "pattern": tensor.pattern,
        "shape": list(tensor.stored[1]),
        "new_shape": list(tensor.written[1]),
        "factors": [{"text": str(scale), "value": float(scale)} for scale in tensor.part_scales],
        "copies_are_zero": Fill.ZERO in tensor.fills,
        "filled": sorted(fill.value for fill in tensor.fills),
        "split": tensor.split and {"way": tensor.split.way, "dimension": tensor.split.dimension},
        "dtype": tensor.stored[0],
        "new_dtype": tensor.written[0],
        "exactness": tensor.exactness,
        "rounding": tensor.rounding and {"numbers": tensor.rounding[0], "relative": 2.0 ** -tensor.rounding[1]},
    }
