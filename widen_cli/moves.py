"""What a run notes before it moves several files to their names, so that the next one completes what was cut short.

The note is a hidden file beside the main one: which file waits under which hidden name, where it is to go, where the old
one is set aside, and the size and time of either, by which they are known again. It is on the disk before the first file
moves and removed after the last; whoever reads or writes one of these names finds it (`settle`). Everything that is to
be placed is whole and on the disk before the note is, so what was begun can always be completed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widen_cli.errors import WidenError, printable
from widen_cli.hidden import flush_folder, hidden_in, hidden_sibling, is_hidden, lives, locked, remove
from widen_cli.output_checks import refusing
from widen_cli.renames import rename_new

_Stamp = tuple[int, int]
_LARGEST = 1 << 20  # of a note: a thousand parts take a quarter of it


@dataclass(frozen=True)
class Move:
    """One file or folder: `staged` goes to `real`, what stands there before it to `old` (None: nothing does).

    `new` and `was` are what `_stamp` says of the two.
    """

    staged: Path
    real: Path
    old: Path | None
    new: _Stamp
    was: _Stamp | None
    name: str

    def set_aside(self) -> None:
        if self.old is not None and os.path.lexists(self.staged) and os.path.lexists(self.real):
            with refusing(self.name, self.real.parent):
                os.rename(self.real, self.old)

    def place(self) -> None:
        if os.path.lexists(self.staged):
            with refusing(self.name, self.real.parent):
                rename_new(self.staged, self.real, self.name)

    def take_back(self) -> None:
        if not os.path.lexists(self.staged) and _stamp(self.real) == self.new:
            self.staged.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.real, self.staged)

    def restore(self) -> None:
        if self.old is not None and os.path.lexists(self.old):
            rename_new(self.old, self.real, self.name)

    @property
    def placed(self) -> bool:
        return _stamp(self.real) == self.new and not os.path.lexists(self.staged)

    @property
    def strange(self) -> bool:
        """Whether something stands there that is neither the old one nor the new one."""
        found = _stamp(self.real)
        return found is not None and found not in (self.new, self.was)

    @property
    def staging(self) -> Path | None:
        """The staging folder in which it waits, if it is one."""
        return next((path for path in self.staged.parents if is_hidden(path.name, "staging")), None)


@dataclass(frozen=True)
class Moves:
    """Several moves that belong together, the main one first, and the note of them, locked while a run is at work on it."""

    note: Path
    each: tuple[Move, ...]
    fd: int

    @classmethod
    def begin(cls, wanted: Sequence[tuple[Path, Path, str, bool]]) -> Moves:
        """Notes what is to be moved: (staged, real, its name in messages, whether what stands there is replaced)."""
        main, name = wanted[0][1:3]
        each = tuple(
            Move(
                staged,
                real,
                hidden_sibling(real, "old") if replaces else None,
                _stamp(staged) or (0, 0),
                _stamp(real) if replaces else None,
                shown,
            )
            for staged, real, shown, replaces in wanted
        )
        note = hidden_sibling(main, "placing")
        with refusing(name, main.parent):
            fd = os.open(note, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            moves = cls(note, each, fd)
            try:
                locked(fd)
                data = _as_bytes(note.parent, each)
                while data:
                    data = data[os.write(fd, data) :]
                os.fsync(fd)
                flush_folder(note.parent)
            except BaseException:
                moves.forget()
                raise
        return moves

    def carry_out(self) -> None:
        """Moves everything forward. WidenError where something stands against it; then every name has what it had."""
        try:
            self.forward()
        except BaseException:
            # What cannot be taken back either is noted, and the next run finds it.
            with suppress(OSError, WidenError):
                self.back()
                self.forget()
            raise

    def forward(self) -> None:
        """From whatever state they are in: the old ones aside, the main one first, and the new ones in, the main one last."""
        main, *others = self.each
        for each in self.each:
            each.set_aside()
        for each in (*others, main):
            each.place()
        self._flush()

    def back(self) -> None:
        """From whatever state they are in: the new ones away, the main one first, and the old ones in, the main one last."""
        main, *others = self.each
        for each in self.each:
            each.take_back()
        for each in (*others, main):
            each.restore()
        self._flush()

    def _flush(self) -> None:
        for folder in {each.real.parent for each in self.each}:
            flush_folder(folder)

    def forget(self) -> None:
        """Removes the old ones where the new ones are placed, and then the note."""
        if all(each.placed for each in self.each):
            for old in filter(None, (each.old for each in self.each)):
                remove(old)
        remove(self.note)
        os.close(self.fd)


def settle(path: Path, back: bool = False, look: bool = False) -> bool:
    """Completes what an interrupted run had begun to put in place at a path, or inside it; whether something had to be moved.

    `back`: takes it back into its staging folder instead, where it waits in one, so that the run can be resumed. `look`:
    moves nothing, and tells whether something would be. WidenError where neither is possible.
    """
    real = Path(os.path.realpath(path))
    folders = (real.parent, real) if real.is_dir() else (real.parent,)
    found = [(note, pid) for folder in folders for note, pid in hidden_in(folder, "placing")]
    moved = [_settled(note, pid, real, back, look) for note, pid in found]
    return any(moved)


def _settled(note: Path, pid: int, real: Path, back: bool, look: bool) -> bool:
    try:
        fd = os.open(note, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    free = locked(fd)
    # Another run may have settled it between the two calls.
    ours = os.fstat(fd).st_uid == os.geteuid() and os.fstat(fd).st_nlink
    if not ours or not (not lives(pid) if free is None else free):
        os.close(fd)
        return False
    each = _read(note, fd)
    if each is None and not lives(pid) and not look:
        # Cut short while it was written, when nothing had been moved yet.
        remove(note)
    if each is None or look or not any(_concerns(move, real) for move in each):
        os.close(fd)
        return each is not None and any(_concerns(move, real) for move in each)
    return _complete(Moves(note, each, fd), back)


def _complete(moves: Moves, back: bool) -> bool:
    """Whether something had to be moved. Raises WidenError where what stands there is not what the note knows."""
    main = printable(str(moves.each[0].real))
    strange = next((each for each in moves.each if each.strange), None)
    if strange is not None:
        os.close(moves.fd)
        raise WidenError(
            f"{main}: an interrupted run had begun to put it in place, and {printable(str(strange.real))} has been changed "
            f"since; remove {printable(str(moves.note))}, which notes what waits under which name, to leave it so"
        )
    done = all(each.placed for each in moves.each)
    complete = done or all(each.placed or os.path.lexists(each.staged) for each in moves.each)
    stagings = {each.staging for each in moves.each} - {None}
    with refusing(main, moves.note.parent):
        if complete and not (back and stagings):
            moves.forward()
            for staging in filter(None, stagings):
                remove(staging)
        else:
            moves.back()
        moves.forget()
    return not done


def _concerns(move: Move, real: Path) -> bool:
    """Whether a path is one that is moved to, holds it, or is the target that numbered parts were asked for as."""
    staging = move.staging
    asked = staging is not None and staging.parent == real.parent and is_hidden(staging.name, "staging", real)
    return asked or real == move.real or real in move.real.parents


def _stamp(path: Path) -> _Stamp | None:
    """What a file or folder is known by under any name: its size, 0 of a folder, and its time; None where there is none."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return 0 if stat.S_ISDIR(found.st_mode) else found.st_size, found.st_mtime_ns


def _as_bytes(folder: Path, moves: Sequence[Move]) -> bytes:
    """The note. Its paths are relative, so that it stays true where a folder is renamed or mounted elsewhere."""

    def relative(path: Path | None) -> str | None:
        return None if path is None else os.path.relpath(path, os.path.realpath(folder))

    told = [
        {
            "staged": relative(each.staged),
            "real": relative(each.real),
            "old": relative(each.old),
            "new": each.new,
            "was": each.was,
        }
        for each in moves
    ]
    return json.dumps(told, indent=1).encode()


def _read(note: Path, fd: int) -> tuple[Move, ...] | None:
    """The moves that a note tells; None where it was cut short, or tells of names that no run makes."""
    try:
        told = json.loads(os.pread(fd, _LARGEST, 0))
        moves = tuple(_move(note.parent, entry) for entry in told)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return moves or None


def _move(folder: Path, told: dict[str, Any]) -> Move:
    """One move. ValueError where it is none that a run makes: a note may come with a model from elsewhere."""
    staged, real = (Path(os.path.normpath(folder / told[key])) for key in ("staged", "real"))
    old = None if told["old"] is None else Path(os.path.normpath(folder / told["old"]))
    waits = is_hidden(staged.name, "tmp") or any(is_hidden(path.name, "staging") for path in staged.parents)
    if not waits or not (old is None or (old.parent == real.parent and is_hidden(old.name, "old", real))):
        raise ValueError(f"{staged} or {old} is no name that a run makes")
    new, was = (tuple(told[key]) if told[key] is not None else None for key in ("new", "was"))
    if new is None or (old is None) != (was is None):
        raise ValueError("a move without a stamp")
    return Move(staged, real, old, new, was, printable(str(real)))
