"""The plan's factors of gradients against the gradients themselves, by transformers in float64 throughout.

    python tests/gradient_checks.py [FAMILY ...]      # every family, variant and growth, in every mode that is exact

A narrow and a wide model take the same batch; a loss reads all of their outputs, those that grew folded. The gradient of
every stored tensor is what save_pretrained writes of a model whose parameters hold their gradients, so that names, packings
and experts are those of the checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from families import MODES, Family
from safetensors.torch import load_file

from widen_cli.convert import prepare
from widen_cli.dimensions import Growth, runs
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.plan.result import Gradient, Plan
from widen_cli.writing import run

Arrays = dict[str, np.ndarray]


def gradients_of(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], plan: Plan | None, described: models.Variant
) -> Arrays:
    """The gradient of every stored tensor, for a loss that is a random sum over all outputs; those that are not of the narrow
    `shapes` are first folded as the plan says that they grew. `shapes` is filled where it is empty."""
    stated = plan.output_scales if plan else {}
    with models.Float64Throughout():
        model = models.load(folder, torch.float64)
        model.config._experts_implementation = "eager"
        found = model(**(described.inputs or models.fixed_inputs)(model.config))
        outputs = {
            name: value
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        if not shapes:
            assert isinstance(shapes, dict)
            shapes |= {name: tuple(value.shape) for name, value in outputs.items()}
        loss = torch.zeros((), dtype=torch.float64)
        for name, value in outputs.items():
            if tuple(value.shape) != shapes[name]:
                default = stated.get("last_hidden_state", 1.0) if name.endswith("last_hidden_state") else 1.0
                copies = value.shape[-1] // shapes[name][-1]
                if name.endswith("_embeds"):
                    default = copies**-0.5  # what is normalised to length 1
                value = value.reshape(*shapes[name], copies).mean(-1) / stated.get(name, default)
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weights = torch.randn(shapes[name], generator=drawn, dtype=torch.float64)
            loss = loss + torch.where(value.abs() < 1e4, value * weights, 0.0).sum()
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        return {k: v.double().numpy() for path in Path(place).glob("*.safetensors") for k, v in load_file(path).items()}


def spread(values: np.ndarray, growth: Growth, axis: int) -> np.ndarray:
    """Values along an axis as a tree of factors lays them."""
    at: list[int] = []
    factors: list[float] = []
    for each in runs(growth):
        for position in range(each.start, each.stop):
            at += [position] * each.each
            live = 0 if each.filled else each.live
            factors += [float(each.scale) if copy < live else 0.0 for copy in range(each.each)]
    shape = [1] * values.ndim
    shape[axis] = -1
    return values.take(at, axis) * np.reshape(factors, shape)


def expected(narrow: np.ndarray, gradient: Gradient) -> np.ndarray:
    for axis, tree in enumerate(gradient.growth):
        narrow = spread(narrow, tree, axis)
    return narrow * float(gradient.scale)


@dataclass(frozen=True)
class Compared:
    """The largest relative error, the tensor that has it, how many tensors are right by what is known, and why others begin anew."""

    error: float
    tensor: str
    known: int
    anew: Mapping[str, int]
    unknown: int


def compared(plan: Plan, narrow: Arrays, wide: Arrays) -> Compared:
    """Every tensor's gradient against what the plan says it is. Some gradients are zero but for roundings, such as those of
    keys' biases, which a softmax does not see: they count against the largest of all."""
    floor = 1e-6 * max(np.abs(values).max(initial=0.0) for values in narrow.values())
    worst, at, known, anew, unknown = 0.0, "", 0, Counter[str](), 0
    for tensor in plan.tensors:
        name = tensor.source.name
        gradient = plan.gradients.get(name)
        if gradient is None or name not in narrow or tensor.names[0] not in wide:
            anew["no gradient in the plan, or no parameter"] += 1
            continue
        if gradient.reason:
            anew[gradient.reason] += 1
            continue
        said, own = expected(narrow[name], gradient), wide[tensor.names[0]]
        if gradient.unknown:
            own = np.where(said != 0, own, 0.0)
            unknown += gradient.unknown
        known += 1
        error = float(
            np.abs(said - own).max(initial=0.0)
            / max(np.abs(own).max(initial=0.0), np.abs(said).max(initial=0.0), floor)
        )
        if not error <= worst:
            worst, at = error, name
    return Compared(worst, at, known, anew, unknown)


def checked(described: models.Variant, growth: str, mode: str, root: Path, held: dict[str, Any]) -> Compared:
    """One widening in `root`; `held` keeps the narrow gradients for the next one of the same variant."""
    narrow = root / "narrow"
    if not held:
        models.build(described, torch.float64).save_pretrained(narrow)
        held["shapes"] = {}
        held["narrow"] = gradients_of(narrow, held["shapes"], None, described)
    asked: dict[str, Any] = (
        {"factor": int(growth[7:])} if growth.startswith("factor=") else {"grow": models.by_factors(growth)}
    )
    job = prepare(
        Options(input=str(narrow), output=str(root / "wide"), scaling=mode, optimizer="keep", force=True, **asked)
    )
    run(job, lambda nbytes: None)
    return compared(job.plan, held["narrow"], gradients_of(root / "wide", held["shapes"], job.plan, described))


def cases(family: Family) -> Iterator[tuple[str, str, str]]:
    """Variant, growth and mode: the usual variant by 2 in all modes that are exact and by every growth in two of them, the
    others by 2 in two and by one growth in one."""
    for number, variant in enumerate(family.variants):
        for turn, growth in enumerate(("factor=2", *family.growths)):
            modes = [mode for mode in MODES if family.refusal(variant, mode, growth) is None]
            many = (
                (4 if turn == 0 else 2) if number == 0 else 2 if turn == 0 else turn == 1 + number % len(family.growths)
            )
            chosen = [modes[(number + turn + step) % len(modes)] for step in range(many)] if modes else []
            yield from ((variant, growth, mode) for mode in dict.fromkeys(chosen))


def main() -> None:
    from test_families import FAMILIES

    asked = set(sys.argv[1:])
    for family in FAMILIES:
        if asked and family.name not in asked:
            continue
        held: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory() as root:
            for variant, growth, mode in cases(family):
                place = Path(root, variant)
                place.mkdir(exist_ok=True)
                start = time.time()
                try:
                    found = checked(family.variants[variant], growth, mode, place, held.setdefault(variant, {}))
                    told = f"{found.error:.1e} known {found.known} anew {sum(found.anew.values())} unknown {found.unknown} {found.tensor}"
                    told += "".join(f" [{count}: {why}]" for why, count in found.anew.items())
                except WidenError as error:
                    told = f"refused: {str(error).splitlines()[0][:150]}"
                except Exception as error:
                    told = f"FAILED {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                print(f"{family.name}\t{variant}\t{growth}\t{mode}\t{told}\t{time.time() - start:.1f}s", flush=True)


if __name__ == "__main__":
    main()
