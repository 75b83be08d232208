"""benchmarks/exactness.py: its figures are those of exact growths, it sees what is none, and says what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import models
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import exactness


def test_figures_of_a_few_rows(tmp_path: Path) -> None:
    narrow = tmp_path / "llama"
    models.build(exactness.KNOWN["llama"], torch.float64).save_pretrained(narrow)
    before = models.outputs(narrow, torch.float64)["logits"]

    def figure(row: str) -> str:
        return exactness.measured(narrow, before, tmp_path / "wide", exactness.asked("llama", row))

    assert float(figure("hidden 576 -> 768, gemma3 640 -> 1024")) <= 1e-11
    assert figure("--depth 2x") == "0.0e+00"
    assert float(figure("vocab=round:128")) <= 1e-11
    assert float(figure("head_dim=2x --rope pairs")) > 0.1
    assert figure("head_dim=1.5x --rope spread").startswith("refused: --rope spread: cannot grow head_dim by 3/2")
