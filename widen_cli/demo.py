"""A tiny LLaMA made with numpy, widened, and run narrow and wide by a forward pass that knows nothing of the tool."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from widen_cli.convert import prepare
from widen_cli.errors import WidenError, printable
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.plan.text import plan_text
from widen_cli.writing import run

Array = npt.NDArray[Any]
TOLERANCE = 1e-5  # float32 sums in another order; a wrong factor or epsilon is off by 1e-2 and more

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def demonstration(folder: str | None) -> tuple[str, bool]:
    """What the demo shows, and whether wide and narrow agree; the files stay in `folder` if one is given.

    Raises WidenError where the folder holds an earlier demo's files, or somebody else's.
    """
    if folder is not None:
        for name in ("narrow", "wide"):
            if (Path(folder) / name).exists():
                raise WidenError(f"{printable(str(Path(folder) / name))}: exists; give the demo a folder of its own")
        return _shown(Path(folder), kept=True)
    with tempfile.TemporaryDirectory() as temporary:
        return _shown(Path(temporary), kept=False)


def _shown(folder: Path, kept: bool) -> tuple[str, bool]:
    narrow, wide = folder / "narrow", folder / "wide"
    make_checkpoint(narrow)
    report = _widened(narrow, wide)
    tokens = np.arange(20) * 31 % CONFIG["vocab_size"]
    before, after = logits(narrow, tokens), logits(wide, tokens)
    error = float(np.abs(after - before).max() / np.abs(before).max())
    same = error < TOLERANCE
    old, new = (f"{model}/model.safetensors" if kept else f"{model.name}/model.safetensors" for model in (narrow, wide))
    lines = [
        f"made    {old}: a random LLaMA, {_parameters(narrow)} parameters",
        f"widened {new}: {_parameters(wide)} parameters",
        "",
        plan_text(report.job.plan),
        "",
        f"ran both on {len(tokens)} tokens with a forward pass in numpy: logits {list(before.shape)}, "
        f"largest difference {error:.1e} of the largest",
        "the wide model computes the same function" if same else "THE MODELS DIFFER; please report this",
    ]
    return "\n".join(lines), same


def _widened(narrow: Path, wide: Path) -> Report:
    job = prepare(Options(input=str(narrow), output=str(wide), factor=2, force=True))
    return run(job, lambda nbytes: None)


def _parameters(model: Path) -> int:
    return sum(tensor.size for tensor in load_file(model / "model.safetensors").values())


def make_checkpoint(folder: Path) -> None:
    """Writes model.safetensors and config.json of a tiny random LLaMA with tied embeddings."""
    random = np.random.default_rng(0)
    hidden, ffn, head = (
        CONFIG["hidden_size"],
        CONFIG["intermediate_size"],
        CONFIG["hidden_size"] // CONFIG["num_attention_heads"],
    )
    keys = CONFIG["num_key_value_heads"] * head

    def matrix(rows: int, columns: int, deviation: float) -> Array:
        return np.asarray(random.standard_normal((rows, columns)) * deviation, np.float32)

    def gain() -> Array:
        return np.asarray(1 + 0.2 * random.standard_normal(hidden), np.float32)

    tensors = {"model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden, 0.1), "model.norm.weight": gain()}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        tensors |= {f"{at}.{name}.weight": matrix(*shape, shape[1] ** -0.5) for name, shape in shapes.items()}
        tensors |= {f"{at}.{name}.weight": gain() for name in ("input_layernorm", "post_attention_layernorm")}
    folder.mkdir(parents=True, exist_ok=True)
    # Not save_file, which leaves the file to its owner alone.
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")


def logits(folder: Path, tokens: Array) -> Array:
    """The logits [tokens, vocab] of a LLaMA in float64, straight from its config and its paper."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    stream = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        block = {
            name.split(".", 3)[3]: tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        stream = stream + _attention(_norm(stream, block["input_layernorm.weight"], config), block, config)
        stream = stream + _feed_forward(_norm(stream, block["post_attention_layernorm.weight"], config), block)
    return np.asarray(_norm(stream, weights["model.norm.weight"], config) @ weights["model.embed_tokens.weight"].T)


def _norm(x: Array, gain: Array, config: dict[str, Any]) -> Array:
    return np.asarray(gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]))


def _attention(x: Array, block: dict[str, Array], config: dict[str, Any]) -> Array:
    count, head = len(x), config["hidden_size"] // config["num_attention_heads"]
    query, key, value = (
        (x @ block[f"self_attn.{name}_proj.weight"].T).reshape(count, -1, head).swapaxes(0, 1) for name in "qkv"
    )
    group = len(query) // len(key)
    key, value = _rotated(key, config).repeat(group, axis=0), value.repeat(group, axis=0)
    scores = _rotated(query, config) @ key.swapaxes(1, 2) / np.sqrt(head)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ value
    return np.asarray(mixed.swapaxes(0, 1).reshape(count, -1) @ block["self_attn.o_proj.weight"].T)


def _rotated(heads: Array, config: dict[str, Any]) -> Array:
    half = heads.shape[-1] // 2
    angles = np.arange(heads.shape[1])[:, None] * config["rope_theta"] ** -(np.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )


def _feed_forward(x: Array, block: dict[str, Array]) -> Array:
    gate, up = (x @ block[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return np.asarray((gate / (1 + np.exp(-gate)) * up) @ block["mlp.down_proj.weight"].T)
