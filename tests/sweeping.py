"""Random conversions of tiny models, everything in one run: widths by factors and sizes, depth, experts, an untied head, fills.

Each is drawn by a seed alone. The written model computes the narrow one's function in float64, `verify` derives it again, and
`collapse` takes it back; or the run is refused, with a reason. `python tests/sweeping.py SEED COUNT` tries as many as wanted.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families_llama
import models
import numpy as np
import torch
from test_collapse import differing

from widen_cli.collapse import collapse
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

KNOWN: dict[str, models.Variant] = {
    **models.VARIANTS,
    **{name: variant for family in families_llama.FAMILIES for name, variant in family.variants.items()},
}
VARIANTS = (
    "llama",
    "llama_tied",
    "llama_gqa",
    "llama3_rope",
    "llama_headdim",
    "mistral_tied",
    "qwen2",
    "qwen3",
    "qwen3_sliding",
    "gemma3_text",
    "gpt2",
    "gpt2_untied",
    "bert_mlm",
    "bert_mlm_untied",
)
UPCYCLED = ("llama", "mistral", "qwen2", "qwen3")
# By the type stored: exact but for the order of sums, or as far as its roundings move the outputs of so small a model.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Trial:
    """One conversion: what is widened, as which type it is stored, and what is asked."""

    variant: str
    dtype: torch.dtype
    asked: dict[str, Any]

    def __str__(self) -> str:
        said = " ".join(f"{name}={value}" for name, value in self.asked.items())
        return f"{self.variant} {str(self.dtype).removeprefix('torch.')} {said}"


@dataclass(frozen=True)
class Outcome:
    """What came of it: the relative error of a model that was written, or why none was."""

    trial: Trial
    error: float = 0.0
    refused: str = ""
    differences: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether a model was written that is not the narrow one's function, or that `verify` does not derive again."""
        return not self.refused and not (self.error <= BOUNDS[self.trial.dtype] and not self.differences)


def trials(seed: int, count: int, variants: Sequence[str] = VARIANTS) -> list[Trial]:
    """The first `count` trials of a seed."""
    draw = random.Random(seed)
    return [_trial(draw, variants) for _ in range(count)]


def _trial(draw: random.Random, variants: Sequence[str]) -> Trial:
    variant = draw.choice(variants)
    config = KNOWN[variant].make_config()
    asked: dict[str, Any] = {}
    if (grow := _grow(draw, config)) and draw.random() < 0.85:
        asked["grow"] = grow
    elif draw.random() < 0.7:
        asked["factor"] = draw.choice((2, 3))
    if draw.random() < 0.5 and config.model_type != "bert":
        asked["depth"] = (draw.choice(("2x", "+1", "+1@0", "+2@end", "+3")),)
    if config.model_type in UPCYCLED and draw.random() < 0.4:
        slices = draw.choice((1, 1, 2, 5))
        copies = draw.choice((2, 3, 4))
        asked |= {"experts": slices * copies, "slices": slices, "router": draw.choice(("random", "random", "zero"))}
        if draw.random() < 0.5:
            asked["top_k"] = slices * draw.randint(1, copies)
    asked |= {"untie": True} if draw.random() < 0.2 and getattr(config, "tie_word_embeddings", True) else {}
    asked["scaling"] = draw.choice(("auto", "auto", "orthogonal", "copy", "sum", "quiet"))
    asked["layout"] = draw.choice(("auto", "auto", "tile"))
    asked["fill"] = draw.choice(("copy", "copy", "zero", "random"))
    if draw.random() < 0.2 and config.model_type not in ("bert", "gpt2"):
        asked["rope"] = draw.choice(("spread", "theta"))
    return Trial(variant, draw.choice((torch.float64,) * 4 + (torch.float32, torch.bfloat16)), asked)


def _grow(draw: random.Random, config: Any) -> str:
    """Wishes of a few axes, most of which go together."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    wishes: dict[str, str] = {}
    chance = draw.random
    if chance() < 0.7:
        wishes["hidden"] = draw.choice(("2x", "3x", "4/3x", "3/2x", "5/3x", f"{hidden + 4}", f"+{heads}", "round:40"))
    if chance() < 0.6:
        wishes["intermediate"] = draw.choice(("2x", "3x", f"{inner + 7}", "round:32", "+1", "2x:round:16"))
    if chance() < 0.6:
        if kv_heads:
            wishes |= draw.choice(
                (
                    {"heads": "2x", "kv_heads": "2x"},
                    {"heads": "2x"},
                    {"kv_heads": "2x"},
                    {"heads": f"+{kv_heads}"},
                    {"heads": f"+{heads // kv_heads}", "kv_heads": "+1"},
                    {"heads": "3x", "kv_heads": "3x"},
                )
            )
        else:
            wishes["heads"] = draw.choice(("2x", "4/3x", "+1", "3x"))
    if chance() < 0.25:
        wishes["head_dim"] = draw.choice(("2x", "3x", "4/3x", "+2", "3/2x"))
    if chance() < 0.25:
        wishes["vocab"] = draw.choice(("round:16", "round:128", "+3"))
    return ",".join(f"{axis}={wish}" for axis, wish in wishes.items())


class Sweep:
    """Runs trials in a folder; narrow models and what they compute are made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[tuple[str, torch.dtype], models.Outputs] = {}

    def narrow(self, trial: Trial) -> tuple[Path, models.Outputs]:
        key = (trial.variant, trial.dtype)
        path = self.folder / f"{trial.variant}-{str(trial.dtype)[6:]}"
        if key not in self.said:
            models.build(KNOWN[trial.variant], trial.dtype).save_pretrained(path)
            # Stored in few bits, computed in many: what differs then is what the conversion rounded.
            self.said[key] = models.outputs(path, torch.float64)
        return path, self.said[key]

    def outcome(self, trial: Trial) -> Outcome:
        path, before = self.narrow(trial)
        wide = self.folder / "wide"
        shutil.rmtree(wide, ignore_errors=True)
        try:
            job = prepare(Options(str(path), str(wide), threads=1, **trial.asked))
        except WidenError as error:
            return Outcome(trial, refused=str(error))
        run(job, lambda nbytes: None)
        error = _error(before, models.outputs(wide, torch.float64, inputs=_inputs_of(path)))
        found = verify(Options(str(path), str(wide)), lambda nbytes: None).differences
        return Outcome(trial, error, differences=(*map(str, found), *self.back(path, wide, trial)))

    def back(self, narrow: Path, wide: Path, trial: Trial) -> list[str]:
        """The tensors and config keys that do not come back as they were, but for values that the conversion rounded."""
        back = self.folder / "back"
        folded = collapse(
            Options(str(wide), str(back), threads=1, force=True), None, lambda nbytes: None, lambda text: None
        )
        # Weights that were written apart stay so.
        untied = (
            {"lm_head.weight", "cls.predictions.decoder.weight", "tie_word_embeddings"}
            if "untie" in trial.asked
            else set()
        )
        others = set(differing(narrow, back)) - {*folded.inexact} - untied
        return [f"collapse: {name}" for name in sorted(others | {name for name, _ in folded.moved})]


def _inputs_of(narrow: Path) -> Any:
    """The narrow model's inputs: a padded vocabulary draws others."""
    config = models.load(narrow, torch.float32).config
    return lambda _: models.fixed_inputs(config)


def _error(before: models.Outputs, after: models.Outputs) -> float:
    """The largest relative error of the logits; of a padded vocabulary those of the old tokens, and no new one wins."""
    old, new = before["logits"], after["logits"]
    padding = new[..., old.shape[-1] :]
    if padding.size and (padding.max(-1) > new[..., : old.shape[-1]].max(-1)).any():
        return float("inf")
    return float(np.abs(new[..., : old.shape[-1]] - old).max() / np.abs(old).max())


def main(seed: int, count: int) -> int:
    """Runs trials and prints those that are wrong, and how often each reason refused one."""
    refused: Counter[str] = Counter()
    wrong, exact, worst = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(Path(folder))
        for number, trial in enumerate(trials(seed, count)):
            try:
                outcome = sweep.outcome(trial)
            except Exception as error:
                print(f"{number}: {trial}\n    CRASH {type(error).__name__}: {error}", flush=True)
                wrong += 1
                continue
            if outcome.refused:
                refused[outcome.refused.replace(folder, "")[:230]] += 1
            elif outcome.wrong:
                wrong += 1
                print(f"{number}: {trial}\n    {outcome.error:.2e} {outcome.differences[:2]}", flush=True)
            else:
                exact += 1
                worst = max(worst, outcome.error if trial.dtype == torch.float64 else 0)
    print(f"{exact} exact (the worst float64 error {worst:.1e}), {sum(refused.values())} refused, {wrong} wrong")
    for reason, times in refused.most_common():
        print(f"{times:4} {reason}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
