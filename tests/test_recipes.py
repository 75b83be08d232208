"""Recipes: what the flags say in a YAML file, with the same plan, the same bytes and the same checks."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import models
import mutations
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from widen_cli.cli import cli
from widen_cli.conversion_options import conversion_params
from widen_cli.options import Options
from widen_cli.recipes import key_of

WHOLE = """\
# Everything at once.
grow:
  hidden: 2x
  intermediate: round:100   # 50 to 100
  heads: +6
  kv_heads: 2x
scaling: copy
dtype: bf16
set: {rms_norm_eps: 4e-3}
untie: true
"""
DOCUMENTED = (Path(__file__).parents[1] / "docs" / "growth.md").read_text(encoding="utf-8")
FLAGS = ["--grow", "hidden=2x,intermediate=round:100,heads=+6,kv_heads=2x", "--scaling", "copy", "--dtype", "bf16",
         "--set", "rms_norm_eps=4e-3", "--untie"]  # fmt: skip


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama_tied", tmp_path_factory.mktemp("recipes") / "narrow")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_recipe_gives_the_bytes_of_its_flags(narrow: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "grow.yaml"
    recipe.write_text(WHOLE)
    for out, arguments in (("by_recipe", ["--recipe", recipe]), ("by_flags", FLAGS)):
        result = run(narrow, tmp_path / out, *arguments)
        assert result.exit_code == 0, result.output
    assert files(tmp_path / "by_recipe") == files(tmp_path / "by_flags")
    record = (tmp_path / "by_recipe" / "model.safetensors").read_bytes()
    assert b"hidden=2x,intermediate=round:100,heads=+6,kv_heads=2x" in record
    assert b"grow.yaml" not in record
    verified = run("verify", narrow, tmp_path / "by_recipe")
    assert (verified.exit_code, "verified" in verified.output) == (0, True)
    back = run("collapse", tmp_path / "by_recipe", tmp_path / "back")
    assert back.exit_code == 0, back.output
    assert json.loads((tmp_path / "back/config.json").read_text())["num_attention_heads"] == 6


ROUND = [
    ([], "factor: 2\n"),
    (["--factor", "3", "--layout", "tile"], "factor: 3\nlayout: tile\n"),
    (FLAGS, "grow:\n  hidden: 2x\n  intermediate: round:100\n  heads: '+6'\n  kv_heads: 2x\nscaling: copy\ndtype: BF16\nset:\n"
            "  rms_norm_eps: 4e-3\nuntie: true\n"),
    (["--grow", "hidden=4", "--strip-prefix", "model.,a", "--rope", "theta", "--embedding-type", "f32"],
     "grow:\n  hidden: 4\nembedding-type: F32\nstrip-prefix: model.,a\nrope: theta\n"),
    (["--set", "rms_norm_eps=1e-5", "--set", "rms_norm_eps=2e-5", "--grow", "head_dim=2x"],
     "grow:\n  head_dim: 2x\nset:\n- rms_norm_eps=1e-5\n- rms_norm_eps=2e-5\n"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "expected"), ROUND, ids=[str(n) for n in range(len(ROUND))])
def test_a_printed_recipe_says_the_same(flags: list[str], expected: str, narrow: Path, tmp_path: Path) -> None:
    asked = [flag for flag in flags if flag not in ("--strip-prefix", "model.,a")]
    printed = run(narrow, "--dry-run", "--as-recipe", *asked).stdout
    assert printed == expected.replace("strip-prefix: model.,a\n", "")
    (tmp_path / "again.yaml").write_text(printed)
    again = ["--recipe", tmp_path / "again.yaml"]
    assert run(narrow, "--dry-run", "--as-recipe", *again).stdout == printed
    assert run(narrow, "--dry-run", "--json", *again).stdout == run(narrow, "--dry-run", "--json", *asked).stdout


def test_flags_count_before_the_recipe(narrow: Path, tmp_path: Path) -> None:
    (tmp_path / "grow.yaml").write_text(WHOLE)
    told = run(
        narrow,
        "--dry-run",
        "--as-recipe",
        "--recipe",
        tmp_path / "grow.yaml",
        "--grow",
        "hidden=3x",
        "--scaling",
        "sum",
    )
    assert told.stdout == "grow:\n  hidden: 3x\nscaling: sum\ndtype: BF16\nset:\n  rms_norm_eps: 4e-3\nuntie: true\n"


def test_every_fault_of_a_recipe_is_told_with_its_place(narrow: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "grow:\n  hidden: two\n  heads: 2x\nscalling: copy\nlayout: tiled\nfactor: 1\nset: [nothing, a=2]\ndtype:\n"
        "rope: {a: {b: c}}\nuntie: perhaps\ntarget-params: many\nrecipe: other.yaml\nmax_shard_size: 1GB\n"
    )
    result = run(narrow, tmp_path / "out", "--recipe", tmp_path / "bad.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert not (tmp_path / "out").exists()
    lines = [line.removeprefix(f"{tmp_path}/bad.yaml:") for line in result.stderr.splitlines()]
    assert [re.split(r";|\. Recognized", line)[0] for line in lines] == [
        "2:11: --grow hidden=two: 'hidden=two' says of no axis what it grows to",
        "4:1: unknown key 'scalling' (did you mean 'scaling'?)",
        "5:9: layout: 'tiled' is not one of 'auto', 'interleave', 'tile'.",
        "6:9: factor: '1' is no whole number from 2 to 65536",
        "7:7: --set nothing: expected key=value, such as --set num_attention_heads=12",
        "8:1: 'dtype' has no value",
        "9:11: 'rope.a' has to be a text or a number",
        "10:8: untie: 'perhaps' is not a valid boolean",
        "11:16: --target-params many: is no number of parameters",
        "12:1: unknown key 'recipe' (did you mean 'rope'?)",
        "13:1: unknown key 'max_shard_size'",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- grow\n", ":1:1: a recipe is a YAML mapping of options; `widen-ckpt IN --dry-run --as-recipe` prints one"),
        ("factor: 2\nfactor: 3\n", ":2:1: 'factor' stands twice; the first is at {file}:1:1"),
        ("grow: {hidden: 2x\n", ":2:1: did not find expected ',' or '}}'"),
        ("grow: {}\n", ":1:1: 'grow' has no value"),
        (None, ": cannot read the recipe: No such file or directory"),
    ],
)
def test_what_is_no_recipe(text: str | None, fault: str, narrow: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    if text is not None:
        file.write_text(text)
    result = run(narrow, tmp_path / "out", "--recipe", file)
    assert (result.exit_code, result.stderr) == (1, f"{file}{fault.format(file=file)}\n")


def test_as_recipe_goes_with_a_dry_run(narrow: Path, tmp_path: Path) -> None:
    for more in (["--as-recipe"], ["--as-recipe", "--dry-run", "--json"]):
        result = run(narrow, tmp_path / "out", *more)
        assert result.exit_code == 2
        assert (
            "--as-recipe prints on stdout what a dry run plans; give --dry-run, and leave --json out" in result.stderr
        )


def test_every_option_of_a_conversion_is_a_key() -> None:
    """And nothing else is: a new option needs no word here."""
    names = {str(param.name): key_of(param) for param in conversion_params()}
    assert names["settings"] == "set"
    assert names["embedding_type"] == "embedding-type"
    assert {*names} <= {*Options.__dataclass_fields__}
    for command in ("convert", "verify", "collapse"):
        helped = run(command, "--help").stdout
        assert all(f"--{key}" in helped for key in [*names.values(), "recipe"])


@settings(deadline=None, max_examples=60)
@given(drawn=st.randoms(use_true_random=False))
def test_a_changed_recipe_is_read_or_refused_with_its_places(
    drawn: random.Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "changed.yaml"
    file.write_bytes(mutations.mutate(drawn, "x.yaml", WHOLE.encode()))
    result = run("convert", "/nowhere", "--dry-run", "--recipe", file)
    assert result.exit_code in (1, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    for line in result.stderr.splitlines():
        assert line.isprintable()
        assert re.match(
            rf"{re.escape(str(file))}(:\d+:\d+)?: .|--\w|/nowhere: |warning: |Usage: |Try |Error: |$", line
        ), line


def test_the_documented_recipe_is_one(narrow: Path, tmp_path: Path) -> None:
    """And its commands run, on a model and one that is twice as wide."""
    recipe = re.search(r"```yaml\n(.*?)```", DOCUMENTED, flags=re.DOTALL)
    assert recipe is not None
    (tmp_path / "grow.yaml").write_text(recipe[1])
    (tmp_path / "narrow").symlink_to(narrow)
    assert run(narrow, tmp_path / "big", "--scaling", "copy").exit_code == 0
    section = DOCUMENTED.partition("\n## Saying what to grow to\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line.partition("  #")[0].partition(" > ")[0].split() for line in lines]
    assert len(commands) == 5
    for command in commands:
        result = run(
            *(str(tmp_path / word) if re.match("narrow|wide|big|grow.yaml", word) else word for word in command[1:]),
            "--force",
        )
        assert result.exit_code == 0, result.output
