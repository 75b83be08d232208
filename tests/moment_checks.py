"""Grown moments of every model with experts against those that the wide model gathers itself, by transformers in float64.

    python tests/moment_checks.py [VARIANT ...]      # factor 2 with --optimizer keep, in copy and in quiet

`test_optimizer.py` has one variant of most families; this runs all of which the class has a loss.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from unittest import mock

import models
import optimizer_here
import torch
from test_optimizer import VARIANTS, by_name, largest_error, trained, unknown_left_out, widen

from widen_cli.moments import attach

BOUND = 1e-10
EXPERTS = [name for name, variant in VARIANTS.items() if "expert" in str(variant.config)]


def checked(narrow: Path, wide: Path, scaling: str) -> tuple[bool, str]:
    """Whether the moments of a widened model are its own, and what is said of it."""
    done = widen(str(narrow), str(wide), "--factor=2", f"--scaling={scaling}", "--optimizer=keep")
    if done.exit_code:
        return "not function-exact" in done.output, f"refused: {done.output.strip()[:160]}"
    model, optimizer = trained(wide)
    own = by_name(model, optimizer.state_dict())
    grown = by_name(model, torch.load(wide / attach.STATE, weights_only=True))
    error = largest_error(grown, unknown_left_out(own, grown) if "nothing is known" in done.output else own)
    return error < BOUND, f"{error:.1e}, {len(grown)} kept, {len(own) - len(grown)} begin anew"


def main(variants: list[str]) -> int:
    wrong = 0
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(attach, "answer_of", optimizer_here.answer):
            narrow = Path(folder, "narrow")
            models.build(VARIANTS[variant], torch.float64).save_pretrained(narrow)
            try:
                state = trained(narrow)[1].state_dict()
            except AttributeError as error:
                print(f"{variant}: no loss ({error})")
                continue
            torch.save(state, narrow / attach.STATE)
            for scaling in ("copy", "quiet"):
                right, told = checked(narrow, Path(folder, scaling), scaling)
                wrong += not right
                print(f"{variant}, {scaling}: {'' if right else 'WRONG, '}{told}", flush=True)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or EXPERTS))
