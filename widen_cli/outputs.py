"""Where the wide checkpoint goes: a file or a folder that appears whole or not at all, or a stream."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Never, Protocol, Self

from widen_cli.errors import Faults, WidenError, printable

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


class Output(Protocol):
    """Takes the bytes of one output file."""

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Writes all of `data` at `offset` from the file's start; WidenError when the system refuses."""


def is_stream(target: str) -> bool:
    """Whether `target` is `-`, an open descriptor under another name (/dev/stdout), a fifo or a character device."""
    path = Path(target)
    return _descriptor_of(target) is not None or path.is_fifo() or path.is_char_device()


def check_output(target: str, inputs: Sequence[Path], force: bool, directory: bool) -> None:
    """Returns when `target` can be written; WidenError with everything that speaks against it.

    `directory` says that a folder is to be written. Nothing is created or changed.
    """
    name = printable(target)
    with Faults() as faults:
        check = _stream_faults(target, directory) if is_stream(target) else _place_faults(target, directory, force)
        for fault in check:
            faults.add(f"{name}: {fault}")
        for given in inputs:
            if _is_same(target, given, directory):
                faults.add(f"{name}: is the input {printable(str(given))} or holds it; choose another output")


def check_space(folder: Path, nbytes: int, largest: int | None = None) -> None:
    """Returns when `folder` has `nbytes` free and the process may write a file of `largest` (default all) bytes.

    Raises WidenError with the bytes needed and free, or the limit. Nothing is written.
    """
    name = printable(str(folder))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    biggest = nbytes if largest is None else largest
    with Faults() as faults:
        free = _free_bytes(folder)
        if free is not None and free < nbytes:
            faults.add(f"{name}: {nbytes} bytes needed, {free} free; free some space or choose another folder")
        if limit != resource.RLIM_INFINITY and biggest > limit:
            faults.add(f"{name}: a file of {biggest} bytes needed, the limit is {limit}; raise it with ulimit -f")


class FileOutput:
    """A file that stands at `target` only when the `with` block ends without an exception.

    The bytes go to a hidden file beside the real target (a link stays a link), which is flushed and renamed; after any
    exception it is removed. `nbytes`, the size where it is known, serves the message of a full disk.
    `write_at` may be called from several threads. WidenError when the system refuses.
    """

    def __init__(self, target: str | Path, nbytes: int | None = None) -> None:
        self.name = printable(str(target))
        self._real = Path(os.path.realpath(target))
        self._nbytes = nbytes
        self._temporary = _hidden_sibling(self._real, "tmp")
        self._fd = -1

    def __enter__(self) -> Self:
        _remove_leftovers(self._real, "tmp")
        # Nobody may read a replaced file's new bytes who may not read the old ones; a new file gets the usual mode.
        mode = 0o600 if self._real.exists() else 0o666
        with self._refusing():
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        return self

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view = _flat(data)
        with self._refusing():
            while view:
                written = os.pwrite(self._fd, view, offset)
                offset, view = offset + written, view[written:]

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
        os.replace(self._temporary, self._real)
        _flush_folder(self._real.parent)

    def _discard(self) -> None:
        """Gives up the descriptor and whatever still has the temporary name (after a commit nothing has)."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._temporary.unlink(missing_ok=True)

    def _refusing(self) -> AbstractContextManager[None]:
        return _refusing(self.name, self._real.parent, self._nbytes)


class StreamOutput:
    """Standard output, a fifo or a device, written strictly forward; BrokenPipeError passes through.

    An offset other than the position is a mistake of the program: ValueError. WidenError when the target cannot be
    opened or written.
    """

    def __init__(self, target: str = "-") -> None:
        self.name = "standard output" if target == "-" else printable(target)
        self.position = 0
        own = _descriptor_of(target)
        with _refusing(self.name):
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
            with _refusing(self.name):
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
    those that were not written here stay, but for *.safetensors and their index at its top, which would belong to
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
        with _refusing(self.name, self._real.parent):
            self._staging.mkdir()
        return self

    def open(self, name: str, nbytes: int | None = None) -> FileOutput:
        """The output of one file in the folder, to be used with `with`; `name` may have sub-folders."""
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise ValueError(f"{name!r} leads out of the folder")
        file = self._staging / name
        with _refusing(self.name, self._real.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        return FileOutput(file, nbytes)

    def copy(self, source: Path, relative: str) -> None:
        """Copies a file's content (a link's target's) to `relative` in the folder."""
        reading = _refusing(printable(str(source)), verb="read")
        with reading, open(source, "rb") as stream, self.open(relative) as output:
            offset = 0
            while piece := stream.read(1 << 20):
                output.write_at(offset, piece)
                offset += len(piece)

    def commit(self) -> None:
        """Puts the folder in place; a second call does nothing. WidenError when the target may not be replaced."""
        if self._committed:
            return
        with _refusing(self.name, self._real.parent):
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


def _descriptor_of(target: str) -> int | None:
    """The number of this process's open descriptor that `-` or a name such as /dev/stdout means, through any links."""
    path = Path("/dev/stdout" if target == "-" else target)
    for _ in range(40):
        folder = os.path.realpath(path.parent)
        if re.fullmatch(rf"/proc/{os.getpid()}(/task/\d+)?/fd", folder) and path.name.isdecimal():
            return int(path.name)
        link = Path(folder, path.name)
        if not link.is_symlink():
            break
        path = Path(folder, os.readlink(link))
    return None


def _stream_faults(target: str, directory: bool) -> Iterator[str]:
    number = _descriptor_of(target)
    if directory:
        yield "is a pipe or a device, but a folder is to be written"
    elif number is not None and os.isatty(number):
        yield "is a terminal; send it to a file or a pipe"


def _place_faults(target: str, directory: bool, force: bool) -> Iterator[str]:
    """What speaks against a file or folder at `target`, apart from the inputs."""
    real = Path(os.path.realpath(target))
    if real.parent.name == "blobs" and re.match("(models|datasets|spaces)--", real.parent.parent.name):
        yield f"lies in a Hugging Face cache ({printable(str(real))}), whose files are shared; choose another output"
    parent = printable(str(real.parent))
    if not real.parent.is_dir():
        yield f"the folder {parent} does not exist; create it with mkdir -p"
    elif not _may_write(real.parent):
        yield f"the folder {parent} is not writable for you; choose another one"
    if real.is_dir():
        yield from _folder_faults(real, directory, force)
    elif os.path.lexists(real) and not real.is_file():
        yield "is no regular file; choose another output"
    elif real.exists() and directory:
        yield "is a file, but a folder is to be written; choose another output"
    elif real.exists() and not force:
        yield "exists; use --force to replace it"


def _folder_faults(real: Path, directory: bool, force: bool) -> Iterator[str]:
    if not directory:
        yield "is a folder, but a file is to be written; give a file name"
    elif os.path.ismount(real):
        yield "is a mount point, which cannot be replaced in one step; choose a folder inside it"
    elif not _may_write(real):
        yield "the folder is not writable for you; choose another one"
    elif not force and any(real.iterdir()):
        yield "exists and is not empty; use --force to replace it"


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _is_same(target: str, given: Path, directory: bool) -> bool:
    """Whether writing `target` would replace the input, a file of an input folder, or a folder that holds the input."""
    path = "/dev/stdout" if target == "-" else target
    with suppress(OSError):
        if os.path.samefile(path, given):
            return True
    if directory:
        return Path(os.path.realpath(given)).is_relative_to(os.path.realpath(path))
    with suppress(OSError):
        return given.is_dir() and any(os.path.samefile(path, file) for file in given.iterdir() if file.exists())
    return False


def _free_bytes(folder: Path) -> int | None:
    """None where the file system does not say."""
    with suppress(OSError):
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize if space.f_blocks else None
    return None


@contextmanager
def _refusing(name: str, folder: Path = Path("/"), nbytes: int | None = None, verb: str = "written") -> Iterator[None]:
    """Turns the system's refusals into WidenError; a broken pipe passes, its reader has had enough."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        needed = "" if nbytes is None else f"{nbytes} bytes needed, "
        texts = {
            errno.EFBIG: f"the file is larger than allowed; {needed}see ulimit -f",
            errno.ENOSPC: f"the disk is full; {needed}{_free_bytes(folder)} free; free some space",
            errno.EDQUOT: f"the disk quota is used up; {needed}free some space",
        }
        raise WidenError(f"{name}: {texts.get(error.errno or 0, f'cannot be {verb}: {error.strerror}')}") from None


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
            stale = Path(folder) == old and name.endswith((".safetensors", ".safetensors.index.json"))
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
