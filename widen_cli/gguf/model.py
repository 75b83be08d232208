"""A GGUF model on disk: one file, or the numbered parts that llama.cpp's gguf-split makes.

Source: tools/gguf-split of llama.cpp (names, keys) and llama-model-loader.cpp (what the loader checks).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from widen_cli.errors import WidenError, printable
from widen_cli.gguf.header import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    GgufHeader,
    TensorEntry,
    gguf_header_bytes,
    padded,
    raise_capped,
    read_gguf_header,
    stated_alignment,
)
from widen_cli.gguf.values import GgufValue, ValueType
from widen_cli.safetensors_file import shown
from widen_cli.sharding import plan_shards
from widen_cli.sources import FileSource, PipeSource, Source

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"
SPLIT_KEYS = (SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS)
# split.no and split.count are u16.
PARTS_LIMIT = (1 << 16) - 1
TOKENIZER_KEY = "tokenizer.ggml.model"

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GgufModel:
    """An opened model.

    `header` is that of the only file or, of parts, one for all: the first part's version, alignment, data start and
    values without the `split.*` keys; the tensors of all parts in order, each with its own source; the bytes of all
    files. `sources` are those of the parts, also where one holds no tensor; `files` are the inputs, which no output may
    touch (none of a pipe).
    """

    header: GgufHeader
    sources: tuple[Source, ...]
    files: tuple[Path, ...]
    warnings: tuple[str, ...]

    def close(self) -> None:
        """Closes every part."""
        for source in self.sources:
            source.close()


@dataclass(frozen=True)
class GgufPart:
    """One file to be written: `header` at its start, then for each of `tensors` (numbers of the entries) the data.

    Tensor number i goes to `offsets[i]`, and `gaps[i]` says where zeros follow it and how many. `nbytes` is the file.
    """

    name: str
    tensors: tuple[int, ...]
    header: bytes
    offsets: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]
    nbytes: int


def open_gguf(given: Path | Source) -> GgufModel:
    """The model that a file, any part of a split one, or a pipe's source holds, with every header checked.

    Raises WidenError with the faults of all parts together: missing files, damaged ones, split.* keys that disagree.
    A part alone in a pipe is refused, the others cannot be found.
    """
    if not isinstance(given, Path):
        header = read_gguf_header(given)
        if _whole(header.values, SPLIT_COUNT, given.name, default=0) > 1:
            raise WidenError(f"{given.name}: is one part of a split model; give the path of a part, not a pipe")
        if isinstance(given, PipeSource):
            given.promised = max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
        return GgufModel(header, (given,), (), tuple(_doubts(header, given.name)))
    with ExitStack() as opened:
        source = FileSource(given)
        opened.callback(source.close)
        header = read_gguf_header(source)
        sources: list[Source] = [source]
        files: tuple[Path, ...] = (given,)
        doubts: list[str] = []
        if _whole(header.values, SPLIT_COUNT, source.name, default=0) > 1:
            files = _part_files(given, header)
            headers = _open_parts(files, given, header, sources, opened)
            _check_parts(files, headers)
            header = _merged(files, headers, doubts)
        # From here on the model closes its sources.
        opened.pop_all()
    return GgufModel(header, tuple(sources), files, (*doubts, *_doubts(header, source.name)))


def plan_parts(
    values: Mapping[str, GgufValue], tensors: Sequence[TensorEntry], name: str, max_nbytes: int | None = None
) -> list[GgufPart]:
    """The files that hold the tensors in order: one called `name`, or numbered parts of at most `max_nbytes` each.

    A part is larger than that only where one tensor or the metadata is. The first part has the metadata (and maybe no
    tensor), all have the `split.*` keys. WidenError when more parts are needed than can be numbered.
    """
    groups = _groups(values, tensors, max_nbytes) if max_nbytes is not None else []
    if len(groups) < 2:
        return [_part(name, values, tensors, range(len(tensors)))]
    if len(groups) > PARTS_LIMIT:
        raise WidenError(
            f"--max-shard-size {max_nbytes}: {len(groups)} files needed, {PARTS_LIMIT} can be numbered; give a larger size"
        )
    parts = []
    for number, (group, file) in enumerate(zip(groups, part_names(name, len(groups)), strict=True)):
        own = _part_values(values, number, len(groups), len(tensors))
        parts.append(_part(file, own, tensors, group))
    return parts


def part_names(name: str, count: int) -> list[str]:
    """The names that llama.cpp looks for: `wide.gguf` becomes `wide-00001-of-00002.gguf`, the numbers from 1."""
    match = _PART.fullmatch(name)
    stem = match["stem"] if match else name.removesuffix(".gguf")
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _whole(values: Mapping[str, GgufValue], key: str, name: str, default: int | None = None) -> int:
    """The whole number under a split key; WidenError where it is another value, or absent without a default."""
    if key not in values and default is not None:
        return default
    stated = values.get(key)
    if stated is not None and stated.type.is_integer and isinstance(number := stated.value, int):
        return number
    raise WidenError(f"{name}: {key} is {'no whole number' if stated else 'absent'}; download the model again")


def _doubts(header: GgufHeader, name: str) -> Iterable[str]:
    """What speaks against loading the model in llama.cpp, though nothing is wrong with its bytes."""
    if header.alignment < DEFAULT_ALIGNMENT:
        yield f"{name}: {ALIGNMENT_KEY} is {header.alignment}; llama.cpp needs {DEFAULT_ALIGNMENT} or more"
    kind = header.values.get("general.type")
    if TOKENIZER_KEY not in header.values and (kind is None or kind.value == "model"):
        yield f"{name}: has no {TOKENIZER_KEY}; llama.cpp does not load a model without a tokenizer"


def _part_files(given: Path, header: GgufHeader) -> tuple[Path, ...]:
    """The files of all parts by the name of one; WidenError where the name is not that of a part."""
    name = printable(str(given))
    count = _whole(header.values, SPLIT_COUNT, name)
    match = _PART.fullmatch(given.name)
    if match is None or int(match["count"]) != count:
        number = _whole(header.values, SPLIT_NO, name) + 1
        wanted = f"*-{number:05d}-of-{count:05d}.gguf"
        raise WidenError(f"{name}: is part {number} of {count}, but its name is not {wanted}; rename it back")
    return tuple(given.with_name(part) for part in part_names(given.name, count))


def _open_parts(
    files: Sequence[Path], given: Path, header: GgufHeader, sources: list[Source], opened: ExitStack
) -> list[GgufHeader]:
    """The headers of all parts, of which `given` is read already; WidenError with the faults of all of them."""
    headers: list[GgufHeader] = []
    faults: list[str] = []
    for file in files:
        if file == given:
            headers.append(header)
        elif not os.path.lexists(file):
            faults.append(f"{printable(str(file))}: missing, {printable(given.name)} is there; download it too")
        else:
            try:
                source = FileSource(file)
                opened.callback(source.close)
                sources.append(source)
                headers.append(read_gguf_header(source))
            except WidenError as error:
                faults += error.faults
    raise_capped(printable(str(given.parent)), faults)
    return headers


def _check_parts(files: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
    """Returns when the split.* keys of all parts agree with each other, the names and the tensors."""
    faults: list[str] = []
    total = sum(len(header.tensors) for header in headers)
    holders: dict[str, str] = {}
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        name = printable(str(file))
        for key, expected in zip(SPLIT_KEYS, (number, len(files), total), strict=True):
            try:
                stated = _whole(header.values, key, name)
            except WidenError as error:
                faults += error.faults
                continue
            if stated != expected:
                faults.append(f"{name}: {key} is {stated}, expected {expected}; the parts are not of one model")
        for tensor in header.tensors:
            if tensor.name in holders:
                faults.append(
                    f"{name}: has {shown(tensor.name)}, which {holders[tensor.name]} has; download both again"
                )
            holders[tensor.name] = printable(file.name)
    raise_capped(printable(str(files[0].parent)), faults)


def _merged(files: Sequence[Path], headers: Sequence[GgufHeader], doubts: list[str]) -> GgufHeader:
    """One header for all parts. llama.cpp reads the metadata of the first part only, so other parts' is told of."""
    first = headers[0].values
    for file, header in zip(files[1:], headers[1:], strict=True):
        own = header.values.keys() - {*SPLIT_KEYS, ALIGNMENT_KEY}
        unused = [key for key in header.values if key in own and first.get(key) != header.values[key]]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            doubts.append(
                f"{printable(str(file))}: {shown(unused[0])}{more} not used, the first part's metadata counts"
            )
    return replace(
        headers[0],
        values={key: value for key, value in first.items() if key not in SPLIT_KEYS},
        tensors=tuple(tensor for header in headers for tensor in header.tensors),
        nbytes=sum(header.nbytes for header in headers),
    )


def _part_values(values: Mapping[str, GgufValue], number: int, count: int, total: int) -> dict[str, GgufValue]:
    """The metadata of part `number`, counted from 0, in the types that llama.cpp demands."""
    # The alignment is the file's own affair: a part that does not state it is read with 32.
    kept = values if number == 0 else {key: values[key] for key in [ALIGNMENT_KEY] if key in values}
    return {
        **kept,
        SPLIT_NO: GgufValue.of(ValueType.U16, number),
        SPLIT_COUNT: GgufValue.of(ValueType.U16, count),
        SPLIT_TENSORS: GgufValue.of(ValueType.I32, total),
    }


def _groups(values: Mapping[str, GgufValue], tensors: Sequence[TensorEntry], max_nbytes: int) -> list[list[int]]:
    """The numbers of the tensors part by part; whole files count, not only their tensors' bytes."""
    alignment = stated_alignment(values)
    first, other = (_metadata_nbytes(_part_values(values, number, 2, 2)) for number in (0, 1))
    # What the first part has more goes in as an entry before the tensors.
    sizes = [("", first - other)]
    for name, type, shape in tensors:
        described = 24 + len(name.encode()) + 8 * len(shape)
        sizes.append((name, described + padded(type.nbytes(shape), alignment)))
    # A file is its metadata, descriptions and data, padded: as large as the last whole unit of alignment allows.
    groups = plan_shards(sizes, max_nbytes // alignment * alignment - other)
    return [[number - 1 for number in group if number] for group in groups]


def _metadata_nbytes(values: Mapping[str, GgufValue]) -> int:
    """The bytes before the table of tensors."""
    return 24 + sum(12 + len(key.encode()) + len(value.raw) for key, value in values.items())


def _part(name: str, values: Mapping[str, GgufValue], tensors: Sequence[TensorEntry], group: Sequence[int]) -> GgufPart:
    alignment = stated_alignment(values)
    entries = [tensors[number] for number in group]
    header, offsets = gguf_header_bytes(values, entries, alignment)
    ends = [offset + type.nbytes(shape) for offset, (_, type, shape) in zip(offsets, entries, strict=True)]
    gaps = tuple((end, padded(end, alignment) - end) for end in ends)
    nbytes = padded(ends[-1], alignment) if ends else len(header)
    return GgufPart(name, tuple(group), header, tuple(offsets), gaps, nbytes)
