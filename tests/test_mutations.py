"""The loop of random changes (tests/fuzzing.py), for a bounded time, and what it once found, kept in tests/corpus/finds.

`WIDEN_FUZZ_SECONDS=1800 WIDEN_FUZZ_SEED=7 pytest tests/test_mutations.py` runs longer, and other changes. Without a seed they
are the same each time, so that a commit is not blamed for what it did not do.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzzing
import mutations
import pytest

import widen_cli.commands.convert
from widen_cli.errors import WidenError

SECONDS = float(os.environ.get("WIDEN_FUZZ_SECONDS", "15"))
SEED = os.environ.get("WIDEN_FUZZ_SEED", "0")
BY_NAME = {case.name: case for case in fuzzing.cases()}


def fuzz(*arguments: str) -> str:
    """What a run in a process of its own, with its limits, says at its end."""
    root = Path(widen_cli.__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", fuzzing.__file__, *arguments], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_random_changes(tmp_path: Path) -> None:
    told = fuzz("--seconds", str(SECONDS), "--seed", SEED, "--keep", str(tmp_path))
    assert told.endswith("; 0 faults\n")
    # On the slowest machine some are done: a loop that stands still proves nothing.
    assert int(told.split()[0]) > 5 * SECONDS
    assert " done, " in told
    assert " refused; " in told


def test_what_was_found_once() -> None:
    told = fuzz("--finds")
    assert told.startswith(f"{len(fuzzing.finds())} mutants: ")
    assert len(fuzzing.finds()) == sum(path.is_file() for path in (fuzzing.CORPUS / "finds").rglob("*"))


def test_every_seed_does_what_it_is_for() -> None:
    """Unchanged, each is converted, drafted or verified: otherwise its changes would be refused for another reason."""
    tally = fuzzing.Tally()
    for case in BY_NAME.values():
        target = case.targets[0]
        assert fuzzing.judge(case, target, (case.folder / target).read_bytes(), tally) is None
    assert tally.outcomes == {"done": len(BY_NAME)}


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in fuzzing.CORPUS.rglob("*") if path.is_file()) < 400_000


@pytest.mark.parametrize("ending", list(mutations.BY_ENDING))
def test_changes_change_and_are_the_same_for_a_seed(ending: str) -> None:
    names = [(case, target) for case in BY_NAME.values() for target in case.targets if target.endswith(ending)]
    case, target = names[0]
    data = (case.folder / target).read_bytes()
    made = [mutations.mutate(random.Random(seed), target, data) for seed in range(50)]
    assert made == [mutations.mutate(random.Random(seed), target, data) for seed in range(50)]
    assert len(set(made) - {data}) > 35


def broken(how: str) -> Any:
    """A `prepare` with a fault of its own."""
    real = widen_cli.commands.convert.prepare

    def prepare(options: Any) -> Any:
        if how == "crash":
            raise KeyError("x")
        if how == "nameless":
            raise WidenError("it does not work")
        if how == "terminal":
            raise WidenError("model.safetensors: \x1b[31m")
        if how == "leftover":
            Path("left").write_text("")
            raise WidenError("model.safetensors: no")
        if how == "input":
            Path("config.json").write_text("{}")
        if how == "descriptor":
            os.dup(0)
        if how == "wrong bytes" and not options.dry_run:
            os.rename("model.safetensors", "away")
            Path("model.safetensors").write_bytes(Path("away").read_bytes()[:-1] + b"\x01")
            job = real(options)
            os.rename("away", "model.safetensors")
            return job
        return real(options)

    return prepare


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("crash", "KeyError"),
        ("nameless", "begins with no file's name"),
        ("terminal", "not fit for a terminal"),
        ("leftover", "left"),
        ("input", "an input was changed"),
        ("descriptor", "a descriptor stays open"),
        ("wrong bytes", "verify: exit code 3"),
    ],
)
def test_a_fault_is_seen(how: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: each thing that is looked for is found where it is."""
    case = BY_NAME["single"]
    monkeypatch.setattr("widen_cli.commands.convert.prepare", broken(how))
    data = json.dumps(json.loads((case.folder / "config.json").read_text())).encode()
    fault = fuzzing.judge(case, "config.json", data)
    assert fault is not None
    assert told in fault


def test_an_endless_run_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(options: Any) -> Any:
        while True:
            pass

    monkeypatch.setattr("widen_cli.commands.convert.prepare", endless)
    monkeypatch.setattr(fuzzing, "SECONDS", 0.2)
    old = signal.signal(signal.SIGPROF, fuzzing._too_long)
    try:
        case = BY_NAME["single"]
        fault = fuzzing.judge(case, "config.json", (case.folder / "config.json").read_bytes())
    finally:
        signal.signal(signal.SIGPROF, old)
    assert fault is not None
    assert fault.startswith("took too long")
