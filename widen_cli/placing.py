"""How what is written comes to stand at its names: whole, in one step where the system has one, and undone after an error."""

from __future__ import annotations

import ctypes
import errno
import filecmp
import hashlib
import os
import re
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from widen_cli.errors import WidenError
from widen_cli.output_checks import refusing

_NOREPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_SMALL = 1 << 20  # a file up to this size is compared with the one it would replace


@dataclass(frozen=True)
class Placement:
    """A file or folder that is ready under a hidden name, and the name that it is to have; `name` is that in messages."""

    staged: Path
    real: Path
    name: str
    force: bool


def put_in_place(placements: Sequence[Placement]) -> None:
    """Moves files or folders to their names, in this order.

    One is exchanged in one step. Of several, all old ones but the first's are set aside before, from the last to the
    second: whenever the run is cut short, what can be seen under these names is all old or all new, never some of each.
    Without force nothing is replaced but an empty folder. WidenError when that or the system stands against it; then
    every name has again what it had.
    """
    with ExitStack() as undo:
        changed = [each for number, each in enumerate(placements) if number == 0 or not _same(each)]
        aside = [_set_aside(each, undo) for each in reversed(changed[1:]) if each.force and os.path.lexists(each.real)]
        for each in changed:
            with refusing(each.name, each.real.parent):
                if each.staged.is_dir():
                    _place_folder(each, undo)
                else:
                    _place_file(each, undo, alone=len(changed) == 1)
        undo.pop_all()
    for folder in {each.real.parent for each in changed}:
        flush_folder(folder)
    for old in aside:
        with suppress(OSError):
            old.unlink()
    for each in placements:
        remove_leftover_files(each.real)


def _same(each: Placement) -> bool:
    """Whether a small file stands there already with the same bytes, so that nothing has to move."""
    with suppress(OSError):
        small = each.force and each.staged.is_file() and each.staged.stat().st_size <= _SMALL
        return small and filecmp.cmp(each.staged, each.real, shallow=False)
    return False


def _set_aside(each: Placement, undo: ExitStack) -> Path:
    old = hidden_sibling(each.real, "old")
    with refusing(each.name, each.real.parent):
        os.rename(each.real, old)
    undo.callback(os.rename, old, each.real)
    return old


def _place_folder(each: Placement, undo: ExitStack) -> None:
    exists = os.path.lexists(each.real)
    if exists and not each.force and any(each.real.iterdir()):
        raise WidenError(f"{each.name}: exists and is not empty; use --force to replace it")
    if exists:
        exchange(each.staged, each.real)
        undo.callback(exchange, each.staged, each.real)
    else:
        os.rename(each.staged, each.real)
        undo.callback(os.rename, each.real, each.staged)


def _place_file(each: Placement, undo: ExitStack, alone: bool) -> None:
    if not each.force:
        rename_new(each.staged, each.real, each.name)
    elif not alone and os.path.lexists(each.real):
        if _renamed(each.staged, each.real, _EXCHANGE):
            undo.callback(_renamed, each.staged, each.real, _EXCHANGE)
        else:
            os.replace(each.staged, each.real)
            # The old one is gone, so the others that belonged to it must not come back beside the new one.
            undo.pop_all()
        return
    else:
        os.replace(each.staged, each.real)
    undo.callback(os.replace, each.real, each.staged)


def rename_new(temporary: Path, real: Path, name: str) -> None:
    """Renames where nothing stands at `real` yet; of two runs at once only one gets there."""
    if _renamed(temporary, real, _NOREPLACE):
        return
    try:
        os.link(temporary, real)
    except FileExistsError:
        raise WidenError(f"{name}: exists; use --force to replace it") from None
    except OSError:
        # A file system without hard links and without the flag: the check before the work has to do.
        os.replace(temporary, real)
    else:
        temporary.unlink()


def exchange(new: Path, old: Path) -> None:
    """Puts `new` in the place of `old` in one step (renameat2(2)), in two where the system cannot; removes no file."""
    if _renamed(new, old, _EXCHANGE):
        return
    aside = hidden_sibling(old, "old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        os.rename(aside, old)
        raise
    os.rename(aside, new)


def _renamed(new: Path, old: Path, flag: int) -> bool:
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), flag) == 0)


def flush_folder(folder: Path) -> None:
    """Brings a folder's names to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Some network file systems cannot flush a folder; the rename is done all the same.
    with suppress(OSError):
        os.fsync(fd)
    os.close(fd)


def hidden_sibling(real: Path, ending: str) -> Path:
    """A new hidden name beside a target, which tells the target, the tool and the process."""
    return real.parent / f".{_stem(real)}.widen-{os.getpid()}-{secrets.token_hex(4)}.{ending}"


def _stem(real: Path) -> str:
    # 50 characters are at most 200 bytes, so pid and ending fit into the 255 bytes of a file name; two long names differ.
    if len(real.name) <= 50:
        return real.name
    return f"{real.name[:41]}~{hashlib.sha256(os.fsencode(real.name)).hexdigest()[:8]}"


def leftovers(real: Path, ending: str) -> list[tuple[Path, int]]:
    """The hidden siblings of a target that runs have made, with the number of the process; `ending` is a pattern."""
    pattern = re.compile(rf"\.{re.escape(_stem(real))}\.widen-(\d{{1,9}})-[0-9a-f]{{8}}\.(?:{ending})", re.DOTALL)
    with suppress(OSError):
        matches = filter(None, map(pattern.fullmatch, sorted(os.listdir(real.parent))))
        return [(real.parent / match[0], int(match[1])) for match in matches]
    return []


def remove_leftover_files(real: Path) -> None:
    """Removes the files that killed runs left for the same target; a run that lives keeps its own."""
    for path, pid in leftovers(real, "tmp|old"):
        if not lives(pid):
            with suppress(OSError):
                path.unlink()


def lives(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


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
