"""Random conversions of tiny models, everything in one run: widths by factors, sizes and `--like`, depth, experts, an untied
head, fills, parts and noise, types; of a few families by all of these, of every family by the axes of its map.

Each is drawn by a seed alone. The written model computes the narrow one's function in float64, `verify` derives it again,
`collapse` takes it back, and of some a pipe and an interrupted run give the same bytes; or the run is refused, with a reason.
`python tests/sweeping.py SEED COUNT [all]` tries as many as wanted.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import torch
import transformers
from click.testing import CliRunner
from test_collapse import differing
from test_families import FAMILIES

from widen_cli.cli import cli
from widen_cli.collapse import collapse
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Job, Report
from widen_cli.maps import map_for_model_type
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

KNOWN: dict[str, models.Variant] = {
    **models.VARIANTS,
    **{name: variant for family in FAMILIES for name, variant in family.variants.items()},
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
EXACT = 1e-11
BOUNDS = {"F64": EXACT, "F32": 2e-5, "BF16": 0.1}
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
ROUTES = ("pipe", "resume")


@dataclass(frozen=True)
class Trial:
    """One conversion: what is widened, as which type it is stored, what is asked, and by which route it is made once more.

    `like` are the config's values that differ in the model that `--like` names.
    """

    variant: str
    dtype: torch.dtype
    asked: dict[str, Any]
    route: str = ""
    like: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        said = " ".join(f"{name}={value}" for name, value in self.asked.items())
        return f"{self.variant} {NAMES[self.dtype]} {said} {self.route} {dict(self.like) or ''}"


@dataclass(frozen=True)
class Outcome:
    """What came of it: the relative error of a model that was written, or why none was."""

    trial: Trial
    error: float = 0.0
    bound: float = EXACT
    refused: str = ""
    differences: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether a model was written that is not the narrow one's function, or that is not made again as it is."""
        return not self.refused and not (self.error <= self.bound and not self.differences)


def trials(seed: int, count: int, variants: Sequence[str] = VARIANTS) -> list[Trial]:
    """The first `count` trials of a seed."""
    draw = random.Random(seed)
    return [_trial(draw, variants) for _ in range(count)]


def wild_trials(seed: int, count: int) -> list[Trial]:
    """The same of every family, by the axes of its map."""
    draw = random.Random(seed)
    return [_wild_trial(draw) for _ in range(count)]


def _trial(draw: random.Random, variants: Sequence[str]) -> Trial:
    variant = draw.choice(variants)
    config = KNOWN[variant].make_config()
    asked: dict[str, Any] = {}
    like: dict[str, int] = {}
    if draw.random() < 0.1:
        like = _like(draw, config)
    elif (grow := _grow(draw, config)) and draw.random() < 0.85:
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
    if draw.random() < 0.2 and config.model_type not in ("bert", "gpt2"):
        asked["rope"] = draw.choice(("spread", "theta", "frequencies"))
    return _drawn_rest(draw, variant, asked, tuple(like.items()))


def _wild_trial(draw: random.Random) -> Trial:
    # Hidden states that are given from without lie side by side.
    variant = draw.choice([name for family in FAMILIES for name in family.variants if "cross" not in name])
    found = map_for_model_type(KNOWN[variant].make_config().model_type)
    assert found is not None
    axes = [name for name, axis in found.axes.items() if axis.keys and not axis.fixed]
    asked: dict[str, Any] = {}
    if draw.random() < 0.85:
        chosen = draw.sample(axes, min(len(axes), draw.choice((1, 2, 3, 4))))
        # What is counted in heads mostly goes together, as hidden = heads * head_dim does.
        together = draw.choice(("2x", "3x", "4/3x", "3/2x"))
        own = ("2x", "3x", "4/3x:round:1", "3/2x:round:1", "+2", "2x:round:5")
        tied = [axis for axis in axes if "head" in axis or axis.endswith("hidden")] if draw.random() < 0.6 else []
        wishes = {axis: draw.choice(own) for axis in chosen} | {axis: together for axis in tied if "dim" not in axis}
        asked["grow"] = ",".join(f"{axis}={wish}" for axis, wish in wishes.items())
    else:
        asked["factor"] = draw.choice((2, 3))
    if draw.random() < 0.3:
        stack = draw.choice(("encoder:", "decoder:")) if "encoder_heads" in axes else ""
        asked["depth"] = (stack + draw.choice(("2x", "+1", "+1@0", "+1@end")),)
    asked |= {"untie": True} if draw.random() < 0.1 else {}
    asked |= {"rope": draw.choice(("spread", "theta", "frequencies"))} if draw.random() < 0.1 else {}
    return _drawn_rest(draw, variant, asked, ())


def _drawn_rest(draw: random.Random, variant: str, asked: dict[str, Any], like: tuple[tuple[str, int], ...]) -> Trial:
    """What goes with every family: scaling, layout, fill, parts, types and routes."""
    asked["scaling"] = draw.choice(("auto", "auto", "orthogonal", "copy", "sum", "quiet"))
    asked["layout"] = draw.choice(("auto", "auto", "tile"))
    asked["fill"] = draw.choice(("copy", "copy", "zero", "random"))
    if draw.random() < 0.35:
        asked |= draw.choice(({"split": "uneven"}, {"split": "even"}, {"noise": -20.0}))
    if draw.random() < 0.5:
        asked["seed"] = draw.randrange(1000)
    if draw.random() < 0.1:
        asked["dtype"] = draw.choice(("F64", "F32", "BF16"))
    dtype = draw.choice((torch.float64,) * 4 + (torch.float32, torch.bfloat16))
    return Trial(variant, dtype, asked, draw.choice(ROUTES) if draw.random() < 0.15 else "", like)


def _like(draw: random.Random, config: Any) -> dict[str, int]:
    """Sizes of another model, some of which cannot be reached."""
    sizes = {
        key: value
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "n_embd", "n_head")
        if isinstance(value := config.to_dict().get(key), int)
    }  # fmt: skip
    chosen = draw.sample(sorted(sizes), min(len(sizes), 3))
    return {key: draw.choice((2 * sizes[key], 3 * sizes[key], 4 * sizes[key] // 3, sizes[key] + 8)) for key in chosen}


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
        wishes["intermediate"] = draw.choice(
            ("2x", "3x", f"{inner + 7}", "round:32", "+1", "2x:round:16", "2x@0", "3x@1-2")
        )
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
                    {"heads": f"{3 * heads}", "kv_heads": f"{3 * kv_heads}"},
                    {"heads": "24", "kv_heads": "+3"},
                    {"heads": "18"},
                )
            )
        else:
            wishes["heads"] = draw.choice(("2x", "4/3x", "+1", "3x", "18"))
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
        path = self.folder / f"{trial.variant}-{NAMES[trial.dtype]}"
        if key not in self.said:
            self.make(trial, path)
            self.said[key] = self.outputs(path, trial, path)
        return path, self.said[key]

    def make(self, trial: Trial, path: Path) -> None:
        """Writes a trial's narrow model."""
        models.build(KNOWN[trial.variant], trial.dtype).save_pretrained(path)

    def outputs(self, folder: Path, trial: Trial, narrow: Path) -> models.Outputs:
        """What a model computes of the narrow one's inputs. Stored in few bits, computed in many: what differs then is what
        the conversion rounded."""
        return models.outputs(folder, torch.float64, inputs=_inputs_of(narrow, trial))

    def outcome(self, trial: Trial) -> Outcome:
        path, before = self.narrow(trial)
        wide = self.folder / "wide"
        shutil.rmtree(wide, ignore_errors=True)
        asked = dict(trial.asked)
        if trial.like:
            (self.folder / "like.json").write_text(
                json.dumps(json.loads((path / "config.json").read_text()) | dict(trial.like))
            )
            asked["like"] = str(self.folder / "like.json")
        options = Options(str(path), str(wide), threads=1, **asked)
        try:
            job = prepare(options)
        except WidenError as refusal:
            return Outcome(trial, refused=str(refusal))
        report = run(job, lambda nbytes: None)
        self.job = job
        found = error(job, before, self.outputs(wide, trial, path))
        differences = [str(one) for one in verify(Options(str(path), str(wide)), lambda nbytes: None).differences]
        differences += self._back(path, wide, trial)
        if trial.route:
            differences += self._piped(options) if trial.route == "pipe" else self._resumed(options)
        return Outcome(trial, found, _bound(trial, report), differences=tuple(differences))

    def _back(self, narrow: Path, wide: Path, trial: Trial) -> list[str]:
        """The tensors and config keys that do not come back as they were, but for values that the conversion rounded."""
        file = narrow / "model.safetensors"
        if {"noise", "dtype"} & trial.asked.keys() or not file.is_file() or b"_blocks" in file.read_bytes():
            return []  # of MXFP4 blocks no means are taken
        back = self.folder / "back"
        shutil.rmtree(back, ignore_errors=True)
        folded = collapse(Options(str(wide), str(back), threads=1), None, lambda nbytes: None, lambda text: None)
        # Weights that were written apart stay so.
        apart = {"lm_head.weight", "cls.predictions.decoder.weight", "tie_word_embeddings"}
        others = set(differing(narrow, back)) - {*folded.inexact} - (apart if "untie" in trial.asked else set())
        return [f"collapse: {name}" for name in sorted(others | {name for name, _ in folded.moved})]

    def _piped(self, options: Options) -> list[str]:
        """What differs if the weights come through a pipe."""
        source, target = Path(options.input), self.folder / "again"
        shutil.rmtree(target, ignore_errors=True)
        said = ["convert", "-", f"{target}/", "--config", str(source / "config.json")]
        for name, value in _said(options):
            said += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
        done = CliRunner().invoke(cli, said, (source / "model.safetensors").read_bytes())
        return (
            _unlike(Path(options.output), target) if done.exit_code == 0 else [f"pipe: {done.output} {done.exception}"]
        )

    def _resumed(self, options: Options) -> list[str]:
        """What differs if the run is interrupted and goes on."""
        target = self.folder / "again"
        shutil.rmtree(target, ignore_errors=True)
        options = replace(options, output=str(target), max_shard_size="60KB")
        try:
            run(prepare(options), interrupted_after(100_000))
        except KeyboardInterrupt:
            run(prepare(replace(options, resume=True)), lambda nbytes: None)
        return [str(one) for one in verify(Options(options.input, str(target)), lambda nbytes: None).differences]


def interrupted_after(limit: int) -> Callable[[int], None]:
    """A run's progress, which is interrupted once more than so many bytes have been written."""
    written = 0

    def progress(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if written > limit:
            raise KeyboardInterrupt

    return progress


def _said(options: Options) -> list[tuple[str, Any]]:
    plain = Options(options.input, options.output)
    names = (
        "factor",
        "grow",
        "like",
        "scaling",
        "dtype",
        "layout",
        "rope",
        "untie",
        "experts",
        "top_k",
        "slices",
        "router",
    )
    names += ("fill", "split", "noise", "seed")
    said = [(name, value) for name in names if (value := getattr(options, name)) != getattr(plain, name)]
    return [*said, *(("depth", depth) for depth in options.depth)]


def _unlike(one: Path, other: Path) -> list[str]:
    names = ("config.json", "model.safetensors")
    return [f"{name} is another" for name in names if (one / name).read_bytes() != (other / name).read_bytes()]


def _bound(trial: Trial, report: Report) -> float:
    """How far outputs may be off: not at all where no value was rounded."""
    if report.total.rounded == 0:
        return EXACT
    kinds = {NAMES[trial.dtype], trial.asked.get("dtype", NAMES[trial.dtype])}
    return max(BOUNDS[kind] for kind in kinds)


def _inputs_of(narrow: Path, trial: Trial) -> Callable[[Any], dict[str, torch.Tensor]]:
    """The narrow model's inputs, also where the wide one's vocabulary is padded; some give hidden states as wide as the model."""
    known, config = KNOWN.get(trial.variant), transformers.AutoConfig.from_pretrained(narrow)
    if known is None or not known.inputs:
        return lambda _: models.fixed_inputs(config)
    old = known.inputs(config)
    return lambda wide: {
        name: old[name] if old[name].shape == value.shape else value for name, value in known.inputs(wide).items()
    }


def error(job: Job, before: models.Outputs, after: models.Outputs) -> float:
    """The largest relative error of all outputs; of a padded vocabulary the logits of the old tokens, and no new one wins.

    Outputs that grew are folded by the plan's scale; by fractions they are left out.
    """
    stated = job.plan.output_scales
    scales = {name: stated["last_hidden_state"] for name in after if name.endswith(".last_hidden_state")} | stated
    embedded = [name for name in after if name.endswith("_embeds")]
    scales |= {name: (before[name].shape[-1] / after[name].shape[-1]) ** 0.5 for name in embedded}
    old, new = dict(before), dict(after)
    for name, values in before.items():
        size = values.shape[-1]
        padding = after[name][..., size:]
        if "logits" in name and padding.size:
            new[name] = after[name][..., :size]
            if (padding.max(-1) > new[name].max(-1)).any():
                return float("inf")
        elif after[name].shape[-1] % size:
            del old[name], new[name]
        elif padding.size and job.plan.layout == "tile":
            new[name] = after[name].reshape(*values.shape[:-1], -1, size).swapaxes(-1, -2).reshape(after[name].shape)
    return models.relative_error(old, new, scales) if old else 0.0


def main(asked: Sequence[Trial], kind: type[Sweep] = Sweep) -> int:
    """Runs trials and prints those that are wrong, and how often each reason refused one."""
    refused: Counter[str] = Counter()
    first: dict[str, str] = {}
    wrong, exact, worst = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        sweep = kind(Path(folder))
        for number, trial in enumerate(asked):
            try:
                outcome = sweep.outcome(trial)
            except Exception as error:
                print(f"{number}: {trial}\n    CRASH {type(error).__name__}: {str(error)[:1500]}", flush=True)
                wrong += 1
                continue
            if outcome.refused:
                reason = outcome.refused.replace(folder, "")[:400]
                refused[reason] += 1
                first.setdefault(reason, f"{number}: {trial}")
            elif outcome.wrong:
                wrong += 1
                print(f"{number}: {trial}\n    {outcome.error:.2e} {outcome.differences[:2]}", flush=True)
            else:
                exact += 1
                worst = max(worst, outcome.error if outcome.bound == EXACT else 0)
    print(
        f"{exact} right (the worst error where nothing rounds {worst:.1e}), {sum(refused.values())} refused, {wrong} wrong"
    )
    for reason, times in refused.most_common():
        print(f"{times:4} {reason}\n         {first[reason]}")
    return int(wrong > 0)


if __name__ == "__main__":
    drawn = wild_trials if sys.argv[3:] == ["all"] else trials
    sys.exit(main(drawn(*map(int, sys.argv[1:3]))))
