"""How far widened models are from the narrow ones: every kind of growth, on tiny random models, by transformers in float64.

    python benchmarks/exactness.py [--architecture llama qwen3 gemma3 gpt2 bert]

A figure is the largest difference of the logits over the largest logit (of old tokens, where a vocabulary is padded); a word in
its place is the reason why the growth is refused. Weights are stored in float64, so that nothing but the growth itself shows.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.writing import run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import models

HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
LLAMA = {**models.LLAMA, **HEADS, "hidden_size": 576, "intermediate_size": 96}
GEMMA = {
    **LLAMA, "hidden_size": 640, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 16,
    "sliding_window": 16, "tie_word_embeddings": True,
}  # fmt: skip
KNOWN = {
    "llama": models.Variant("LlamaForCausalLM", LLAMA),
    "qwen3": models.Variant("Qwen3ForCausalLM", {**LLAMA, "head_dim": 64, "tie_word_embeddings": True}),
    "gemma3": models.Variant("Gemma3ForCausalLM", GEMMA),
    "gpt2": models.Variant(
        "GPT2LMHeadModel", {**models.VARIANTS["gpt2"].config, "n_embd": 576, "n_head": 9, "n_inner": 96}
    ),
    "bert": models.Variant(
        "BertForMaskedLM", {**models.BERT, "hidden_size": 576, "num_attention_heads": 9, "intermediate_size": 96}
    ),
}
ALL = "hidden=2x,intermediate=2x,heads=2x"
# What goes along, where a config ties heads to hidden or wants them to divide it.
GROW = {
    "hidden": {"llama": "hidden=768,heads=+3,kv_heads=+1", "qwen3": "hidden=768", "gemma3": "hidden=1024",
               "gpt2": "hidden=768,heads=+3", "bert": "hidden=768,heads=+3"},
    "heads": {"llama": "heads=18", "qwen3": "heads=+3", "gemma3": "heads=+4", "gpt2": "hidden=4/3x,heads=+3",
              "bert": "hidden=2x,heads=+9"},
}  # fmt: skip
FACTORS = ("1.5", "2", "3")
ROWS: dict[str, dict[str, Any]] = {
    "--factor 2": {"factor": 2},
    "--factor 3": {"factor": 3},
    "hidden 576 -> 768, gemma3 640 -> 1024": {"grow": "hidden"},
    "heads by so many": {"grow": "heads"},
    "intermediate=round:128": {"grow": "intermediate=round:128"},
    "the same, --fill zero": {"grow": "intermediate=round:128", "fill": "zero"},
    "the same, --fill random": {"grow": "intermediate=round:128", "fill": "random"},
    "vocab=round:128": {"grow": "vocab=round:128"},
    **{f"head_dim={r}x": {"grow": f"head_dim={r}x"} for r in FACTORS},
    **{f"head_dim={r}x --rope {way}": {"grow": f"head_dim={r}x", "rope": way, "allow_approximate": way == "pairs"}
       for way in ("theta", "spread", "frequencies", "pairs") for r in FACTORS},
    "--factor 2 --split uneven": {"factor": 2, "split": "uneven"},
    "--factor 2 --noise -20": {"factor": 2, "noise": -20.0},
    "--depth 2x": {"depth": ("2x",)},
    "--depth +1@0 --factor 2": {"depth": ("+1@0",), "factor": 2},
    "--depth 0-1,0-1 (another function)": {"depth": ("0-1,0-1",), "allow_approximate": True},
    "--experts 4": {"experts": 4},
    "--experts 8 --slices 4 --factor 2": {"experts": 8, "slices": 4, "factor": 2},
    "intermediate=2x@0": {"grow": "intermediate=2x@0"},
}  # fmt: skip


def asked(architecture: str, row: str) -> dict[str, Any]:
    """The row's options for one architecture."""
    options = ROWS[row]
    return {**options, "grow": GROW[options["grow"]][architecture]} if options.get("grow") in GROW else options


def measured(narrow: Path, before: np.ndarray, wide: Path, options: dict[str, Any]) -> str:
    """The relative error of one growth as a text, or why there is none."""
    shutil.rmtree(wide, ignore_errors=True)
    try:
        run(prepare(Options(str(narrow), str(wide), **options)), lambda nbytes: None)
    except WidenError as error:
        return f"refused: {error.faults[0].replace(str(narrow), narrow.name)[:90]}"
    config = transformers.AutoConfig.from_pretrained(narrow)
    after = models.outputs(wide, torch.float64, inputs=lambda _: models.fixed_inputs(config))["logits"]
    old = after[..., : before.shape[-1]]
    if (after.argmax(-1) >= before.shape[-1]).any():
        return "a new token wins"
    return f"{np.abs(old - before).max() / np.abs(before).max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", nargs="+", choices=KNOWN, default=list(KNOWN))
    chosen = parser.parse_args().architecture
    with tempfile.TemporaryDirectory() as root:
        for name in chosen:
            narrow = Path(root, name)
            models.build(KNOWN[name], torch.float64).save_pretrained(narrow)
            before = models.outputs(narrow, torch.float64)["logits"]
            print(f"\n{name}", flush=True)
            for row in ROWS:
                print(f"{row:38} {measured(narrow, before, Path(root, 'wide'), asked(name, row))}", flush=True)


if __name__ == "__main__":
    main()
