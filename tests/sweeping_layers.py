"""The sweep of Hugging Face models whose layers may differ: Gemma 3n, Nemotron-NAS and OpenELM, grown by ranges of layers.

`python tests/sweeping_layers.py SEED COUNT`. The classes of the latter two come with the models, so transformers runs modules of
LLaMA and Qwen 3 of each layer's sizes in their place, in float64.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import models
import sweeping
import test_layer_lists
import torch
import transformers
from safetensors.torch import load_file, save_file
from sweeping import Sweep, Trial
from test_layer_lists import PROMPTS, elm_inner
from transformers.models.qwen3 import modeling_qwen3

from widen_cli.maps import map_for_model_type

GEMMA, NAS, ELM = "gemma3n_text", "nemotron-nas", "openelm"
# How many layers there are, and the axes in which they may differ.
FAMILIES: dict[str, tuple[int, tuple[str, ...]]] = {
    GEMMA: (5, ("intermediate",)),
    NAS: (4, ("intermediate", "kv_heads")),
    ELM: (3, ("intermediate",)),
}
SIZES = {
    GEMMA: ("2x", "3x", "3/2x", "+4", "round:16", "1.5x:round:4", "to:60", "1x"),
    NAS: ("2x", "3x", "3/2x", "+256", "round:512", "1.2x:round:256", "to:1024", "4/3x"),
    ELM: ("2x", "3x", "3/2x", "+8", "round:32", "1.2x:round:8", "to:120", "5/4x"),
}
HEADS = ("2x", "3x", "to:6", "+1", "1x")


def trials(seed: int, count: int) -> list[Trial]:
    draw = random.Random(seed)
    return [_trial(draw) for _ in range(count)]


def _trial(draw: random.Random) -> Trial:
    variant = draw.choice(tuple(FAMILIES))
    layers, axes = FAMILIES[variant]
    found = map_for_model_type(variant)
    assert found is not None
    asked: dict[str, Any] = {}
    if variant != GEMMA and variant != ELM and draw.random() < 0.25:
        asked["depth"] = (draw.choice(("2x", "+1", "+1@end")),)
        layers += 1
    others = [name for name, axis in found.axes.items() if axis.keys and not axis.fixed and name not in axes]
    wishes: dict[str, str] = {}
    if draw.random() < 0.5:
        together = draw.choice(("2x", "3x", "4/3x", "3/2x"))
        wishes |= dict.fromkeys(("hidden", "heads") if variant == NAS else ("hidden",), together)
    if draw.random() < 0.3:
        wishes.setdefault(draw.choice(others), draw.choice(("2x", "3x")))
    said = [f"{axis}={wish}" for axis, wish in wishes.items()]
    for axis in draw.sample(axes, draw.randint(1, len(axes))):
        of_axis = SIZES[variant] if axis == "intermediate" else HEADS
        starts = sorted(draw.sample(range(layers), draw.choice((0, 1, 1, 2))))
        for first, behind in zip(starts, [*starts, layers][1:], strict=True):
            said.append(f"{axis}={draw.choice(of_axis)}@{first}-{draw.randint(first, behind - 1)}")
        said += [f"{axis}={draw.choice(of_axis)}"] if not starts or draw.random() < 0.3 else []
    asked["grow"] = ",".join(said)
    return sweeping._drawn_rest(draw, variant, asked, ())


def elm_logits(folder: Path) -> models.Outputs:
    """OpenELM run by Qwen 3's modules, whose attention is the same: its weights taken apart, sizes from the config alone."""
    config = json.loads((folder / "config.json").read_text())
    stored = {name: values.to(torch.float64) for name, values in load_file(folder / "model.safetensors").items()}
    head, heads, kv_heads, inner = (
        config["head_dim"],
        config["num_query_heads"],
        config["num_kv_heads"],
        elm_inner(config),
    )
    assert heads == test_layer_lists.elm_heads(config)
    table = stored["transformer.token_embeddings.weight"]
    with models.Float64Throughout(), torch.no_grad():
        layers = []
        for n, sizes in enumerate(zip(heads, kv_heads, inner, strict=True)):
            at = f"transformer.layers.{n}."
            of = {name.removeprefix(at): values for name, values in stored.items() if name.startswith(at)}
            parts = [sizes[0] * head, sizes[1] * head, sizes[1] * head]
            query, key, value = of.pop("attn.qkv_proj.weight").split(parts)
            gate, up = of.pop("ffn.proj_1.weight").split(sizes[2])
            named = {
                "self_attn.q_proj": query,
                "self_attn.k_proj": key,
                "self_attn.v_proj": value,
                "mlp.gate_proj": gate,
            }
            named |= {"mlp.up_proj": up} | {new: of[f"{old}.weight"] for old, new in ELM_NAMES.items()}
            layer = modeling_qwen3.Qwen3DecoderLayer(_qwen3(config, sizes), n).to(torch.float64)
            layer.load_state_dict({f"{name}.weight": values for name, values in named.items()})
            layers.append(layer)
        model = transformers.Qwen3Model(_qwen3(config, (heads[0], kv_heads[0], inner[0]))).to(torch.float64)
        model.layers = torch.nn.ModuleList(layers)
        model.embed_tokens.weight.copy_(table)
        model.norm.weight.copy_(stored["transformer.norm.weight"])
        found = [model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0] @ table.T for tokens in PROMPTS]
    return {"logits": torch.cat(found).numpy()}


ELM_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm", "attn.out_proj": "self_attn.o_proj", "ffn.proj_2": "mlp.down_proj",
}  # fmt: skip


def _qwen3(config: dict[str, Any], sizes: tuple[int, int, int]) -> transformers.Qwen3Config:
    found = transformers.Qwen3Config(
        vocab_size=config["vocab_size"], hidden_size=config["model_dim"], head_dim=config["head_dim"],
        num_hidden_layers=config["num_transformer_layers"],
        num_attention_heads=sizes[0], num_key_value_heads=sizes[1], intermediate_size=sizes[2], rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_freq_constant"]}, attn_implementation="eager",
    )  # fmt: skip
    found._attn_implementation = "eager"
    return found


FOLDERS = {NAS: test_layer_lists.nas_folder, ELM: test_layer_lists.elm_folder}
RUN = {NAS: test_layer_lists.nas_logits, ELM: elm_logits}


class LayeredSweep(Sweep):
    """Runs trials in a folder; narrow models and what they compute are made once."""

    def make(self, trial: Trial, path: Path) -> None:
        if trial.variant not in FOLDERS:
            super().make(trial, path)
            return
        FOLDERS[trial.variant](path)
        weights = path / "model.safetensors"
        # What is loaded lies in the file that is written.
        stored = {name: values.to(trial.dtype, copy=True) for name, values in load_file(weights).items()}
        save_file(stored, weights)

    def outputs(self, folder: Path, trial: Trial, narrow: Path) -> models.Outputs:
        run_by = RUN.get(trial.variant)
        return run_by(folder) if run_by is not None else super().outputs(folder, trial, narrow)


if __name__ == "__main__":
    sys.exit(sweeping.main(trials(*map(int, sys.argv[1:3])), LayeredSweep))
