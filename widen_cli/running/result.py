"""What is asked of a run of both models, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What a rounding to a type can change, relative to a value.
ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8, "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3}


@dataclass(frozen=True)
class Asked:
    """What the command line says of a run: the inputs, the type to run in, the tolerance in place of the measured one."""

    text: str | None = None
    seed: int = 0
    dtype: str | None = None
    tolerance: float | None = None
    wide_base: str | None = None


@dataclass(frozen=True)
class Known:
    """What is known of the wide model's making: the types in which values were rounded, and the scales of outputs that grow, by
    transformers' names."""

    rounded: tuple[str, ...]
    scales: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """The verdict on one output: in words, and as JSON values."""

    same: bool
    told: str
    figures: dict[str, Any]


@dataclass(frozen=True)
class RunResult:
    """What ran both models on what, what came of every output, and what is to be noted beside."""

    runtime: str
    inputs: str
    outputs: tuple[Outcome, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        return all(outcome.same for outcome in self.outputs)

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "same": self.same,
            "runtime": self.runtime,
            "inputs": self.inputs,
            "outputs": [outcome.figures for outcome in self.outputs],
            "notes": list(self.notes),
        }


def roundoff_of(kinds: tuple[str, ...]) -> float:
    """The largest rounding of these types; 0.0 of none. Of quantised blocks the scales are rounded, which are halves."""
    return max((ROUNDOFF.get(kind, ROUNDOFF["F16"]) for kind in kinds), default=0.0)
