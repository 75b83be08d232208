"""How what is written comes to stand at its names: whole, in one step where the system has one, and undone after an error."""

from __future__ import annotations

import filecmp
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from widen_cli.errors import WidenError
from widen_cli.hidden import flush_folder, remove_leftover_files
from widen_cli.moves import Moves
from widen_cli.output_checks import refusing
from widen_cli.renames import exchanged, rename_new

_SMALL = 1 << 20  # a file up to this size is compared with the one it would replace


@dataclass(frozen=True)
class Placement:
    """A file or folder that is ready under a hidden name, and the name that it is to have; `name` is that in messages."""

    staged: Path
    real: Path
    name: str
    force: bool


@contextmanager
def put_in_place(placements: Sequence[Placement]) -> Iterator[None]:
    """Moves files or folders to their names; the first is the main one, by which what is written is opened.

    One alone gets there in one step. Of several the old main one is set aside first, then the other old ones, and the new
    main one comes last: whenever the run is cut short, the main name has the old one beside its own, the new one beside
    its own, or nothing. What is to be moved is noted before (`Moves`), so that the next run can complete it; the note is
    removed as the block ends, in which what was staged may be given up.
    Without force nothing is replaced but an empty folder. WidenError when that or the system stands against it; then
    every name has again what it had.
    """
    changed = [each for each in placements if not _same(each)]
    if len(changed) > 1:
        # The main one moves although it stays the same: what belongs to it changes in several steps.
        changed = [placements[0], *(each for each in changed if each is not placements[0])]
    if not changed or (len(changed) == 1 and _placed_alone(changed[0])):
        for each in changed:
            flush_folder(each.real.parent)
        yield
    else:
        moves = Moves.begin([(each.staged, each.real, each.name, _replaces(each)) for each in changed])
        moves.carry_out()
        yield
        moves.forget()
    for each in placements:
        remove_leftover_files(each.real)


def _same(each: Placement) -> bool:
    """Whether a small file stands there already with the same bytes, so that nothing has to move."""
    with suppress(OSError):
        small = each.force and each.staged.is_file() and each.staged.stat().st_size <= _SMALL
        return small and filecmp.cmp(each.staged, each.real, shallow=False)
    return False


def _placed_alone(each: Placement) -> bool:
    """Whether the one that is to be placed has got there in one step; False where the system has no such step."""
    with refusing(each.name, each.real.parent):
        if not _replaces(each):
            rename_new(each.staged, each.real, each.name)
        elif each.staged.is_dir():
            return exchanged(each.staged, each.real)
        else:
            os.replace(each.staged, each.real)
    return True


def _replaces(each: Placement) -> bool:
    """Whether something stands there that may be replaced. Raises WidenError where it may not."""
    if not os.path.lexists(each.real):
        return False
    if each.staged.is_dir() and not each.force and any(each.real.iterdir()):
        raise WidenError(f"{each.name}: exists and is not empty; use --force to replace it")
    return each.force or each.staged.is_dir()


@contextmanager
def signals_held() -> Iterator[None]:
    """A block that no signal cuts in two: one that comes meanwhile is delivered at the end."""
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)

    heard: list[int] = []
    if threading.current_thread() is threading.main_thread():
        heard = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(n))]
    old = {number: signal.signal(number, hold) for number in heard}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)
