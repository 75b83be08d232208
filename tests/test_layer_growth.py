"""Growth by ranges of layers, `--grow intermediate=2@8-15`: what each layer becomes, run in llama.cpp, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import gguf_families
import models
import numpy as np
import pytest
import test_gguf_layers
import torch
from click.testing import CliRunner
from llama_cpp import difference, log_probabilities
from test_gguf_layers import BOUND, PROMPTS, widened

from widen_cli.cli import cli
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.options import Options
from widen_cli.plan.layer_growth import parse_growth
from widen_cli.plan.wishes import parse_grow

_KEYS = ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.key_length")


FORMATS = (
    "GGUF: deci (intermediate, heads, kv_heads, which a llama becomes), openelm (intermediate, heads, kv_heads); "
    "Hugging Face: gemma3n_text (intermediate), nemotron-nas (intermediate, kv_heads), openelm (intermediate)"
)


def _llama(**sizes: Any) -> gguf_families.Family:
    return gguf_families.Family("llama", gguf_families._llama_like(), gguf_families.Sizes(layers=3, **sizes))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Narrow files by name: `deci`, of four layers that all differ, and a `llama` of three, `mha` with a kv head each."""
    folder = tmp_path_factory.mktemp("narrow")
    return cache(
        lambda name: (
            test_gguf_layers.write(folder / "deci.gguf")
            if name == "deci"
            else gguf_families.write_family(
                _llama(**({"kv_heads": 6} if name == "mha" else {})), folder / f"{name}.gguf"
            )
        )
    )


@cache
def logs(path: Path) -> Any:
    return log_probabilities(path, PROMPTS)


def sizes(path: Path) -> list[Any]:
    fields = gguf.GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "deci"
    return [fields[f"deci.{key}"].contents() for key in _KEYS if f"deci.{key}" in fields]


@pytest.mark.parametrize(
    ("name", "grow", "mode", "expected"),
    [
        ("deci", "intermediate=3@2-3", "sum", [[50, 0, 90, 66], [6, 4, 0, 2], [3, 1, 0, 2], 10]),
        (
            "deci",
            "hidden=2,intermediate=2x@0,heads=2@0-1,kv_heads=2@0",
            "orthogonal",
            [[100, 0, 30, 22], [12, 8, 0, 2], [6, 1, 0, 2], 10],
        ),
        ("llama", "intermediate=2@1", "quiet", [[50, 100, 50], 6, 3]),
        ("llama", "hidden=2,heads=2@0-1,intermediate=3@2", "copy", [[50, 50, 150], [12, 12, 6], 3]),
        ("llama", "hidden=3,intermediate=2@0,intermediate=5@2", "orthogonal", [[100, 50, 250], 6, 3, 6]),
        # The first layer's heads say how large a head is and how many kv heads there are, until it is written.
        ("mha", "heads=2@0", "copy", [50, [12, 6, 6], 6, 6]),
        ("mha", "heads=2@1,kv_heads=2@1", "sum", [50, [6, 12, 6], [6, 12, 6]]),
        # Sizes, additions and multiples, of what each layer has.
        ("deci", "intermediate=round:20", "sum", [[60, 0, 40, 40], [6, 4, 0, 2], [3, 1, 0, 2], 10]),
        (
            "deci",
            "hidden=4/3x,heads=to:6@0-1,intermediate=+7@0-2",
            "quiet",
            [[57, 0, 37, 22], [6, 6, 0, 2], [3, 1, 0, 2], 10],
        ),
        (
            "llama",
            "heads=4/3x@1,kv_heads=4/3x@1,intermediate=64,intermediate=2x@2",
            "copy",
            [[64, 64, 100], [6, 8, 6], [3, 4, 3]],
        ),
    ],
)
def test_layers_grow_on_their_own(
    files: Callable[[str], Path], tmp_path: Path, name: str, grow: str, mode: str, expected: list[Any]
) -> None:
    wide = tmp_path / "wide.gguf"
    widened(files(name), wide, grow=grow, scaling=mode)
    assert difference(logs(files(name)), log_probabilities(wide, PROMPTS)) <= BOUND
    assert sizes(wide) == expected
    assert CliRunner().invoke(cli, ["verify", str(files(name)), str(wide)]).exit_code == 0


@pytest.mark.parametrize("layout", ["auto", "tile"])
@pytest.mark.parametrize("fill", ["copy", "zero", "random"])
def test_fractions_of_layers_go_with_all_else(
    files: Callable[[str], Path], tmp_path: Path, fill: str, layout: str
) -> None:
    """By the new numbers of layers; what was said of the whole goes for the layers that are not named."""
    wide, grow = tmp_path / "wide.gguf", "intermediate=round:32@1-2,intermediate=3/2x,heads=+3@4-5"
    report = widened(files("llama"), wide, depth=("2x",), grow=grow, fill=fill, layout=layout, seed=3)
    assert report.job.plan.grown == (
        "layers 3 -> 6, intermediate=32/25x@1-2, heads=3/2x@4-5, intermediate=3/2x@0, intermediate=3/2x@3-5"
    )
    assert sizes(wide) == [[75, 64, 64, 75, 75, 75], [6, 6, 6, 6, 9, 9], 3]
    assert difference(logs(files("llama")), log_probabilities(wide, PROMPTS)) <= BOUND
    assert CliRunner().invoke(cli, ["verify", str(files("llama")), str(wide)]).exit_code == 0
    back = CliRunner().invoke(cli, ["collapse", str(wide), str(tmp_path / "back.gguf")])
    assert "intermediate x25/32 in layers 1-2" in back.stderr
    assert (tmp_path / "back.gguf").read_bytes() == files("llama").read_bytes()


def test_layers_not_named_grow_by_the_factor(files: Callable[[str], Path], tmp_path: Path) -> None:
    wide = tmp_path / "wide.gguf"
    report = widened(files("deci"), wide, factor=2, grow="intermediate=3@0")
    assert sizes(wide)[:2] == [[150, 0, 60, 44], [12, 8, 0, 4]]
    assert report.job.plan.grown == "hidden x2, intermediate x2, heads x2, kv_heads x2, intermediate=3x@0"
    assert difference(logs(files("deci")), log_probabilities(wide, PROMPTS)) <= BOUND


def test_a_layers_factor_that_is_not_its_own_shows(files: Callable[[str], Path], tmp_path: Path) -> None:
    """Layer 1 has twice the units, so its down projection is halved; as in the other layers it would be seen."""
    wide = tmp_path / "wide.gguf"
    widened(files("llama"), wide, grow="intermediate=2@1", scaling="copy")
    found = next(one for one in gguf.GGUFReader(wide).tensors if one.name == "blk.1.ffn_down.weight")
    data, start = wide.read_bytes(), int(found.data_offset)
    values = 2 * np.array(found.data)
    wide.write_bytes(data[:start] + values.tobytes() + data[start + values.nbytes :])
    assert difference(logs(files("llama")), log_probabilities(wide, PROMPTS)) > 5 * BOUND


def refusal(path: Path, **asked: Any) -> list[str]:
    with pytest.raises(WidenError) as caught:
        prepare(Options(str(path), f"{path}-refused", **asked))
    return [fault.replace(str(path), "IN") for fault in caught.value.faults]


def test_what_a_file_cannot_say(files: Callable[[str], Path]) -> None:
    assert refusal(files("llama"), grow="head_dim=2@0,intermediate=2@0") == [
        "--grow head_dim=2@0: 'head_dim' has one size in all layers; these may differ: intermediate, heads, kv_heads"
    ]
    assert refusal(files("llama"), grow="intermediate=2@1-3,heads=2@7") == [
        "--grow intermediate=2@1-3: the model has 3 layers, counted from 0",
        "--grow heads=2@7: the model has 3 layers, counted from 0",
    ]
    assert refusal(files("llama"), grow="intermediat=2@1")[0].startswith(
        "--grow intermediat=2@1: map 'llama' has no such axis (did you mean 'intermediate'?); it has hidden, "
    )
    assert refusal(files("deci"), grow="kv_heads=2x@3") == [
        "IN: the wide model would have heads 2, kv_heads 4 in layer 3, and 'deci' needs heads % kv_heads == 0; choose other "
        "factors with --grow"
    ]
    assert refusal(files("llama"), grow="intermediate=2@1", experts=4) == [
        "--grow intermediate=2@1: the GGUF of a 'llama' with experts has one intermediate for all layers; models with one for each: "
        + FORMATS
    ]


def test_what_a_layer_cannot_become(files: Callable[[str], Path]) -> None:
    assert refusal(files("deci"), grow="intermediate=3/2x@0-3,heads=5@0-3,kv_heads=3@3") == [
        "--grow heads=5@1: can mean 5 heads or 5 times as many; write heads=5x@1 for 20, or heads=to:5@1 for 5",
        "--grow heads=5@3: can mean 5 heads or 5 times as many; write heads=5x@3 for 10, or heads=to:5@3 for 5",
        "--grow kv_heads=3@3: can mean 3 kv_heads or 3 times as many; write kv_heads=3x@3 for 6, or kv_heads=to:3@3 for 3",
    ]
    assert refusal(files("deci"), grow="intermediate=1.3x@2-3,heads=2x@2") == [
        "--grow intermediate=1.3x@3: 1.3 times 22 is 28.6, no whole number; write intermediate=29@3, or "
        "intermediate=1.3x:round:1@3 for the next one",
        "--grow heads=2x@2: layer 2 has no 'heads'",
    ]


def test_degrees_that_a_layers_size_does_not_divide_by(files: Callable[[str], Path]) -> None:
    job = prepare(Options(str(files("llama")), "x.gguf", grow="intermediate=51@1-2,intermediate=2x@0", dry_run=True))
    job.checkpoint.close()
    assert [text for text in job.warnings if "tensor-parallel" in text] == [
        "intermediate grows from 50 to 51 in layer 1, which tensor-parallel degrees of 2 and 4 and 8 do not divide; "
        "intermediate=round:8@1 in --grow gives a size that they do"
    ]


def test_a_recipe_of_layers(files: Callable[[str], Path], tmp_path: Path) -> None:
    """It is printed as a list where an axis stands twice, and each fault has its line."""
    recipe, grow = tmp_path / "grow.yaml", "hidden=2x,intermediate=64@0,intermediate=+4@1-2"
    said = [str(files("llama")), "--dry-run", "--as-recipe"]
    printed = CliRunner().invoke(cli, [*said, "--grow", grow]).stdout
    assert printed == "grow:\n- hidden=2x\n- intermediate=64@0\n- intermediate=+4@1-2\n"
    recipe.write_text(printed)
    assert CliRunner().invoke(cli, [*said, "--recipe", str(recipe)]).stdout == printed
    for text, fault in (
        (
            "grow:\n  hidden: 2x\n  intermediate: two@1\n",
            "3:17: --grow intermediate=two: 'intermediate=two' says of no",
        ),
        (
            "grow:\n- heads=2x@0-3\n- heads=3x@3\n",
            "2:1: --grow heads=2x@0-3,heads=3x@3: two ranges of 'heads' share a layer",
        ),
    ):
        recipe.write_text(text)
        told = CliRunner().invoke(cli, [*said, "--recipe", str(recipe)])
        assert told.stderr.startswith(f"{recipe}:{fault}"), told.stderr


def test_other_formats_are_told_which_ones_can(tmp_path: Path) -> None:
    models.build(models.VARIANTS["llama"], torch.float32).save_pretrained(tmp_path / "hf")
    assert refusal(tmp_path / "hf", grow="intermediate=2@1,heads=2@0") == [
        f"--grow {growth}: the config of a 'llama' has one {axis} for all layers; models with one for each: {FORMATS}"
        for growth, axis in (("intermediate=2@1", "intermediate"), ("heads=2@0", "heads"))
    ]


def test_ranges_are_read() -> None:
    wishes, ranges = parse_growth("hidden=2, heads=3x@4 - 7,heads=to:12@1,intermediate=2x:round:8@0")
    assert wishes == parse_grow("hidden=2")
    assert [(str(one), one.first, one.last) for one in ranges] == [
        ("heads=3x@4-7", 4, 7),
        ("heads=to:12@1", 1, 1),
        ("intermediate=2x:round:8@0", 0, 0),
    ]


_NO_LAYERS = "names no layers; write for example intermediate=2@8-15, or intermediate=2@3 for one, counted from 0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("heads=2@", f"'heads=2@' {_NO_LAYERS}"),
        ("heads=2@7-3", f"'heads=2@7-3' {_NO_LAYERS}"),
        ("heads=2@1-3,heads=3@3", "two ranges of 'heads' share a layer"),
    ],
)
def test_ranges_that_cannot_be_read(text: str, expected: str) -> None:
    with pytest.raises(WidenError) as caught:
        parse_growth(text)
    assert str(caught.value) == f"--grow {text}: {expected}"
