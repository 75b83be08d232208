"""What the tests hold a widened GGUF to, made without the tool: a reader of the format, and repeats by numpy."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize

Values = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Kind = gguf.GGMLQuantizationType

# A GGUF file as its format's text says it lies: neither the tool's reader nor gguf-py's.

WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9


RECORD = "widen_ckpt.record"


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: rows of bytes [rows, bytes], mapped; `shape` with the row's length last."""

    kind: Kind
    shape: tuple[int, ...]
    rows: Bytes

    def values(self, rows: Any = slice(None)) -> Values:
        return dequantize(np.ascontiguousarray(self.rows[rows]), self.kind)


@dataclass(frozen=True)
class GgufFile:
    """`pairs` are raw: the type's number and the bytes that follow it, at `places` in the file's `data`.

    What is recorded of how the file was made is none of them.
    """

    data: Bytes
    pairs: dict[str, tuple[int, bytes]]
    places: dict[str, int]
    tensors: dict[str, Stored]

    def number(self, key: str) -> int | float:
        kind, raw = self.pairs[key]
        return struct.unpack({4: "<I", 5: "<i", 6: "<f"}[kind], raw)[0]

    @property
    def model(self) -> tuple[dict[str, tuple[int, bytes]], list[tuple[str, Kind, tuple[int, ...], bytes]]]:
        """All that a runtime sees, in order."""
        return self.pairs, [(name, item.kind, item.shape, item.rows.tobytes()) for name, item in self.tensors.items()]


def read(path: Path, mode: str = "r") -> GgufFile:
    data = np.memmap(path, np.uint8, mode)
    buffer = memoryview(data)
    magic, version, tensor_count, pair_count = struct.unpack_from("<4sIQQ", buffer)
    assert (magic, version) == (b"GGUF", 3)
    at, pairs, places = 24, {}, {}
    for _ in range(pair_count):
        key, at = _text(buffer, at)
        (kind,) = struct.unpack_from("<I", buffer, at)
        end = _value_end(buffer, at + 4, kind)
        assert key not in pairs
        pairs[key], places[key] = (kind, bytes(buffer[at + 4 : end])), at + 4
        at = end
    infos = []
    for _ in range(tensor_count):
        name, at = _text(buffer, at)
        (rank,) = struct.unpack_from("<I", buffer, at)
        *dims, kind, offset = struct.unpack_from(f"<{rank}QIQ", buffer, at + 4)
        infos.append((name, Kind(kind), tuple(reversed(dims)), offset))
        at += 16 + 8 * rank
    pairs.pop(RECORD, None)
    start = at + -at % 32
    tensors = {name: _stored(data, start + offset, kind, shape) for name, kind, shape, offset in infos}
    return GgufFile(data, pairs, places, tensors)


def retyped(source: Path, target: Path, kind: Kind) -> Path:
    """The file with its matrices in another type, if rows fill its blocks, as llama-quantize makes it: all metadata, the record
    too, as they were."""
    found = read(source)
    buffer = memoryview(found.data)
    end = max(_value_end(buffer, at, *struct.unpack_from("<I", buffer, at - 4)) for at in found.places.values())
    infos, data = bytearray(), bytearray()
    for name, tensor in found.tensors.items():
        matrix = len(tensor.shape) > 1 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        rows = quantize(tensor.values().reshape(tensor.shape), kind).tobytes() if matrix else tensor.rows.tobytes()
        dims, to = tuple(reversed(tensor.shape)), kind if matrix else tensor.kind
        infos += struct.pack("<Q", len(name)) + name.encode()
        infos += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, to, len(data))
        data += rows + bytes(-len(rows) % 32)
    header = bytes(buffer[:end]) + infos
    target.write_bytes(header + bytes(-len(header) % 32) + data)
    return target


def _text(buffer: memoryview, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", buffer, at)
    return str(buffer[at + 8 : at + 8 + length], "utf-8"), at + 8 + length


def _value_end(buffer: memoryview, at: int, kind: int) -> int:
    if kind == TEXT:
        return _text(buffer, at)[1]
    if kind != ARRAY:
        return at + WIDTHS[kind]
    element, count = struct.unpack_from("<IQ", buffer, at)
    at += 12
    if element in WIDTHS:
        return at + count * WIDTHS[element]
    for _ in range(count):
        at = _value_end(buffer, at, element)
    return at


def _stored(data: Bytes, offset: int, kind: Kind, shape: tuple[int, ...]) -> Stored:
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    row = shape[-1] // block * nbytes
    count = math.prod(shape[:-1])
    return Stored(kind, shape, data[offset : offset + count * row].reshape(count, row))


@dataclass(frozen=True)
class Repeats:
    """How axes are repeated: their sizes and growth, and whether copies are tiled. `spaces` names the axes of each space."""

    spaces: ClassVar[Mapping[str, tuple[str, ...]]]
    sizes: dict[str, int]
    growth: dict[str, int]
    tiled: bool

    def copies(self, space: str) -> int:
        return math.prod(self.growth.get(axis, 1) for axis in self.spaces[space])

    def spread(self, array: npt.NDArray[Any], space: str, silent: bool = False) -> npt.NDArray[Any]:
        """The last axis repeated as the space's axes grow; `silent`: zeros for all copies but the first."""
        before, names = array.shape[:-1], self.spaces[space]
        array = array.reshape(*before, *(self.sizes[name] for name in names)) if len(names) > 1 else array
        for axis, name in enumerate(names, start=len(before)):
            copies = self.growth.get(name, 1)
            others = [np.zeros_like(array) if silent else array] * (copies - 1)
            if self.tiled:
                array = np.concatenate([array, *others], axis)
            else:
                array = np.stack([array, *others], axis + 1)
                array = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
        return array.reshape(*before, -1)
