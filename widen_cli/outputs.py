"""Where the wide checkpoint goes: a file or a folder that appears whole or not at all, or a stream."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Never, Self

from widen_cli.errors import WidenError, printable
from widen_cli.output_checks import descriptor_of, refusing

_NOREPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h
_SYNC_FILE_RANGE = getattr(_LIBC, "sync_file_range", None)
# What one call writes at most, the fastest measured. More makes the kernel take larger pages, which a virtual machine may have
# to ask its host for; less makes two threads hand the interpreter to each other more often.
_WRITE_BYTES = 1 << 19


class FileOutput:
    """A file that stands at `target` only when the `with` block ends without an exception.

    The bytes go to a hidden file beside the real target (a link stays a link), which is flushed and renamed; after any
    exception it is removed. `nbytes`, the size where it is known, serves the message of a full disk. Without `force` a
    file that came into being in the meantime stays, and WidenError is raised.
    `write_at` may be called from several threads. WidenError when the system refuses.
    """

    def __init__(self, target: str | Path, nbytes: int | None = None, force: bool = False) -> None:
        self.name = printable(str(target))
        self._real = Path(os.path.realpath(target))
        self._nbytes = nbytes
        self._force = force
        self._temporary = _hidden_sibling(self._real, "tmp")
        self._fd = -1
        # One thread writes at a time: the system lets no two write to a file at once, and those that wait for it do so busily.
        self._writing = Lock()

    def __enter__(self) -> Self:
        _remove_leftovers(self._real, "tmp")
        # Nobody may read a replaced file's new bytes who may not read the old ones; a new file gets the usual mode.
        mode = 0o600 if self._real.exists() else 0o666
        with self._refusing():
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        return self

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view, start = _flat(data), offset
        with self._refusing(), self._writing:
            while view:
                written = os.pwrite(self._fd, view[:_WRITE_BYTES], offset)
                offset, view = offset + written, view[written:]
        _begin_flush(self._fd, start, offset - start)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                with self._refusing():
                    self._commit()
        finally:
            self._discard()

    def _commit(self) -> None:
        os.fsync(self._fd)
        with suppress(FileNotFoundError):
            os.fchmod(self._fd, stat.S_IMODE(self._real.stat().st_mode) & 0o777)
        if self._force:
            os.replace(self._temporary, self._real)
        else:
            _rename_new(self._temporary, self._real, self.name)
        _flush_folder(self._real.parent)

    def _discard(self) -> None:
        """Gives up the descriptor and whatever still has the temporary name (after a commit nothing has)."""
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


class DirectoryOutput:
    """A folder that stands at `target` only when the `with` block ends without an exception.

    It is built in a hidden sibling and put in place in one step. With `force` it replaces a folder that holds files:
    those that were not written here stay, but for *.safetensors, pytorch_model*.bin and their index at its top, which would belong to
    another model. After any exception the sibling is removed. WidenError when the system refuses.
    """

    def __init__(self, target: str | Path, force: bool = False) -> None:
        self.name = printable(str(target))
        self._real = Path(os.path.realpath(target))
        self._force = force
        self._staging = _hidden_sibling(self._real, "staging")
        self._committed = False

    def __enter__(self) -> Self:
        _remove_leftovers(self._real, "staging")
        with refusing(self.name, self._real.parent):
            self._staging.mkdir()
        return self

    def open(self, name: str, nbytes: int | None = None) -> FileOutput:
        """The output of one file in the folder, to be used with `with`; `name` may have sub-folders."""
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise ValueError(f"{name!r} leads out of the folder")
        file = self._staging / name
        with refusing(self.name, self._real.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        return FileOutput(file, nbytes)

    def copy(self, source: Path, relative: str) -> None:
        """Copies a file's content (a link's target's) to `relative` in the folder."""
        reading = refusing(printable(str(source)), verb="read")
        with reading, open(source, "rb") as stream, self.open(relative) as output:
            offset = 0
            while piece := stream.read(1 << 20):
                output.write_at(offset, piece)
                offset += len(piece)

    def commit(self) -> None:
        """Puts the folder in place; a second call does nothing. WidenError when the target may not be replaced."""
        if self._committed:
            return
        with refusing(self.name, self._real.parent):
            exists = os.path.lexists(self._real)
            if exists and not self._force and any(self._real.iterdir()):
                raise WidenError(f"{self.name}: exists and is not empty; use --force to replace it")
            if exists:
                _keep_foreign(self._real, self._staging)
                self._staging.chmod(stat.S_IMODE(self._real.stat().st_mode))
            for folder, _, _ in os.walk(self._staging):
                _flush_folder(Path(folder))
            place = _exchange if exists else os.rename
            place(self._staging, self._real)
            self._committed = True
            _flush_folder(self._real.parent)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)


def _begin_flush(fd: int, offset: int, nbytes: int) -> None:
    """Starts to bring these bytes to the disk, so that the flush at the end has less to wait for; a hint, no promise."""
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_WRITE)


def _flat(data: memoryview | bytes) -> memoryview:
    # A view with a zero in its shape cannot be cast.
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _hidden_sibling(real: Path, ending: str) -> Path:
    # 50 characters are at most 200 bytes, so pid and ending fit into the 255 bytes of a file name.
    return real.parent / f".{real.name[:50]}.widen-{os.getpid()}-{secrets.token_hex(4)}.{ending}"


def _remove_leftovers(real: Path, ending: str) -> None:
    """Removes what a killed run left for the same target; a run that lives keeps its own."""
    pattern = re.compile(rf"\.{re.escape(real.name[:50])}\.widen-(\d{{1,9}})-[0-9a-f]{{8}}\.{ending}", re.DOTALL)
    with suppress(OSError):
        for match in filter(None, map(pattern.fullmatch, os.listdir(real.parent))):
            leftover = real.parent / match[0]
            if not _lives(int(match[1])):
                shutil.rmtree(leftover) if ending == "staging" else leftover.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Some network file systems cannot flush a folder; the rename is done all the same.
    with suppress(OSError):
        os.fsync(fd)
    os.close(fd)


def _keep_foreign(old: Path, new: Path) -> None:
    """Gives `new` every file of `old` that it has not, except weights at the top; `old` stays whole."""
    for folder, folders, names in os.walk(old, onerror=_raise):
        here = new / Path(folder).relative_to(old)
        if not os.path.lexists(here):
            here.mkdir()
            shutil.copystat(folder, here)
        # os.walk counts links to folders as folders and does not enter them.
        links = [name for name in folders if os.path.islink(Path(folder, name))]
        for name in [*names, *links]:
            torch = name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json"))
            stale = Path(folder) == old and (torch or name.endswith((".safetensors", ".safetensors.index.json")))
            if not stale and not os.path.lexists(here / name):
                _link_or_copy(Path(folder, name), here / name)


def _raise(error: OSError) -> Never:
    raise error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # Not every file system has hard links, and a foreign file may not be linked.
        shutil.copy2(source, target, follow_symlinks=False)


def _rename_new(temporary: Path, real: Path, name: str) -> None:
    """Renames where nothing stands at `real` yet; of two runs at once only one gets there."""
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 and renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(real), _NOREPLACE) == 0:
        return
    try:
        os.link(temporary, real)
    except FileExistsError:
        raise WidenError(f"{name}: exists; use --force to replace it") from None
    except OSError:
        # A file system without hard links and without the flag: the check before the work has to do.
        os.replace(temporary, real)


def _exchange(new: Path, old: Path) -> None:
    """Puts `new` in the place of `old` in one step (renameat2(2)), in two where the system cannot; removes no file."""
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 and renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE) == 0:
        return
    aside = _hidden_sibling(old, "old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        os.rename(aside, old)
        raise
    os.rename(aside, new)
