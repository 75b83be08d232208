"""The sweep of GGUF files, numbers and quantised blocks: factors, sizes, depth, experts, ranges of layers, tails and types in one run.

`python tests/sweeping_gguf.py SEED COUNT`. llama.cpp rounds what quantised blocks multiply, so both files are run with their
blocks made numbers by gguf-py: then nothing is left between the two but what the conversion rounded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import gguf_families
import gguf_oracle
import numpy as np
import numpy.typing as npt
import sweeping
from gguf import GGMLQuantizationType as Kind
from gguf_families import FAMILIES, Family, Sizes
from llama_cpp import log_probabilities
from sweeping import Outcome

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

PROMPTS = [
    [5, 9, 17, 33, 70, 21, 8, 55, 13],
    [3],
    [int(token) for token in np.random.default_rng(1).integers(3, 101, 30)],
]
# By the side of their blocks: the sizes of llama's and others' files.
SMALL = {"": Sizes(), "32": Sizes(96, 160, 6, 3, 16), "256": Sizes(256, 512, 4, 2, 64)}
BLOCKS = dict.fromkeys((Kind.F32, Kind.F16), "") | dict.fromkeys((Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0), "32")
BLOCKS |= dict.fromkeys((Kind.Q4_K, Kind.Q6_K), "256")
PLAIN = (
    "qwen2",
    "qwen2-untied",
    "qwen3-biases",
    "gemma-biases",
    "gemma3-untied",
    "phi3",
    "starcoder2",
    "olmo2",
    "granite-biases",
)
LLAMA = Family("llama", gguf_families._llama_like())
RANGES = ("2x@0", "3x@1", "3/2x@0", "round:64@1", "64@0")
# What float32 sums leave of logits of some units; and what rounded scales, of 11 bits, do to them.
BOUND, ROUNDED = 5e-4, 5e-2


@dataclass(frozen=True)
class Trial:
    """One conversion of a file of a family, with its matrices of a type."""

    family: str
    kind: Kind
    asked: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.family} {self.kind.name} " + " ".join(f"{name}={value}" for name, value in self.asked.items())


def trials(seed: int, count: int) -> list[Trial]:
    draw = random.Random(seed)
    return [_trial(draw) for _ in range(count)]


def _trial(draw: random.Random) -> Trial:
    family = draw.choice(("llama",) * 4 + PLAIN)
    kind = draw.choice((Kind.F32, Kind.F32, *BLOCKS))
    chance, choice = draw.random, draw.choice
    unit = int(BLOCKS[kind] or 1)
    ranges = family == "llama"
    wishes: dict[str, str] = {}
    if chance() < 0.65:
        wishes["hidden"] = choice(("2x", "2x", "3x", "4/3x", "3/2x", f"+{unit}", "round:64"))
    if chance() < 0.6:
        wishes["intermediate"] = choice(("2x", "3x", "3/2x", f"+{unit}", "+7") + RANGES * ranges)
    if chance() < 0.6:
        by_layer = [
            {"heads": "2x@0", "kv_heads": "2x@0"},
            {"heads": "+3@1"},
            {"heads": "4/3x@0", "kv_heads": "4/3x@0"},
        ] * ranges
        wishes |= choice(({"heads": "2x", "kv_heads": "2x"}, {"heads": "2x"}, {"kv_heads": "2x"}, {"heads": "3x", "kv_heads": "3x"},
                          {"heads": "4/3x", "kv_heads": "4/3x"}, {"heads": "3/2x"}, *by_layer))  # fmt: skip
    if chance() < 0.2:
        wishes["head_dim"] = choice(("2x", "2x", "3/2x"))
    if chance() < 0.2:
        wishes["vocab"] = choice(("round:128", "+3"))
    asked: dict[str, Any] = (
        {"grow": ",".join(f"{axis}={wish}" for axis, wish in wishes.items())} if wishes else {"factor": 2}
    )
    if chance() < 0.45:
        asked["depth"] = (choice(("2x", "+1", "+1@0", "+2@end")),)
    if family in ("llama", "qwen2-untied") and chance() < 0.25:
        asked |= choice(({"experts": 4}, {"experts": 4, "slices": 2, "top_k": 2}, {"experts": 2, "top_k": 2}))
    asked["scaling"] = choice(("auto", "auto", "auto", "copy", "sum", "quiet", "orthogonal"))
    asked["layout"] = choice(("auto", "auto", "auto", "interleave", "tile"))
    asked["fill"] = choice(("copy", "zero", "zero", "random" if kind == Kind.F32 else "zero"))
    asked |= {"untie": True} if chance() < 0.1 else {}
    asked |= {"embedding_type": choice(("F32", "F16"))} if chance() < 0.25 else {}
    asked |= {"dequantize": choice(("F32", "F16"))} if chance() < 0.15 else {}
    asked |= choice(({"split": "uneven"}, {"noise": -20.0})) if chance() < 0.12 else {}
    asked |= {"rope": choice(("theta", "spread", "frequencies"))} if chance() < 0.1 else {}
    return Trial(family, kind, asked)


def random_blocks(kind: Kind, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint8]:
    """Rows of any codes; the scales of a block make numbers of about a quarter, as those of the families are."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    rows = draw.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), np.uint8)
    scales = draw.uniform(0.5, 1, rows.shape[:-1])
    if kind == Kind.Q4_K:
        pair = np.stack([scales / 2**10, scales / 2**8], -1).astype("<f2")
        rows[..., :4] = pair.view(np.uint8).reshape(*rows.shape[:-1], 4)
    else:
        rows[..., -2:] = (scales / 2**13).astype("<f2")[..., None].view(np.uint8).reshape(*rows.shape[:-1], 2)
    return rows.reshape(*shape[:-1], -1)


def write(trial: Trial, path: Path) -> Path:
    """The narrow file. Codes of K quants, which gguf-py does not make, are drawn."""
    family = LLAMA if trial.family == "llama" else FAMILIES[trial.family]
    if BLOCKS[trial.kind]:
        sizes = SMALL[BLOCKS[trial.kind]]
        family = replace(family, sizes=replace(sizes, tied=family.sizes.tied))
    made: Callable[..., Any] = gguf.quants.quantize
    if trial.kind in (Kind.Q4_K, Kind.Q6_K):
        gguf.quants.quantize = lambda values, kind: random_blocks(
            kind, values.shape, values.size + int(values.sum() * 1e6) % 10**6
        )
    try:
        return gguf_families.write_family(family, path, None if trial.kind == Kind.F32 else trial.kind)
    finally:
        gguf.quants.quantize = made


class GgufSweep:
    """Runs trials in a folder; narrow files and what they compute are made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[tuple[str, Kind], tuple[Path, npt.NDArray[np.float64]]] = {}

    def outputs(self, path: Path) -> npt.NDArray[np.float64]:
        return log_probabilities(gguf_oracle.retyped(path, self.folder / "numbers.gguf", Kind.F32), PROMPTS)

    def outcome(self, trial: Trial) -> Outcome:
        key = (trial.family, trial.kind)
        if key not in self.said:
            path = write(trial, self.folder / f"{trial.family}-{trial.kind.name}.gguf")
            self.said[key] = path, self.outputs(path)
        path, before = self.said[key]
        wide = self.folder / "wide.gguf"
        wide.unlink(missing_ok=True)
        try:
            job = prepare(Options(str(path), str(wide), threads=1, **trial.asked))
        except WidenError as refusal:
            return Outcome(trial, refused=str(refusal))
        report = run(job, lambda nbytes: None)
        differences = verify(Options(str(path), str(wide)), lambda nbytes: None).differences
        coarse = report.total.rounded and (trial.kind != Kind.F32 or "F16" in trial.asked.values())
        return Outcome(
            trial,
            error(before, self.outputs(wide)),
            ROUNDED if coarse else BOUND,
            differences=tuple(map(str, differences)),
        )


def error(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> float:
    """The largest difference of log-probabilities among the old tokens, of which one always stays the likeliest."""
    size = before.shape[-1]
    if (after.argmax(-1) >= size).any():
        return float("inf")
    shared = after[:, :size] - np.log(np.exp(after[:, :size]).sum(-1, keepdims=True))
    return float(np.abs(shared - before).max())


if __name__ == "__main__":
    sys.exit(sweeping.main(trials(*map(int, sys.argv[1:3])), GgufSweep))
