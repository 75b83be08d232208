"""Rows of shared/cli.tsv about the disk: full, read-only, and a pipe whose header is in another order than its data."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import test_cli
from safetensors.numpy import load_file, save_file
from small_llama import CONFIG, llama
from test_cli import ROOT, state, widen

folder, wide = test_cli.folder, test_cli.wide
# The system's answers made up: little room, or room that is gone when it is needed.
NO_ROOM = """
import os
real = os.statvfs
os.statvfs = lambda path: os.statvfs_result((*real(path)[:2], *real(path)[2:3], 0, 1, *real(path)[5:]))
"""
GONE = """
import errno, os

def pwrite(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

os.pwrite = pwrite
"""


def under(folder: Path, script: str) -> dict[str, str]:
    """An environment in which a command begins with a script."""
    site = folder.with_name(f"{folder.name}-site")
    site.mkdir()
    (site / "sitecustomize.py").write_text(script)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


@pytest.mark.parametrize("out", ["out.safetensors", "out/"])
def test_a_full_disk_is_told_before_the_work(folder: Path, out: str) -> None:
    if not out.endswith("/"):
        (folder / out).write_bytes(b"old")
    before = state(folder)
    done = widen(folder, "in.safetensors", out, "--force", env=under(folder, NO_ROOM))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    needed, free = (int(word) for word in line.replace(",", "").split() if word.isdigit())
    assert needed > free
    assert "bytes needed" in line
    assert state(folder) == before


def test_a_disk_that_fills_up_leaves_the_old_file(folder: Path) -> None:
    (folder / "out.safetensors").write_bytes(b"old")
    before = state(folder)
    done = widen(folder, "in.safetensors", "out.safetensors", "--force", env=under(folder, GONE))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("out")
    assert "the disk is full; " in line
    assert state(folder) == before
    assert {path.name for path in folder.iterdir()} == set(before)


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """A file system of 64 KiB at a place; False where none may be mounted."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True
    ).returncode == 0  # fmt: skip
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", place], check=True)


def check_small_disk(tmp_path: Path) -> None:
    tensors = llama("F32") | {name: llama("F32")["lm_head.weight"].repeat(99, 0) for name in ("lm_head.weight",)}
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 16 * 99}))
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk"):
        (tmp_path / "disk" / "out.safetensors").write_bytes(b"old")
        done = widen(tmp_path, "in.safetensors", "disk/out.safetensors", "--force")
        assert done.returncode == 1
        assert "bytes needed" in done.stderr
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out.safetensors"]
        assert (tmp_path / "disk" / "out.safetensors").read_bytes() == b"old"


# The system says that there is room, as some network file systems do; the disk itself fills up.
BOASTING = """
import os
real = os.statvfs
os.statvfs = lambda path: os.statvfs_result((*real(path)[:2], 1 << 30, 1 << 30, 1 << 30, *real(path)[5:]))
"""


def check_disk_that_fills_up(tmp_path: Path) -> None:
    """The kernel's own refusal in the middle of the third shard: the old folder stays, finished shards are gone on from."""
    (tmp_path / "work").mkdir()
    work, disk = tmp_path / "work", tmp_path / "work" / "disk"
    disk.mkdir()
    (work / "model").mkdir()
    save_file({name: value.repeat(4, 0) if value.shape[0] == 16 else value for name, value in llama("F32").items()},
              work / "model" / "model.safetensors")  # fmt: skip
    (work / "model" / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 64}))
    line = ("model", "disk/out", "--max-shard-size", "4KB", "--force")
    assert widen(work, "model", "whole", "--max-shard-size", "4KB").returncode == 0
    with small_disk(disk):
        (disk / "out").mkdir()
        (disk / "out" / "notes").write_text("mine")
        (disk / "filler").write_bytes(bytes(44 << 10))
        done = widen(work, *line, env=under(work, BOASTING))
        assert (done.returncode, done.stdout) == (1, "")
        assert "the disk is full; " in done.stderr
        assert "--resume goes on from there" in done.stderr
        assert [path.name for path in (disk / "out").iterdir()] == ["notes"]
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        again = widen(work, *line, "--resume")
        assert again.returncode == 0, again.stderr
        assert "resumed: " in again.stderr
        assert {path.name: path.read_bytes() for path in (disk / "out").glob("*.safetensors")} == {
            path.name: path.read_bytes() for path in (work / "whole").glob("*.safetensors")
        }
        assert {path.name for path in disk.iterdir()} == {"out"}


# Where nothing can be mounted nothing is collected, so that there are no skipped tests.
test_a_small_disk: Callable[..., None] | None = None
test_a_disk_that_fills_up_in_truth: Callable[..., None] | None = None
with tempfile.TemporaryDirectory() as trial, small_disk(Path(trial)) as possible:
    if possible:
        test_a_small_disk = check_small_disk
        test_a_disk_that_fills_up_in_truth = check_disk_that_fills_up


def _as_a_normal_user() -> None:
    """Root without the right to pass over the modes of files; a normal user has none to lose."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH of linux/capability.h
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.parametrize("out", ["shut/out.safetensors", "shut/out/"])
def test_a_folder_that_is_not_writable(folder: Path, out: str) -> None:
    shut = folder / "shut"
    shut.mkdir()
    shut.chmod(0o500)
    before = state(folder)
    try:
        done = widen(folder, "in.safetensors", out, preexec_fn=_as_a_normal_user)
        assert list(shut.iterdir()) == []
    finally:
        shut.chmod(0o700)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(out.rstrip("/"))
    assert "shut" in done.stderr
    assert "writable" in done.stderr
    assert state(folder) == before


def test_inputs_that_may_not_be_read(folder: Path) -> None:
    for name in ("in.safetensors", "config.json"):
        (folder / name).chmod(0)
        done = widen(folder, "in.safetensors", "out.safetensors", preexec_fn=_as_a_normal_user)
        (folder / name).chmod(0o600)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"{name}: ")
        assert "ermission denied" in done.stderr
        assert not (folder / "out.safetensors").exists()


@pytest.mark.parametrize("out", ["out.safetensors", "-"])
def test_a_pipe_whose_header_is_in_another_order(folder: Path, wide: bytes, out: str) -> None:
    """It streams: the order of the data counts, and nothing is kept anywhere."""
    data = (folder / "in.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = dict(reversed(json.loads(data[8 : 8 + length]).items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    (folder / "in.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with (folder / "in.safetensors").open("rb") as given, (folder / "o").open("wb") as stdout:
        done = widen(folder, "--config", "config.json", "-", out, stdin=given, stdout=stdout)
    assert done.returncode == 0, done.stderr
    made = folder / ("o" if out == "-" else out)
    assert made.read_bytes() == wide
    assert len(load_file(made)) == len(header) - 1
