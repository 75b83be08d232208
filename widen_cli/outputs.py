"""Where the wide checkpoint goes: a file that appears whole or not at all, or a stream."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Lock
from typing import Protocol, Self

from widen_cli.errors import printable
from widen_cli.hidden import hidden_sibling, remove_leftover_files
from widen_cli.output_checks import descriptor_of, refusing
from widen_cli.placing import Placement, put_in_place, signals_held

_SYNC_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
# What one call writes at most, the fastest measured. More makes the kernel take larger pages, which a virtual machine may have
# to ask its host for; less makes two threads hand the interpreter to each other more often.
_WRITE_BYTES = 1 << 19


class Output(Protocol):
    """What is written under a hidden name and put in place when it is whole."""

    @property
    def name(self) -> str:
        """The target, safe for a terminal."""

    @property
    def committed(self) -> bool:
        """Whether it is in place."""

    def finish(self) -> list[Placement]:
        """Brings everything to the disk; what is to be put in place, the main one first. Nothing after a commit."""

    def placed(self) -> None:
        """Is told that everything is in place."""


def commit(*outputs: Output) -> None:
    """Puts several outputs in place together, the first of which is the main one: by its name the old ones are seen, the new
    ones or nothing (`put_in_place`).

    Raises WidenError when a target may not be replaced or the system refuses; then all targets are as they were. A signal
    waits until everything is in place, and is told so by a note.
    """
    try:
        _commit(*outputs)
    except (KeyboardInterrupt, SystemExit) as stopped:
        if all(output.committed for output in outputs):
            stopped.add_note(f"{outputs[0].name} is complete")
        raise


def _commit(*outputs: Output) -> None:
    placements = [placement for output in outputs for placement in output.finish()]
    with signals_held(), put_in_place(placements):
        for output in outputs:
            output.placed()


class FileOutput:
    """A file that stands at `target` only when it is committed: by `commit`, or as the `with` block ends without an exception.

    The bytes go to a hidden file beside the real target (a link stays a link), which is flushed and renamed; after any
    exception it is removed. `nbytes`, the size where it is known, serves the message of a full disk. Without `force` a
    file that came into being in the meantime stays, and WidenError is raised. `hashed`: `pieces` tells what was written
    where, with its SHA-256.
    `write_at` may be called from several threads. WidenError when the system refuses.
    """

    def __init__(
        self,
        target: str | Path,
        nbytes: int | None = None,
        force: bool = False,
        hashed: bool = False,
        name: str | None = None,
    ) -> None:
        self.name = printable(str(target) if name is None else name)
        self.pieces: list[tuple[int, int, str]] = []
        self._real = Path(os.path.realpath(target))
        self._nbytes = nbytes
        self._force = force
        self._hashed = hashed
        self._temporary = hidden_sibling(self._real, "tmp")
        self._fd = -1
        self.committed = False
        # One thread writes at a time: the system lets no two write to a file at once, and those that wait for it do so busily.
        self._writing = Lock()

    def __enter__(self) -> Self:
        remove_leftover_files(self._real)
        # Nobody may read a replaced file's new bytes who may not read the old ones; a new file gets the usual mode.
        mode = 0o600 if self._real.exists() else 0o666
        with self._refusing():
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        return self

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view, start = _flat(data), offset
        if self._hashed and view:
            self.pieces.append((offset, view.nbytes, hashlib.sha256(view).hexdigest()))
        with self._refusing(), self._writing:
            while view:
                written = os.pwrite(self._fd, view[:_WRITE_BYTES], offset)
                offset, view = offset + written, view[written:]
        _begin_flush(self._fd, start, offset - start)

    def finish(self) -> list[Placement]:
        if self.committed:
            return []
        with self._refusing():
            os.fsync(self._fd)
            with suppress(FileNotFoundError):
                os.fchmod(self._fd, stat.S_IMODE(self._real.stat().st_mode) & 0o777)
        return [Placement(self._temporary, self._real, self.name, self._force)]

    def placed(self) -> None:
        self.committed = True
        self._discard()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                _commit(self)
        finally:
            self._discard()

    def _discard(self) -> None:
        """Gives up the descriptor and whatever still has the temporary name (the old file where the two were exchanged)."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._temporary.unlink(missing_ok=True)

    def _refusing(self) -> AbstractContextManager[None]:
        return refusing(self.name, self._real.parent, self._nbytes)


class StreamOutput:
    """Standard output, a fifo or a device, written strictly forward; BrokenPipeError passes through.

    An offset other than the position is a mistake of the program: ValueError. WidenError when the target cannot be
    opened or written.
    """

    def __init__(self, target: str = "-") -> None:
        self.name = "standard output" if target == "-" else printable(target)
        self.position = 0
        own = descriptor_of(target)
        with refusing(self.name):
            # A duplicate, because opening /dev/stdout again would start at the beginning of a file that has bytes.
            self._fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY) if own is None else os.dup(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        if offset != self.position:
            raise ValueError(f"a stream is written forward only: {offset} given at {self.position}")
        view = _flat(data)
        while view:
            with refusing(self.name):
                written = os.write(self._fd, view)
            self.position, view = self.position + written, view[written:]

    def close(self) -> None:
        """Closes the own descriptor, not the process's standard output; a second call does nothing."""
        fd, self._fd = self._fd, -1
        with suppress(OSError):
            os.close(fd)


def _begin_flush(fd: int, offset: int, nbytes: int) -> None:
    """Starts to bring these bytes to the disk, so that the flush at the end has less to wait for; a hint, no promise."""
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_WRITE)


def _flat(data: memoryview | bytes) -> memoryview:
    # A view with a zero in its shape cannot be cast.
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
