"""A run that is cut short at any step leaves the old output, the new one or none; `--resume` goes on from what it had finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ALONE = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@cache
def process() -> subprocess.Popen[str]:
    """One that has imported what its children need, and has no threads and so may fork."""
    script = [sys.executable, str(ROOT / "tests" / "interruptions.py"), "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(script, env={**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}, **pipes)


def interrupt(case: str, how: str, *more: str) -> dict[str, Any]:
    """All interruptions of a case."""
    running = process()
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(json.dumps(["--case", case, "--how", how, *more]) + "\n")
    running.stdin.flush()
    told: dict[str, Any] = json.loads(running.stdout.readline())
    return told


@pytest.mark.parametrize(
    ("case", "how", "least", "resumed"),
    [
        ("file", "kill", 12, 0),
        ("file --force", "power", 16, 0),
        ("file --force", "TERM", 10, 0),
        ("folder", "power", 50, 30),
        ("folder --force", "kill", 55, 30),
        ("parts", "full", 35, 5),
        ("parts --force", "kill", 40, 20),
        ("parts --force", "INT", 40, 15),
        ("folder and config --force", "kill --last 20", 20, 8),
        ("file and mask", "power", 16, 0),
        ("file and mask --force", "kill", 20, 0),
    ],
)
def test_every_step(case: str, how: str, least: int, resumed: int) -> None:
    """At every system call that makes, flushes, renames, notes or removes a file or folder."""
    told = interrupt(case, *how.split())
    assert told["faults"] == []
    assert told["blows"] >= least
    assert told.get("resumed", 0) >= resumed
    assert told["slowest"] < 2


@pytest.mark.parametrize("case", ["file", "folder --force"])
def test_random_moments(case: str) -> None:
    """Killed in the middle of writing 50 times, 25 of them in the second half of the bytes."""
    told = interrupt(case, "kill", "--last", "-1", "--random", "50")
    assert told["faults"] == []
    assert told["blows"] == 50
    assert told.get("resumed", 0) >= (25 if case.startswith("folder") else 0)


@pytest.mark.parametrize(
    ("broken", "case", "how", "fault"),
    [
        ("in place", "file", "kill", "mixed or partial"),
        ("unflushed", "file", "power", "mixed or partial"),
        ("one by one", "file --force", "kill", "mixed or partial"),
        ("main first", "parts", "kill", "partial"),
        ("without note", "file --force", "kill", "not completed"),
        ("trusting", "folder", "power", "with --resume: not the bytes of a run in one go"),
    ],
)
def test_a_wrong_order_is_found(broken: str, case: str, how: str, fault: str) -> None:
    """Guards the two above: each of these faults, put into the program, has to be seen."""
    more = ("--random", "2") if broken == "in place" else ("--last", "20")
    assert any(fault in text for text in interrupt(case, how, "--broken", broken, *more)["faults"])
