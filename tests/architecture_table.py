"""Makes docs/architectures.md of the results that tests noted: `python tests/architecture_table.py RESULTS`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import models
from families import MODES, Family
from test_families import FAMILIES, map_of
from test_lossless import SHARED_EPS, family

HEAD = """# Architectures

Made by the tests of real results: tiny random checkpoints, widened on files and run by transformers in float64 throughout
(`WIDEN_RESULTS=r.jsonl pytest && python tests/architecture_table.py r.jsonl > docs/architectures.md`).
The error is the largest difference of an output over the largest output, worst of all variants, growths and modes; in float32 the
default of the command line, whose rounding of stored weights it shows. *Grows* lists what `--grow` takes; a mode that is refused is
not function-exact for some variant there, and the plan says which equations rule it out. *Head_dim* says by which `--rope` heads
grow under rotary positions, with the worst error of those.

| family | variants | cases | grows | head_dim | refused modes | error, float64 | error, float32 |
|---|---|---|---|---|---|---|---|
"""


# Those that test_lossless runs, each growth in each mode.
FIRST = [
    Family(
        name,
        {variant: each for variant, each in models.VARIANTS.items() if family(variant) == name},
        (),
        refused={
            f"{variant}:{mode}": "eps" for variant in SHARED_EPS for mode in ("orthogonal", "sum") if name == "bert"
        },
    )
    for name in ("bert", "gpt2", "llama", "mistral", "qwen2")
]


def row(family: Family, results: Sequence[Sequence[object]]) -> str:
    architecture = map_of(family)
    mine = [result for result in results if result[0] == family.name]
    own = [result for result in mine if not str(result[2]).startswith("rope")]
    heads = [result for result in mine if result not in own]
    errors = {
        dtype: max((float(str(found)) for *_, kind, found in own if kind == dtype and found is not None), default=None)
        for dtype in ("float64", "float32")
    }
    grown = [name for name, axis in architecture.axes.items() if not axis.fixed and axis.keys]
    refused = [mode for mode in MODES if mode in family.refused]
    some = sorted({key.split(":")[1] for key, word in family.refused.items() if ":" in key and word})
    modes = ", ".join([*refused, *(f"{mode} (some)" for mode in some if mode not in refused)]) or "none"
    shown = {dtype: "" if error is None else f"{error:.0e}" for dtype, error in errors.items()}
    cells = (
        family.name,
        len(family.variants),
        len(own),
        ", ".join(grown),
        head_dim(family, heads),
        modes,
        *shown.values(),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def head_dim(family: Family, results: Sequence[Sequence[object]]) -> str:
    """How heads can become larger: `exact`, under rotary positions by which ways and with which error, or not."""
    architecture = map_of(family)
    if architecture.growth.head_dim is None:
        return "fixed"
    run = {str(mode)[5:]: None for _, _, mode, _, kind, _ in results if kind == "float64"}
    if run:
        worst = max(float(str(found)) for *_, kind, found in results if kind == "float64")
        return f"exact ({', '.join(way for way in architecture.rope.methods if way in run)}), {worst:.0e}"
    rotated = any("rope(" in space.formula.text for space in architecture.spaces.values() if space.formula)
    return "refused" if rotated else "exact"


def table(lines: Iterable[str]) -> str:
    results = [json.loads(line) for line in lines]
    found: dict[str, int] = defaultdict(int)
    for name, *_ in results:
        found[name] += 1
    return HEAD + "\n".join(row(each, results) for each in (*FIRST, *FAMILIES) if found[each.name]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1]).read_text().splitlines()))
