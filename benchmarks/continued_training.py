"""How training goes on after widening: with --optimizer keep, with reset-new, and with the optimizer left out.

    python benchmarks/continued_training.py [--architecture llama llama-grouped gpt2 bert] [--seeds 3] [--before 300] [--after 60]

For every seed a tiny model learns a random chain, in which the next token depends on the two before it, and is saved with its
optimizer.pt as a Trainer saves it. It is widened by two in each way, and model and optimizer go on with AdamW. All runs of a seed
see the same batches, in float64 throughout, at a constant learning rate and without clipping. A table tells for each way

    first      how far the first loss is from the narrow model's on the same batch, relative: widening changes no function
    ten        the same of the first ten losses, so after up to nine steps, at most
    bump       by how much one of the first twenty losses is above the narrow run's on the same batch, at most
    end        the loss on held-out tokens after the last step
    gain       by how much that is below the end of the narrow run that went on with its own optimizer, at the full rate

the first two as the largest of all seeds, the others as their mean and standard deviation.

Where is a wide run the narrow one? A wide weight is f times the narrow one and its gradient g times the narrow one's, but AdamW's
step lr * m / (sqrt(v) + eps) forgets g (up to eps) and knows no f: the weights stay f times the narrow ones only under a learning rate of
f * lr, with g * eps and a decay of 1/f, tensor by tensor. So under one learning rate no mode follows the narrow run: `sum`, where
every matrix has f = 1 but embeddings have 2 and gains 1/2, is nearest, and matrices of f = 1/2 (`copy`) take steps twice as large.
"matched" rows set these three per tensor, and then `keep` gives the narrow run's losses again, to rounding, in every mode that
makes equal copies; in `quiet` new units are no copies, and where keys begin anew (grouped queries) no rate can.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest import mock

import torch
import transformers

from widen_cli.convert import prepare
from widen_cli.moments import attach
from widen_cli.options import Options
from widen_cli.writing import run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import models
import optimizer_here

TOKENS, MASK, LENGTH, ROWS, HELD_OUT = 48, 48, 16, 16, 256
RATE, DECAY, WARM_UP = 3e-3, 0.1, 20
BUMP, TEN = 20, 10
SIZES = {"vocab_size": TOKENS + 1, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "initializer_range": 0.1}  # fmt: skip
LLAMA = {**SIZES, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "tie_word_embeddings": False}
MODELS = {
    "llama": models.Variant("LlamaForCausalLM", LLAMA),
    "llama-grouped": models.Variant("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "gpt2": models.Variant(
        "GPT2LMHeadModel",
        {"vocab_size": TOKENS + 1, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1},
    ),
    "bert": models.Variant(
        "BertForMaskedLM",
        {**SIZES, "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}  # fmt: skip

HEADS = {
    "llama": "heads=2x,kv_heads=2x",
    "llama-grouped": "heads=2x,kv_heads=2x",
    "gpt2": "heads=2x",
    "bert": "heads=2x",
}
ALL = "hidden=2x,intermediate=2x,{heads}"
GROWTHS: dict[str, dict[str, Any]] = {
    "narrow": {},
    **{mode: {"scaling": mode, "grow": ALL} for mode in ("copy", "sum", "quiet")},
    "copy --split uneven": {"scaling": "copy", "grow": ALL, "split": "uneven"},
    "head_dim=2x": {"scaling": "copy", "grow": "hidden=2x,intermediate=2x,head_dim=2x"},
    "--depth 2x": {"depth": ("2x",)},
}


@dataclass(frozen=True)
class Way:
    """How a model grows (a key of GROWTHS), what its optimizer begins with (`none` is left out), and the learning rate: the
    narrow run's, a "warm-up" to it, "half" of it, or "matched" tensor by tensor."""

    growth: str
    optimizer: str = "none"
    rate: str = ""

    def __str__(self) -> str:
        return f"{self.growth}, {self.optimizer}{self.rate and ', ' + self.rate}"


REFERENCE = Way("narrow", "keep")
COPIES = (Way("copy"), Way("copy", "reset-new"), Way("copy", "keep"), Way("copy", "keep", "matched"))
WAYS = {
    "llama": (
        REFERENCE,
        Way("narrow"),
        *COPIES,
        Way("copy", "none", "warm-up"),
        Way("copy", "reset-new", "warm-up"),
        Way("copy --split uneven"),
        Way("sum"),
        Way("sum", "keep"),
        Way("quiet"),
        Way("quiet", "reset-new"),
        Way("quiet", "keep"),
        Way("head_dim=2x"),
        Way("head_dim=2x", "keep"),
        Way("--depth 2x"),
        Way("--depth 2x", "keep"),
        Way("narrow", "keep", "half"),
        Way("copy", "none", "half"),
        Way("copy", "reset-new", "half"),
        Way("copy", "keep", "half"),
        Way("copy --split uneven", "none", "half"),
        Way("quiet", "none", "half"),
        Way("quiet", "keep", "half"),
    ),
    "llama-grouped": (REFERENCE, *COPIES),
    "gpt2": (REFERENCE, *COPIES, Way("quiet", "keep")),
    "bert": (REFERENCE, *COPIES, Way("quiet", "keep")),
}


class Chain:
    """Text of a seed: a token's logits are a sum of what the token before it asks for and, more softly, the one before that."""

    def __init__(self, seed: int) -> None:
        self.drawn = torch.Generator().manual_seed(seed)
        last, second = (torch.randn(TOKENS, TOKENS, generator=self.drawn, dtype=torch.float64) for _ in range(2))
        self.odds = (3 * last[:, None] + 2 * second[None]).softmax(-1)

    def batch(self, rows: int, masked: bool) -> dict[str, torch.Tensor]:
        """Inputs, in which a quarter of the tokens is hidden where `masked`, and all tokens as labels."""
        columns = list(torch.randint(0, TOKENS, (2, rows), generator=self.drawn))
        while len(columns) < LENGTH:
            columns.append(torch.multinomial(self.odds[columns[-1], columns[-2]], 1, generator=self.drawn)[:, 0])
        tokens = torch.stack(columns, 1)
        hidden = torch.rand(tokens.shape, generator=self.drawn) < (0.25 if masked else 0)
        return {"input_ids": tokens.where(~hidden, MASK), "labels": tokens}


@dataclass(frozen=True)
class Run:
    """The loss on every batch before its step, and that on held-out tokens at the end."""

    losses: list[float]
    end: float


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """A Trainer's AdamW, with its groups."""
    asked = transformers.TrainingArguments(learning_rate=RATE, weight_decay=DECAY, use_cpu=True, report_to=[])
    return transformers.Trainer(model, asked).create_optimizer()


def match(optimizer: torch.optim.Optimizer, wide: Any, narrow: Any) -> None:
    """Gives every tensor that is f times the narrow one, in n copies, what makes its step f times the narrow one: f times the
    rate, 1/f of the decay, and g = 1/(f n) of eps, as its gradient is g times the narrow one's."""
    old = dict(narrow.named_parameters())
    names = {parameter: name for name, parameter in wide.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            source = old[names[parameter]]
            size = float(source.detach().abs().mean())
            f = float(parameter.detach().abs().mean()) / size if size else 1.0
            g = source.numel() / parameter.numel() / f
            groups.append(
                {**group, "params": [parameter], "lr": RATE * f, "weight_decay": group["weight_decay"] / f, "eps": g * group["eps"]}
            )  # fmt: skip
    optimizer.param_groups[:] = groups


def train(
    model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[dict[str, torch.Tensor]], warm_up: int = 0
) -> list[float]:
    """The loss on every batch before the step that it leads to; the rate rises from zero over `warm_up` steps."""
    losses, full = [], [group["lr"] for group in optimizer.param_groups]
    for step, batch in enumerate(batches, 1):
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = rate * min(1.0, step / (warm_up or 1))
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for group, rate in zip(optimizer.param_groups, full, strict=True):
        group["lr"] = rate
    return losses


class Seed:
    """One narrow model that has been trained for `before` steps, and the batches of the `after` steps that follow."""

    def __init__(self, architecture: str, seed: int, before: int, after: int, root: Path) -> None:
        self.narrow, self.wide, self.heads = root / "narrow", root / "wide", HEADS[architecture]
        chain, masked = Chain(seed), "Masked" in MODELS[architecture].model_class
        torch.manual_seed(seed)
        model = getattr(transformers, MODELS[architecture].model_class)(MODELS[architecture].make_config()).double()
        optimizer = optimizer_of(model)
        self.before = train(model, optimizer, [chain.batch(ROWS, masked) for _ in range(before)], WARM_UP)
        model.save_pretrained(self.narrow)
        torch.save(optimizer.state_dict(), self.narrow / "optimizer.pt")
        self.batches = [chain.batch(ROWS, masked) for _ in range(after)]
        self.held_out = chain.batch(HELD_OUT, masked)

    def grown(self, way: Way) -> Path:
        """The folder of the model that goes on, with the optimizer's state where the way keeps one."""
        how = dict(GROWTHS[way.growth])
        if not how:
            return self.narrow
        if "grow" in how:
            how["grow"] = how["grow"].format(heads=self.heads)
        kept = None if way.optimizer == "none" else way.optimizer
        shutil.rmtree(self.wide, ignore_errors=True)
        # In a process of its own, as the tool does it, half the time went into importing transformers.
        with mock.patch.object(attach, "answer_of", optimizer_here.answer):
            options = Options(str(self.narrow), str(self.wide), optimizer=kept, **how)
            run(attach.attach(prepare(options)), lambda nbytes: None)
        return self.wide

    def go_on(self, way: Way) -> Run:
        """Training on the same batches as every other way of the seed."""
        folder = self.grown(way)
        model = models.load(folder, torch.float64)
        optimizer = optimizer_of(model)
        if way.optimizer != "none":
            optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        if way.rate == "matched":
            match(optimizer, model, models.load(self.narrow, torch.float64))
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 if way.rate == "half" else 1.0
        losses = train(model, optimizer, self.batches, WARM_UP if way.rate == "warm-up" else 0)
        with torch.inference_mode():
            return Run(losses, float(model(**self.held_out).loss))


def figures(found: Run, reference: Run) -> dict[str, float]:
    """What the table tells of one run, beside the narrow one that went on."""
    pairs = list(zip(found.losses, reference.losses, strict=True))
    far = [abs(own / narrow - 1) for own, narrow in pairs]
    return {
        "first": far[0],
        "ten": max(far[:TEN]),
        "bump": max(own - narrow for own, narrow in pairs[:BUMP]),
        "end": found.end,
        "gain": reference.end - found.end,
    }


def row(way: Way, found: Sequence[dict[str, float]]) -> str:
    """A line of the table: the largest distances of all seeds, then means and standard deviations."""
    first, ten = (max(each[name] for each in found) for name in ("first", "ten"))
    cells = [f"{way!s:32} {first:6.0e} {ten:8.1e}"]
    for name in ("bump", "end", "gain"):
        values = [each[name] for each in found]
        cells.append(f"{fmean(values):6.3f} ± {stdev(values) if values[1:] else 0:.3f}")
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--before", type=int, default=300)
    parser.add_argument("--after", type=int, default=60)
    asked = parser.parse_args()
    for architecture in asked.architecture:
        found: dict[Way, list[dict[str, float]]] = {way: [] for way in WAYS[architecture]}
        reached = []
        for seed in range(asked.seeds):
            with tempfile.TemporaryDirectory() as root, models.Float64Throughout():
                one = Seed(architecture, seed, asked.before, asked.after, Path(root))
                reached.append(fmean(one.before[-20:]))
                reference = one.go_on(REFERENCE)
                for way in found:
                    found[way].append(figures(reference if way == REFERENCE else one.go_on(way), reference))
        print(
            f"\n{architecture}: ln {TOKENS} = {math.log(TOKENS):.2f}, after {asked.before} steps {fmean(reached):.2f}; {asked.after} more\n"
            f"{'':32} {'first':>6} {'ten':>8}  {'bump':>14}  {'end':>14}  {'gain':>14}"
        )
        for way in found:
            print(row(way, found[way]), flush=True)


if __name__ == "__main__":
    main()
