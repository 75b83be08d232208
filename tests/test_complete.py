"""`--resume` after a finished run: a script that is run again has nothing to do, and anything else that stands there is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from interruptions import inputs

from widen_cli.cli import cli
from widen_cli.hidden import hidden_sibling

CASES = {
    "file": ("in.safetensors", "out.safetensors"),
    "folder": ("model", "out", "--max-shard-size", "2KB"),
    "file and config": ("in.safetensors", "out.safetensors", "--config-out", "out-config.json"),
    "parts": ("in.gguf", "out.gguf", "--max-shard-size", "120KB"),
}
REMEDY = "; use --force to replace it, or choose another output"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def widen(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def state(here: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that stands there: number, time and bytes of every file."""
    files = (path for path in sorted(here.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("case", CASES)
def test_a_finished_run_has_nothing_more_to_do(case: str, here: Path) -> None:
    arguments = (*CASES[case], "--resume")
    assert widen(*arguments).exit_code == 0
    before = state(here)
    target = Path(os.path.realpath(arguments[1]))
    left = hidden_sibling(target, "tmp")
    (dead := left.with_name(left.name.replace(str(os.getpid()), "999999999"))).write_bytes(b"1")
    again = widen(*arguments)
    assert (again.exit_code, again.stdout) == (0, "")
    assert [line for line in again.stderr.splitlines() if not line.startswith(("--resume", "warning: --resume"))] == [
        f"{arguments[1]}: is complete: it records this conversion, and no input was changed since; nothing was written "
        "(widen-ckpt verify compares the bytes)"
    ]
    assert state(here) == before
    assert not dead.exists()
    proved = widen(*arguments, "--json", *([] if case == "parts" else ["--verify"]))
    told = json.loads(proved.stdout)
    assert (proved.exit_code, told["was_complete"]) == (0, True)
    assert case == "parts" or told["verification"]["same"]
    assert widen(*CASES[case]).exit_code == 1


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_this_conversion_is_refused(case: str, here: Path) -> None:
    arguments = (*CASES[case], "--resume")
    assert widen(*arguments).exit_code == 0
    before, given = state(here), arguments[0]
    main = {"folder": "model-00001-of-00003.safetensors", "parts": "out-00001-of-00003.gguf"}.get(case, arguments[1])
    for other in (["--factor", "3"], ["--scaling", "sum"]):
        refused = widen(*arguments, *other)
        assert refused.exit_code == 1
        assert "exists, and " in refused.stderr
        assert refused.stderr.endswith(f" is not of this conversion{REMEDY}\n")
    assert state(here) == before
    file = Path(given, "model.safetensors") if case == "folder" else Path(given)
    later = Path("out", main).stat().st_mtime_ns if case == "folder" else Path(main).stat().st_mtime_ns
    os.utime(file, ns=(later + 1, later + 1))
    assert widen(*arguments).stderr.splitlines()[-1] == f"{arguments[1]}: exists, and {file} was changed since{REMEDY}"
    os.utime(file, ns=(0, 0))
    assert widen(*arguments).exit_code == 0
    shard = Path("out", main) if case == "folder" else Path(main)
    shard.write_bytes(shard.read_bytes()[:-1])
    assert widen(*arguments).stderr.splitlines()[-1] == (
        f"{arguments[1]}: exists, and {shard.name} is not of this conversion{REMEDY}"
    )


def test_what_lies_beside_the_weights_counts(here: Path) -> None:
    arguments = (*CASES["folder"], "--resume")
    assert widen(*arguments).exit_code == 0
    for name, told in (
        ("config.json", "config.json is not of this conversion"),
        ("tokenizer.json", "tokenizer.json in it is not the input's"),
        ("model.safetensors.index.json", "model.safetensors.index.json is missing"),
    ):
        old = Path("out", name).read_bytes()
        Path("out", name).write_bytes(b"{ }") if "missing" not in told else Path("out", name).unlink()
        assert widen(*arguments).stderr.splitlines()[-1] == f"out: exists, and {told}{REMEDY}"
        Path("out", name).write_bytes(old)
    assert widen(*arguments).exit_code == 0
