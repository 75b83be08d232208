"""Where the outputs of several inputs go, and which have no place."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from widen_cli.cli import cli
from widen_cli.errors import WidenError
from widen_cli.several import targets_in


def test_each_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert targets_in("out", ["../a/", "b/c.gguf", "."]) == ["out/a", "out/c.gguf", "out/model"]


@pytest.mark.parametrize(
    ("folder", "inputs", "faults"),
    [
        ("", ["a"], ["--into: an empty name is no folder; name one, which is made where it does not exist"]),
        ("file", ["a"], ["--into: 'file' is no folder; name one, which is made where it does not exist"]),
        (
            "out",
            ["-", "a", "/", "b/a/"],
            [
                "--into: '-' has no name for its output; name a file or a folder",
                "--into: '/' has no name for its output; name a file or a folder",
                "--into: 'a' and 'b/a/' would both be out/a; widen one of them into another folder",
            ],
        ),
    ],
)
def test_what_has_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, inputs: list[str], faults: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    with pytest.raises(WidenError) as caught:
        targets_in(folder, inputs)
    assert list(caught.value.faults) == faults
    done = CliRunner().invoke(cli, ["convert", "--into", folder, *inputs], catch_exceptions=False)
    assert done.exit_code == 2
    assert "\n".join(faults) in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
