"""gpt-oss in MXFP4, widened as it stands: codes are moved, factors go into the powers of two, and the function is kept.

transformers reads both files by itself: on a CPU it makes numbers of blocks and scales when it loads them.
"""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from widen_cli import stream
from widen_cli.blocks import types
from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.options import Options
from widen_cli.writing import run

# Three blocks wide and five, six heads on three.
VARIANT = models.Variant(
    "GptOssForCausalLM",
    {
        **models.LLAMA,
        "hidden_size": 96,
        "intermediate_size": 160,
        "head_dim": 8,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
)
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"
WEIGHTS = [EXPERTS.format(layer, name) for layer in (0, 1) for name in ("down", "gate_up")]
DOWN, GATE_UP = WEIGHTS[2:]
TWICE = "hidden=2,intermediate=2,heads=2,kv_heads=2"
THRICE = "hidden=2,intermediate=3,heads=4,kv_heads=2"
Tensors = dict[str, torch.Tensor]


def packed(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A gpt-oss with random codes and scales in the place of its experts, as the published files have them."""
    models.build(VARIANT, dtype).save_pretrained(folder)
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, read, written = tensors.pop(name).shape
        shape = (experts, written, read // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=draw, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(117, 124, shape, generator=draw, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edited_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return folder


def edited_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def edited(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("mxfp4") / "narrow")


@pytest.fixture(scope="module")
def before(narrow: Path) -> models.Outputs:
    return models.outputs(narrow, torch.float64)


def widened(source: Path, target: Path, grow: str, **options: Any) -> Report:
    return run(prepare(Options(str(source), str(target), grow=models.by_factors(grow), **options)), lambda nbytes: None)


def refused(source: Path, grow: str = TWICE, **options: Any) -> list[str]:
    target = source.with_name("refused")
    with pytest.raises(WidenError) as caught:
        widened(source, target, grow, **options)
    assert not target.exists()
    return [text.removeprefix(f"{source}: ") for text in caught.value.faults]


def error(before: models.Outputs, wide: Path) -> float:
    return models.relative_error(before, models.outputs(wide, torch.float64))


# The function.


@pytest.mark.parametrize(
    ("grow", "options", "mode"),
    [
        (TWICE, {}, "sum"),
        (TWICE, {"scaling": "copy", "layout": "tile"}, "copy"),
        ("hidden=2,intermediate=4,heads=4,kv_heads=2", {"scaling": "copy"}, "copy"),
        (THRICE, {}, "quiet"),
        # The others' factors of 3 are exact enough in float64, which MXFP4 takes no part in.
        ("hidden=3,intermediate=2,heads=2,kv_heads=1", {"dtype": "F64", "max_shard_size": "300KB"}, "sum"),
        ("hidden=4,intermediate=4,heads=2,kv_heads=1", {"scaling": "orthogonal", "dtype": "F64"}, "orthogonal"),
        ("hidden=2,head_dim=2", {"scaling": "quiet", "dtype": "F64"}, "quiet"),
    ],
)
def test_the_function_is_kept(
    narrow: Path, before: models.Outputs, tmp_path: Path, grow: str, options: dict[str, Any], mode: str
) -> None:
    report = widened(narrow, tmp_path / "wide", grow, **options)
    assert report.job.plan.mode == mode
    assert report.total.overflowed == 0
    assert all(not counts.rounded for name, counts in report.counts.items() if name.endswith(("_blocks", "_scales")))
    assert (tmp_path / "wide/model.safetensors").exists() != ("max_shard_size" in options)
    assert error(before, tmp_path / "wide") <= 1e-12
    checked = CliRunner().invoke(cli, ["verify", str(narrow), str(tmp_path / "wide")], catch_exceptions=False)
    assert checked.exit_code == 0, checked.stderr
    stated, written = (json.loads((folder / "config.json").read_text()) for folder in (narrow, tmp_path / "wide"))
    assert written["quantization_config"] == stated["quantization_config"]


def swapped_nibbles(tensors: Tensors) -> None:
    tensors[f"{DOWN}_blocks"] = tensors[f"{DOWN}_blocks"] << 4 | tensors[f"{DOWN}_blocks"] >> 4


def forgotten_factor(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_scales"] += 1


def neighbour_scale(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"].roll(1, 2)


def gate_for_up(tensors: Tensors) -> None:
    tensors[f"{GATE_UP}_blocks"] = tensors[f"{GATE_UP}_blocks"].roll(1, 1)


@pytest.mark.parametrize("mistake", [swapped_nibbles, forgotten_factor, neighbour_scale, gate_for_up])
def test_guard_a_mistake_in_the_file_is_seen(
    narrow: Path, before: models.Outputs, tmp_path: Path, mistake: Callable[[Tensors], object]
) -> None:
    wide = tmp_path / "wide"
    widened(narrow, wide, THRICE)
    edited(wide, mistake)
    assert error(before, wide) > 1e-4


def test_guard_codes_in_the_order_of_ggml_are_seen(
    narrow: Path, before: models.Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its MXFP4 has the first sixteen codes in the low bits, the others above them."""
    kind = types.block_type("MXFP4_CODES")
    ggml = types.Codes(1, (types.Plane(0, 32, 4, lanes=16),), 0)
    monkeypatch.setitem(types._KNOWN, kind.name, replace(kind, codes=(ggml,)))
    widened(narrow, tmp_path / "wide", TWICE)
    assert error(before, tmp_path / "wide") > 1e-4


# The numbers.


def numbers(folder: Path, name: str) -> torch.Tensor:
    """A weight's numbers as transformers makes them, [experts, read, written]."""
    tensors = load_file(folder / "model.safetensors")
    return convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float64)


@pytest.mark.parametrize("scaling", ["copy", "quiet"])
def test_the_wide_numbers_are_the_narrow_ones_repeated_bit_for_bit(narrow: Path, tmp_path: Path, scaling: str) -> None:
    wide = tmp_path / "wide"
    widened(narrow, wide, "hidden=2,intermediate=4,heads=2,kv_heads=2", scaling=scaling)
    pairs = numbers(narrow, GATE_UP).unflatten(2, (160, 2))  # gate and up of a unit stand side by side
    expected = pairs.repeat_interleave(4, 2).flatten(2).repeat_interleave(2, 1)
    assert torch.equal(numbers(wide, GATE_UP), expected / (2 if scaling == "copy" else 1))
    once = numbers(narrow, DOWN).repeat_interleave(2, 2)
    expected = once.repeat_interleave(4, 1) / 4
    if scaling == "quiet":
        expected = torch.zeros(3, 640, 192, dtype=torch.float64)
        expected[:, ::4] = once
    assert torch.equal(numbers(wide, DOWN), expected)


def test_scales_at_the_ends_of_their_range(narrow: Path, tmp_path: Path) -> None:
    """The smallest power of two cannot be halved, which is counted; 255 is no number and stays."""
    folder = packed(tmp_path / "narrow")

    def at_the_ends(tensors: Tensors) -> None:
        tensors[f"{GATE_UP}_scales"][0, 0] = torch.tensor([0, 1, 255], dtype=torch.uint8)

    edited(folder, at_the_ends)
    report = widened(folder, tmp_path / "wide", TWICE, scaling="copy")
    row = load_file(tmp_path / "wide/model.safetensors")[f"{GATE_UP}_scales"][0, 0]
    assert row.tolist() == [0, 0, 0, 0, 255, 255]
    counts = report.counts[f"{GATE_UP}_scales"]
    assert (counts.values, counts.rounded, counts.overflowed) == (3 * 320 * 3, 1, 0)


def test_a_pipe_gives_the_same_bytes(narrow: Path, tmp_path: Path) -> None:
    widened(narrow, tmp_path / "wide", THRICE)
    command = [sys.executable, "-m", "widen_cli", "-q", "--grow", str(models.by_factors(THRICE)), "-", "-"]
    command += ["--config", str(narrow / "config.json"), "--config-out", str(tmp_path / "config.json")]
    stored = (narrow / "model.safetensors").read_bytes()
    piped = subprocess.run(command, input=stored, capture_output=True, check=True).stdout
    (tmp_path / "piped.safetensors").write_bytes(piped)
    assert filecmp.cmp(tmp_path / "piped.safetensors", tmp_path / "wide/model.safetensors", shallow=False)
    assert filecmp.cmp(tmp_path / "config.json", tmp_path / "wide/config.json", shallow=False)


def test_gate_and_up_of_a_unit_move_as_one_row(narrow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row they give the same bytes, in thousands of small pieces."""
    report = widened(narrow, tmp_path / "wide", THRICE)
    plans = [plan for plan in report.job.plan.tensors if plan.source.name.startswith(GATE_UP)]
    pieces = [len(list(stream.blocks(stream.layout(plan), stream.BLOCK_BYTES))) for plan in plans]
    monkeypatch.setattr(stream, "ROWS_TOGETHER", 1)
    widened(narrow, tmp_path / "rows", THRICE)
    small = [len(list(stream.blocks(stream.layout(plan), stream.BLOCK_BYTES))) for plan in plans]
    # The bias, then codes and scales of three experts with 160 units each.
    assert (pieces[-2:], small[-2:]) == ([1, 1], [480, 480])
    assert filecmp.cmp(tmp_path / "rows/model.safetensors", tmp_path / "wide/model.safetensors", shallow=False)


def test_verify_names_the_byte(narrow: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    widened(narrow, wide, TWICE)

    def flipped(tensors: Tensors) -> None:
        tensors[f"{DOWN}_blocks"][2, 5, 7, 3] ^= 0x10
        tensors[f"{DOWN}_scales"][1, 0, 0] += 1

    old = load_file(wide / "model.safetensors")
    code, power = int(old[f"{DOWN}_blocks"][2, 5, 7, 3]), int(old[f"{DOWN}_scales"][1, 0, 0])
    edited(wide, flipped)
    told = CliRunner().invoke(
        cli, ["verify", str(narrow), str(wide), "--grow", str(models.by_factors(TWICE))], catch_exceptions=False
    )
    assert told.exit_code == 3
    assert (
        f"{DOWN}_blocks: 1 of 92160 values differ, the first at [2, 5, 7, 3]: should be {code}, is {code ^ 0x10}"
        in told.stderr
    )
    assert (
        f"{DOWN}_scales: 1 of 5760 values differ, the first at [1, 0, 0]: should be {power}, is {power + 1}"
        in told.stderr
    )


# What is refused, and what is said.


def test_factors_that_are_no_power_of_two_are_refused(narrow: Path) -> None:
    reason = (
        "MXFP4: its scales are powers of two, so it cannot be multiplied by {}; "
        "use a scaling that puts no factor here, or store this tensor in an unquantised type"
    )
    faults = refused(narrow, TWICE, scaling="orthogonal")
    assert faults[2:] == [
        f"tensor '{DOWN}_blocks': {reason.format('1/(2 sqrt(2))')}",
        f"tensor '{GATE_UP}_blocks': {reason.format('1/sqrt(2)')}",
    ]
    assert refused(narrow, THRICE, scaling="copy")[1] == f"tensor '{DOWN}_blocks': {reason.format('1/3')}"
    assert refused(narrow, THRICE, scaling="sum")[1] == f"tensor '{DOWN}_blocks': {reason.format('4/3')}"


def test_other_types(narrow: Path, tmp_path: Path) -> None:
    job = prepare(Options(str(narrow), str(tmp_path / "wide"), grow=TWICE, dtype="BF16"))
    job.checkpoint.close()
    assert job.warnings == (
        f"{narrow}: --dtype BF16 leaves weights in MXFP4 blocks as they are; for numbers, save the model as numbers from "
        "transformers (Mxfp4Config(dequantize=True)) first",
    )
    assert {plan.written[0] for plan in job.plan.tensors} == {"BF16", "U8"}
    assert refused(narrow, dequantize="F32") == [
        "--dequantize f32: is for a GGUF; --dtype sets the type of a safetensors model's weights",
        *(
            f"tensor '{name}_blocks' holds MXFP4 blocks, which are not written as F32; save the model as numbers from "
            "transformers (Mxfp4Config(dequantize=True)) first"
            for name in WEIGHTS
        ),
    ]


def test_the_way_back_takes_numbers(narrow: Path, tmp_path: Path) -> None:
    """It said that the file's blocks were none."""
    wide = tmp_path / "wide"
    widened(narrow, wide, TWICE)
    told = CliRunner().invoke(cli, ["collapse", str(wide), str(tmp_path / "back")], catch_exceptions=False)
    assert told.exit_code == 1
    assert told.stderr == (
        f"{wide}: tensor '{WEIGHTS[0]}_blocks' holds MXFP4 blocks, and means are taken of numbers; save the model as "
        "numbers from transformers (Mxfp4Config(dequantize=True)) first\n"
    )
    assert not (tmp_path / "back").exists()


def test_halves_that_do_not_fit(tmp_path: Path) -> None:
    folder = packed(tmp_path / "narrow")
    kept = load_file(folder / "model.safetensors")

    def faults(edit: Callable[[Tensors], object]) -> list[str]:
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        edited(folder, edit)
        return refused(folder)

    assert faults(lambda tensors: tensors.pop(f"{DOWN}_scales")) == [
        f"tensor '{DOWN}_blocks' U8 [3, 96, 5, 16] holds MXFP4 blocks, and '{DOWN}_scales' with their scales is missing; "
        "the file is incomplete, fetch it again"
    ]
    assert faults(lambda tensors: tensors.pop(f"{DOWN}_blocks")) == [
        f"tensor '{DOWN}_scales' U8 [3, 96, 5] holds the scales of MXFP4 blocks, and '{DOWN}_blocks' is missing; "
        "the file is incomplete, fetch it again"
    ]
    assert faults(lambda tensors: (tensors.pop(f"{DOWN}_blocks"), tensors.pop(f"{DOWN}_scales"))) == [
        f"tensor '{DOWN}' is missing; the file is incomplete, or the config belongs to another model"
    ]
    no_pair = "are no MXFP4, which is U8 [..., n, 16] and U8 [..., n]; fetch the file again, or save the model as numbers from"
    assert faults(lambda tensors: tensors.update({f"{DOWN}_scales": torch.ones(3, 96, 4, dtype=torch.uint8)})) == [
        f"tensors '{DOWN}_blocks' U8 [3, 96, 5, 16] and '{DOWN}_scales' U8 [3, 96, 4] {no_pair} "
        "transformers (Mxfp4Config(dequantize=True)) first"
    ]
    assert faults(lambda tensors: tensors.update({f"{DOWN}_scales": torch.ones(3, 96, 5)}))[0].startswith(
        f"tensors '{DOWN}_blocks' U8 [3, 96, 5, 16] and '{DOWN}_scales' F32 [3, 96, 5] are no MXFP4"
    )
    assert faults(lambda tensors: tensors.update({DOWN: torch.ones(3, 160, 96)})) == [
        f"tensor '{DOWN}' is stored beside '{DOWN}_blocks' U8 [3, 96, 5, 16], which is the same weight in MXFP4, and loaders "
        "disagree on which counts; take one of the two out"
    ]


def test_a_size_that_does_not_fill_blocks_is_no_size_of_the_file(narrow: Path, tmp_path: Path) -> None:
    config = json.loads((narrow / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 150}))
    faults = refused(narrow, config=str(tmp_path / "config.json"))
    assert (
        f"tensor '{WEIGHTS[1]}_blocks' has shape [3, 320, 96], but experts: (gate_up 2) <- normed needs 300 "
        "where it has 320 (experts 3, hidden 96, intermediate 150)"
    ) in faults


def test_a_map_that_does_not_say_how_is_not_enough(narrow: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: gpt_oss\narchitecture: mine\ntensors:\n"
        f"  {EXPERTS.format('*', 'gate_up')}: 'experts: normed -> (gate_up 2)'\n"
        f"  {EXPERTS.format('*', 'down')}: 'experts: product -> hidden'\n"
    )
    with pytest.raises(WidenError) as caught:
        widened(narrow, tmp_path / "wide", TWICE, map=str(mine))
    assert caught.value.faults == (
        f"{narrow / 'config.json'}: quantization_config says that weights are packed in MXFP4, and map 'mine' does not say which "
        "and how ('packed', docs/maps.md); save the model as numbers from transformers (Mxfp4Config(dequantize=True)) first",
    )
    mine.write_text(
        f"extends: gpt_oss\narchitecture: mine\ntensors:\n  {EXPERTS.format('*', 'down')}:\n"
        "    {shape: 'experts: product -> hidden', packed: 'experts: hiden <- product', offset: 1}\n"
    )
    with pytest.raises(WidenError) as caught:
        widened(narrow, tmp_path / "wide", TWICE, map=str(mine))
    assert caught.value.faults == (
        f"{mine}:5:52: a weight with an 'offset' has no 'packed' form, since blocks hold no 1 + w",
        f"{mine}:5:61: 'hiden' is no axis or space of this map (did you mean 'hidden'?)",
    )


def test_numbers_and_blocks_are_planned_alike(narrow: Path, tmp_path: Path) -> None:
    """The same model as numbers, by the other shape of the map, has the same wide numbers."""
    plain = tmp_path / "plain"
    models.build(VARIANT).save_pretrained(plain)
    edited(plain, lambda tensors: tensors.update({name: numbers(narrow, name).float() for name in WEIGHTS}))
    for source, target in ((narrow, "packed"), (plain, "numbers")):
        widened(source, tmp_path / target, THRICE, scaling="quiet")
    expected = load_file(tmp_path / "numbers/model.safetensors")
    found = load_file(tmp_path / "packed/model.safetensors")
    for name, value in expected.items():
        same = numbers(tmp_path / "packed", name).float() if name in WEIGHTS else found[name]
        assert torch.equal(same, value), name
