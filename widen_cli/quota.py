"""What a user may still write to a disk on which users' shares are counted (Linux quotas)."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

_QUOTACTL_FD = 443  # the system call's number, the same on all machines but Alpha; Linux 5.14 and later
_GET_QUOTA = 0x800007  # Q_GETQUOTA of linux/quota.h
_USER, _GROUP = 0, 1
_BLOCK = struct.Struct("@8QI4x")  # struct if_dqblk: hard and soft limit in KiB, bytes used, ...
_LIBC = ctypes.CDLL(None, use_errno=True)


def quota_left(folder: Path) -> int | None:
    """How many bytes the user's and the group's share of the disk still allow; None where nothing limits them or is told.

    What a folder's project may hold is in the free bytes that the file system tells. The superuser is not limited.
    """
    if os.geteuid() == 0:
        return None
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            group = found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
            left = [_left(_ask(fd, _USER, os.geteuid())), _left(_ask(fd, _GROUP, group))]
        finally:
            os.close(fd)
        return min((each for each in left if each is not None), default=None)
    return None


def _left(block: bytes | None) -> int | None:
    if block is None:
        return None
    hard, _, used, *_ = _BLOCK.unpack(block)
    return max(0, hard * 1024 - used) if hard else None


def _ask(fd: int, kind: int, number: int) -> bytes | None:
    """The kernel's struct if_dqblk of a user or group; None where it keeps none."""
    block = ctypes.create_string_buffer(_BLOCK.size)
    command = _GET_QUOTA << 8 | kind
    done = _LIBC.syscall(ctypes.c_long(_QUOTACTL_FD), fd, ctypes.c_uint(command), ctypes.c_uint(number), block)
    return block.raw if done == 0 else None
