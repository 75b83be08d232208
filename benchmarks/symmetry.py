"""Whether the copies of a widened model part in training: a tiny model is widened in each way and trained for a few steps.

    python benchmarks/symmetry.py [--steps 50] [--architecture llama gpt2 bert]

For every way the table says how far the first loss is from the narrow model's, the loss at the end, and for each axis how far
copies are apart then: of the rows that write copies of one unit the relative distance |w1 - w2| / |w1 + w2|, 0 where they are
the same bit by bit. All is done in float64 on one thread, with AdamW, on the same random tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from widen_cli.convert import prepare
from widen_cli.options import Options
from widen_cli.writing import run

WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "--split even": {"split": "even"},
    "--split uneven": {"split": "uneven"},
    "--noise -30": {"noise": -30.0},
    "--noise -60": {"noise": -60.0},
    "quiet copies": {"scaling": "quiet"},
}
# Of each architecture the model, what grows, and the weights whose rows (columns where +1) write copies of one unit of an axis:
# the name's end, the axis that writes, and how many neighbours a unit is.
HEAD = 8
SIZES = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, tuple[str, int, int]]]] = {
    "llama": (
        "LlamaForCausalLM",
        {**SIZES, "num_key_value_heads": 3, "tie_word_embeddings": False},
        "hidden=2,intermediate=2,heads=2,kv_heads=2",
        {
            "hidden": ("embed_tokens.weight", 1, 1),
            "intermediate": ("layers.0.mlp.up_proj.weight", 0, 1),
            "heads": ("layers.0.self_attn.q_proj.weight", 0, HEAD),
            "kv_heads": ("layers.0.self_attn.k_proj.weight", 0, HEAD),
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 6, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        "hidden=2,intermediate=2,head_dim=2",
        {
            "hidden": ("wpe.weight", 1, 1),
            "intermediate": ("h.0.mlp.c_fc.weight", 1, 1),
            "head_dim of q, k, v": ("h.0.attn.c_attn.weight", 1, 1),
        },
    ),
    "bert": (
        "BertForMaskedLM",
        {**SIZES, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "hidden=2,intermediate=2,head_dim=2",
        {
            "hidden": ("embeddings.position_embeddings.weight", 1, 1),
            "intermediate": ("layer.0.intermediate.dense.weight", 0, 1),
            "head_dim of query": ("layer.0.attention.self.query.weight", 0, 1),
            "head_dim of key": ("layer.0.attention.self.key.weight", 0, 1),
        },
    ),
}  # fmt: skip


def narrow_model(architecture: str, folder: Path) -> Path:
    """A random model of the architecture, saved in float64."""
    torch.manual_seed(0)
    name, config, _, _ = MODELS[architecture]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def widen(architecture: str, narrow: Path, wide: Path, **how: Any) -> Path:
    options = Options(input=str(narrow), output=str(wide), grow=MODELS[architecture][2], **{"scaling": "copy", **how})
    run(prepare(options), lambda nbytes: None)
    return wide


def train(folder: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss before every step and after the last, and the trained weights, by AdamW in float64."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    name = next(iter(transformers.AutoConfig.from_pretrained(folder).architectures))
    model = (
        getattr(transformers, name).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps + 1):
        tokens = torch.randint(3, 97, (4, 16), generator=draw)
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(float(loss.detach()))
        if len(losses) <= steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def apart(architecture: str, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    """For each axis the relative distance between neighbouring copies."""
    for axis, (end, dimension, size) in MODELS[architecture][3].items():
        (weight,) = (value for name, value in weights.items() if name.endswith(end))
        rows = weight.movedim(dimension, 0)
        one, other = rows.reshape(-1, 2, size, rows.shape[-1]).unbind(1)
        if rows.shape[-1] % 2 == 0 and "embed" not in end and "wpe" not in end:
            # What a row reads stands in parts; their sums are what two rows have in common before training.
            one, other = (each.reshape(*each.shape[:-1], -1, 2).sum(-1) for each in (one, other))
        yield axis, float((one - other).norm() / (one + other).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--architecture", nargs="+", choices=MODELS, default=list(MODELS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for architecture in asked.architecture:
            narrow = narrow_model(architecture, Path(root, architecture))
            first, *_, last = train(narrow, asked.steps)[0]
            print(
                f"\n{architecture}, {MODELS[architecture][2]}, {asked.steps} steps; narrow: loss {first:.6f} -> {last:.6f}"
            )
            for number, (way, how) in enumerate(WAYS.items()):
                losses, weights = train(
                    widen(architecture, narrow, Path(root, f"{architecture}{number}"), **how), asked.steps
                )
                far = ", ".join(f"{axis} {value:.1e}" for axis, value in apart(architecture, weights))
                print(
                    f"{way:15} first loss off by {abs(losses[0] / first - 1):.0e}, last {losses[-1]:.6f}; apart: {far}"
                )


if __name__ == "__main__":
    main()
