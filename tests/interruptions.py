"""Runs the command and interrupts it at every step: what is left has to be the old output, the new one, or none.

Each run is a process of its own, forked from this one so that it costs no start, in which the system calls that matter are
counted: at the n-th of them, or in the middle of the n-th byte written, it kills itself, is sent a signal, loses its power
(what was not flushed is lost with it), or is refused by the system. Then the command is run again, with `--resume` and
without, and has to come to the bytes of a run in one go.

    python tests/interruptions.py --how kill --random 1000
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf_families import write as write_gguf
from safetensors.numpy import save_file
from small_llama import CONFIG, llama

from widen_cli import cli, journal, moves, outputs, placing, renames
from widen_cli.__main__ import main as command
from widen_cli.convert import prepare
from widen_cli.options import Options

assert cli  # loaded before the forks, not by each of them

HOWS = ("kill", "power", "INT", "TERM", "full")
HIDDEN = re.compile(r"\.(?:out|wide)(?:\.[a-z]+)*\.widen-\d+-[0-9a-f]{8}\.(?:tmp|old|staging|placing)")
HIDDEN_PART = re.compile(r"\.out-0000\d-of-00003\.gguf\.widen-\d+-[0-9a-f]{8}\.(?:old|placing)")
EVENTS = ("fsync", "rename", "replace", "link", "unlink", "rmdir", "mkdir", "write")
Content = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A command; `old` makes the output that it replaces, `main` is the file by which the output is opened."""

    name: str
    arguments: tuple[str, ...]
    main: str
    old: tuple[str, ...] = ()

    @property
    def forced(self) -> bool:
        return bool(self.old)

    @property
    def line(self) -> list[str]:
        return [*self.arguments, *(["--force"] if self.forced else [])]


FILE = Case("file", ("in.safetensors", "out.safetensors"), "out.safetensors")
FOLDER = Case("folder", ("model", "out", "--max-shard-size", "2KB"), "out/model.safetensors.index.json")
BESIDE = replace(FOLDER, name="folder and config", arguments=(*FOLDER.arguments, "--config-out", "out.config.json"))
MASK = replace(FILE, name="file and mask", arguments=(*FILE.arguments, "--new-parameters", "out.new.safetensors"))
PARTS = Case("parts", ("in.gguf", "out.gguf", "--max-shard-size", "120KB"), "out-00001-of-00003.gguf")
CASES = {
    case.name: case
    for plain in (FILE, FOLDER, BESIDE, MASK, PARTS)
    for case in (plain, replace(plain, name=f"{plain.name} --force", old=(*plain.arguments, "--scaling", "sum")))
}


def inputs(folder: Path) -> None:
    """A safetensors file with its config, a model's folder, and a GGUF; float32, so that the modes differ."""
    (folder / "model").mkdir()
    for target, dtype in ((folder / "in.safetensors", "F32"), (folder / "model" / "model.safetensors", "BF16")):
        save_file(llama(dtype), target, metadata={"format": "pt"})
        (target.parent / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model" / "tokenizer.json").write_text("{}")
    write_gguf("qwen2", folder / "in.gguf")


@dataclass(frozen=True)
class Blow:
    """What happens to a run: `how`, at an event (a system call) or once that many bytes have been written."""

    how: str = ""
    event: int = 0
    nbytes: int = 0


@dataclass
class Watch:
    """The child's side: counts what it does, and strikes."""

    blow: Blow
    events: int = 0
    nbytes: int = 0
    struck: float = 0.0
    unflushed: dict[int, int] = field(default_factory=dict)

    def install(self) -> None:
        for name in EVENTS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        os_open, pwrite = os.open, os.pwrite

        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                self.step(refusable=True)
            return os_open(path, flags, *more, **named)

        def written(fd: int, data: memoryview, offset: int) -> int:
            self.keep(fd)
            rest = self.blow.nbytes - self.nbytes
            if self.blow.nbytes and not self.struck and rest <= len(data):
                pwrite(fd, data[:rest], offset)
                self.strike(refusable=True)
            self.nbytes += len(data)
            return pwrite(fd, data, offset)

        os.open, os.pwrite = opened, written
        library = renames._LIBC

        class Library:
            @staticmethod
            def renameat2(*arguments: Any) -> Any:
                self.step(refusable=False)
                return library.renameat2(*arguments)

        renames._LIBC = Library()

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.step(refusable=name not in ("unlink", "rmdir"))
            if name == "write":
                self.keep(arguments[0])
            if name == "fsync":
                # The disk itself is not needed: what counts is what was asked to be on it.
                self.unflushed.pop(os.fstat(arguments[0]).st_ino, None)
                return None
            return call(*arguments, **named)

        return counted

    def keep(self, fd: int) -> None:
        """Has in mind that a file holds what is not flushed."""
        number = os.fstat(fd).st_ino
        if number not in self.unflushed:
            self.unflushed[number] = os.dup(fd)

    def step(self, refusable: bool) -> None:
        self.events += 1
        if self.events == self.blow.event:
            self.strike(refusable)

    def strike(self, refusable: bool) -> None:
        self.struck = time.monotonic()
        if self.blow.how == "power":
            for fd in self.unflushed.values():
                os.ftruncate(fd, os.fstat(fd).st_size // 2)
        if self.blow.how in ("kill", "power"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.blow.how in ("INT", "TERM"):
            os.kill(os.getpid(), getattr(signal, f"SIG{self.blow.how}"))
        if self.blow.how == "full" and refusable:
            raise OSError(28, "No space left on device")


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `answer` is how long it took to end after the blow."""

    code: int
    stderr: str
    events: int = 0
    nbytes: int = 0
    answer: float = 0.0


def run(folder: Path, arguments: list[str], blow: Blow | None = None, broken: str = "") -> Outcome:
    """Runs the command in a child of this process."""
    log = folder.with_name(f"{folder.name}.log")
    child = os.fork()
    if child == 0:
        _child(folder, arguments, blow or Blow(), broken, log)
    _, status = os.waitpid(child, 0)
    shown = log.read_text()
    log.unlink()
    told = re.search(r"\0(.*)\0", shown)
    numbers = json.loads(told[1]) if told else {}
    return Outcome(os.waitstatus_to_exitcode(status), shown.split("\0")[0], **numbers)


def _child(folder: Path, arguments: list[str], blow: Blow, broken: str, log: Path) -> None:
    code = 70
    try:
        os.chdir(folder)
        fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.argv = ["widen-ckpt", *arguments]
        BROKEN.get(broken, lambda: None)()
        watch = Watch(blow)
        watch.install()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            command()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        sys.stderr.flush()
        answer = time.monotonic() - watch.struck if watch.struck else 0.0
        numbers = {"events": watch.events, "nbytes": watch.nbytes, "answer": answer}
        sys.stderr.write(f"\0{json.dumps(numbers)}\0")
        sys.stderr.flush()
    finally:
        os._exit(code)


def _broken_in_place() -> None:
    """Writes to the target itself."""

    def sibling(real: Path, ending: str) -> Path:
        real.unlink(missing_ok=True)
        return real

    outputs.hidden_sibling = sibling


def _broken_unflushed() -> None:
    """Renames what has not been flushed."""
    finish = outputs.FileOutput.finish

    def unflushed(self: outputs.FileOutput) -> list[placing.Placement]:
        fsync, os.fsync = os.fsync, lambda fd: None
        try:
            return finish(self)
        finally:
            os.fsync = fsync

    outputs.FileOutput.finish = unflushed


def _broken_main_first() -> None:
    """Puts the file by which a model is opened in place before the others."""

    def forward(self: moves.Moves) -> None:
        for each in self.each:
            each.set_aside()
        for each in self.each:
            each.place()

    moves.Moves.forward = forward


def _broken_one_by_one() -> None:
    """Replaces several old files one after the other."""

    @contextmanager
    def one_by_one(placements: list[placing.Placement]) -> Iterator[None]:
        for each in placements:
            os.replace(each.staged, each.real)
        yield

    outputs.put_in_place = one_by_one


def _broken_without_note() -> None:
    """Does not find what an interrupted run noted."""
    moves._read = lambda note, fd: None


def _broken_trusting() -> None:
    """Takes a finished file's name for its content, which was noted before it was flushed."""
    _broken_unflushed()
    journal.Finished.is_in = lambda self, folder, progress: (folder / self.name).exists()


BROKEN = {
    "in place": _broken_in_place,
    "unflushed": _broken_unflushed,
    "main first": _broken_main_first,
    "one by one": _broken_one_by_one,
    "without note": _broken_without_note,
    "trusting": _broken_trusting,
}


def visible(folder: Path) -> Content:
    """What a user sees of the output: the hash of each file under no hidden name."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name.startswith("out") and path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


@dataclass
class Trials:
    """All interruptions of one case, and what was wrong with what they left."""

    case: Case
    folder: Path
    broken: str = ""
    old: Content = field(default_factory=dict)
    new: Content = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def prepare(self) -> Outcome:
        """Makes the input, the old output and the one that is to come; tells what a run does that nothing interrupts."""
        self.template = self.folder / "template"
        self.template.mkdir(parents=True)
        inputs(self.template)
        # What is read once (maps) is read before the forks.
        os.chdir(self.template)
        prepare(Options(self.case.arguments[0], self.case.arguments[1], dry_run=True)).checkpoint.close()
        os.chdir(self.folder)
        if self.case.forced:
            assert run(self.template, list(self.case.old)).code == 0
            self.old = visible(self.template)
        (whole,) = self.copies(self.template, "whole")
        outcome = run(whole, [*self.case.line, "--threads", "1"])
        assert (outcome.code, hidden(whole)) == (0, []), outcome.stderr
        self.new = visible(whole)
        assert not self.new.items() <= self.old.items()
        shutil.rmtree(whole)
        return outcome

    def copies(self, folder: Path, *names: str) -> Iterator[Path]:
        for name in names:
            shutil.copytree(folder, self.folder / name)
            yield self.folder / name

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def trial(self, blow: Blow, threads: int) -> None:
        """Interrupts one run, looks at what is left, and runs it again: to resume, and where it was killed at a step also anew."""
        (folder,) = self.copies(self.template, "trial")
        outcome = run(folder, [*self.case.line, "--threads", str(threads)], blow, self.broken)
        self.count("blows")
        self.slowest = max(self.slowest, outcome.answer if blow.how in ("INT", "TERM") else 0)
        found = [*self.left(folder), *self.ended(folder, outcome, blow)]
        if any(name.endswith(".placing") for name in hidden(folder)):
            (read,) = self.copies(folder, "read")
            found += [f"read: {fault}" for fault in self.read(read)]
            shutil.rmtree(read)
        if blow.how == "kill" and blow.event:
            (anew,) = self.copies(folder, "anew")
            found += [f"anew: {fault}" for fault in self.again(anew, [])]
            shutil.rmtree(anew)
        found += [f"with --resume: {fault}" for fault in self.again(folder, ["--resume"])]
        self.faults += [f"{self.case.name}, {blow}: {fault}" for fault in found]
        shutil.rmtree(folder)

    def left(self, folder: Path) -> Iterator[str]:
        """What is wrong with the files that an interrupted run left."""
        seen = visible(folder)
        if not (seen.items() <= self.old.items() or seen.items() <= self.new.items()):
            yield f"mixed or partial: {sorted(seen)}"
        elif seen not in (self.old, self.new):
            # Several names cannot change in one step: meanwhile the one by which they are opened is not there.
            self.count("absent")
            if self.case.main in seen:
                yield f"partial: {sorted(seen)}"
        for name in hidden(folder):
            if not HIDDEN.fullmatch(name) and not HIDDEN_PART.fullmatch(name):
                yield f"a leftover with a name that tells nothing: {name}"

    def ended(self, folder: Path, outcome: Outcome, blow: Blow) -> Iterator[str]:
        """What is wrong with how a run ended, and with what one that was not killed has left undone."""
        expected = {"kill": -9, "power": -9, "INT": 130, "TERM": 143, "full": 1}[blow.how]
        done = outcome.code == 0 and visible(folder) == self.new
        if outcome.code != expected and not done:
            yield f"ended with {outcome.code}: {outcome.stderr}"
        if expected < 0:
            return
        if "Traceback" in outcome.stderr:
            yield outcome.stderr
        if visible(folder) == self.new != self.old:
            # Cut short while what was replaced is removed: the next run does that.
            if outcome.code and "is complete" not in outcome.stderr:
                yield f"the output stands, and was not said to: {outcome.stderr}"
            return
        kept = [file.name for name in hidden(folder) for file in (folder / name / "files").glob("*")]
        if any((file not in self.new and f"out/{file}" not in self.new) or "0000" not in file for file in kept):
            yield f"something unfinished stayed: {kept}"
        if kept:
            self.count("kept")
            if "--resume goes on from there" not in outcome.stderr:
                yield f"what was kept was not told: {outcome.stderr}"
        elif hidden(folder):
            yield f"something stayed: {hidden(folder)}"

    def read(self, folder: Path) -> Iterator[str]:
        """What is wrong after a command that reads the output: it has to complete what was begun."""
        before = visible(folder)
        outcome = run(folder, ["verify", self.case.arguments[0], self.case.main.split("/")[0]], broken=self.broken)
        after = visible(folder)
        self.count("completed by a reader")
        # A note that was cut short speaks of nothing that has been moved.
        if after != self.new and not before == after == self.old:
            yield f"not completed: {outcome.stderr}"
        elif outcome.code and after and "--config-out" not in self.case.arguments:
            yield outcome.stderr

    def again(self, folder: Path, extra: list[str]) -> Iterator[str]:
        """What is wrong with the next run."""
        before = visible(folder)
        outcome = run(folder, [*self.case.line, *extra], broken=self.broken)
        if outcome.code == 1 and not self.case.forced and "exists" in outcome.stderr:
            if before != self.new and extra and not self.case.name.startswith("file"):
                yield f"refused: {outcome.stderr}"
            if visible(folder) != self.new:
                yield f"refused, but not complete: {outcome.stderr}"
            outcome = run(folder, [*self.case.line, *extra, "--force"], broken=self.broken)
        self.count("resumed" if "resumed:" in outcome.stderr else "made anew")
        if outcome.code != 0:
            yield outcome.stderr
        elif visible(folder) != self.new:
            yield "not the bytes of a run in one go"
        elif hidden(folder):
            yield f"not cleaned up: {hidden(folder)}"


def every_step(trials: Trials, how: str, events: int, last: int) -> None:
    """A blow at each system call that makes, flushes, renames or removes something; or at the last ones only."""
    for event in range(max(1, events - last), events + 1):
        trials.trial(Blow(how, event=event), threads=1)


def random_moments(trials: Trials, how: str, nbytes: int, number: int, seed: int) -> None:
    """Blows in the middle of writing, half of them in the second half of the bytes."""
    draw = random.Random(seed)
    for count in range(number):
        part = draw.random() / 2 + (0.5 if count % 2 else 0)
        trials.trial(Blow(how, nbytes=max(1, int(part * nbytes))), threads=2)


def trials_of(case: Case, how: str, last: int, number: int, broken: str = "", seed: int = 0) -> Mapping[str, Any]:
    """All interruptions of a case: how many, and what was wrong."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        trials = Trials(case, Path(name), broken)
        whole = trials.prepare()
        every_step(trials, how, whole.events, last)
        random_moments(trials, how, whole.nbytes, number, seed)
        os.chdir("/")
    told = {"case": case.name, "how": how, **trials.counts, "slowest": round(trials.slowest, 2)}
    return {**told, "faults": trials.faults}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES])
    parser.add_argument("--how", action="append", choices=HOWS)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--last", type=int, default=10**6, help="only the last steps; -1 for none")
    parser.add_argument("--broken", default="", choices=[*BROKEN])
    parser.add_argument("--serve", action="store_true", help="take arguments from standard input, a JSON list a line")
    return parser.parse_args(arguments)


def results(asked: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    for case in asked.case or CASES:
        for how in asked.how or HOWS:
            yield trials_of(CASES[case], how, asked.last, asked.random, asked.broken, asked.seed)


def serve() -> None:
    """Answers each line of arguments with a line: importing takes longer than most cases."""
    for line in sys.stdin:
        try:
            (answer,) = results(parsed(json.loads(line)))
        except Exception:
            answer = {"faults": [traceback.format_exc()]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    gc.freeze()  # what was imported is not looked through, and so not copied, in every child
    if (given := parsed()).serve:
        serve()
    for result in results(given) if not given.serve else ():
        print(json.dumps(result), flush=True)
