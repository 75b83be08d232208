"""What a run notes of its finished files, so that `--resume` can go on from them after an interruption.

A journal is a file of JSON lines in the run's staging folder: the first says what is being made and of what, each further
one that a file is finished, with the hash of every piece of it. A line that was cut short counts as not written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator, BaseModel, ConfigDict

from widen_cli.hidden import leftovers, lives, locked
from widen_cli.placing import signals_held

JOURNAL = "journal"
FILES = "files"  # the folder beside it in which the finished files are
_READ = 4 << 20


class Identity(BaseModel):
    """What a run makes, and of what: only a run with the same gives the same bytes.

    `made` is a hash of the plan, `inputs` has the size and the time of change, in nanoseconds, of every file read. `asked` are
    the options in words, to be told: they may be written otherwise and mean the same.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str
    made: str
    inputs: dict[str, tuple[int, int]]
    asked: str = ""

    def is_that_of(self, other: Identity) -> bool:
        """Whether both make the same of the same."""
        return (self.tool, self.made, self.inputs) == (other.tool, other.made, other.inputs)


def _plain(name: str) -> str:
    """Refuses what does not name a file in the folder: one elsewhere, or none at all."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(name)
    return name


class Finished(BaseModel):
    """A file that is written and flushed: its size, its pieces (offset, length, SHA-256) and what happened to its values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(_plain)]
    nbytes: int
    pieces: tuple[tuple[int, int, str], ...]
    counts: dict[str, tuple[int, int, int]]

    def is_in(self, folder: Path, progress: Callable[[int], None]) -> bool:
        """Whether the folder has this file with these bytes; it is read in pieces. What is no file of its own is not one."""
        with suppress(OSError), open(folder / self.name, "rb", buffering=0, opener=_opened_itself) as file:
            found = os.fstat(file.fileno())
            own = stat.S_ISREG(found.st_mode) and found.st_size == self.nbytes
            return own and self._whole and self._has(file, progress)
        return False

    @property
    def _whole(self) -> bool:
        """Whether the pieces, one after the other, are the whole file."""
        end = 0
        for offset, nbytes, _ in sorted(self.pieces):
            if offset != end:
                return False
            end += nbytes
        return end == self.nbytes

    def _has(self, file: BinaryIO, progress: Callable[[int], None]) -> bool:
        for offset, nbytes, expected in sorted(self.pieces):
            found, left = hashlib.sha256(), nbytes
            while left:
                data = os.pread(file.fileno(), min(left, _READ), offset + nbytes - left)
                if not data:
                    return False
                found.update(data)
                left -= len(data)
            if found.hexdigest() != expected:
                return False
            progress(nbytes)
        return True


@dataclass(frozen=True)
class Leftover:
    """The staging folder of a run that is no more, with the journal's content."""

    path: Path
    identity: Identity
    finished: tuple[Finished, ...]

    @property
    def nbytes(self) -> int:
        """What its finished files take on the disk."""
        return sum(self.size(each) for each in self.finished)

    def size(self, each: Finished) -> int:
        """What the file takes there, 0 where it is missing."""
        with suppress(OSError):
            return (self.path / FILES / each.name).stat().st_size
        return 0


class Journal:
    """The journal of a run that lives: it is locked, which tells other runs so. OSError when the system refuses."""

    def __init__(self, folder: Path, identity: Identity, finished: Sequence[Finished] = ()) -> None:
        self.finished = {each.name: each for each in finished}
        temporary = folder / f"{JOURNAL}.new"
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            locked(self._fd)
            for line in (identity, *finished):
                self._write(line)
            os.fsync(self._fd)
            # Under its name it is locked and has its first line from the beginning.
            os.replace(temporary, folder / JOURNAL)
        except BaseException:
            self.close()
            raise

    def add(self, finished: Finished) -> None:
        """Notes a file that has been flushed. A signal waits for the whole of it: what is noted is not removed again."""
        with signals_held():
            self._write(finished)
            self.finished[finished.name] = finished
            os.fsync(self._fd)

    def _write(self, line: BaseModel) -> None:
        # Not model_dump_json, which refuses a tensor's name that is no text; json escapes it.
        data = json.dumps(line.model_dump()).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Unlocks it; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def left_by_dead_runs(real: Path) -> list[Leftover]:
    """The staging folders for this target that hold finished files, of runs that are no more."""
    found = [_read(path) for path, pid in leftovers(real, "staging") if not _in_use(path, pid)]
    return [leftover for leftover in found if leftover is not None and leftover.finished]


def claim(leftover: Leftover, staging: Path) -> int | None:
    """Makes a leftover this run's own, as `staging`: the lock, to be closed later; None where another run was faster."""
    with suppress(OSError):
        fd = os.open(leftover.path / JOURNAL, os.O_RDWR | os.O_CLOEXEC)
        if locked(fd):
            with suppress(OSError):
                os.rename(leftover.path, staging)
                return fd
        os.close(fd)
    return None


def remove_leftover_folders(real: Path, finished_too: bool) -> None:
    """Removes what dead runs left for a target; what holds finished files only where that is said."""
    kept = set() if finished_too else {leftover.path for leftover in left_by_dead_runs(real)}
    for path, pid in leftovers(real, "staging"):
        if path not in kept and not _in_use(path, pid):
            shutil.rmtree(path, ignore_errors=True)


def _opened_itself(path: str, flags: int) -> int:
    """Opens a file, but neither what a link points to nor a pipe, for which it would wait."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _read(staging: Path) -> Leftover | None:
    try:
        with open(staging / JOURNAL, "rb") as file:
            lines = [line for line in file if line.endswith(b"\n")]
        identity = Identity.model_validate(json.loads(lines[0]))
    except (OSError, ValueError, IndexError, RecursionError):
        return None
    if (staging / FILES).is_symlink():
        return None
    finished: dict[str, Finished] = {}
    for line in lines[1:]:
        with suppress(ValueError, RecursionError):
            each = Finished.model_validate(json.loads(line))
            finished[each.name] = each
    return Leftover(staging, identity, tuple(finished.values()))


def _in_use(staging: Path, pid: int) -> bool:
    """Whether a run is at work in a staging folder: one with a journal holds its lock, of others the number has to tell."""
    try:
        fd = os.open(staging / JOURNAL, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return lives(pid)
    try:
        free = locked(fd)
    finally:
        os.close(fd)
    return lives(pid) if free is None else not free
