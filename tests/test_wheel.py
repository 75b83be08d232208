"""The wheel carries the maps and works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_map(wheel: Path) -> None:
    inside = {
        name.split("/")[-1] for name in zipfile.ZipFile(wheel).namelist() if name.startswith("widen_cli/configs/")
    }
    assert inside == {path.name for path in (ROOT / "configs").glob("*.yaml")}


def test_installed_wheel_finds_its_maps_and_widens(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for arguments in (["maps", "llama"], ["demo", "kept"], ["kept/narrow", "again"]):
        done = subprocess.run(
            [sys.executable, "-m", "widen_cli", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    where = "import widen_cli; print(widen_cli.__file__)"
    done = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(str(target))
