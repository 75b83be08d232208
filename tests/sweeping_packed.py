"""The sweep of models in quantised Hugging Face types: gpt-oss in MXFP4, and a llama in FP8 with a grid of scales.

`python tests/sweeping_packed.py SEED COUNT`. Where a rounded number makes a router choose other experts, the wide model is run
once more with the narrow one's choices: what is left then is what the bound speaks of.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import sweeping
import test_fp8
import test_mxfp4
import torch
from sweeping import Outcome, Sweep, Trial
from transformers.models.gpt_oss import modeling_gpt_oss

MXFP4, FP8 = "gpt_oss_mxfp4", "llama_fp8"
DEPTHS = {"2x": lambda layer: 2 * layer, "+1@0": lambda layer: layer and layer + 1, "+1@end": lambda layer: layer}


def trials(seed: int, count: int) -> list[Trial]:
    draw = random.Random(seed)
    return [_trial(draw) for _ in range(count)]


def _trial(draw: random.Random) -> Trial:
    variant = draw.choice((MXFP4, MXFP4, FP8))
    chance = draw.random
    wishes: dict[str, str] = {}
    if chance() < 0.7:
        wishes["hidden"] = draw.choice(("2x", "2x", "3x", "4x", "4/3x", "5/3x", "3/2x", "+32", "+24"))
    if chance() < 0.6:
        wishes["intermediate"] = draw.choice(("2x", "3x", "4x", "6/5x", "3/2x", "+32", "+2", "+7"))
    if chance() < 0.6:
        wishes |= draw.choice(({"heads": "2x", "kv_heads": "2x"}, {"heads": "2x"}, {"kv_heads": "2x"}, {"heads": "4x", "kv_heads": "2x"},
                               {"heads": "+3"}, {"heads": "+2", "kv_heads": "+1"}, {"heads": "3x", "kv_heads": "3x"}))  # fmt: skip
    if chance() < 0.2:
        wishes["head_dim"] = draw.choice(("2x", "3x", "3/2x"))
    if chance() < 0.2:
        wishes["vocab"] = draw.choice(("round:128", "+3"))
    asked: dict[str, Any] = (
        {"grow": ",".join(f"{axis}={wish}" for axis, wish in wishes.items())} if wishes else {"factor": 2}
    )
    if chance() < 0.4:
        asked["depth"] = (draw.choice(tuple(DEPTHS)),)
    asked["scaling"] = draw.choice(("auto", "auto", "auto", "copy", "sum", "quiet", "orthogonal"))
    asked["layout"] = draw.choice(("auto", "auto", "interleave", "tile"))
    asked["fill"] = draw.choice(("copy", "copy", "zero", "zero", "random"))
    if chance() < 0.2:
        asked |= draw.choice(({"split": "uneven"}, {"noise": -20.0}))
    if chance() < 0.2 and variant == MXFP4:
        asked["dtype"] = draw.choice(("F64", "BF16"))
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16))
    return Trial(variant, dtype, asked, draw.choice(sweeping.ROUTES) if chance() < 0.15 else "")


class Routes:
    """What every router of a model chose, call by call; another model's can be made to choose the same."""

    def __init__(self) -> None:
        self.chosen: list[torch.Tensor] = []
        self.flipped = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        given = modeling_gpt_oss.GptOssTopKRouter.forward

        def forward(router: Any, states: torch.Tensor) -> Any:
            found = given(router, states)
            self.chosen.append(found[-1])
            return found

        modeling_gpt_oss.GptOssTopKRouter.forward = forward
        try:
            yield
        finally:
            modeling_gpt_oss.GptOssTopKRouter.forward = given

    @contextmanager
    def forced(self, old: dict[int, int]) -> Iterator[None]:
        """`old`: the number of each layer that was there before, by its new one."""
        given, calls = modeling_gpt_oss.GptOssTopKRouter.forward, iter(range(1000))

        def forward(router: Any, states: torch.Tensor) -> Any:
            logits, weights, chosen = given(router, states)
            layer = old.get(next(calls))
            if layer is None:
                return logits, weights, chosen
            own = self.chosen[layer]
            self.flipped += int((own.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
            values = torch.nn.functional.linear(states, router.weight, router.bias).gather(-1, own)
            return logits, values.softmax(-1), own

        modeling_gpt_oss.GptOssTopKRouter.forward = forward
        try:
            yield
        finally:
            modeling_gpt_oss.GptOssTopKRouter.forward = given


class PackedSweep(Sweep):
    """Runs FP8 as the numbers that it stands for, which transformers does not make of it on a CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.routes: dict[torch.dtype, Routes] = {}
        self.traced: list[str] = []

    def make(self, trial: Trial, path: Path) -> None:
        if trial.variant == FP8:
            test_fp8.quantised(path)
        else:
            test_mxfp4.packed(path, trial.dtype)

    def outputs(self, folder: Path, trial: Trial, narrow: Path) -> models.Outputs:
        if trial.variant == FP8:
            numbers = self.folder / "numbers"
            shutil.rmtree(numbers, ignore_errors=True)
            folder = test_fp8.dequantised(folder, numbers)
        routes = self.routes.setdefault(trial.dtype, Routes())
        if folder.name != "wide" and trial.variant == MXFP4:
            with routes.noted():
                return super().outputs(folder, trial, narrow)
        return super().outputs(folder, trial, narrow)

    def outcome(self, trial: Trial) -> Outcome:
        found = super().outcome(trial)
        if trial.variant != MXFP4 or found.refused or found.error <= found.bound:
            return found
        path, before = self.narrow(trial)
        depth = DEPTHS[trial.asked["depth"][0]] if "depth" in trial.asked else int
        routes = self.routes[trial.dtype]
        routes.flipped = 0
        with routes.forced({depth(layer): layer for layer in (0, 1)}):
            after = super().outputs(self.folder / "wide", trial, path)
        same = replace(found, error=sweeping.error(self.job, before, after))
        self.traced.append(
            f"{trial}: {found.error:.1e}, with the narrow model's {routes.flipped} choices {same.error:.1e}"
        )
        print("traced:", self.traced[-1], flush=True)
        if same.error <= same.bound:
            return same
        # Rounded as coarsely as before, but not so often: with all roundings but MXFP4's own gone, no difference may be left.
        return super().outcome(replace(trial, asked=trial.asked | {"dtype": "F64"}))


if __name__ == "__main__":
    sys.exit(sweeping.main(trials(*map(int, sys.argv[1:3])), PackedSweep))
