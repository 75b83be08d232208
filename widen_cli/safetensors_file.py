"""The safetensors format: a strict reader of headers and a writer of them.

Source: https://github.com/huggingface/safetensors, README.md section "Format" and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from widen_cli.dtypes import STORED, DType
from widen_cli.errors import Faults, WidenError, did_you_mean, is_text, printable
from widen_cli.sources import PipeSource, Source

# MAX_HEADER_SIZE of safetensors/src/tensor.rs.
HEADER_LIMIT = 100_000_000
# numpy takes no array of more axes; the bound also keeps a product of sizes short.
AXES_LIMIT = 64
# An entry of a tensor has three brackets and some fifty bytes; only long texts of other proportions matter.
BRACKETS_FROM = 10_000_000
FAULT_LIMIT = 10
AGAIN = "make or download the file again"

_FOREIGN = (
    (rb"GGUF", "is a GGUF file, not safetensors; give it a name that ends in .gguf"),
    (rb"PK\x03\x04", "is a PyTorch zip file with a pickle inside, which is not opened; convert it to safetensors"),
    (rb"\x80[\x02-\x05](?!\x00{6})", "is a pickle, which is not opened; convert it to safetensors"),
    (rb"\x89HDF", "is an HDF5 file, not safetensors; convert it to safetensors"),
    (rb"\s*<(!doctype|html|head|\?xml)", "is an HTML page: the download failed or needs a login; download it again"),
    (
        rb"\.{1,2}/[^\x00-\x1f]*\Z",
        "is the text of a symbolic link, as a copy without links leaves it; copy the file it names",
    ),
    (rb"\s*[{\[]\s*[\"{\[\]}]", "is a JSON text, not safetensors; of a sharded model give the folder, not its index"),
)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as stored: `nbytes` bytes at `offset` (counted from the file's start) of `source`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source: Source


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors in the order of their data, the `__metadata__`, the bytes of the whole file, and what to say of it.

    A PyTorch file has one of the same form, without metadata.
    """

    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]
    nbytes: int
    warnings: tuple[str, ...] = ()


class JsonObject(list[tuple[str, object]]):
    """A JSON object as its pairs, so that no repeated key is lost."""

    @property
    def repeated(self) -> list[str]:
        """The keys that stand there more than once, each once."""
        return [key for key, count in Counter(key for key, _ in self).items() if count > 1]


@dataclass(frozen=True)
class _Span:
    """Bytes of the data section that a tensor claims."""

    begin: int
    end: int
    name: str


class _TableFaults:
    """The first faults of one file as texts, the others as a count: a header can hold a million of them."""

    def __init__(self, source: Source) -> None:
        self.faults = Faults()
        self.more = 0
        self.name = source.name

    def add(self, fault: str) -> None:
        if len(self.faults.texts) < FAULT_LIMIT:
            self.faults.add(f"{self.name}: {fault}")
        else:
            self.more += 1

    def raise_any(self) -> None:
        with self.faults:
            if self.more:
                self.faults.add(f"{self.name}: ... and {self.more} more")


def read_header(source: Source) -> SafetensorsHeader:
    """The checked header of a safetensors file.

    Every tensor's bytes are known to lie in the file (a pipe's end is met when it is read), to be its alone and to
    fit its shape. Raises WidenError with all faults of the tensor table, at most ten of them as texts.
    """
    text = _header_text(source)
    data_start = 8 + len(text)
    table = parse_json(text, f"{source.name}: the header")
    if not isinstance(table, JsonObject):
        raise WidenError(f"{source.name}: the header is no JSON object but another JSON value; {AGAIN}")
    faults = _TableFaults(source)
    metadata: dict[str, str] = {}
    tensors: list[StoredTensor] = []
    spans: list[_Span] = []
    seen: set[str] = set()
    for name, entry in table:
        if name in seen:
            faults.add(f"the header names {shown(name)} twice; {AGAIN}")
        seen.add(name)
        if name == "__metadata__":
            metadata = _metadata(entry, faults)
            continue
        fields = _fields(name, entry, faults)
        span = _span(name, fields, faults) if fields else None
        if span is None:
            continue
        spans.append(span)
        tensor = _tensor(span, fields, data_start, source, faults)
        if tensor is not None:
            tensors.append(tensor)
    data_end = _check_cover(spans, faults)
    _check_size(data_start + data_end, source, faults)
    faults.raise_any()
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.offset + tensor.nbytes))
    if isinstance(source, PipeSource):
        source.promised = data_start + data_end
    return SafetensorsHeader(tuple(tensors), metadata, data_start + data_end)


def header_bytes(
    entries: Sequence[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """The start of a safetensors file, length included, and each tensor's offset from the file's start.

    The data follows in the order of `entries`. The metadata states `format` = `pt` where it states no format, because
    older loaders refuse a file without. The text is padded with spaces to a multiple of 8 bytes.
    """
    loader = {} if "format" in metadata else {"format": "pt"}
    table: dict[str, object] = {"__metadata__": {**metadata, **loader}}
    begins: list[int] = []
    end = 0
    for name, dtype, shape in entries:
        if name in table:
            raise ValueError(f"two tensors of the name {name!r}")
        begin, end = end, end + dtype.nbytes(shape)
        begins.append(begin)
        kind, sizes = dtype.entry(shape)
        table[name] = {"dtype": kind, "shape": list(sizes), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + begin for begin in begins]


def parse_json(data: bytes, what: str) -> object:
    """The JSON value, its objects as JsonObject; WidenError that begins with `what` when it is not strict JSON.

    A large text that is mostly brackets is no table of anything, and takes minutes and gigabytes to read.
    """
    if len(data) > BRACKETS_FROM and data.count(b"{") + data.count(b"[") > len(data) // 8:
        raise WidenError(f"{what} is JSON of nothing but brackets; {AGAIN}")
    try:
        return json.loads(data.decode(), object_pairs_hook=JsonObject, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise WidenError(f"{what} is not UTF-8 (its byte {error.start}); {AGAIN}") from None
    except RecursionError:
        raise WidenError(f"{what} is JSON nested too deeply; {AGAIN}") from None
    except MemoryError:
        raise WidenError(f"{what} is JSON of more values than there is memory for; {AGAIN}") from None
    except ValueError as error:
        raise WidenError(f"{what} is not valid JSON ({error}); {AGAIN}") from None


def shown(value: object) -> str:
    """A name or value from a file in quotes, safe for a terminal and short."""
    text = printable(value if isinstance(value, str) else repr(value))
    return f"'{text if len(text) <= 200 else text[:200] + '...'}'"


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _header_text(source: Source) -> bytes:
    """The JSON text of the header; WidenError when the file is something else or its header is cut."""
    first = _up_to(source, 0, 8)
    if not first:
        raise WidenError(f"{source.name}: the file is empty (0 bytes); the download or copy was cut short: do it again")
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > HEADER_LIMIT or (source.size is not None and 8 + length > source.size):
        _refuse_foreign(source, first + _up_to(source, len(first), 512))
        raise WidenError(f"{source.name}: {_length_fault(len(first), length, source.size)}")
    text = bytes(source.read(8, length))
    if not text.startswith(b"{"):
        _refuse_foreign(source, first + text[:512])
    return text


def _up_to(source: Source, offset: int, limit: int) -> bytes:
    """The bytes from `offset`, at most `limit` of them and fewer where the source ends."""
    if source.size is not None:
        return bytes(source.read(offset, max(0, min(limit, source.size - offset))))
    got = b""
    while len(got) < limit:
        try:
            got += source.read(offset + len(got), 1)
        except WidenError:
            break
    return got


def _refuse_foreign(source: Source, start: bytes) -> None:
    """Raises WidenError when the first bytes are those of another kind of file."""
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d{1,20})$", start, re.MULTILINE)
        promise = f" of {size[1].decode()} bytes" if size else ""
        raise WidenError(f"{source.name}: is a Git LFS pointer to a file{promise}; fetch the file with git lfs pull")
    for pattern, text in _FOREIGN:
        if re.match(pattern, start, re.IGNORECASE):
            raise WidenError(f"{source.name}: {text}")


def _length_fault(read: int, length: int, size: int | None) -> str:
    if read < 8:
        return f"the file has {read} bytes, less than the 8 of a header length; download or copy it again"
    if size is not None and 8 + length > size:
        return f"the header claims {length} bytes, the file has {size} bytes; the download was cut short: do it again"
    return f"the header claims {length} bytes, more than the {HEADER_LIMIT} that the format allows; {AGAIN}"


def _metadata(entry: object, faults: _TableFaults) -> dict[str, str]:
    if entry is None:
        return {}
    if not isinstance(entry, JsonObject):
        faults.add(f"__metadata__ is no JSON object; {AGAIN}")
        return {}
    metadata: dict[str, str] = {}
    for key, value in entry:
        if key in metadata:
            faults.add(f"__metadata__ names the key {shown(key)} twice; {AGAIN}")
        elif not isinstance(value, str):
            faults.add(f"__metadata__: the value of {shown(key)} is no text; {AGAIN}")
        elif not is_text(key + value):
            faults.add(f"__metadata__: {shown(key)} holds half a surrogate pair, which is no text; {AGAIN}")
        else:
            metadata[key] = value
    return metadata


def _fields(name: str, entry: object, faults: _TableFaults) -> dict[str, object]:
    """The entry's fields by name, empty (and a fault) when its form or the tensor's name is wrong."""
    pairs = entry if isinstance(entry, JsonObject) else JsonObject()
    fields = dict(pairs)
    if len(fields) < len(pairs) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        faults.add(f"{shown(name)} does not have dtype, shape and data_offsets once each; {AGAIN}")
        return {}
    if not is_text(name):
        faults.add(f"the name {shown(name)} holds half a surrogate pair, which is no text; {AGAIN}")
        return {}
    return fields


def _span(name: str, fields: Mapping[str, object], faults: _TableFaults) -> _Span | None:
    """The bytes that the entry claims, None (and a fault) when they are no range."""
    offsets = _sizes(fields["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        given = shown(fields["data_offsets"])
        faults.add(f"{shown(name)}: data_offsets {given} are no pair of ascending integers; {AGAIN}")
        return None
    return _Span(offsets[0], offsets[1], name)


def _sizes(value: object) -> tuple[int, ...] | None:
    """The integers of a JSON list, None when the value is another or one of them is no unsigned 64-bit integer."""
    if not isinstance(value, list) or isinstance(value, JsonObject):
        return None
    if all(type(size) is int and 0 <= size < 1 << 64 for size in value):
        return tuple(value)
    return None


def _tensor(
    span: _Span, fields: Mapping[str, object], data_start: int, source: Source, faults: _TableFaults
) -> StoredTensor | None:
    """The tensor of an entry, None (and a fault) when dtype, shape and bytes do not fit together."""
    dtype = _dtype(span.name, fields["dtype"], faults)
    shape = _shape(span.name, fields["shape"], faults)
    if dtype is None or shape is None:
        return None
    form = f"{shown(span.name)}: {dtype.name} [{', '.join(map(str, shape))}]"
    held = span.end - span.begin
    try:
        needed = dtype.nbytes(shape)
    except ValueError:
        faults.add(f"{form} fills no whole number of bytes; {AGAIN}")
        return None
    if needed != held:
        faults.add(f"{form} needs {needed} bytes, its data_offsets hold {held}; {AGAIN}")
        return None
    return StoredTensor(span.name, dtype, shape, data_start + span.begin, held, source)


def _dtype(name: str, word: object, faults: _TableFaults) -> DType | None:
    dtype = STORED.get(word) if isinstance(word, str) else None
    if dtype is None:
        near = did_you_mean(word, STORED) if isinstance(word, str) and len(word) < 20 else ""
        faults.add(f"{shown(name)} has the dtype {shown(word)}, which is not known{near}; save it in another one")
    return dtype


def _shape(name: str, given: object, faults: _TableFaults) -> tuple[int, ...] | None:
    shape = _sizes(given)
    if shape is None:
        faults.add(f"{shown(name)}: shape {shown(given)} is no list of integers from 0 up; {AGAIN}")
    elif len(shape) > AXES_LIMIT:
        faults.add(f"{shown(name)} has {len(shape)} axes, more than {AXES_LIMIT}; {AGAIN}")
        return None
    return shape


def _check_cover(spans: Sequence[_Span], faults: _TableFaults) -> int:
    """The end of the data; a fault for every hole and overlap between neighbours."""
    reach = _Span(0, 0, "")
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        if span.begin > reach.end:
            before = shown(reach.name) if reach.name else "the header"
            faults.add(f"hole of {span.begin - reach.end} bytes between {before} and {shown(span.name)}; {AGAIN}")
        elif span.begin < reach.end and span.name != reach.name:
            shared = min(span.end, reach.end) - span.begin
            faults.add(f"{shown(reach.name)} and {shown(span.name)} overlap by {shared} bytes; {AGAIN}")
        if span.end >= reach.end:
            reach = span
    return reach.end


def _check_size(needed: int, source: Source, faults: _TableFaults) -> None:
    if source.size is None or source.size == needed:
        return
    if source.size < needed:
        missing = f"{needed - source.size} bytes missing of {needed}"
        faults.add(f"truncated: {missing}; the download or copy was cut short: do it again")
    else:
        faults.add(f"{source.size - needed} bytes follow the last tensor, which no tensor owns; {AGAIN}")
