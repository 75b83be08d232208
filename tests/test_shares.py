"""Rotary pairs of several kinds (time, height, width): the lists that say how many are of each follow larger heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families_multimodal
import models
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from widen_cli.collapse import collapse
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.verification import verify
from widen_cli.writing import run

VARIANTS = {name: each for family in families_multimodal.FAMILIES for name, each in family.variants.items()}
SECTIONS = ("text_config", "rope_parameters", "mrope_section")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shares")
    for name in ("qwen2_vl", "qwen3_vl"):
        models.build(VARIANTS[name], torch.float64).save_pretrained(root / name)
    return root


def widen(source: Path, target: Path, grow: str, **options: Any) -> None:
    run(prepare(Options(str(source), str(target), grow=grow, **options)), lambda nbytes: None)


def sections(folder: Path, new: Any = None) -> Any:
    """The list in a folder's config, which becomes `new` where that is said."""
    config = json.loads((folder / "config.json").read_text())
    held = config["text_config"]["rope_parameters"]
    if new is not None:
        held["mrope_section"] = new
        (folder / "config.json").write_text(json.dumps(config))
    return held["mrope_section"]


def error(variant: str, narrow: Path, wide: Path) -> float:
    inputs = VARIANTS[variant].inputs
    return models.relative_error(*(models.outputs(one, torch.float64, inputs=inputs) for one in (narrow, wide)))


@pytest.mark.parametrize(
    ("variant", "grow", "way", "expected", "wrong"),
    [
        ("qwen2_vl", "hidden=2x,head_dim=2x", "spread", [2, 2, 2], [1, 1, 4]),
        ("qwen2_vl", "hidden=2x,head_dim=2x", "theta", [1, 1, 4], [2, 2, 2]),
        ("qwen2_vl", "hidden=4/3x,head_dim=4/3x", None, [1, 1, 2], [2, 1, 1]),
        ("qwen3_vl", "head_dim=2x", None, [9, 1, 2], [6, 2, 4]),
        ("qwen3_vl", "head_dim=7/6x", None, [4, 1, 2], [3, 2, 2]),
    ],
)
def test_each_pair_keeps_its_kind(
    variant: str, grow: str, way: str | None, expected: list[int], wrong: list[int], narrow: Path, tmp_path: Path
) -> None:
    source, wide = narrow / variant, tmp_path / "wide"
    widen(source, wide, grow, rope=way)
    assert sections(wide) == expected
    assert error(variant, source, wide) <= 1e-11
    assert verify(Options(str(source), str(wide)), lambda nbytes: None).differences == ()
    if "/" not in grow:
        collapse(Options(str(wide), str(tmp_path / "back")), None, lambda nbytes: None, lambda text: None)
        assert sections(tmp_path / "back") == sections(source)
        files = [folder / "model.safetensors" for folder in (source, tmp_path / "back")]
        assert models.relative_error(*({"": loaded(file)} for file in files)) <= 1e-15
    sections(wide, wrong)
    assert error(variant, source, wide) > 1e-4


def loaded(file: Path) -> Any:
    return np.concatenate([value.ravel() for _, value in sorted(load_file(file).items())])


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ([1, 1, 2], "{} is [1, 1, 2], where whole numbers with a sum of 3 are needed, the rotary pairs of a head"),
        ([1, 2.0, 0], "{} is [1, 2.0, 0], where whole numbers with a sum of 3 are needed, the rotary pairs of a head"),
        (
            None,
            "mrope_section is not there; it says how many rotary pairs turn by each kind of position, and heads cannot grow "
            "without it: write the list that the model uses, which has a sum of 3",
        ),
    ],
)
def test_what_counts_no_pairs_of_a_head_is_refused(told: Any, fault: str, narrow: Path, tmp_path: Path) -> None:
    source = narrow / "qwen2_vl"
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = told
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config))
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(source), str(tmp_path / "wide"), grow="hidden=2x,head_dim=2x", config=str(other)))
    place = "rope_parameters.mrope_section"
    assert caught.value.faults == (f"{other}: {fault.format(place)}",)
