"""Models of several parts, each with its own condition: which tensors have to be there, and which kinds are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import families_wrappers
import models
import pytest
from safetensors.torch import load_file, save_file

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.maps import load_map
from widen_cli.options import Options

VARIANTS = {name: variant for family in families_wrappers.FAMILIES for name, variant in family.variants.items()}


def refusal(folder: Path) -> list[str]:
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(folder), str(folder.with_name("wide")), dry_run=True))
    return [fault.removeprefix(f"{folder}") for fault in caught.value.faults]


def changed(folder: Path, part: str | None = None, **values: Any) -> Path:
    """A model whose config says something else, in one of its sections or at its top."""
    config = json.loads((folder / "config.json").read_text())
    (config[part] if part else config).update(values)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("bert2gpt2", "decoder.transformer.h.1.ln_cross_attn.weight"),
        ("bert2gpt2", "encoder.encoder.layer.0.output.dense.bias"),
        ("bert2gpt2_projected", "enc_to_dec_proj.bias"),
        ("bert2bert", "decoder.cls.predictions.bias"),
        ("roberta2roberta", "decoder.roberta.encoder.layer.2.crossattention.self.key.weight"),
        ("vit2bert", "encoder.layernorm.weight"),
    ],
)
def test_each_part_has_to_be_whole(tmp_path: Path, name: str, lacking: str) -> None:
    models.build(VARIANTS[name]).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    # Of all layers: nothing that is left asks for the rest.
    kind = re.compile(re.sub(r"\\\.\d+\\\.", lambda hit: r"\.\d+\.", re.escape(lacking)))
    tensors = {stored: tensor for stored, tensor in tensors.items() if not kind.fullmatch(stored)}
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    assert (
        f": tensor '{lacking}' is missing; the file is incomplete, or the config belongs to another model"
        in refusal(tmp_path / "model")
    )


@pytest.mark.parametrize(
    ("part", "values", "text"),
    [
        (
            "encoder",
            {"model_type": "distilbert"},
            "encoder.model_type is 'distilbert', which map 'encoder-decoder' does not cover: it needs encoder.model_type in "
            '["bert", "roberta", "xlm-roberta", "camembert"]',
        ),
        (
            "decoder",
            {"model_type": "bart"},
            "decoder.model_type is 'bart', which map 'encoder-decoder' does not cover: it needs decoder.model_type in "
            '["bert", "roberta", "xlm-roberta", "camembert", "gpt2"]',
        ),
        (
            None,
            {"tie_encoder_decoder": True},
            "tie_encoder_decoder is True, which map 'encoder-decoder' does not cover: it needs not tie_encoder_decoder",
        ),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, part: str | None, values: dict[str, Any], text: str) -> None:
    models.build(VARIANTS["bert2gpt2"]).save_pretrained(tmp_path / "model")
    folder = changed(tmp_path / "model", part, **values)
    assert refusal(folder) == [f"/config.json: {text}; give --map with a map of your own"]


def test_a_part_that_no_tensor_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: encoder-decoder\narchitecture: mine\nparts:\n  decodr.: true\n  encoder.: no_key == 1\n")
    with pytest.raises(WidenError) as caught:
        load_map(path, "mine.yaml")
    assert (
        "mine.yaml:4:3: no tensor of this map begins with 'decodr.' (did you mean 'decoder.'?)" in caught.value.faults
    )
    assert "mine.yaml:5:13: 'no_key' is no axis, space or config key of this map" in caught.value.faults
