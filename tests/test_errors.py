"""Names and values from files in messages: safe for a terminal, and of bearable length."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fuzzing
import pytest
from click.testing import CliRunner

from widen_cli.cli import cli
from widen_cli.config import parse_settings
from widen_cli.errors import WidenError, brief, did_you_mean, is_text, printable

SEEDS = fuzzing.CORPUS / "seeds"


def test_names_are_escaped_and_cut_inside() -> None:
    assert printable("a\x1bé\n\ud800") == "a\\x1b\\xe9\\n\\ud800"
    assert printable("x" * 800) == "x" * 800
    assert printable("a" * 5000 + "z" * 300) == "a" * 400 + "..." + "z" * 200


def test_values_are_as_python_writes_them_and_cut() -> None:
    assert brief("a\x1b") == "'a\\x1b'"
    assert brief([1, None]) == "[1, None]"
    assert brief("y" * 5000) == "'" + "y" * 199 + "..."


def test_a_near_word_is_escaped_too() -> None:
    assert did_you_mean("hidden_size", ["hidden\x1bsize"]) == " (did you mean 'hidden\\x1bsize'?)"


def test_half_a_surrogate_pair_is_no_text() -> None:
    assert is_text("é模")
    assert not is_text("a\ud800")


def test_what_is_no_text_is_refused_in_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux hands over any bytes; what is written down of the run has to be text."""
    shutil.copytree(SEEDS / "single", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WidenError, match=r"^--set name=\\udcff: is no UTF-8 text$"):
        parse_settings(("name=\udcff",))
    given = ["model.safetensors", "out.safetensors"]
    result = CliRunner().invoke(cli, [*given, "--strip-prefix", "\udcff"])
    assert (result.exit_code, result.stderr) == (1, "--strip-prefix \\udcff: is no UTF-8 text\n")


def test_the_file_at_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses a file that nothing else speaks of; standard output has nothing to do with it."""

    def refuse(options: object) -> None:
        raise PermissionError(13, "Permission denied", "in/a\x1b.json")

    monkeypatch.setattr("widen_cli.commands.convert.prepare", refuse)
    monkeypatch.setattr("widen_cli.shell._drop_stdout", lambda: None)
    result = CliRunner().invoke(cli, ["in", "out"])
    assert (result.exit_code, result.stderr) == (1, "in/a\\x1b.json: Permission denied\n")


@pytest.mark.parametrize("architecture", [b"\xf4lama", b"x" * 229])
def test_an_architecture_that_is_no_name(tmp_path: Path, architecture: bytes) -> None:
    """With --map too, since the keys of the wide model begin with it."""
    data = (SEEDS / "gguf" / "model.gguf").read_bytes()
    changed = len(architecture).to_bytes(8, "little") + architecture
    data = data.replace((5).to_bytes(8, "little") + b"llama", changed, 1)
    (tmp_path / "x.gguf").write_bytes(data)
    result = CliRunner().invoke(cli, [str(tmp_path / "x.gguf"), str(tmp_path / "out.gguf"), "--map", "llama.gguf"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{tmp_path / 'x.gguf'}: general.architecture '")
    assert result.stderr.endswith("' is no name; make or download the file again\n")


def test_a_nan_in_a_config_is_the_same_nan(tmp_path: Path) -> None:
    shutil.copytree(SEEDS / "single", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"x": [float("nan")], "y": float("nan")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    narrow, wide = str(tmp_path / "model.safetensors"), str(tmp_path / "wide.safetensors")
    assert CliRunner().invoke(cli, [narrow, wide]).exit_code == 0
    assert CliRunner().invoke(cli, ["verify", narrow, wide]).exit_code == 0
    written = json.loads((tmp_path / "wide.config.json").read_text()) | {"y": 0.0}
    (tmp_path / "wide.config.json").write_text(json.dumps(written))
    result = CliRunner().invoke(cli, ["verify", narrow, wide])
    assert (result.exit_code, result.stderr) == (3, f"{wide}: y: should be NaN, is 0.0\n")
