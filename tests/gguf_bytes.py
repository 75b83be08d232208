"""GGUF files put together by hand from the format's text, so that reader and writer have something else to agree with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from widen_cli.errors import WidenError
from widen_cli.gguf.header import GgufHeader, TensorEntry, read_gguf_header
from widen_cli.sources import FileSource, Source

U32, STRING, ARRAY = 4, 8, 9


def text(data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data)) + data


def pair(key: bytes | str, type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type) + value


def u32(key: bytes | str, number: int) -> bytes:
    return pair(key, U32, struct.pack("<I", number))


def array(element: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", element, count) + data


def tensor(name: bytes | str, dims: Sequence[int], type: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type, offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    alignment: int = 32,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file whose data are `data` bytes 1, 2, ... 250, 1, 2 ...; `counts` (tensors, keys) may lie."""
    start = (
        b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs)))) + b"".join([*pairs, *tensors])
    )
    start += bytes(-len(start) % alignment)
    return start + bytes(1 + position % 250 for position in range(data))


def source(tmp_path: Path, data: bytes, size: int | None = None) -> FileSource:
    """A file called x; `size` extends it by a hole."""
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    if size is not None:
        with open(path, "r+b") as file:
            file.truncate(size)
    return FileSource(path, name="x")


def faults(given: Source) -> list[str]:
    """The faults of a source, which is closed: thousands of cuts and flips are read."""
    with closing(given), pytest.raises(WidenError) as caught:
        read_gguf_header(given)
    return list(caught.value.faults)


def entries(header: GgufHeader) -> list[TensorEntry]:
    """The tensors as the writer takes them."""
    return [(tensor.name, tensor.type, tensor.shape) for tensor in header.tensors]
