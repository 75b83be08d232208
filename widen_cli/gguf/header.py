"""The GGUF format: a strict reader of one file's header and a writer of it.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml/src/gguf.cpp of llama.cpp.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from widen_cli.errors import WidenError
from widen_cli.gguf.cursor import HeaderCursor
from widen_cli.gguf.types import REMOVED_TYPES, TYPE_NUMBERS, GgufType
from widen_cli.gguf.values import GgufValue, ValueType
from widen_cli.safetensors_file import AGAIN, FAULT_LIMIT, shown
from widen_cli.sources import PipeSource, Source

VERSION = 3
GGUF_MAGIC = b"GGUF"
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
# The padding before and behind the data is written, so its size has a limit: a huge page.
ALIGNMENT_LIMIT = 1 << 21
# llama.cpp compares each key and name with all before it; these are far above any model's, and bound the objects made.
KEY_COUNT_LIMIT = 1 << 16
TENSOR_COUNT_LIMIT = 1 << 17
KEY_LIMIT = 65535
# GGML_MAX_NAME without the zero byte, and GGML_MAX_DIMS.
NAME_LIMIT = 63
AXES_LIMIT = 4
# ggml counts elements in int64_t.
COUNT_LIMIT = 1 << 63

# The least that a key with its value, and a tensor, take in the header.
_KEY_NBYTES = 8 + 1 + 4 + 1
_TENSOR_NBYTES = 8 + 1 + 4 + 4 + 8

_FOREIGN = (
    (rb"\s*<(!doctype|html|head|\?xml)", "is an HTML page: the download failed or needs a login; download it again"),
    (rb"lmgg|fmgg|tjgg|algg", "is a GGML file, older than GGUF; convert the original model with llama.cpp again"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "is a PyTorch file with a pickle inside, which is not opened; convert it to GGUF"),
    (rb"(?s:.{8})\{\s*\"", "is a safetensors file, not GGUF; give it a name that ends in .safetensors"),
    (rb"\.{1,2}/[^\x00-\x1f]*\Z", "is the text of a symbolic link, not the file; copy the file it names"),
)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored: `nbytes` bytes at `offset` (counted from the file's start) of `source`.

    `shape` is in numpy's order, rows first: the last size is that of a contiguous row (GGUF's first dimension).
    """

    name: str
    type: GgufType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source: Source


@dataclass(frozen=True)
class GgufHeader:
    """A file's metadata in stored order and its tensors in the order of their data.

    `alignment` is the one that counts, stated by `general.alignment` or 32; the data begins at `data_start`; `nbytes`
    is the whole file, the padding behind the last tensor included.
    """

    version: int
    alignment: int
    values: dict[str, GgufValue]
    tensors: tuple[GgufTensor, ...]
    data_start: int
    nbytes: int


# Name, type and numpy shape of a tensor to be written.
TensorEntry = tuple[str, GgufType, tuple[int, ...]]


@dataclass(frozen=True)
class _Info:
    """A tensor as the table states it; `type` and `nbytes` are None where they cannot be known."""

    name: str
    shape: tuple[int, ...]
    offset: int
    type: GgufType | None
    nbytes: int | None

    @property
    def end(self) -> int:
        return self.offset + (self.nbytes or 0)


def read_gguf_header(source: Source) -> GgufHeader:
    """The checked header of a GGUF file, version 2 or 3, little-endian.

    Every tensor's bytes are known to lie in the file (a pipe's end is met when it is read), to be its alone and to fit
    its shape. Of a pipe nothing behind the header is read. Raises WidenError with all faults of keys and tensors, at
    most ten of them as texts; what stops the reading (an end, an unknown value type) is one of them.
    """
    reader = _HeaderReader(source)
    try:
        header = reader.read()
    except WidenError as error:
        reader.faults += error.faults
    raise_capped(source.name, reader.faults)
    return header


def gguf_header_bytes(
    values: Mapping[str, GgufValue], tensors: Sequence[TensorEntry], alignment: int
) -> tuple[bytes, list[int]]:
    """The start of a version 3 file, padded to where its data begins, and each tensor's offset from the file's start.

    Values and tensors stand in the order given, the values as the bytes they are. Behind each tensor's data, the last
    one's too, zeros fill up to a multiple of the alignment, which must be the one that `values` state. ValueError for
    a key, name, shape or alignment that the format does not take.
    """
    if alignment != stated_alignment(values):
        raise ValueError(f"alignment {alignment}, but the values state {stated_alignment(values)}")
    head = [struct.pack("<4sIQQ", GGUF_MAGIC, VERSION, len(tensors), len(values))]
    head += [_string(key, KEY_LIMIT) + struct.pack("<I", value.type) + value.raw for key, value in values.items()]
    offsets: list[int] = []
    end = 0
    for name, type, shape in tensors:
        if len(shape) > AXES_LIMIT:
            raise ValueError(f"{name!r} has {len(shape)} axes, more than {AXES_LIMIT}")
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head.append(_string(name, NAME_LIMIT) + sizes + struct.pack("<IQ", type.number, end))
        offsets.append(end)
        end += padded(type.nbytes(shape), alignment)
    if end >= COUNT_LIMIT:
        raise ValueError(f"{end} bytes of data, more than 63 bits can count")
    if len({name for name, _, _ in tensors}) < len(tensors):
        raise ValueError("two tensors of one name")
    start = b"".join(head)
    start += bytes(padded(len(start), alignment) - len(start))
    return start, [len(start) + offset for offset in offsets]


def stated_alignment(values: Mapping[str, GgufValue]) -> int:
    """The alignment that the metadata states, 32 where it states none; ValueError when no file can have it."""
    if ALIGNMENT_KEY not in values:
        return DEFAULT_ALIGNMENT
    stated = values[ALIGNMENT_KEY]
    alignment = stated.value
    if stated.type is not ValueType.U32 or not isinstance(alignment, int):
        raise ValueError(f"is of the type {stated.type.name.lower()}, not u32")
    if alignment < 8 or alignment & (alignment - 1) or alignment > ALIGNMENT_LIMIT:
        raise ValueError(f"is {alignment}, no power of two from 8 to {ALIGNMENT_LIMIT}")
    return alignment


def padded(nbytes: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return nbytes + -nbytes % alignment


def expect_end(source: PipeSource, header: GgufHeader) -> None:
    """Reads a pipe to its end; WidenError where it is cut short or has bytes behind the last tensor and its padding."""
    end = max([source.position, *(tensor.offset + tensor.nbytes for tensor in header.tensors)])
    source.read(end, 0)
    try:
        for position in range(end, header.nbytes):
            source.read(position, 1)
    except WidenError:
        # llama.cpp needs no padding behind the last tensor.
        return
    source.expect_end()


def raise_capped(name: str, faults: Sequence[str]) -> None:
    """Raises WidenError with the first faults and the number of the others; returns when there are none."""
    more = len(faults) - FAULT_LIMIT
    rest = [f"{name}: ... and {more} more"] if more > 0 else []
    if faults:
        raise WidenError(*faults[:FAULT_LIMIT], *rest)


def _string(text: str, limit: int) -> bytes:
    data = text.encode()
    if not 0 < len(data) <= limit:
        raise ValueError(f"{text[:100]!r} has {len(data)} bytes, not 1 to {limit}")
    return struct.pack("<Q", len(data)) + data


class _HeaderReader:
    """Reads one header; what does not stop the reading is collected in `faults`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.cursor = HeaderCursor(source)
        self.faults: list[str] = []

    def fault(self, text: str, remedy: str = AGAIN) -> None:
        self.faults.append(f"{self.source.name}: {text}; {remedy}")

    def read(self) -> GgufHeader:
        version = self.version()
        n_tensors, n_keys = self.counts()
        values = self.values(n_keys)
        infos = self.infos(n_tensors)
        # Last, because nothing can be said of the data without it, but of keys and tensors all has been said by now.
        alignment = self.alignment(values)
        data_start = padded(self.cursor.position, alignment)
        nbytes = self.check_places(infos, data_start, alignment)
        tensors = tuple(
            GgufTensor(info.name, info.type, info.shape, data_start + info.offset, info.nbytes, self.source)
            for info in infos
            if info.type is not None and info.nbytes is not None
        )
        return GgufHeader(version, alignment, values, tensors, data_start, nbytes)

    def version(self) -> int:
        if self.cursor.peek(4) != GGUF_MAGIC:
            raise self.cursor.error(_foreign(self.cursor.peek(512)))
        _, version = self.cursor.fields("<4sI")
        if version & 0xFFFF == 0 and version:
            raise self.cursor.error("is big-endian; convert the original model to a little-endian GGUF with llama.cpp")
        if version == 1:
            raise self.cursor.error("is GGUF version 1, read by nothing since 2023; convert the original model again")
        if version not in (2, VERSION):
            raise self.cursor.error(
                f"is GGUF version {version}; versions 2 and {VERSION} are known, save it as one of them"
            )
        return int(version)

    def counts(self) -> tuple[int, int]:
        n_tensors, n_keys = self.cursor.fields("<QQ")
        left = self.cursor.left
        for count, nbytes, limit, what in (
            (n_keys, _KEY_NBYTES, KEY_COUNT_LIMIT, "metadata keys"),
            (n_tensors, _TENSOR_NBYTES, TENSOR_COUNT_LIMIT, "tensors"),
        ):
            if count * nbytes > left:
                raise self.cursor.error(
                    f"truncated or damaged: {count} {what} promised, {left} bytes are left; {AGAIN}"
                )
            if count > limit:
                raise self.cursor.error(f"{count} {what} promised, more than {limit}, which no model has; {AGAIN}")
        return int(n_tensors), int(n_keys)

    def values(self, count: int) -> dict[str, GgufValue]:
        values: dict[str, GgufValue] = {}
        for number in range(1, count + 1):
            self.cursor.inside = f"key {number} of {count}"
            raw = self.cursor.string()
            key = self.text(raw, f"key {number}")
            self.cursor.inside = f"'{key}'"
            value = self.cursor.value()
            if len(raw) > KEY_LIMIT:
                self.fault(f"the key {shown(key)} has {len(raw)} bytes, more than {KEY_LIMIT}")
            if key in values:
                self.fault(f"has the key {shown(key)} twice")
            values[key] = value
        return values

    def text(self, raw: bytes, what: str) -> str:
        """A key or a tensor's name, which must be text and not empty; what is no UTF-8 is shown by its bytes."""
        if not raw:
            self.fault(f"{what} has an empty name")
        text = raw.decode(errors="backslashreplace")
        if text.encode() != raw:
            self.fault(f"the name of {what}, {shown(text)}, is no UTF-8 text")
        elif "\0" in text:
            self.fault(f"the name of {what}, {shown(text)}, holds a zero byte, at which llama.cpp cuts it")
        return text

    def alignment(self, values: Mapping[str, GgufValue]) -> int:
        try:
            return stated_alignment(values)
        except ValueError as error:
            raise self.cursor.error(f"{ALIGNMENT_KEY} {error}; {AGAIN}") from None

    def infos(self, count: int) -> list[_Info]:
        """The tensor table in the order of the data, of which tensors of no bytes come first."""
        infos: list[_Info] = []
        names: set[str] = set()
        for number in range(1, count + 1):
            self.cursor.inside = f"tensor {number} of {count}"
            raw = self.cursor.string()
            name = self.text(raw, f"tensor {number}")
            self.cursor.inside = f"'{name}'"
            if len(raw) > NAME_LIMIT:
                self.fault(
                    f"{shown(name)} is a name of {len(raw)} bytes, llama.cpp takes {NAME_LIMIT}", "shorten the name"
                )
            if name in names:
                self.fault(f"has the tensor {shown(name)} twice")
            names.add(name)
            infos.append(self.info(name))
        return sorted(infos, key=lambda info: (info.offset, info.nbytes != 0))

    def info(self, name: str) -> _Info:
        (axes,) = self.cursor.fields("<I")
        if axes > AXES_LIMIT:
            raise self.cursor.error(f"{shown(name)} has {axes} dimensions, more than {AXES_LIMIT}; {AGAIN}")
        *sizes, number, offset = self.cursor.fields(f"<{axes}QIQ")
        shape = tuple(reversed(sizes))
        type = TYPE_NUMBERS.get(number)
        nbytes: int | None = None
        if type is None:
            self.unknown_type(name, number)
        else:
            nbytes = self.nbytes(name, type, shape)
        return _Info(name, shape, offset, type, nbytes)

    def unknown_type(self, name: str, number: int) -> None:
        if number in REMOVED_TYPES:
            removed = f"{shown(name)} is of type {number} ({REMOVED_TYPES[number]}), which llama.cpp no longer reads"
            self.fault(removed, "quantise the original model again")
        else:
            unknown = f"{shown(name)} is of type {number}, which ggml does not have (a fork's?): its size is unknown"
            self.fault(unknown, "quantise the model with llama.cpp itself")

    def nbytes(self, name: str, type: GgufType, shape: tuple[int, ...]) -> int | None:
        count = 1
        for size in shape:
            count *= size
        if count >= COUNT_LIMIT or any(size >= COUNT_LIMIT for size in shape):
            self.fault(f"{_form(name, type, shape)} has {count} elements, more than 63 bits can count")
            return None
        try:
            return type.nbytes(shape)
        except ValueError as error:
            self.fault(f"{_form(name, type, shape)} has {error}")
            return None

    def check_places(self, infos: Sequence[_Info], data_start: int, alignment: int) -> int:
        """The size of the whole file; a fault for data beyond its end, holes, overlaps and bytes of no tensor."""
        size = self.source.size
        data_end = max([0, *(info.end for info in infos)])
        inside = [info for info in infos if size is None or data_start + info.end <= size]
        if size is not None and len(inside) < len(infos):
            needed = data_start + data_end
            cut = next(info for info in infos if data_start + info.end > size)
            missing = f"truncated: {needed - size} bytes missing of {needed}, from {shown(cut.name)} on"
            self.fault(missing, "the download or copy was cut short: do it again")
        self.check_cover(inside, alignment)
        whole = data_start + padded(data_end, alignment)
        if size is not None and size > whole and not self.faults:
            self.fault(
                f"{size - whole} bytes follow the last tensor, which no tensor owns",
                f"download it again, or cut them off (truncate -s {whole})",
            )
        return whole

    def check_cover(self, infos: Sequence[_Info], alignment: int) -> None:
        """A fault for every hole and overlap between neighbours and every offset that is not aligned."""
        reach: int | None = 0  # None behind a tensor of unknown size
        before: _Info | None = None
        for info in infos:
            expected = None if reach is None else padded(reach, alignment)
            if info.offset % alignment:
                crooked = f"{shown(info.name)} has the offset {info.offset}"
                self.fault(f"{crooked}, no multiple of the alignment {alignment}")
            elif expected is not None and info.offset != expected:
                self.fault(_misplaced(before, info, expected))
            if info.nbytes is None:
                reach, before = None, info
            elif reach is None or info.end >= reach:
                reach, before = info.end, info


def _form(name: str, type: GgufType, shape: tuple[int, ...]) -> str:
    return f"{shown(name)}: {type.name} [{', '.join(map(str, shape))}]"


def _misplaced(before: _Info | None, info: _Info, expected: int) -> str:
    first = shown(before.name) if before else "the header"
    if info.offset > expected:
        return f"hole of {info.offset - expected} bytes between {first} and {shown(info.name)}"
    placed = f"the offset of {shown(info.name)} is {info.offset}, expected {expected}"
    return f"{first} and {shown(info.name)} overlap: {placed}"


def _foreign(start: bytes) -> str:
    """What a file is that does not begin as a GGUF does, and what to do."""
    if not start:
        return "the file is empty (0 bytes); the download or copy was cut short: do it again"
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d{1,20})$", start, re.MULTILINE)
        promise = f" of {size[1].decode()} bytes" if size else ""
        return f"is a Git LFS pointer to a file{promise}; fetch the file with git lfs pull"
    for pattern, text in _FOREIGN:
        if re.match(pattern, start, re.IGNORECASE):
            return text
    if GGUF_MAGIC.startswith(start):
        return f"truncated: the file has {len(start)} bytes; {AGAIN}"
    return f"is no GGUF file, it begins with {shown(start[:4].decode('latin-1'))}; give a file that llama.cpp reads"
