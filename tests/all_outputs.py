"""Every output of a model, nested ones and those of each layer too: it is as it was, or the plan says how it comes out.

`python tests/all_outputs.py [NAME ...]` runs all variants of all families, or those named, and prints what is not so.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import models
import numpy as np
import test_families
import torch
from families import MODES, Family

from widen_cli.errors import WidenError
from widen_cli.plan.result import Plan

BOUND = 1e-9


def everything(folder: Path, inputs: Any) -> models.Outputs:
    """All that a model puts out in numbers, by dotted names; tuples by number."""
    with models.Float64Throughout():
        model = models.load(folder, torch.float64)
        model.config._experts_implementation = "eager"
        asked = {"output_hidden_states": True, "output_attentions": True}
        with torch.inference_mode():
            found = model(**(inputs or models.fixed_inputs)(model.config), **asked)
    return dict(_flat(found, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield name, value.double().numpy()
    elif isinstance(value, Mapping | tuple | list):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        # A state, as RWKV's, is nothing to read but what the same model goes on from.
        for part, inner in ((part, inner) for part, inner in parts if part != "state"):
            yield from _flat(inner, f"{name}.{part}" if name else str(part))


def untold(plan: Plan, narrow: models.Outputs, wide: models.Outputs) -> list[str]:
    """What is wrong with the outputs of a widened model; empty where each is as the plan says."""
    if narrow.keys() != wide.keys():
        return [f"other outputs: {sorted(narrow.keys() ^ wide.keys())}"]
    return [f"{name}: {fault}" for name in narrow if (fault := _fault(plan, name, narrow, wide))]


def _fault(plan: Plan, name: str, narrow: models.Outputs, wide: models.Outputs) -> str:
    before, after = narrow[name], wide[name]
    if after.shape == before.shape:
        off = np.abs(after - before).max() / max(float(np.abs(before).max()), 1e-300)
        return "" if off <= BOUND else f"differs by {off:.1e}"
    scales = _scales(plan, name, narrow)
    if "attentions." in name and not scales:
        return _copied_heads(plan, before, after)
    copies, left = divmod(after.shape[-1], before.shape[-1])
    if left or after.shape[:-1] != before.shape[:-1]:
        return f"{after.shape} is no widening of {before.shape}"
    if name.endswith("_embeds"):
        scales = [copies**-0.5]  # brought to the length 1
    if not scales:
        return "grew, and the plan does not say how"
    groups = after.reshape(*before.shape, copies)
    off = min(float(np.abs(groups / scale - before[..., None]).max() / np.abs(before).max()) for scale in scales)
    return "" if off <= BOUND else f"is off by {off:.1e} where the plan says {scales}"


def _copied_heads(plan: Plan, before: np.ndarray, after: np.ndarray) -> str:
    """The weights of attention stand once for each copy of a head: heads by heads, or in groups of those that share a key."""
    batch, heads, *places = before.shape
    copies, left = divmod(after.shape[1], heads)
    grown = {plan.factors[axis] for axis in plan.axes if axis.endswith("heads")}
    if left or after.shape != (batch, heads * copies, *places) or copies not in grown:
        return f"{after.shape} is no widening of {before.shape} by heads"
    groups = [group for group in range(1, heads + 1) if heads % group == 0]
    offs = [
        np.abs(
            after.reshape(batch, heads // group, copies, group, *places) - before.reshape(batch, -1, 1, group, *places)
        ).max()
        for group in groups
    ]
    return "" if min(offs) <= BOUND else f"heads are off by {min(offs):.1e}"


def _scales(plan: Plan, name: str, narrow: models.Outputs) -> list[float]:
    """What the plan says an output is multiplied by; the last of the layers' hidden states may be the model's."""
    said = plan.output_scales
    bare = re.sub(r"(\.\d+)+$", "", name)
    if "." in bare or (bare in said and bare != "hidden_states"):
        return [said[each] for each in (bare, f"{bare.rpartition('.')[0]}.last_hidden_state") if each in said]
    kind = re.sub("^(encoder|decoder)_", "", bare)
    last = kind == "hidden_states" and name != bare and f"{bare}.{int(name.rpartition('.')[2]) + 1}" not in narrow
    known = [kind, *(["last_hidden_state", "decoder_last_hidden_state"] if last else [])]
    return [said[each] for each in known if each in said]


def checked(family: Family, variant: str, folder: Path, mode: str) -> list[str]:
    """What is wrong with the outputs of a family's variant, twice as large."""
    described = family.variants[variant]
    source, target = folder / variant, folder / f"{variant}-wide"
    models.build(described, torch.float64).save_pretrained(source)
    report = test_families.convert(source, target, "factor=2", scaling=mode)
    narrow, wide = (everything(each, described.inputs) for each in (source, target))
    return untold(report.job.plan, narrow, wide)


def mode_of(family: Family, variant: str) -> str:
    """A mode that is exact, of those in which a stream and its last norm have different scales if there is one."""
    exact = [mode for mode in ("quiet", "sum", *MODES) if family.refusal(variant, mode, "factor=2") is None]
    return exact[0] if exact else "auto"


def main(names: list[str]) -> int:
    """Prints what is wrong, and how many were run."""
    run = wrong = 0
    for family in test_families.FAMILIES:
        for variant in family.variants:
            if names and not {family.name, variant} & {*names}:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = checked(family, variant, Path(folder), mode_of(family, variant))
                except WidenError as error:
                    print(f"{variant}: refused, {error}"[:200], flush=True)
                    continue
            run += 1
            wrong += bool(found)
            for fault in found:
                print(f"{variant} ({mode_of(family, variant)}): {fault}", flush=True)
    print(f"{run} run, {wrong} with outputs that are not as the plan says")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
