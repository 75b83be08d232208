"""What else a model puts out beside its logits, of a few families; `python tests/all_outputs.py` runs them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import all_outputs
import models
import pytest
import test_families
import torch

FAMILIES = {variant: family for family in test_families.FAMILIES for variant in family.variants}
VARIANTS = (
    "clip",
    "siglip",
    "siglip_classification",
    "llava_tied",
    "gemma3",
    "qwen3_vl",
    "bart_decoder",
    "t5_encoder",
    "bert2gpt2",
    "vit",
    "falcon_40b",
    "rwkv",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_output_is_as_it_was_or_as_the_plan_says(variant: str, tmp_path: Path) -> None:
    family = FAMILIES[variant]
    assert all_outputs.checked(family, variant, tmp_path, all_outputs.mode_of(family, variant)) == []


def test_an_output_of_another_scale_is_found(tmp_path: Path) -> None:
    family = FAMILIES["llava_tied"]
    described = family.variants["llava_tied"]
    models.build(described, torch.float64).save_pretrained(tmp_path / "narrow")
    report = test_families.convert(tmp_path / "narrow", tmp_path / "wide", "factor=2", scaling="quiet")
    narrow, wide = (all_outputs.everything(tmp_path / each, described.inputs) for each in ("narrow", "wide"))
    plan = report.job.plan
    silent = replace(plan, outputs={name: space for name, space in plan.outputs.items() if "image" not in name})
    name = "image_outputs.pooler_output.0"
    assert f"{name}: grew, and the plan does not say how" in all_outputs.untold(silent, narrow, wide)
    other = replace(plan, outputs={**plan.outputs, "image_outputs.pooler_output": "final"})
    assert [fault.split(":")[0] for fault in all_outputs.untold(other, narrow, wide)] == [
        f"image_outputs.pooler_output.{number}" for number in range(models.BATCH)
    ]
    assert all_outputs.untold(plan, narrow, {**wide, "logits": wide["logits"] * 1.001}) == [
        "logits: differs by 1.0e-03"
    ]
