"""What every family's proof is made of: variants of tiny checkpoints, growths, and what has to be refused with which word.

A family stands in one of the modules `families_*.py`; test_families.py runs them all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from models import Variant

MODES = ("orthogonal", "copy", "sum", "quiet")


@dataclass(frozen=True)
class Family:
    """A map and its proof.

    `variants` are checkpoints by name, the first the usual one. `growths` is what `--grow` takes, beside `factor=2`.
    `refused` names the modes that are not function-exact, with a word that the refusal has to hold; a key `variant:mode`
    speaks of one variant, `variant:mode:growth` of one growth, where "" says that it is exact.
    `impossible` names growths that are refused in every mode. `heads` are the growths of heads under rotary positions, by
    variant: each is run by raised bases, those of heads and stream together by all ways that the map knows.
    """

    name: str
    variants: Mapping[str, Variant]
    growths: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: str = ""

    def refusal(self, variant: str, mode: str, growth: str) -> str | None:
        """The word that a refusal of the mode has to hold, None where the mode is function-exact."""
        for key in (f"{variant}:{mode}:{growth}", f"{variant}:{mode}", mode):
            if key in self.refused:
                return self.refused[key] or None
        return None


def note(family: str, variant: str, mode: str, growth: str, dtype: str, found: float | None) -> None:
    """Appends a result to the file that WIDEN_RESULTS names; architecture_table.py makes docs/architectures.md of it."""
    if name := os.environ.get("WIDEN_RESULTS"):
        with open(name, "a") as file:
            file.write(json.dumps([family, variant, mode, growth, dtype, found]) + "\n")


def larger_heads(*variants: str, mixed: str, tied: bool = False) -> dict[str, tuple[str, ...]]:
    """`Family.heads`: the first variant's heads grow alone and together with all else, the others' alone.

    `tied`: a head's size is hidden / heads, so both grow.
    """
    alone = "hidden=2,head_dim=2" if tied else "head_dim=2"
    return {variant: (alone, *([mixed] if variant == variants[0] else [])) for variant in variants}
