"""Renames that Python has no name for: onto nothing, and of two against each other (renameat2(2))."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from widen_cli.errors import WidenError

_NOREPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


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


def exchanged(new: Path, old: Path) -> bool:
    """Puts each in the place of the other, in one step; False where the system cannot."""
    return _renamed(new, old, _EXCHANGE)


def _renamed(new: Path, old: Path, flag: int) -> bool:
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), flag) == 0)
