"""Which scaling keeps the function: the one asked for, or by `auto` the one that rounds the least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from widen_cli.errors import WidenError, printable
from widen_cli.plan.match import Match
from widen_cli.plan.modes import MODES
from widen_cli.plan.offers import NoScalingError
from widen_cli.plan.result import TensorPlan
from widen_cli.plan.spaces import SpaceScales
from widen_cli.plan.written import WrittenTypes
from widen_cli.scales import ContradictionError

Scales = dict[str, Any]
Chosen = tuple[str, str, Scales]


@dataclass(frozen=True)
class Choice:
    """A choice among the modes of a checkpoint's laws; `file` is its name in messages.

    `writable` says whether there is a place for the epsilons that scales change, `plans` the tensors' plans under a mode.
    """

    spaces: SpaceScales
    match: Match
    types: WrittenTypes
    file: str
    writable: Callable[[Scales], bool]
    plans: Callable[[str, Scales], Sequence[TensorPlan]]

    def of(self, scaling: str) -> Chosen:
        """The mode for what `--scaling` says, a mode or `auto`: its name, why it, and the scale of every space.

        Raises WidenError where the mode that was asked for does not keep the function, or none does.
        """
        if scaling != "auto":
            try:
                return scaling, "as asked", self.spaces.solve(MODES[scaling])
            except ContradictionError as error:
                raise WidenError(
                    f"--scaling {scaling}: not function-exact for this checkpoint, because {_listed(error.equations)}"
                    f"{self.otherwise(scaling)}"
                ) from None
        why = ""
        if all(self.types.cast(item.tensor.dtype).bits >= 32 for item in self.match.matched):
            try:
                scales = self.spaces.solve(MODES["orthogonal"])
                if self.writable(scales):
                    return "orthogonal", "32 bits or wider are written, and every law holds", scales
                why = "orthogonal would change an epsilon, and there is no config to write it to; "
            except ContradictionError as error:
                why = f"orthogonal is not function-exact here, because {_listed(error.equations)}; "
        return self.fewest_rounded(why)

    def otherwise(self, mode: str) -> str:
        """What to do where a mode that was asked for does not keep the function."""
        if any(self.spaces.solves(other) for other in MODES.values()):
            return "; --scaling auto takes a mode that is"
        return self.untying(mode) or self.untying("copy") or "; no other mode is either"

    def untying(self, mode: str) -> str:
        """That --untie would help a mode, where it would."""
        names = " and ".join(f"'{printable(name)}'" for name in self.spaces.freed(MODES[mode]))
        return (
            f"; with --untie, which writes {names} as a weight of its own, {mode} keeps the function" if names else ""
        )

    def fewest_rounded(self, why: str) -> Chosen:
        """The function-exact mode under which the fewest stored values are rounded, by header facts alone.

        Of quantised blocks, those whose scales shrink may be: they are often subnormal halves.
        """
        rounded: dict[str, int] = {}
        solved: dict[str, dict[str, Any]] = {}
        reasons: list[str] = []
        refusals: list[str] = []
        blocks = any(item.tensor.dtype.kind == "blocks" for item in self.match.matched)
        for name in ("sum", "quiet", "copy") if blocks else ("copy", "sum", "quiet"):
            try:
                solved[name] = self.spaces.solve(MODES[name])
            except ContradictionError as error:
                reasons = reasons or error.equations
                continue
            try:
                tensors = self.plans(name, solved[name])
            except WidenError as error:
                refusals += error.faults
                continue
            rounded[name] = sum(math.prod(tensor.source.shape) for tensor in tensors if tensor.may_round)
        if not rounded and refusals:
            raise WidenError(*dict.fromkeys(refusals))
        if not rounded:
            untying = self.untying("copy")
            told = f"{self.file}: no scaling keeps the function of this checkpoint, because {_listed(reasons)}{untying}"
            raise WidenError(told) if untying else NoScalingError(told)
        best = min(rounded, key=lambda name: rounded[name])
        counts = ", ".join(f"{name} {number}" for name, number in rounded.items())
        return (
            best,
            f"{why}it rounds the fewest stored values for certain ({counts}; of equals the first)",
            solved[best],
        )


def _listed(equations: Sequence[str]) -> str:
    return ", and ".join(equations)
