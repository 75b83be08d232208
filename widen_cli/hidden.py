"""Names that users do not see: beside a target, told by its name, the tool's and the process's; and who is at work on them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

_PROCESS = r"widen-(\d{1,9})-[0-9a-f]{8}"


def hidden_sibling(real: Path, ending: str) -> Path:
    """A new hidden name beside a target, which tells the target, the tool and the process."""
    return real.parent / f".{_stem(real)}.widen-{os.getpid()}-{secrets.token_hex(4)}.{ending}"


def _stem(real: Path) -> str:
    # 50 characters are at most 200 bytes, so pid and ending fit into the 255 bytes of a file name; two long names differ.
    if len(real.name) <= 50:
        return real.name
    return f"{real.name[:41]}~{hashlib.sha256(os.fsencode(real.name)).hexdigest()[:8]}"


def is_hidden(name: str, ending: str, real: Path | None = None) -> bool:
    """Whether runs make such a name, for this target or any; `ending` is a pattern."""
    return _pattern(ending, real).fullmatch(name) is not None


def _pattern(ending: str, real: Path | None) -> re.Pattern[str]:
    stem = ".+" if real is None else re.escape(_stem(real))
    return re.compile(rf"\.{stem}\.{_PROCESS}\.(?:{ending})", re.DOTALL)


def leftovers(real: Path, ending: str) -> list[tuple[Path, int]]:
    """The hidden siblings of a target that runs have made, with the number of the process; `ending` is a pattern."""
    return hidden_in(real.parent, ending, real)


def hidden_in(folder: Path, ending: str, real: Path | None = None) -> list[tuple[Path, int]]:
    """What runs have hidden in a folder, for one target or any, with the number of the process."""
    with suppress(OSError):
        matches = filter(None, map(_pattern(ending, real).fullmatch, sorted(os.listdir(folder))))
        return [(folder / match[0], int(match[1])) for match in matches]
    return []


def remove_leftover_files(real: Path) -> None:
    """Removes what killed runs left for the same target beside their staging folders; a run that lives keeps its own."""
    for path, pid in leftovers(real, "tmp|old"):
        if not lives(pid):
            remove(path)


def remove(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, as far as the system allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def lives(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def locked(fd: int) -> bool | None:
    """Whether the lock could be had; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def flush_folder(folder: Path) -> None:
    """Brings a folder's names to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Some network file systems cannot flush a folder; the rename is done all the same.
    with suppress(OSError):
        os.fsync(fd)
    os.close(fd)
