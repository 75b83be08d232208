"""The same input and options give the same bytes, whatever the threads, the hashes, the locale and the order of a folder's files."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fuzzing
import pytest

import widen_cli

ROOT = Path(widen_cli.__file__).parents[1]
# What a file system may do: list a folder in any order. And small blocks, so that threads have something to share.
OTHERWISE = """
import os
import widen_cli.stream

widen_cli.stream.BLOCK_BYTES = 64
listdir, scandir = os.listdir, os.scandir


class Reversed:
    def __init__(self, entries):
        self.entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.entries)

    def close(self):
        pass


os.listdir = lambda *path: sorted(listdir(*path), reverse=True)
os.scandir = lambda *path: Reversed(scandir(*path))
"""
PLAIN = {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "UTC"}
OTHER = {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "PYTHONOPTIMIZE": "1", "COLUMNS": "40"}
# (seed, options): what is read and written in every format.
KINDS = {
    "a file whose values are rounded": ("single", ["--factor", "3", "--dtype", "BF16"]),
    "shards into shards": ("sharded", ["--max-shard-size", "300"]),
    "a folder with modules": ("sentence", []),
    "a zip of PyTorch": ("zip", []),
    "an adapter": ("adapter", []),
    "block-scaled FP8": ("fp8", []),
    "quantised blocks": ("quantised", []),
    "quantised blocks in another type": ("quantised", ["--factor", "3", "--embedding-type", "F16"]),
    "a split GGUF into parts": ("split", ["--max-shard-size", "2000"]),
    "larger heads": ("single", ["--grow", "head_dim=2", "--rope", "theta"]),
}


def outcome(folder: Path) -> dict[str, str]:
    """Every file, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def converted(case: fuzzing.Case, options: list[str], folder: Path, other: bool) -> dict[str, str]:
    """What a run leaves, in a folder whose files came in one order or the other."""
    paths = sorted((path for path in case.folder.rglob("*") if path.is_file()), reverse=other)
    for path in paths:
        target = folder / path.relative_to(case.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    site = folder.with_name(f"{folder.name}-site")
    site.mkdir()
    (site / "sitecustomize.py").write_text(OTHERWISE if other else "")
    path = os.pathsep.join([str(site), str(ROOT)])
    threads = ["--threads", "4" if other else "1"]
    done = subprocess.run(
        [sys.executable, "-m", "widen_cli", *case.arguments, *options, *threads],
        cwd=folder, env=os.environ | (OTHER if other else PLAIN) | {"PYTHONPATH": path}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return outcome(folder)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_bytes(kind: str, tmp_path: Path) -> None:
    seed, options = KINDS[kind]
    case = next(case for case in fuzzing.cases() if case.name == seed)
    one = converted(case, options, tmp_path / "one", other=False)
    other = converted(case, options, tmp_path / "elsewhere", other=True)
    assert one == other
    written = one.keys() - outcome(case.folder).keys()
    assert any(name.startswith("out") for name in written)
    if "shard" in kind or "parts" in kind:
        assert len(written) > 2


def test_what_is_otherwise_is_otherwise(tmp_path: Path) -> None:
    """A guard: folders are listed in another order, hashes differ, and blocks are small."""
    (tmp_path / "sitecustomize.py").write_text(OTHERWISE)
    for name in "abc":
        (tmp_path / name).touch()
    script = (
        "import os, widen_cli.stream as s; print([e for e in os.listdir() if len(e) == 1], hash('a'), s.BLOCK_BYTES)"
    )
    shown = []
    for env in (PLAIN, OTHER):
        path = os.pathsep.join([*([str(tmp_path)] if env is OTHER else []), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=os.environ | env | {"PYTHONPATH": path},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        shown.append(done.stdout.split())
    assert shown[1][:3] == ["['c',", "'b',", "'a']"]
    assert shown[0][3] != shown[1][3]
    assert (int(shown[0][4]) > 64, shown[1][4]) == (True, "64")
