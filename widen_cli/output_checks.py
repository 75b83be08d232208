"""Whether an output can be written, asked before any work; and how the system's refusals are told."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from widen_cli.errors import Faults, WidenError, printable
from widen_cli.quota import quota_left


def is_stream(target: str) -> bool:
    """Whether `target` is `-`, an open descriptor under another name (/dev/stdout), a fifo or a character device."""
    if descriptor_of(target) is not None:
        return True
    with suppress(OSError, ValueError):
        mode = os.stat(target).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    return False


def check_output(target: str, inputs: Sequence[Path], force: bool, directory: bool) -> None:
    """Returns when `target` can be written; WidenError with everything that speaks against it.

    `directory` says that a folder is to be written. Nothing is created or changed.
    """
    name = printable(target)
    if target == "-" and sys.stdout is None:
        raise WidenError("standard output: is closed; send it somewhere, or name a file")
    with Faults() as faults, refusing(name):
        held = next((given for given in inputs if _is_same(target, given, directory)), None)
        if held is not None:
            # Nothing else is worth saying: --force, for one, would not help.
            raise WidenError(f"{name}: is the input {printable(str(held))} or holds it; choose another output")
        check = _stream_faults(target, directory) if is_stream(target) else _place_faults(target, directory, force)
        for fault in check:
            faults.add(f"{name}: {fault}")


def check_space(folder: Path, nbytes: int, largest: int | None = None) -> None:
    """Returns when `folder` has `nbytes` free, also for this user, and the process may write a file of `largest` (default all).

    Raises WidenError with the bytes needed and free, or left of a quota, or the limit. Nothing is written.
    """
    name = printable(str(folder))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    biggest = nbytes if largest is None else largest
    with Faults() as faults:
        free = free_bytes(folder)
        if free is not None and free < nbytes:
            faults.add(f"{name}: {nbytes} bytes needed, {free} free; free some space or choose another folder")
        allowed = quota_left(folder)
        if allowed is not None and allowed < nbytes:
            faults.add(
                f"{name}: {nbytes} bytes needed, your disk quota has {allowed} left; free some space or choose another folder"
            )
        if limit != resource.RLIM_INFINITY and biggest > limit:
            faults.add(f"{name}: a file of {biggest} bytes needed, the limit is {limit}; raise it with ulimit -f")


def descriptor_of(target: str) -> int | None:
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
    number = descriptor_of(target)
    if directory:
        yield "is a pipe or a device, but a folder is to be written; for one file give a weights file as the input"
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


def free_bytes(folder: Path) -> int | None:
    """None where the file system does not say."""
    with suppress(OSError):
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize if space.f_blocks else None
    return None


@contextmanager
def refusing(name: str, folder: Path = Path("/"), nbytes: int | None = None, verb: str = "written") -> Iterator[None]:
    """Turns the system's refusals into WidenError; a broken pipe passes, its reader has had enough."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        needed = "" if nbytes is None else f"{nbytes} bytes needed, "
        texts = {
            errno.EFBIG: f"the file is larger than allowed; {needed}see ulimit -f",
            errno.ENOSPC: f"the disk is full; {needed}{free_bytes(folder)} free; free some space",
            errno.EDQUOT: f"the disk quota is used up; {needed}free some space",
        }
        raise WidenError(f"{name}: {texts.get(error.errno or 0, f'cannot be {verb}: {error.strerror}')}") from None
