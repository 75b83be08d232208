"""Where the bytes of a checkpoint come from: a regular file, or a pipe that is read once."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from widen_cli.errors import WidenError, did_you_mean, printable

# A pipe is read in pieces of this size, so that a length in a header allocates nothing before its bytes are there.
PIECE = 1 << 20


class Source(Protocol):
    """Bytes at known offsets."""

    @property
    def name(self) -> str:
        """The name shown in messages, safe for a terminal."""

    @property
    def size(self) -> int | None:
        """All bytes of the source, None when that is not known before its end (a pipe)."""

    @property
    def sequential(self) -> bool:
        """True when offsets must be asked for in ascending order."""

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        """Exactly `nbytes` bytes from `offset`; WidenError (`truncated`) when the source ends before."""

    def expect_unchanged(self) -> None:
        """Raises WidenError where somebody has written to the source since it was opened, as far as that can be told."""

    def close(self) -> None:
        """Gives back what the source holds; a second call does nothing."""


class FileSource:
    """A regular file, opened read-only; `read` may be called from several threads.

    Raises WidenError when the file is absent, a dangling link, a folder, a pipe or device, or not readable.
    """

    sequential = False

    def __init__(self, path: Path | str, name: str | None = None) -> None:
        self.name = printable(str(path) if name is None else name)
        self._fd = _open_regular(Path(path), self.name)
        found = os.fstat(self._fd)
        self.size: int | None = found.st_size
        self._end = self.size
        self._changed_at = found.st_mtime_ns

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        # Checked first because os.pread allocates the whole answer before it reads a byte.
        if offset + nbytes > self._end:
            raise _truncated(self.name, offset + nbytes - self._end)
        pieces: list[bytes] = []
        got = 0
        while got < nbytes:
            piece = self._pread(offset + got, nbytes - got)
            if not piece:
                raise _truncated(self.name, nbytes - got)
            pieces.append(piece)
            got += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _pread(self, offset: int, nbytes: int) -> bytes:
        try:
            return os.pread(self._fd, nbytes, offset)
        except OSError as error:
            raise WidenError(f"{self.name}: cannot be read: {error.strerror}") from None

    def expect_unchanged(self) -> None:
        """Raises WidenError where somebody has written to the file since it was opened: what was read may be of two kinds."""
        found = os.fstat(self._fd)
        if (found.st_size, found.st_mtime_ns) != (self._end, self._changed_at):
            raise WidenError(f"{self.name}: was changed while it was read; run this again when nothing writes to it")

    def close(self) -> None:
        # The number is forgotten at once: a later read must fail, not read from a file that got the same number.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PipeSource:
    """A binary stream that is read forward once (standard input); nothing of it is kept.

    `read` may skip forward. An offset before the position is a mistake of the program: ValueError. `promised` is the
    size that the header speaks of, once it is known: of a pipe that ends early, what is missing is told by it.
    The stream belongs to the caller: `close` leaves it open.
    """

    sequential = True
    size: int | None = None

    def __init__(self, stream: BinaryIO, name: str = "standard input") -> None:
        self.name = printable(name)
        self.position = 0
        self.promised = 0
        self._stream = stream
        self._ahead = b""

    def starts_with(self, magic: bytes) -> bool:
        """Whether these are the stream's first bytes; they are still to be read afterwards."""
        while len(self._ahead) < len(magic) and (piece := self._stream.read(len(magic) - len(self._ahead))):
            self._ahead += piece
        return self._ahead.startswith(magic)

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        if offset < self.position:
            raise ValueError(f"a pipe is read forward only: {offset} asked for at {self.position}")
        missing = offset + nbytes - self.position
        while self.position < offset:
            missing -= len(self._piece(offset - self.position, missing))
        got = bytearray()
        while len(got) < nbytes:
            piece = self._piece(nbytes - len(got), missing)
            if len(piece) == nbytes:
                return piece
            got += piece
            missing -= len(piece)
        return memoryview(got)

    def expect_end(self) -> None:
        """Returns when nothing follows the position; WidenError (`bytes after the last tensor`) otherwise."""
        if self._ahead or self._stream.read(1):
            raise WidenError(f"{self.name}: there are bytes after the last tensor; make or download the file again")

    def expect_unchanged(self) -> None:
        """What passes once cannot be looked at again."""

    def _piece(self, wanted: int, missing: int) -> bytes:
        try:
            piece, self._ahead = self._ahead[:wanted], self._ahead[wanted:]
            piece = piece or self._stream.read(min(wanted, PIECE))
        except OSError as error:
            raise WidenError(f"{self.name}: cannot be read: {error.strerror}") from None
        if not piece:
            raise _truncated(self.name, max(missing, self.promised - self.position))
        self.position += len(piece)
        return piece

    def close(self) -> None:
        pass


class HashingSource:
    """A source that hashes what is read of it, in the order read: of a pipe, all of a tensor from front to back."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self.size = source.size
        self.sequential = source.sequential
        self._source = source
        self._hash = hashlib.blake2b()

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        data = self._source.read(offset, nbytes)
        self._hash.update(data)
        return data

    def expect_unchanged(self) -> None:
        self._source.expect_unchanged()

    def digest(self) -> bytes:
        """The hash of all bytes read so far."""
        return self._hash.digest()

    def close(self) -> None:
        self._source.close()


class HeldSource:
    """Bytes already read, for what a pipe has to give more than once; offsets count from the piece's start."""

    sequential = False

    def __init__(self, name: str, data: bytes | memoryview) -> None:
        self.name = name
        self.size: int | None = len(data)
        self._data = memoryview(data)

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        return self._data[offset : offset + nbytes]

    def expect_unchanged(self) -> None:
        """Nobody else has these bytes."""

    def close(self) -> None:
        self._data.release()


def _truncated(name: str, missing: int) -> WidenError:
    return WidenError(f"{name}: truncated: {missing} bytes missing; download or copy it again")


def _open_regular(path: Path, name: str) -> int:
    """A descriptor of the regular file at `path`; WidenError that says why there is none."""
    try:
        # O_NONBLOCK because opening a fifo without a writer would wait for ever; regular files do not know it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WidenError(f"{name}: {_why_not(path, error)}") from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise WidenError(f"{name}: is a folder, not a file")
    raise WidenError(f"{name}: is a pipe or a device; give it on standard input, with - as the input's name")


def _why_not(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        target = printable(os.path.realpath(path))
        return f"is a link to {target}, which is missing; download it again or mend the link"
    if isinstance(error, FileNotFoundError):
        with suppress(OSError, ValueError):
            return f"no such file{did_you_mean(path.name, os.listdir(path.parent))}"
        return "no such file"
    if isinstance(error, PermissionError):
        return "permission denied; make it readable for you (chmod u+r)"
    return f"cannot be opened: {error.strerror}"
