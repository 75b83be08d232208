"""The verdict on two models' outputs: what was measured of each output, against how far the narrow model's own outputs move.

A fixed bound would be too loose for one model and too tight for another: scores that a softmax turns into a choice, experts
that are chosen, and tables in a runtime's code carry a last bit's rounding far. So the narrow model is run again with its
weights disturbed by one rounding, and the wide one may be as far off as a few times what that moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from widen_cli.running.comparison import Array, Measured, Outputs, measured

# The wide model sums more terms in another order. Of the tests' models the worst is off by 5 times the disturbance.
TIMES = 8
# Stored values that were rounded are off by no more than they are disturbed by here: at worst by half of what that moves.
TIMES_STORED = 2
# What is allowed at the least: of a relative difference, in roundings of the type that is run in; of a divergence.
LEAST = 64
LEAST_KL = 1e-9
# A divergence goes with the square of a difference: of few positions its mean says too little to be held to a bound.
FEW = 8


@dataclass(frozen=True)
class Bound:
    """What an output may differ by: relative to its largest value, and in mean divergence (infinite: that is not held to any)."""

    relative: float
    kl: float


@dataclass(frozen=True)
class Judged:
    """What was measured of one output and the bound it is held to; of two shapes that are no widening, only the shapes.

    `infinite` counts values of the narrow and of the wide output that are infinite or no number.
    """

    name: str
    measured: Measured | None
    bound: Bound
    shapes: str = ""
    infinite: tuple[int, int] = (0, 0)

    @property
    def same(self) -> bool:
        found = self.measured
        # A NaN is never within a bound.
        return (
            found is not None
            and found.relative <= self.bound.relative
            and (found.kl is None or found.kl[0] <= self.bound.kl)
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values; what is not finite is null."""
        found = self.measured
        if found is None:
            return {"output": self.name, "same": False, "shapes": self.shapes}
        figures: dict[str, Any] = {
            "output": self.name,
            "same": self.same,
            "shape": list(found.shape),
            "copies": found.copies,
            "scale": _finite(found.scale),
            "max_difference": _finite(found.difference),
            "relative_difference": _finite(found.relative),
            "tolerance": _finite(self.bound.relative),
        }
        if any(self.infinite):
            figures |= {"narrow_not_finite": self.infinite[0], "wide_not_finite": self.infinite[1]}
        if found.kl is not None:
            mean, largest = found.kl
            figures |= {"kl_mean": _finite(mean), "kl_max": _finite(largest), "kl_tolerance": _finite(self.bound.kl)}
            figures |= {"top1_agreement": found.top1}
        return figures

    def __str__(self) -> str:
        found = self.measured
        if found is None:
            return f"{self.name}: {self.shapes}"
        text = f"{self.name} {list(found.shape)}"
        if found.copies > 1:
            text += f", repeated {found.copies} times and multiplied by {found.scale:.6g}"
        text += (
            f": largest difference {found.difference:.1e}, {found.relative:.1e} of the largest value "
            f"(tolerance {self.bound.relative:.1e})"
        )
        if found.kl is not None:
            held = f" (tolerance {self.bound.kl:.1e})" if math.isfinite(self.bound.kl) else ""
            text += f"; KL {found.kl[0]:.1e}{held}, at most {found.kl[1]:.1e}"
        if found.top1 is not None:
            text += f"; top-1 agreement {100 * found.top1:.4g}%"
        if any(self.infinite):
            values, (narrow, wide) = math.prod(found.shape), self.infinite
            text += f"; not finite: {narrow} of {values} values of the narrow model, {wide} of the wide one"
        return text


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def disturbances(arithmetic: float, stored: float) -> list[tuple[int, float]]:
    """The roundings by which a narrow model is disturbed, each with how many times what it moves is allowed.

    `stored` is that of values that widening rounded, 0.0 where there are none.
    """
    return [(TIMES, arithmetic), *([(TIMES_STORED, stored)] if stored > arithmetic else [])]


def bounds(
    narrow: Outputs, disturbed: Iterable[tuple[int, Outputs]], roundoff: float, stated: float | None = None
) -> dict[str, Bound]:
    """Of every output, what it may differ by: `stated`, or so many times what disturbances move it.

    `roundoff` is that of the arithmetic, some of which are allowed at the least.
    """
    if stated is not None:
        return {name: Bound(stated, math.inf) for name in narrow}
    moved: dict[str, list[tuple[int, Measured]]] = {name: [] for name in narrow}
    for times, outputs in disturbed:
        for name, output in outputs.items():
            found = measured(name, narrow[name], output)
            if found is not None:
                moved[name].append((times, found))
    return {name: _bound(found, math.prod(narrow[name].shape[:-1]), roundoff) for name, found in moved.items()}


def _bound(moved: list[tuple[int, Measured]], positions: int, roundoff: float) -> Bound:
    # What becomes infinite, or no number, when it is disturbed says nothing of how far it moves.
    apart = [times * one.relative for times, one in moved if math.isfinite(one.relative)]
    diverged = [times * one.kl[0] for times, one in moved if one.kl and math.isfinite(one.kl[0])]
    relative, kl = max(apart, default=0.0) + LEAST * roundoff, max(diverged, default=0.0) + LEAST_KL
    return Bound(relative, kl if positions >= FEW else math.inf)


def judged(
    narrow: Outputs, wide: Outputs, allowed: Mapping[str, Bound], scales: Mapping[str, float]
) -> tuple[Judged, ...]:
    """The verdict on every output of either model. `scales` are those of outputs that grew, where they are known."""
    return tuple(
        _judged(name, narrow, wide, allowed.get(name, Bound(0.0, 0.0)), scales.get(name))
        for name in [*narrow, *(name for name in wide if name not in narrow)]
    )


def _judged(name: str, narrow: Outputs, wide: Outputs, allowed: Bound, scale: float | None) -> Judged:
    if name not in narrow or name not in wide:
        which = "narrow" if name in narrow else "wide"
        return Judged(name, None, allowed, f"only the {which} model has it")
    found = measured(name, narrow[name], wide[name], scale)
    shapes = f"{list(narrow[name].shape)} against {list(wide[name].shape)}, which is no widening"
    infinite = (_not_finite(narrow[name]), _not_finite(wide[name]))
    return Judged(name, found, allowed, "" if found else shapes, infinite)


def _not_finite(output: Array) -> int:
    return output.size - int(np.isfinite(output).sum())
