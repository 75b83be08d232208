"""benchmarks/continued_training.py: it starts at the narrow model's loss, sees what learning rates do, and that moments are right."""

from __future__ import annotations

import sys
from pathlib import Path

import models
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from continued_training import REFERENCE, Seed, Way, figures, row

STEPS = 3


def test_figures_of_a_few_ways(tmp_path: Path) -> None:
    with models.Float64Throughout():
        one = Seed("llama", 0, STEPS, STEPS, tmp_path)
        reference = one.go_on(REFERENCE)
        found = {
            way: figures(one.go_on(way), reference)
            for way in (
                Way("copy", "reset-new"), Way("copy", "keep", "matched"), Way("copy", "none", "matched"),
                Way("sum", "keep", "matched"), Way("quiet", "keep"),
            )
        }  # fmt: skip
    assert len(one.before) == len(reference.losses) == STEPS
    assert max(each["first"] for each in found.values()) <= 1e-13
    for scaling in ("copy", "sum"):
        assert found[Way(scaling, "keep", "matched")]["ten"] <= 1e-12
        assert found[Way(scaling, "keep", "matched")]["gain"] == pytest.approx(0, abs=1e-12)
    for other in (Way("copy", "reset-new"), Way("copy", "none", "matched"), Way("quiet", "keep")):
        assert found[other]["ten"] > 1e-4, other
    assert "copy, keep, matched" in row(Way("copy", "keep", "matched"), [found[Way("copy", "keep", "matched")]] * 2)
