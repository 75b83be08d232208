"""Byte access: regular files at any offset, pipes forward only, and a plain reason when there are no bytes."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from widen_cli import sources
from widen_cli.errors import WidenError
from widen_cli.sources import FileSource, PipeSource

NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """The rights of an unprivileged user, because root may read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def refusal(*arguments: object) -> str:
    with pytest.raises(WidenError) as caught:
        FileSource(*arguments)  # type: ignore[arg-type]
    return str(caught.value)


def test_file_reads_exactly_what_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    source = FileSource(path)
    assert (source.name, source.size, source.sequential) == (str(path), 100, False)
    assert source.read(10, 3) == bytes([10, 11, 12])
    assert source.read(100, 0) == b""
    assert source.read(0, 100) == bytes(range(100))


def test_file_goes_on_after_a_short_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    source = FileSource(path)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, offset: pread(fd, min(nbytes, 7), offset))
    assert source.read(5, 50) == bytes(range(5, 55))


def test_file_past_the_end_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    source = FileSource(path, name="shown")
    with pytest.raises(WidenError, match=r"^shown: truncated: 1 bytes missing; download or copy it again$"):
        source.read(1, 100)
    # 2**62 bytes would be a MemoryError if the length were believed.
    with pytest.raises(WidenError, match=f"truncated: {2**62 - 100} bytes missing"):
        source.read(0, 2**62)


def test_file_that_shrinks_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    source = FileSource(path)
    os.truncate(path, 40)
    with pytest.raises(WidenError, match="truncated: 60 bytes missing"):
        source.read(0, 100)


def test_file_is_read_from_several_threads(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 64)
    source = FileSource(path)
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda offset: source.read(offset, 16), range(0, 256 * 64, 16)))
    assert b"".join(pieces) == path.read_bytes()


def test_closed_file_reads_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    source = FileSource(path)
    source.close()
    source.close()
    (tmp_path / "y").write_bytes(b"two")
    with open(tmp_path / "y", "rb"), pytest.raises(WidenError, match="cannot be read: Bad file descriptor"):
        source.read(0, 3)


def test_absent_folder_and_fifo(tmp_path: Path) -> None:
    assert refusal(tmp_path / "x") == f"{tmp_path}/x: no such file"
    assert refusal(tmp_path) == f"{tmp_path}: is a folder, not a file"
    os.mkfifo(tmp_path / "p")
    text = f"{tmp_path}/p: is a pipe or a device; give it on standard input, with - as the input's name"
    assert refusal(tmp_path / "p") == text
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(tmp_path / "loop") == f"{tmp_path}/loop: cannot be opened: Too many levels of symbolic links"


def test_dangling_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("../blobs/abc")
    text = f"{tmp_path}/link: is a link to {tmp_path.parent}/blobs/abc, which is missing; download it again"
    assert refusal(tmp_path / "link") == text + " or mend the link"


def test_permission() -> None:
    with as_nobody(), tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0)
        assert refusal(file.name) == f"{file.name}: permission denied; make it readable for you (chmod u+r)"


def test_name_is_safe_for_a_terminal(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a\x1b[31mé") == f"{tmp_path}/a\\x1b[31m\\xe9: no such file"


def test_pipe_reads_and_skips_forward() -> None:
    source = PipeSource(io.BytesIO(bytes(range(100))), name="-")
    assert (source.name, source.size, source.sequential) == ("-", None, True)
    assert source.read(0, 8) == bytes(range(8))
    assert source.read(50, 2) == bytes([50, 51])
    assert source.position == 52
    with pytest.raises(ValueError, match="51 asked for at 52"):
        source.read(51, 1)


def test_pipe_joins_short_reads() -> None:
    reader, writer = os.pipe()
    with ThreadPoolExecutor(1) as pool, os.fdopen(reader, "rb", buffering=0) as stream:
        done = pool.submit(_write_slowly, writer, bytes(range(200)))
        source = PipeSource(stream)
        assert bytes(source.read(20, 150)) == bytes(range(20, 170))
        assert bytes(source.read(170, 30)) == bytes(range(170, 200))
        done.result()


def _write_slowly(fd: int, data: bytes) -> None:
    for start in range(0, len(data), 10):
        os.write(fd, data[start : start + 10])
    os.close(fd)


def test_pipe_that_ends_says_how_much_is_missing() -> None:
    with pytest.raises(WidenError, match=r"^standard input: truncated: 60 bytes missing; download or copy it again$"):
        PipeSource(io.BytesIO(bytes(40))).read(0, 100)
    with pytest.raises(WidenError, match="truncated: 80 bytes missing"):
        PipeSource(io.BytesIO(bytes(40))).read(100, 20)


def test_pipe_believes_no_length() -> None:
    with pytest.raises(WidenError, match=f"truncated: {2**62 - 40} bytes missing"):
        PipeSource(io.BytesIO(bytes(40))).read(0, 2**62)


def test_pipe_reads_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 16)
    assert bytes(PipeSource(io.BytesIO(bytes(range(100)))).read(3, 90)) == bytes(range(3, 93))


def test_pipe_end() -> None:
    source = PipeSource(io.BytesIO(bytes(10)))
    source.read(0, 9)
    with pytest.raises(WidenError, match=r"^standard input: there are bytes after the last tensor; make or download"):
        source.expect_end()


def test_pipe_that_ends_where_it_should() -> None:
    source = PipeSource(io.BytesIO(bytes(10)))
    source.read(0, 10)
    source.expect_end()


def test_pipe_close_leaves_the_stream_open() -> None:
    stream = io.BytesIO(b"x")
    PipeSource(stream).close()
    assert not stream.closed
