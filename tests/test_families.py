"""Every family of the catalogue, widened and run by transformers in float64 throughout, in every scaling mode.

A float64 rounding is too small to see, so each law of a map has to hold to the last digits, or the mode is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import families_encoders
import families_hybrids
import families_llama
import families_multimodal
import families_newer
import families_older
import families_wrappers
import models
import numpy as np
import pytest
import torch
from families import MODES, Family, note
from safetensors.torch import save_file

from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.jobs import Report
from widen_cli.map_rules import ArchitectureMap
from widen_cli.maps import map_for_model_type
from widen_cli.options import Options
from widen_cli.writing import run

FAMILIES: tuple[Family, ...] = (
    *families_encoders.FAMILIES,
    *families_llama.FAMILIES,
    *families_older.FAMILIES,
    *families_wrappers.FAMILIES,
    *families_newer.FAMILIES,
    *families_multimodal.FAMILIES,
    *families_hybrids.FAMILIES,
)
EXACT = 1e-11  # relative to the largest output


def growths(family: Family, number: int, mode: str) -> tuple[str, ...]:
    """The usual variant meets factor 2 and the mixed growth in every mode, the rest of the growths and the other variants
    meet two modes each, in turn."""
    turn = MODES.index(mode)
    if number == 0:
        return ("factor=2", *family.growths[:1], *(g for n, g in enumerate(family.growths[1:]) if (n + turn) % 2))
    known = ("factor=2", *family.growths)
    return (known[(number + turn) % len(known)],) if (number + turn) % 2 else ()


def map_of(family: Family) -> ArchitectureMap:
    found = map_for_model_type(next(iter(family.variants.values())).make_config().model_type)
    assert found is not None
    return found


def ways(family: Family) -> list[str]:
    """The exact ways in which heads grow that the family's map knows."""
    rope = map_of(family).rope
    return [way for way in rope.methods if way != "pairs"] if rope else []


def exact_mode(family: Family, variant: str, growth: str, turn: int) -> str:
    """One of the modes that are function-exact."""
    exact = [mode for mode in MODES if family.refusal(variant, mode, growth) is None]
    return exact[turn % len(exact)]


CASES = [
    pytest.param(family, variant, mode, growth, id=f"{variant}-{mode}-{growth}")
    for family in FAMILIES
    for number, variant in enumerate(family.variants)
    for mode in MODES
    for growth in growths(family, number, mode)
]


# Larger heads under rotary positions, each in one mode, in turn.
WAYS = ("theta", "spread")
HEADS = [
    pytest.param(family, variant, growth, way, mode, id=f"{variant}-{way}-{mode}-{growth}")
    for family in FAMILIES
    for number, (variant, growths_of_heads) in enumerate(family.heads.items())
    for place, growth in enumerate(growths_of_heads)
    for turn, way in enumerate(way for way in WAYS if way in ways(family))
    if way == "theta" or place == 1 or ways(family) == ["spread"]
    for mode in [exact_mode(family, variant, growth, number + place + turn)]
]


class Narrow:
    """The narrow checkpoints; each is saved and run once a session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = cache(self._folder)
        self.outputs = cache(self._outputs)

    def _folder(self, family: str, variant: str, dtype: torch.dtype) -> Path:
        described = next(known for known in FAMILIES if known.name == family).variants[variant]
        folder = self.root / f"{variant}-{str(dtype)[6:]}"
        models.build(described, dtype).save_pretrained(folder)
        return folder

    def _outputs(self, family: str, variant: str, dtype: torch.dtype) -> models.Outputs:
        described = next(known for known in FAMILIES if known.name == family).variants[variant]
        return models.outputs(self.folder(family, variant, dtype), torch.float64, inputs=described.inputs)


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    return Narrow(tmp_path_factory.mktemp("families"))


def convert(source: Path, target: Path, growth: str, **options: str) -> Report:
    asked = {"factor": int(growth[7:])} if growth.startswith("factor=") else {"grow": models.by_factors(growth)}
    return run(prepare(Options(input=str(source), output=str(target), **asked, **options)), lambda nbytes: None)


def error(narrow: Narrow, family: Family, variant: str, dtype: torch.dtype, report: Report, folder: Path) -> float:
    """The relative error of a written folder; every output that grew is folded by the scale that the plan says it has."""
    before = narrow.outputs(family.name, variant, dtype)
    wide = models.outputs(folder, torch.float64, inputs=family.variants[variant].inputs)
    stated = report.job.plan.output_scales
    scales = {name: stated["last_hidden_state"] for name in wide if name.endswith(".last_hidden_state")} | stated
    # What is normalised to length 1 has copies of the length that is left for each.
    embedded = [name for name in wide if name.endswith("_embeds")]
    scales |= {name: (before[name].shape[-1] / wide[name].shape[-1]) ** 0.5 for name in embedded}
    grown = {name for name, value in wide.items() if value.shape != before[name].shape}
    assert grown <= scales.keys(), f"the plan does not say how {grown - scales.keys()} come out"
    return models.relative_error(before, wide, scales)


@pytest.mark.parametrize(("family", "variant", "mode", "growth"), CASES)
def test_the_function_is_kept(
    family: Family, variant: str, mode: str, growth: str, narrow: Narrow, tmp_path: Path
) -> None:
    source, target = narrow.folder(family.name, variant, torch.float64), tmp_path / "wide"
    word = family.refusal(variant, mode, growth)
    if word is not None:
        note(family.name, variant, mode, growth, "float64", None)
        with pytest.raises(WidenError) as caught:
            convert(source, target, growth, scaling=mode)
        assert f"--scaling {mode}: not function-exact" in str(caught.value)
        assert word in str(caught.value)
        assert not target.exists()
        return
    report = convert(source, target, growth, scaling=mode)
    found = error(narrow, family, variant, torch.float64, report, target)
    note(family.name, variant, mode, growth, "float64", found)
    assert found <= EXACT


@pytest.mark.parametrize(("family", "variant", "growth", "way", "mode"), HEADS)
def test_larger_heads_under_rotary_positions(
    family: Family, variant: str, growth: str, way: str, mode: str, narrow: Narrow, tmp_path: Path
) -> None:
    source, target = narrow.folder(family.name, variant, torch.float64), tmp_path / "wide"
    report = convert(source, target, growth, scaling=mode, rope=way)
    found = error(narrow, family, variant, torch.float64, report, target)
    note(family.name, variant, f"rope {way}", growth, "float64", found)
    assert found <= EXACT


def test_every_map_with_ways_to_grow_heads_is_run() -> None:
    run_here = {map_of(family).architecture for family in FAMILIES if family.heads}
    assert {map_of(family).architecture for family in FAMILIES if ways(family)} == run_here


@pytest.mark.parametrize(
    ("family", "growth", "word"),
    [
        pytest.param(family, growth, word, id=f"{family.name}-{growth}")
        for family in FAMILIES
        for growth, word in family.impossible.items()
    ],
)
def test_what_cannot_grow_is_refused(family: Family, growth: str, word: str, narrow: Narrow, tmp_path: Path) -> None:
    with pytest.raises(WidenError) as caught:
        convert(narrow.folder(family.name, next(iter(family.variants)), torch.float64), tmp_path / "wide", growth)
    assert word in str(caught.value)


TILED = (
    "albert", "deberta-v2", "modernbert", "gpt_neox", "codegen", "bloom", "falcon_groups", "mixtral", "phi3", "deepseek_v3",
    "gpt_oss", "rwkv", "t5", "bart", "whisper", "encoder-decoder", "vision-encoder-decoder",
)  # fmt: skip


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.name in TILED], ids=lambda family: family.name
)
def test_copies_may_lie_axis_after_axis(family: Family, narrow: Narrow, tmp_path: Path) -> None:
    variant = next(iter(family.variants))
    source = narrow.folder(family.name, variant, torch.float64)
    report = convert(source, tmp_path / "wide", "factor=2", layout="tile")
    wide, before = (
        models.outputs(tmp_path / "wide", torch.float64, inputs=family.variants[variant].inputs),
        narrow.outputs(family.name, variant, torch.float64),
    )
    scale = float(report.job.plan.scales[str(report.job.plan.output)])
    untiled = {name: _side_by_side(value, value.shape[-1] // before[name].shape[-1]) for name, value in wide.items()}
    scales = {name: scale for name in wide if name.endswith("last_hidden_state")}
    assert models.relative_error(before, untiled, scales) <= EXACT


def _side_by_side(tiled: np.ndarray, copies: int) -> np.ndarray:
    """x0 x1 x0 x1 as x0 x0 x1 x1."""
    return tiled.reshape(*tiled.shape[:-1], copies, -1).swapaxes(-1, -2).reshape(tiled.shape)


TOGETHER = "the model takes neighbours along {} together, so their copies have to stand side by side"


@pytest.mark.parametrize(
    ("name", "variant", "growth", "reason"),
    [
        ("mamba2", "mamba2", "hidden=2,heads=2", TOGETHER.format("heads")),
        ("deberta-v2", "deberta_conv_groups", "factor=2", TOGETHER.format("hidden")),
        (
            "stablelm",
            "stablelm_12b",
            "heads=2,kv_heads=2",
            "'model.layers.0.self_attn.k_layernorm.norms.0.weight' is numbered by kv_heads, whose copies have neighbouring numbers",
        ),
    ],
)
def test_neighbours_that_are_taken_together_stay_so(
    name: str, variant: str, growth: str, reason: str, narrow: Narrow, tmp_path: Path
) -> None:
    """Tiled they made another function: groups of other channels, and heads under the norms of others."""
    source = narrow.folder(name, variant, torch.float64)
    with pytest.raises(WidenError) as caught:
        convert(source, tmp_path / "wide", growth, layout="tile")
    assert caught.value.faults == (f"{source}: layout tile, as asked: {reason}",)


def test_what_nothing_makes_is_not_read(tmp_path: Path) -> None:
    """Whether T5 gates says is_gated_act, whatever feed_forward_proj says; and where it lies, the file shows it."""
    described = next(family for family in FAMILIES if family.name == "umt5").variants["umt5_token_classification"]
    ungated = replace(described, config={**described.config, "is_gated_act": False})
    source = models.save(ungated, tmp_path / "narrow", torch.float64)
    convert(source, tmp_path / "wide", "intermediate=2")
    before, after = (
        models.outputs(tmp_path / one, torch.float64, inputs=described.inputs) for one in ("narrow", "wide")
    )
    assert models.relative_error(before, after) <= EXACT
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"is_gated_act": True}))
    with pytest.raises(WidenError) as caught:
        convert(source, tmp_path / "lied", "intermediate=2")
    assert caught.value.faults == (
        f"{source}: tensor 'transformer.encoder.block.*.layer.1.DenseReluDense.wo.weight' reads product, which no tensor of the "
        "file makes; what the config says of the model is not so, or the map is that of another",
    )


def test_what_computes_its_positions_grows_elsewhere(tmp_path: Path) -> None:
    """transformers saves a MarianMTModel without its tables of sinusoids, and makes others for another width."""
    family = next(family for family in FAMILIES if family.name == "marian")
    described = replace(family.variants["marian_base"], model_class="MarianMTModel")
    source, target = tmp_path / "narrow", tmp_path / "wide"
    models.build(described, torch.float64).save_pretrained(source)
    convert(source, target, "encoder_intermediate=3,decoder_intermediate=2")
    before, after = (models.outputs(one, torch.float64, inputs=described.inputs) for one in (source, target))
    assert models.relative_error(before, after) <= EXACT
    with pytest.raises(WidenError) as caught:
        convert(source, tmp_path / "wider", "hidden=2")
    assert caught.value.faults == (
        "--grow hidden=2: 'hidden' cannot grow exactly: its positions are sinusoids computed at run time, which do not follow a "
        "repeat; grow encoder_intermediate and decoder_intermediate instead",
    )


def test_tables_of_positions_that_the_library_drops(tmp_path: Path) -> None:
    """Why a MarianMTModel without tables is refused and none are made: with them it grows, and is loaded so; but transformers
    saves it without, as after training, and then makes others for the new width."""
    family = next(family for family in FAMILIES if family.name == "marian")
    described = replace(family.variants["marian_base"], model_class="MarianMTModel")
    source, wide, again = (tmp_path / each for each in ("narrow", "wide", "again"))
    model = models.build(described, torch.float64)
    # What save_pretrained leaves out; the head is the embedding.
    kept = {
        name: value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" and "embed_tokens" not in name
    }
    model.save_pretrained(source)
    save_file(
        {name: value.contiguous() for name, value in kept.items()}, source / "model.safetensors", {"format": "pt"}
    )
    scales = convert(source, wide, "factor=2").job.plan.output_scales
    before, after = (models.outputs(one, torch.float64, inputs=described.inputs) for one in (source, wide))
    assert models.relative_error(before, after, scales) <= EXACT
    models.load(wide, torch.float64).save_pretrained(again)
    assert models.relative_error(before, models.outputs(again, torch.float64, inputs=described.inputs), scales) > 1e-3


@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in FAMILIES])
def test_float32_without_being_told_more(family: Family, narrow: Narrow, tmp_path: Path) -> None:
    """The default of the command line, on the file type that people have; run in float64, only the weights' rounding shows.

    T5, which does not scale its attention, makes 3e-5 of it; a fault makes 1e-3 and more.
    """
    for variant in family.variants:
        source, target = narrow.folder(family.name, variant, torch.float32), tmp_path / variant
        if all(family.refusal(variant, mode, "factor=2") for mode in MODES):
            with pytest.raises(WidenError, match="no scaling keeps the function"):
                convert(source, target, "factor=2")
            continue
        report = convert(source, target, "factor=2")
        found = error(narrow, family, variant, torch.float32, report, target)
        note(family.name, variant, report.job.plan.mode, "factor=2", "float32", found)
        assert found <= 1e-4
    for variant, (growth, *_) in list(family.heads.items())[:1]:
        source, target = narrow.folder(family.name, variant, torch.float32), tmp_path / "heads"
        found = error(narrow, family, variant, torch.float32, convert(source, target, growth), target)
        note(family.name, variant, "rope", growth, "float32", found)
        assert found <= 1e-4
