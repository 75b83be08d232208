"""Runs the command on changed inputs and judges what came of it: `python tests/fuzzing.py --seconds 1200 --seed 7`.

The seeds lie in tests/corpus/seeds, what was found once in tests/corpus/finds. A run is in this process, under 2 GB of address
space and 10 seconds each: a refusal that names a file in few lines, or a result that an independent reader reads and
`verify` confirms. Anything else is printed, its input kept in the folder of --keep, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import gguf
import ml_dtypes  # noqa: F401 - numpy learns bfloat16
import numpy as np
from click.testing import CliRunner, Result
from mutations import mutate
from safetensors import safe_open

from widen_cli.cli import cli

CORPUS = Path(__file__).parent / "corpus"
MEMORY = 2 << 30
SECONDS = 10.0
LINES = 20


class TooLong(BaseException):
    """A run did not end in time; no `except Exception` of the tool takes it."""


@dataclass(frozen=True)
class Case:
    """A seed: its folder, the command's arguments, and the files that are changed."""

    name: str
    folder: Path
    arguments: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def output(self) -> str | None:
        """What the command writes, None for one that writes nothing."""
        return next((part for part in self.arguments if part.startswith("out")), None)


@dataclass
class Tally:
    """How many runs ended how, the faults of the tool, and the messages without their names and numbers."""

    outcomes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return (
            f"{sum(self.outcomes.values())} mutants: {ended}; {len(self.messages)} different messages; "
            f"the slowest took {self.slowest:.1f} s; {len(self.faults)} faults"
        )


def cases() -> list[Case]:
    found = []
    for folder in sorted((CORPUS / "seeds").iterdir()):
        said = json.loads((folder / "case.json").read_text())
        found.append(Case(folder.name, folder, tuple(said["arguments"]), tuple(said["targets"])))
    return found


def finds() -> list[tuple[Case, str, Path]]:
    """The kept finds: the case each belongs to, the file it takes the place of, and where it lies."""
    by_name = {case.name: case for case in cases()}
    found = []
    for name, case in by_name.items():
        for path in sorted((CORPUS / "finds" / name).glob("*/**/*")):
            if path.is_file():
                found.append((case, "/".join(path.relative_to(CORPUS / "finds" / name).parts[1:]), path))
    return found


def judge(case: Case, target: str, data: bytes, tally: Tally | None = None) -> str | None:
    """Runs the case with `data` as its `target`; what is wrong with what came of it, None if nothing is."""
    tally = tally if tally is not None else Tally()
    with _copied(case) as folder:
        (folder / target).write_bytes(data)
        before, opened, since = _state(folder), _descriptors(), time.process_time()
        try:
            result = _run(case.arguments)
        except TooLong:
            tally.outcomes["too long"] += 1
            return "took too long: " + traceback.format_exc()
        tally.slowest = max(tally.slowest, time.process_time() - since)
        tally.outcomes[_outcome(result)] += 1
        if result.exit_code == 1 and result.stderr:
            tally.messages[f"{case.name}: " + re.sub(r"'[^']*'|[\d.]+", "_", _first(result))[:90]] += 1
        fault = _fault(case, result, folder, before)
        if fault is None and _descriptors() > opened:
            fault = "a descriptor stays open"
        return fault


@contextmanager
def _copied(case: Case) -> Iterator[Path]:
    """A copy of the case's folder, which is the working folder within the block."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        folder, here = Path(made, "case"), os.getcwd()
        shutil.copytree(case.folder, folder)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(here)


def _state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _run(arguments: tuple[str, ...]) -> Result:
    # Time of the processor, since on a busy machine the clock says little.
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return CliRunner().invoke(
            cli, [*arguments, *(() if arguments[0] == "maps" else ("--threads", "1"))], color=True
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


def _outcome(result: Result) -> str:
    return {0: "done", 1: "refused", 3: "found to differ"}.get(result.exit_code, f"exit code {result.exit_code}")


def _first(result: Result) -> str:
    return next(iter(result.stderr.splitlines()), "")


def _fault(case: Case, result: Result, folder: Path, before: dict[str, bytes]) -> str | None:
    """What is wrong with a run, None if nothing is."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception)[-4:])
    after = _state(folder)
    if {name: after.get(name) for name in before} != before:
        return "an input was changed"
    if result.exit_code == 1:
        if after.keys() != before.keys() or (case.output and os.path.lexists(case.output)):
            return f"refused, and left {sorted(after.keys() - before.keys())}"
        return _bad_message(result, folder)
    if result.exit_code == 0:
        return _bad_result(case, result)
    verifying = result.exit_code == 3 and case.arguments[0] == "verify"
    return None if verifying else f"exit code {result.exit_code}: {result.stderr}"


def _bad_message(result: Result, folder: Path) -> str | None:
    lines = result.stderr.splitlines()
    named = {*(path.name for path in folder.iterdir()), "recorded map", "the recorded map"}
    told = [line for line in lines if not line.startswith("warning: ")]
    if not 1 <= len(lines) <= LINES or not told:
        return f"{len(lines)} lines: {result.stderr[:2000]!r}"
    if not told[0].startswith(tuple(named)):
        return f"begins with no file's name: {result.stderr[:500]!r}"
    if not result.stderr.replace("\n", "").isprintable() or "Traceback" in result.stderr:
        return f"not fit for a terminal: {result.stderr[:500]!r}"
    if max(map(len, lines)) > 2000:
        return f"a line of {max(map(len, lines))} characters: {result.stderr[:500]!r}"
    return None


def _bad_result(case: Case, result: Result) -> str | None:
    """Reads what was written with the formats' own libraries, and has the tool verify it."""
    if len(result.stderr.splitlines()) > LINES:
        return f"{len(result.stderr.splitlines())} lines where all is well: {result.stderr[:1500]!r}"
    if case.output is None:
        return None
    try:
        for path in _written(Path(case.output)):
            _read(path)
    except Exception as error:
        return f"the library does not read it: {error!r}; {result.stderr!r}"
    given = list(case.arguments)
    given[given.index(case.output)] = case.output
    verified = _run(("verify", *given))
    if verified.exit_code != 0:
        return f"verify: exit code {verified.exit_code}: {verified.exception!r} {verified.output!r}"
    return None


def _written(out: Path) -> list[Path]:
    if out.is_file():
        return [out]
    return [path for path in sorted(out.iterdir()) if path.suffix in (".safetensors", ".gguf")]


def _read(path: Path) -> None:
    """Touches every value of a file; raises what the library raises."""
    if path.suffix == ".gguf":
        for tensor in gguf.GGUFReader(path).tensors:
            np.asarray(tensor.data).sum()
        return
    with safe_open(path, "np") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            view = opened.get_slice(name)
            if not view.get_dtype().startswith("F8"):  # numpy has none of its own
                opened.get_tensor(name).tobytes()


def loop(seconds: float, seed: int, keep: Path | None = None) -> Tally:
    """Mutants for so many seconds, the same for a seed; each find is kept once for each message."""
    drawn, tally, seen = random.Random(seed), Tally(), set[str]()
    every = [(case, target) for case in cases() for target in case.targets]
    originals = {(case.name, target): (case.folder / target).read_bytes() for case, target in every}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        case, target = drawn.choice(every)
        data = mutate(drawn, target, originals[case.name, target])
        number = sum(tally.outcomes.values())
        if (fault := judge(case, target, data, tally)) is None:
            continue
        key = f"{case.name} " + re.sub(r"\d+|'[^']*'", "_", fault)[-150:]
        if key in seen:
            continue
        seen.add(key)
        tally.faults.append(f"{case.name} {target}, mutant {number} of seed {seed}: {fault}")
        if keep is not None:
            kept = keep / case.name / f"{seed}-{number}" / target
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(data)
            (keep / case.name / f"{seed}-{number}.txt").write_text(fault)
            print(tally.faults[-1], file=sys.stderr, flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="Folder for inputs that led to a fault.")
    parser.add_argument("--finds", action="store_true", help="Run what was found once instead.")
    given = parser.parse_args()
    # Thread pools of the BLAS inside numpy reserve address space by the core, which says nothing about this tool.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, _too_long)
    # A mutant need not outlive a power cut.
    os.fsync = lambda fd: None  # type: ignore[assignment]
    if given.finds:
        tally = Tally()
        for case, target, path in finds():
            fault = judge(case, target, path.read_bytes(), tally)
            tally.faults += [f"{path.relative_to(CORPUS)}: {fault}"] if fault else []
    else:
        tally = loop(given.seconds, given.seed, given.keep)
    print(tally, *tally.faults, sep="\n")
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
