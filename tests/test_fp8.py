"""Block-scaled FP8 widened as it stands: the bytes are moved, factors go into the grid, and the function is kept.

The weights' numbers are made here from bytes and grid, by the format's rule; the function is seen through transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import safetensors
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

BLOCK = 4
_CONFIG = models.VARIANTS["llama"].config
# Heads of 12 are three blocks of 4, the FFN's 50 ends in half a block.
VARIANT = models.Variant("LlamaForCausalLM", {**_CONFIG, "hidden_size": 72})
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantised(folder: Path, seed: int = 0, variant: models.Variant = VARIANT) -> Path:
    """A llama whose linear weights are random FP8 with a grid of random scales, as DeepSeek's files have them."""
    models.build(variant).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.split(".")[-2] in LINEAR]:
        rows, columns = tensors[name].shape
        grid = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), generator=generator) * 0.02 + 0.01
        tensors[f"{name}_scale_inv"] = grid
        tensors[name] = (tensors[name] / expanded(grid, rows, columns)).clamp(-440, 440).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expanded(grid: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return grid.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def dequantised(folder: Path, target: Path) -> Path:
    """The same model in float64, for transformers."""
    tensors = load_file(folder / "model.safetensors")
    numbers = {}
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        numbers[name] = value.double()
        if f"{name}_scale_inv" in tensors:
            numbers[name] *= expanded(tensors[f"{name}_scale_inv"].double(), *value.shape)
    target.mkdir()
    save_file(numbers, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def widened(source: Path, target: Path, grow: str, **options: Any) -> Report:
    return run(prepare(Options(str(source), str(target), grow=models.by_factors(grow), **options)), lambda nbytes: None)


@pytest.mark.parametrize("mode", ["auto", "copy", "sum", "quiet"])
@pytest.mark.parametrize(
    ("grow", "layout"),
    [
        ("hidden=2,intermediate=2,heads=2,kv_heads=2", "interleave"),
        ("hidden=4,intermediate=2,heads=2,kv_heads=1", "interleave"),
        ("hidden=2,heads=2,kv_heads=2", "tile"),
    ],
)
def test_the_function_is_kept(tmp_path: Path, mode: str, grow: str, layout: str) -> None:
    narrow, wide = quantised(tmp_path / "narrow"), tmp_path / "wide"
    report = widened(narrow, wide, grow, scaling=mode, layout=layout)
    assert report.total.rounded == 0
    before = models.outputs(dequantised(narrow, tmp_path / "n"), torch.float64)
    after = models.outputs(dequantised(wide, tmp_path / "w"), torch.float64)
    assert models.relative_error(before, after) <= 1e-12
    # The guard: a grid that was not widened with its weight is seen.
    tensors = load_file(wide / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_scale_inv"] *= 1.01
    save_file(tensors, wide / "model.safetensors", {"format": "pt"})
    assert models.relative_error(before, models.outputs(dequantised(wide, tmp_path / "b"), torch.float64)) > 1e-7


def test_the_bytes_are_those_of_the_narrow_weight(tmp_path: Path) -> None:
    narrow, wide = quantised(tmp_path / "narrow"), tmp_path / "wide"
    widened(narrow, wide, "hidden=2,heads=2,kv_heads=2,intermediate=3", scaling="copy")
    name = "model.layers.1.self_attn.q_proj.weight"
    with (
        safetensors.safe_open(wide / "model.safetensors", "pt") as file,
        safetensors.safe_open(narrow / "model.safetensors", "pt") as old,
    ):
        bytes_ = old.get_tensor(name).view(torch.uint8).reshape(6, 12, 72)
        expected = bytes_.repeat_interleave(2, 0).reshape(144, 72).repeat_interleave(2, 1)
        assert torch.equal(file.get_tensor(name).view(torch.uint8), expected)
        grid = old.get_tensor(f"{name}_scale_inv").reshape(6, 3, 18).repeat_interleave(2, 0).reshape(36, 18)
        assert torch.equal(file.get_tensor(f"{name}_scale_inv"), grid.repeat_interleave(2, 1) / 2)
    config = json.loads((wide / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def test_a_pipe_gives_the_same_bytes_with_more_layers(tmp_path: Path) -> None:
    """A file holds all its F32 first: the grids stand before the weights."""
    narrow = quantised(tmp_path / "narrow")
    given = ["--grow", "heads=+3,intermediate=2x", "--depth", "+1@0", "--fill", "zero"]
    before = models.outputs(dequantised(narrow, tmp_path / "n"), torch.float64)
    sources = {"folder": (str(narrow), b""), "pipe": ("-", (narrow / "model.safetensors").read_bytes())}
    for name, (source, data) in sources.items():
        config = ["--config", str(narrow / "config.json")] if data else []
        done = CliRunner().invoke(cli, ["convert", source, f"{tmp_path / name}/", *config, *given], data)
        assert done.exit_code == 0, done.output
    assert (
        models.relative_error(before, models.outputs(dequantised(tmp_path / "pipe", tmp_path / "w"), torch.float64))
        <= 1e-12
    )
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "pipe" / name).read_bytes() == (tmp_path / "folder" / name).read_bytes()
    assert not verify(Options(str(narrow), str(tmp_path / "pipe")), lambda nbytes: None).differences


def test_what_blocks_cannot_hold_is_refused(tmp_path: Path) -> None:
    narrow = quantised(tmp_path / "narrow")
    # Tiled, the FFN's last half block would be followed by the next copy's first values.
    with pytest.raises(WidenError, match=r"a block of 4 would hold values of two blocks of its scale_inv"):
        widened(narrow, tmp_path / "wide", "intermediate=2", layout="tile")
    with pytest.raises(WidenError, match=r"is block-scaled FP8, which --dtype cannot turn into BF16"):
        widened(narrow, tmp_path / "wide", "hidden=2,heads=2,kv_heads=2", dtype="BF16")
    tensors = load_file(narrow / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(3, 3)
    save_file(tensors, narrow / "model.safetensors", {"format": "pt"})
    with pytest.raises(WidenError, match=r"has shape \[3, 3\], where blocks of 4 x 4 need \[13, 18\]"):
        widened(narrow, tmp_path / "wide", "hidden=2,heads=2,kv_heads=2")
    assert not (tmp_path / "wide").exists()
