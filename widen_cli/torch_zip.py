"""The directory of a zip file as torch.save writes it: entries stored as they are, so that each is a range of the file.

Python's zipfile would do for sound files; of a damaged one it reads what it is told to and raises ten kinds of errors.
Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from widen_cli.errors import WidenError
from widen_cli.safetensors_file import AGAIN, shown
from widen_cli.sources import Source

DIRECTORY_LIMIT = 100_000_000
ENTRY_LIMIT = 1_000_000
CUT = "the download or copy was cut short: do it again"

_END = struct.Struct("<4s4H2LH")
_END64_PLACE = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_COMMENT_LIMIT = (1 << 16) - 1
_FULL16, _FULL32 = (1 << 16) - 1, (1 << 32) - 1
_ENCRYPTED = 1 | 1 << 6


@dataclass(frozen=True)
class ZipEntry:
    """One entry: where its local header lies, its bytes as stored and unpacked, and why it cannot be read, if so."""

    name: str
    header: int
    packed: int
    nbytes: int
    trouble: str


@dataclass(frozen=True)
class ZipDirectory:
    """The entries by name, and where they end: the directory's own offset."""

    entries: dict[str, ZipEntry]
    end: int


def read_zip(source: Source) -> ZipDirectory:
    """The entries of a zip file that is not a pipe.

    Raises WidenError where the file is cut, its directory is damaged or too large, or two entries have one name.
    """
    begin, length, count = _place(source)
    if count > ENTRY_LIMIT or length > DIRECTORY_LIMIT:
        raise WidenError(
            f"{source.name}: a zip directory of {count} entries in {length} bytes is none of PyTorch; {AGAIN}"
        )
    data = bytes(source.read(begin, length))
    entries: dict[str, ZipEntry] = {}
    position = 0
    for _ in range(count):
        if position + _CENTRAL.size > length:
            raise _damaged(source, "ends before its last entry")
        entry, position = _entry(source, data, position)
        if entry.name in entries:
            raise _damaged(source, f"names {shown(entry.name)} twice")
        entries[entry.name] = entry
    return ZipDirectory(entries, begin)


def data_offset(source: Source, directory: ZipDirectory, entry: ZipEntry) -> int:
    """Where the entry's bytes begin in the file; WidenError where they are not stored as they are or do not lie in it."""
    at = f"{source.name}: the entry {shown(entry.name)}"
    if entry.trouble:
        raise WidenError(f"{at} {entry.trouble}")
    if entry.packed != entry.nbytes:
        raise _damaged(source, f"gives {shown(entry.name)} two sizes, {entry.packed} and {entry.nbytes} bytes")
    name = entry.name.encode("utf-8", "surrogateescape")
    if entry.header + _LOCAL.size + len(name) > directory.end:
        raise WidenError(f"{at} begins behind the entries; {AGAIN}")
    local = bytes(source.read(entry.header, _LOCAL.size + len(name)))
    magic, *_, name_length, extra_length = _LOCAL.unpack_from(local)
    if magic != b"PK\x03\x04" or name_length != len(name) or local[_LOCAL.size :] != name:
        raise WidenError(f"{at} is not where the zip directory says; {AGAIN}")
    offset = entry.header + _LOCAL.size + len(name) + int(extra_length)
    if offset + entry.nbytes > directory.end:
        raise WidenError(f"{at} has {entry.nbytes} bytes, which reach behind the entries; {AGAIN}")
    return offset


def _damaged(source: Source, text: str) -> WidenError:
    return WidenError(f"{source.name}: its zip directory {text}; {AGAIN}")


def _place(source: Source) -> tuple[int, int, int]:
    """Offset, bytes and entries of the directory, from the record at the file's end."""
    size = source.size or 0
    tail = min(size, _END.size + _COMMENT_LIMIT)
    data = bytes(source.read(size - tail, tail))
    found = data.rfind(b"PK\x05\x06")
    if found < 0 or found + _END.size > len(data):
        raise WidenError(f"{source.name}: truncated: a zip file without its directory, which stands at the end; {CUT}")
    end = size - tail + found
    _, disk, first, _, count, length, begin, _ = _END.unpack_from(data, found)
    if _FULL16 in (disk, first, count) or _FULL32 in (length, begin):
        disk, first, count, length, begin, end = _place64(source, end)
    if disk or first:
        raise _damaged(source, "is one of several disks")
    if begin + length > end:
        raise _damaged(source, f"claims {length} bytes from {begin}, the file has {end} before its end record")
    return begin, length, count


def _place64(source: Source, end: int) -> tuple[int, int, int, int, int, int]:
    """The same of a zip64 file, whose own end record stands before the usual one."""
    if end >= _END64_PLACE.size:
        magic, _, record, _ = _END64_PLACE.unpack(source.read(end - _END64_PLACE.size, _END64_PLACE.size))
        if magic == b"PK\x06\x07" and record + _END64.size <= end:
            magic, _, _, _, disk, first, _, count, length, begin = _END64.unpack(source.read(record, _END64.size))
            if magic == b"PK\x06\x06":
                return disk, first, count, length, begin, record
    raise _damaged(source, "needs a zip64 record, which is not there")


def _entry(source: Source, data: bytes, position: int) -> tuple[ZipEntry, int]:
    """The entry at `position` of the directory, and where the next one begins."""
    magic, _, _, flags, method, _, _, _, packed, nbytes, *lengths, _, _, _, header = _CENTRAL.unpack_from(
        data, position
    )
    begin = position + _CENTRAL.size
    middle, after = begin + lengths[0], begin + sum(lengths)
    if magic != b"PK\x01\x02" or after > len(data):
        raise _damaged(source, f"is damaged at its byte {position}")
    name = data[begin:middle].decode("utf-8", "surrogateescape")
    extra = data[middle : middle + lengths[1]]
    nbytes, packed, header = _wide(source, name, extra, (nbytes, packed, header))
    return ZipEntry(name, header, packed, nbytes, _trouble(flags, method)), after


def _trouble(flags: int, method: int) -> str:
    if flags & _ENCRYPTED:
        return "is encrypted; unpack it with its password, and save the tensors again"
    if method:
        return f"is compressed (method {method}), which torch.save does not do; load it with torch and save it again"
    return ""


def _wide(source: Source, name: str, extra: bytes, narrow: tuple[int, int, int]) -> list[int]:
    """The numbers of an entry, those that do not fit into 32 bits from its zip64 field."""
    if _FULL32 not in narrow:
        return list(narrow)
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        field = extra[position + 4 : position + 4 + length]
        if kind == 1 and len(field) >= 8 * narrow.count(_FULL32):
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
            return [next(wide) if number == _FULL32 else number for number in narrow]
        position += 4 + length
    raise _damaged(source, f"has no zip64 sizes for {shown(name)}")
