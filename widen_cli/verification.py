"""Proof of what was written: every tensor derived again from the narrow checkpoint and compared with the wide one, byte by byte."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np

from widen_cli.adapters import open_adapter
from widen_cli.checkpoint import GGUF_RECORD, Checkpoint, open_checkpoint
from widen_cli.convert import prepare
from widen_cli.dtypes import DType
from widen_cli.errors import WidenError, printable
from widen_cli.gguf.checkpoint import changed_metadata
from widen_cli.gguf.values import GgufValue
from widen_cli.jobs import Job, Report
from widen_cli.options import Options
from widen_cli.output_checks import is_stream
from widen_cli.plan import TensorPlan
from widen_cli.records import Record, read_record
from widen_cli.safetensors_file import StoredTensor
from widen_cli.writing import derive


class NotRecordedError(WidenError):
    """Nothing says how a wide model was made, so that its bytes cannot be derived again."""


@dataclass(frozen=True)
class Difference:
    """Where the wide checkpoint is not what it should be: the tensor or key, and what is wrong with it.

    Of values that differ: how many elements (of quantised weights, blocks), the index of the first, what was expected
    there and what was found.
    """

    name: str
    fault: str
    differing: int = 0
    index: tuple[int, ...] | None = None
    expected: str | None = None
    found: str | None = None

    def __str__(self) -> str:
        return f"{printable(self.name)}: {self.fault}"


@dataclass(frozen=True)
class Verification:
    """What was compared, and every difference.

    `rounded` are the types in which values were rounded, `scales` are those of outputs that grow, by transformers' names.
    `likely` says what is probably the matter where no weight is as it should be.
    """

    tensors: int
    nbytes: int
    keys: int
    differences: tuple[Difference, ...]
    record: Record | None
    rounded: tuple[str, ...] = ()
    scales: Mapping[str, float] = field(default_factory=dict)
    likely: str = ""

    @property
    def compared(self) -> str:
        """What was compared, in words; an adapter and a file without a config have no config values."""
        values = f" and {self.keys} config values" if self.keys else ""
        return f"{self.tensors} tensors of {self.nbytes} bytes{values}"

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        made = self.record.model_dump(exclude={"map"}, exclude_defaults=True) if self.record else None
        return {
            "same": not self.differences,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "config_values": self.keys,
            "differences": [asdict(difference) for difference in self.differences],
            **({"likely": self.likely} if self.likely else {}),
            "recorded": made,
        }


def verify(options: Options, progress: Callable[[int], None]) -> Verification:
    """Derives the widened form of `options.input` again and compares `options.output` with it.

    How it was made is what `options` says, and for the rest what the wide model records. Raises WidenError where one of
    them cannot be read, or nothing says how the wide one was made.
    """
    wide = options.output
    with ExitStack() as opened:
        found = open_adapter(wide, options.base) if options.base else open_checkpoint(wide, options.config_out, {})
        opened.callback(found.close)
        found, options = _without_prefix(found, options)
        if found.faults:
            raise WidenError(*found.faults)
        if found.sequential:
            raise WidenError(f"{printable(wide)}: a pipe cannot be compared in any order; name a file or a folder")
        record = _record(found, options, wide)
        job = _prepared(options, record)
        opened.callback(job.checkpoint.close)
        values, report = _other_values(job, found, progress)
        for source in found.sources():
            source.expect_unchanged()
        differences = [*_other_tensors(job, found), *values, *_other_keys(job, found)]
        return Verification(
            tensors=sum(len(tensor.names) for tensor in job.plan.tensors),
            nbytes=sum(tensor.dtype.nbytes(tensor.shape) * len(tensor.names) for tensor in job.plan.tensors),
            keys=len(_expected_keys(job)) if found.config.present else 0,
            differences=tuple(differences),
            record=record,
            rounded=_rounded(report),
            scales=job.plan.output_scales,
            likely=_likely(job, found, record, {difference.name for difference in differences}),
        )


def _without_prefix(found: Checkpoint, options: Options) -> tuple[Checkpoint, Options]:
    """The wide model without a prefix that a trainer put before its names, and the options for the narrow one, which may lack it."""
    prefix = options.strip_prefix
    if not prefix or not all(tensor.name.startswith(prefix) for tensor in found.tensors):
        return found, options
    bare = tuple(replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in found.tensors)
    if not is_stream(options.input):
        with (
            suppress(WidenError),
            closing(open_checkpoint(options.input, options.config, {"model_type": None})) as narrow,
        ):
            if not any(tensor.name.startswith(prefix) for tensor in narrow.tensors):
                options = replace(options, strip_prefix=None)
    return replace(found, tensors=bare), options


def _prepared(options: Options, record: Record | None) -> Job:
    """The narrow model, to be widened as the wide one was. Raises WidenError that says so where it cannot be one of its making."""
    try:
        return prepare(_again(options, record))
    except WidenError as error:
        if record is None or options.says_growth or options.base or not _can_be_read(options):
            raise
        arrow = ", ".join(f"{axis} x{factor}" for axis, factor in record.factors.items() if factor != 1)
        raise WidenError(
            f"{printable(options.output)}: records a widening ({arrow or 'nothing grew'}) that {printable(options.input)} does not "
            "take, so that is not the model it was made of, or the two are swapped (verify NARROW WIDE); what it does not fit:",
            *error.faults,
        ) from None


def _can_be_read(options: Options) -> bool:
    """Whether the narrow model is whole, so that what speaks against it is the widening."""
    if is_stream(options.input):
        return False
    try:
        with closing(open_checkpoint(options.input, options.config, {"model_type": None})) as narrow:
            return not narrow.faults
    except WidenError:
        return False


def _likely(job: Job, found: Checkpoint, record: Record | None, differing: Collection[str]) -> str:
    """What is probably the matter where no matrix is as it should be: a prefix, models mixed up, or weights trained since."""
    stored = {tensor.name: tensor.shape for tensor in found.tensors}
    wanted = {name: tensor.written[1] for tensor in job.plan.tensors for name in tensor.names if len(tensor.shape) > 1}
    if not wanted or not wanted.keys() <= {*differing}:
        return ""
    narrow, first = printable(job.checkpoint.name), next(iter(stored), "")
    for prefix in (first[: place + 1] for place, letter in enumerate(first) if letter == "."):
        if wanted.keys() <= {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}:
            return (
                f"every tensor name starts with '{printable(prefix)}', which those of {narrow} do not; "
                f"--strip-prefix {printable(prefix)} compares without it"
            )
    before = read_record(str(job.checkpoint.record), narrow).before
    swapped = before is not None and (record is None or record.before != before)
    if any(stored.get(name) == shape for name, shape in wanted.items()):
        since = "that was trained since or stored in other types; or it was made of another model"
        return f"none of its {len(wanted)} matrices is what widening {narrow} gives, as of a model {since}"
    # With the same names in other shapes and no sign of a swap, the sizes asked for are as likely wrong as the model.
    ways = not swapped and wanted.keys() <= stored.keys()
    return (
        f"none of its {len(wanted)} matrices has the name and shape that widening {narrow} gives: "
        + ("the two are likely swapped (verify NARROW WIDE), or " if swapped else "")
        + ("it was widened by other options (leave out those given, if it records its own), or " if ways else "")
        + "it was made of another model"
    )


def _rounded(report: Report) -> tuple[str, ...]:
    """The types in which values were rounded."""
    kinds = {tensor.source.name: tensor.dtype.name for tensor in report.job.plan.tensors}
    return tuple(sorted({kinds[name] for name, counts in report.counts.items() if counts.rounded}))


def _record(found: Checkpoint, options: Options, wide: str) -> Record | None:
    """What the wide model records; where the command line says how it was made, an unreadable record does not matter."""
    said = options.says_growth
    if found.record is None and not said:
        text = f"{printable(wide)}: does not record how it was made"
        if _narrow_is_recorded(options):
            text += f", and {printable(options.input)} does: are the two swapped (verify NARROW WIDE)? If not,"
        else:
            text += ";"
        raise NotRecordedError(f"{text} give the options of the conversion, such as --factor 2")
    try:
        return None if found.record is None else read_record(found.record, wide)
    except WidenError:
        if said:
            return None
        raise


def _narrow_is_recorded(options: Options) -> bool:
    """Whether it is the narrow model that was widened."""
    if options.base or is_stream(options.input):
        return False
    with suppress(WidenError), closing(open_checkpoint(options.input, options.config, {"model_type": None})) as narrow:
        return narrow.record is not None
    return False


def _again(options: Options, record: Record | None) -> Options:
    """A dry run of the same conversion: it plans, and looks at no output."""
    asked = record.again(options) if record is not None else options
    return replace(asked, dry_run=True, named=False)


def _other_tensors(job: Job, found: Checkpoint) -> Iterator[Difference]:
    """Tensors that one of the two lacks, and those of another type or shape."""
    stored = {tensor.name: tensor for tensor in found.tensors}
    wanted = {name: tensor for tensor in job.plan.tensors for name in tensor.names}
    for name, tensor in wanted.items():
        if name not in stored:
            yield Difference(name, "is missing")
        elif not _alike(tensor, stored[name]):
            yield Difference(
                name,
                f"should be {tensor.written[0]} {list(tensor.written[1])}, is {stored[name].dtype.name} {list(stored[name].shape)}",
            )
    for name in stored.keys() - wanted.keys():
        yield Difference(name, "should not be there")


def _alike(planned: TensorPlan, stored: StoredTensor) -> bool:
    return planned.written == (stored.dtype.name, stored.shape)


def _other_values(job: Job, found: Checkpoint, progress: Callable[[int], None]) -> tuple[list[Difference], Report]:
    stored = {tensor.name: tensor for tensor in found.tensors}
    comparisons = {
        name: _Comparison(stored[name])
        for tensor in job.plan.tensors
        for name in tensor.names
        if name in stored and _alike(tensor, stored[name])
    }
    report = derive(job, comparisons.get, progress)
    return [comparison.difference() for comparison in comparisons.values() if comparison.differing], report


@dataclass
class _Comparison:
    """Takes the bytes that should stand in a tensor, from any thread, and keeps what it needs to tell of those that do not."""

    stored: StoredTensor
    differing: int = 0
    first: int = -1
    expected: bytes = b""
    found: bytes = b""
    lock: Lock = field(default_factory=Lock)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        item = _item_bytes(self.stored.dtype)
        found = self.stored.source.read(self.stored.offset + offset, len(data))
        if found == data:
            return
        old, new = (np.frombuffer(part, np.uint8).reshape(-1, item) for part in (data, found))
        others = np.flatnonzero((old != new).any(axis=1))
        with self.lock:
            self.differing += len(others)
            first = offset // item + int(others[0])
            if self.first < 0 or first < self.first:
                self.first = first
                self.expected, self.found = bytes(old[others[0]]), bytes(new[others[0]])

    def difference(self) -> Difference:
        shape = _items(self.stored.dtype, self.stored.shape)
        index = tuple(int(at) for at in np.unravel_index(self.first, shape))
        what = "block" if self.stored.dtype.kind == "blocks" else "value"
        expected, found = (_shown(self.stored.dtype, data) for data in (self.expected, self.found))
        fault = (
            f"{self.differing} of {math.prod(shape)} {what}s differ, the first at {list(index)}: "
            f"should be {expected}, is {found}"
        )
        return Difference(self.stored.name, fault, self.differing, index, expected, found)


def _item_bytes(dtype: DType) -> int:
    """Bytes of what is compared as one: a number, a quantised block, or a byte of packed numbers."""
    return dtype.block_bytes if dtype.kind == "blocks" else max(1, dtype.bits // 8)


def _items(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [..., items] of a tensor in such items."""
    if dtype.kind == "blocks":
        return (*shape[:-1], shape[-1] // dtype.block)
    return shape if dtype.bits >= 8 else (dtype.nbytes(shape),)


def _shown(dtype: DType, data: bytes) -> str:
    """One item as a number where it is one, else its bytes."""
    return f"0x{data.hex()}" if dtype.numpy is None else str(np.frombuffer(data, dtype.numpy)[0])


def _expected_keys(job: Job) -> dict[str, Any]:
    """The values of the config, or of a GGUF's metadata, that the wide model should have."""
    gguf = job.checkpoint.gguf
    if gguf is None:
        return job.config.values if job.config.present else {}
    changes = [(change.key, change.new) for change in job.plan.config]
    values = changed_metadata(gguf, printable(job.checkpoint.name), changes)
    return {key: value for key, value in values.items() if key != GGUF_RECORD}


def _other_keys(job: Job, found: Checkpoint) -> Iterator[Difference]:
    if found.gguf is None and not found.config.present:
        return
    values: dict[str, Any] = dict(found.gguf.header.values) if found.gguf else found.config.values
    yield from _differing(_expected_keys(job), values)


def _differing(expected: Mapping[str, Any], values: Mapping[str, Any], section: str = "") -> Iterator[Difference]:
    """What is expected and is not there so, by its place in sections; and what a section holds beside it. Beside the sections
    other keys may stand, as loaders and trainers add them."""
    for key, value in expected.items():
        name = section + key
        if key not in values:
            yield Difference(name, f"should be {_value(value)}, is missing")
        elif isinstance(value, dict) and isinstance(values[key], dict):
            yield from _differing(value, values[key], f"{name}.")
            others = (other for other in values[key] if other not in value)
            yield from (Difference(f"{name}.{other}", "should not be there") for other in others)
        elif not _same_value(values[key], value):
            yield Difference(name, f"should be {_value(value)}, is {_value(values[key])}")


def _same_value(one: Any, other: Any) -> bool:
    """Whether two config values are one; a NaN, which equals nothing, is told by its text."""
    return bool(one == other) or _text(one) == _text(other)


def _text(value: Any) -> str:
    return json.dumps(value.value if isinstance(value, GgufValue) else value, ensure_ascii=False, default=str)


def _value(value: Any) -> str:
    """A config value on one line of bearable length."""
    text = _text(value)
    return printable(text if len(text) <= 60 else f"{text[:57]}...")
