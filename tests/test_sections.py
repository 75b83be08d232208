"""Models that hold another: its part of the config, the names that published ones have, and the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families_multimodal
import models
import torch
from click.testing import CliRunner, Result
from models import Variant
from safetensors.torch import load_file, save_file

from widen_cli.cli import cli

EXACT = 1e-12


def variant(name: str) -> Variant:
    return next(family.variants[name] for family in families_multimodal.FAMILIES if name in family.variants)


def saved(name: str, folder: Path) -> Path:
    models.build(variant(name), torch.float64).save_pretrained(folder)
    return folder


def edited(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config with other values; None removes a key. Dots are written as two underscores."""
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *inner, key = path.split("__")
        section = config
        for word in inner:
            section = section[word]
        section.pop(key, None)
        if value is not None:
            section[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return config


def renamed(folder: Path, words: dict[str, str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for old, new in words.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: one for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def widen(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def error(name: str, narrow: Path, wide: Path) -> float:
    before, after = (models.outputs(path, torch.float64, inputs=variant(name).inputs) for path in (narrow, wide))
    return models.relative_error(before, after)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_published_gemma3_leaves_out_what_its_class_knows(tmp_path: Path) -> None:
    """Without the sizes of heads, under the names of the hub; what grows is written, the tower is what it was."""
    narrow, wide = saved("gemma3", tmp_path / "narrow"), tmp_path / "wide"
    names = load_file(narrow / "model.safetensors")
    assert any(name.startswith("model.language_model.") for name in names) or any(
        name.startswith("language_model.model.") for name in names
    )
    renamed(
        narrow,
        {
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
    )
    edited(narrow, tie_word_embeddings=None, text_config__tie_word_embeddings=None)
    done = widen(narrow, wide, "--grow", "hidden=2x,intermediate=3x,heads=2x,kv_heads=1x")
    assert done.exit_code == 0, done.stderr
    assert error("gemma3", narrow, wide) < EXACT
    before, after = (load_file(path / "model.safetensors") for path in (narrow, wide))
    towers = [name for name in before if name.startswith("vision_tower.")]
    assert len(towers) > 10
    assert all(torch.equal(before[name], after[name]) for name in towers)
    sizes = config_of(wide)["text_config"]
    assert (sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]) == (72, 150, 12)
    assert config_of(wide)["vision_config"] == config_of(narrow)["vision_config"]


def test_keys_that_the_class_knows_are_written_where_they_grow(tmp_path: Path) -> None:
    """Gemma 3 4b says nothing of its eight heads, and of the four that they share."""
    usual = variant("gemma3")
    part = {**usual.config["text_config"], "hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4}
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    models.build(replace(usual, config={**usual.config, "text_config": part}), torch.float64).save_pretrained(narrow)
    edited(narrow, text_config__num_attention_heads=None, text_config__num_key_value_heads=None)
    done = widen(narrow, wide, "--grow", "heads=3x,kv_heads=1x")
    assert done.exit_code == 0, done.stderr
    assert error("gemma3", narrow, wide) < EXACT
    part = config_of(wide)["text_config"]
    assert part["num_attention_heads"] == 24
    assert "num_key_value_heads" not in part


def test_a_flat_config_is_the_part_itself(tmp_path: Path) -> None:
    """Qwen2.5-VL is published without a text_config."""
    narrow, wide = saved("qwen2_5_vl_tied", tmp_path / "narrow"), tmp_path / "wide"
    config = config_of(narrow)
    part = config.pop("text_config")
    part = {key: value for key, value in part.items() if key not in ("model_type", "dtype")}
    (narrow / "config.json").write_text(json.dumps({**part, **config}))
    done = widen(narrow, wide, "--grow", "hidden=2x,intermediate=3x,heads=2x,kv_heads=1x")
    assert done.exit_code == 0, done.stderr
    assert error("qwen2_5_vl_tied", narrow, wide) < EXACT
    after = config_of(wide)
    assert "text_config" not in after
    assert (after["hidden_size"], after["vision_config"]["out_hidden_size"]) == (72, 72)


def test_the_way_there_and_back(tmp_path: Path) -> None:
    narrow, wide, back = saved("qwen2_5_vl_tied", tmp_path / "narrow"), tmp_path / "wide", tmp_path / "back"
    done = widen(narrow, wide, "--factor", "2", "--scaling", "copy")
    assert done.exit_code == 0, done.stderr
    assert widen("verify", narrow, wide).exit_code == 0
    folded = widen("collapse", wide, back)
    assert folded.exit_code == 0, folded.stderr
    before, after = (load_file(path / "model.safetensors") for path in (narrow, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert config_of(back) == config_of(narrow)


def test_what_is_tied_is_said_of_the_whole(tmp_path: Path) -> None:
    """--untie says so in the whole model's config, which is where the class looks, and in the part's."""
    narrow, wide = saved("gemma3", tmp_path / "narrow"), tmp_path / "wide"
    done = widen(narrow, wide, "--factor", "2", "--untie")
    assert done.exit_code == 0, done.stderr
    config = config_of(wide)
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, False)
    assert error("gemma3", narrow, wide) < EXACT
    assert widen("verify", narrow, wide).exit_code == 0
    edited(narrow, tie_word_embeddings=None, text_config__tie_word_embeddings=None)
    assert widen(narrow, wide, "--factor", "2", "--untie", "--force").exit_code == 0
    config = config_of(wide)
    assert config["tie_word_embeddings"] is False
    assert "tie_word_embeddings" not in config["text_config"]


def test_layers_of_the_part_multiply(tmp_path: Path) -> None:
    narrow, wide = saved("gemma3", tmp_path / "narrow"), tmp_path / "wide"
    done = widen(narrow, wide, "--depth", "2x", "--factor", "2")
    assert done.exit_code == 0, done.stderr
    assert error("gemma3", narrow, wide) < EXACT
    part = config_of(wide)["text_config"]
    assert (part["num_hidden_layers"], len(part["layer_types"])) == (4, 4)


def test_a_part_of_another_kind_is_refused_by_its_kind(tmp_path: Path) -> None:
    narrow = saved("llava_next", tmp_path / "narrow")
    edited(narrow, text_config__model_type="qwen3")
    done = widen(narrow, tmp_path / "wide")
    assert done.exit_code == 1
    assert done.stderr == (
        f"{narrow}/config.json: text_config.model_type is 'qwen3', which map 'llava_next' does not cover: "
        'it needs text_config.model_type in ["llama", "mistral", "qwen2"]; give --map with a map of your own\n'
    )
