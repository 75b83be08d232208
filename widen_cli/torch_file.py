"""PyTorch's files of tensors (`pytorch_model.bin`, `.pt`, `.pth`), read without running what their pickle says.

Source: https://github.com/pytorch/pytorch, torch/serialization.py (`_save`, `_legacy_save`), caffe2/serialize/inline_container.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from widen_cli.dtypes import STORED, DType
from widen_cli.errors import WidenError, first_of, printable
from widen_cli.safetensors_file import (
    AGAIN,
    FAULT_LIMIT,
    SafetensorsHeader,
    StoredTensor,
    read_header,
    shown,
)
from widen_cli.sources import Source
from widen_cli.torch_pickle import PICKLE_LIMIT, RESAVE, OddTensor, PickledDict, PickledTensor, PickleReader, Storage
from widen_cli.torch_views import HeldBytes, StridedSource
from widen_cli.torch_zip import ZipDirectory, data_offset, read_zip

# The number that torch before 1.6 begins with, as a pickle of its own; from protocol 4 on the pickle is framed.
_LEGACY = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
_LEGACY_VERSION = 1001
_START = 512
# An expanded tensor takes no bytes in its file; what it may take when it is written out.
_REPEATED_LIMIT = 1 << 26

# From a storage to its offset in the file and its bytes; WidenError where it is not there.
_Place = Callable[[Storage], tuple[int, int]]
_Tensor = PickledTensor | OddTensor


@dataclass(frozen=True)
class PickledFile:
    """What a file of torch.save holds: its value, and where its tensors lie."""

    value: object
    source: Source
    place: _Place

    def stored(self, tensors: Sequence[tuple[str, _Tensor]]) -> tuple[StoredTensor, ...]:
        """Tensors of it under new names; WidenError with the first faults of those that do not fit their bytes."""
        return _stored(tensors, self.place, self.source)


def read_weights(source: Source) -> SafetensorsHeader:
    """The header of a PyTorch file or else of a safetensors file, told by the first bytes and not by the name.

    A pipe can only be safetensors. Raises WidenError as `read_torch_file` and `read_header` do.
    """
    if not source.sequential and _kind(source):
        return read_torch_file(source)
    return read_header(source)


def read_torch_file(source: Source) -> SafetensorsHeader:
    """The checked header of what torch.save wrote: a state dict, or a dict with one state dict in it.

    Tensors lie where the file has them; one whose elements are not in order has a source that puts them in order when it
    is read. Raises WidenError for a pickle that asks for more than tensors, for several state dicts or none, for a
    TorchScript archive, and for tensors that do not fit their bytes, at most ten of these.
    """
    if source.sequential:
        raise WidenError(f"{source.name}: a PyTorch file cannot be read from a pipe; save it to a file and name that")
    kind = _kind(source)
    if kind == "tar":
        raise WidenError(f"{source.name}: is a tar file as torch before 0.2 wrote it, which is not opened; {RESAVE}")
    if not kind:
        raise WidenError(
            f"{source.name}: is no PyTorch file: it begins neither as a zip file nor as a pickle of torch; {AGAIN}"
        )
    root, place = _read_zip(source) if kind == "zip" else _read_legacy(source)
    chosen, warnings = _state_dict(root, source.name)
    return SafetensorsHeader(_stored(chosen, place, source), {}, source.size or 0, tuple(warnings))


def read_values(source: Source) -> PickledFile:
    """All that a file of torch.save holds, of whatever form. Raises WidenError as `read_torch_file` does, but not for the form."""
    kind = _kind(source)
    if kind not in ("zip", "legacy"):
        raise WidenError(f"{source.name}: is no PyTorch file; {AGAIN}")
    root, place = _read_zip(source) if kind == "zip" else _read_legacy(source)
    return PickledFile(root, source, place)


def _kind(source: Source) -> str:
    """`zip`, `legacy` or `tar`, empty for a file of another kind."""
    start = bytes(source.read(0, min(_START, source.size or 0)))
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if start[257:262] == b"ustar":
        return "tar"
    return "legacy" if _LEGACY.match(start) else ""


def _read_zip(source: Source) -> tuple[object, _Place]:
    """The pickled value of a zip file, and where its storages lie."""
    directory = read_zip(source)
    roots = [name.removesuffix("data.pkl") for name in directory.entries if re.fullmatch(r"[^/]+/data\.pkl", name)]
    inside = next((name for name in directory.entries if name.endswith((".safetensors", ".gguf", ".bin"))), None)
    if inside is not None and not roots:
        raise WidenError(
            f"{source.name}: is a zip file with '{printable(inside)}' in it; unpack it, and give what it holds"
        )
    if len(roots) != 1:
        found = "is a zip file, but none of PyTorch: it has no" if not roots else "is a zip file with more than one"
        raise WidenError(f"{source.name}: {found} data.pkl; give the file that torch.save wrote")
    (root,) = roots
    if any(name == f"{root}constants.pkl" or name.startswith(f"{root}code/") for name in directory.entries):
        raise WidenError(
            f"{source.name}: is a TorchScript archive, which is a program; save its tensors where you trust it: "
            "torch.save(torch.jit.load(file).state_dict(), ...)"
        )
    _check_byte_order(source, directory, root)
    begin, nbytes = _range(source, directory, f"{root}data.pkl")
    if nbytes > PICKLE_LIMIT:
        raise WidenError(
            f"{source.name}: a pickle of {nbytes} bytes is more than the {PICKLE_LIMIT} of tensors; {RESAVE}"
        )
    reader = PickleReader(source, begin, begin + nbytes)
    value = reader.load()
    taken = [(begin, begin + nbytes, "data.pkl")]
    places: dict[str, tuple[int, int]] = {}
    for key in reader.storages:
        places[key] = _range(source, directory, f"{root}data/{key}")
        taken.append((places[key][0], sum(places[key]), f"data/{key}"))
    _check_apart(source, sorted(taken))
    return value, lambda storage: places[storage.key]


def _range(source: Source, directory: ZipDirectory, name: str) -> tuple[int, int]:
    """Offset and bytes of an entry; WidenError where there is no such entry or it cannot be read in place."""
    entry = directory.entries.get(name)
    if entry is None:
        raise WidenError(f"{source.name}: has no entry {shown(name)}, which its pickle names; {AGAIN}")
    return data_offset(source, directory, entry), entry.nbytes


def _check_byte_order(source: Source, directory: ZipDirectory, root: str) -> None:
    if f"{root}byteorder" in directory.entries:
        begin, nbytes = _range(source, directory, f"{root}byteorder")
        order = bytes(source.read(begin, min(nbytes, 20)))
        if order != b"little":
            raise _big_endian(source, order.decode("utf-8", "surrogateescape"))


def _big_endian(source: Source, order: str) -> WidenError:
    return WidenError(f"{source.name}: was saved with the byte order {shown(order)}, only little is read; {RESAVE}")


def _check_apart(source: Source, taken: Sequence[tuple[int, int, str]]) -> None:
    for (_, end, before), (begin, _, name) in pairwise(taken):
        if begin < end:
            raise WidenError(f"{source.name}: the entries {shown(before)} and {shown(name)} overlap; {AGAIN}")


def _read_legacy(source: Source) -> tuple[object, _Place]:
    """The same of a file that torch before 1.6 wrote: five pickles, then each storage behind its length."""
    size = source.size or 0
    position, values, storages = 0, [], dict[str, Storage]()
    for _ in range(5):
        reader = PickleReader(source, position, size)
        values.append(reader.load())
        position = reader.position
        storages |= reader.storages
    _, version, system, root, keys = values
    if version != _LEGACY_VERSION or not isinstance(system, PickledDict) or not isinstance(keys, list):
        raise WidenError(f"{source.name}: is not laid out as torch before 1.6 did; {AGAIN}")
    if ("little_endian", True) not in system:
        raise _big_endian(source, "big")
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or storage.key in places:
            raise WidenError(f"{source.name}: lists a storage that its pickle does not name, or twice; {AGAIN}")
        numel = int.from_bytes(bytes(source.read(position, 8)), "little")
        places[storage.key] = (position + 8, numel * _itemsize(storage.dtype))
        position = sum(places[storage.key])
        if position > size:
            raise WidenError(f"{source.name}: truncated: {position - size} bytes missing; download or copy it again")
    missing = next((key for key in storages if key not in places), None)
    if missing is not None:
        raise WidenError(f"{source.name}: does not list the storage {shown(missing)}, which its pickle names; {AGAIN}")
    return root, lambda storage: places[storage.key]


def _itemsize(dtype: str) -> int:
    """Bytes of an element, 1 of what is no known type: what follows it will not be read."""
    return STORED[dtype].bits // 8 if dtype in STORED else 1


def _state_dict(root: object, name: str) -> tuple[list[tuple[str, _Tensor]], list[str]]:
    """The one dict of tensors in what was saved, and warnings of what is left out; WidenError for none or several."""
    if not isinstance(root, PickledDict):
        kind = "one tensor" if isinstance(root, _Tensor) else f"a {type(root).__name__}"
        raise WidenError(f"{name}: holds {kind} and no dict of tensors; save model.state_dict()")
    # By identity, because a dict can stand under many names.
    inner = {id(value): (key, value) for key, value in reversed(root) if isinstance(value, PickledDict)}
    counts = {number: _count(pairs) for number, (_, pairs) in inner.items()}
    found = [(_key(key), value) for key, value in reversed(inner.values()) if counts[id(value)]]
    found = [("its top", root), *found] if _count(root) else found
    if not found:
        raise WidenError(f"{name}: holds no dict of tensors, at its top or one level below; save model.state_dict()")
    if len(found) > 1:
        raise _several(found, name)
    ((key, pairs),) = found
    named, others = _split(pairs, name)
    left = others if pairs is root else [other for other, value in root if value is not pairs] + others
    warnings = [f"{name}: the tensors of {key} were taken"] if pairs is not root else []
    if left:
        listed = first_of([*map(_key, left)], FAULT_LIMIT)
        warnings.append(f"{name}: left out, being no tensors of the model: {listed}")
    return named, warnings


def _several(found: Sequence[tuple[str, PickledDict]], name: str) -> WidenError:
    listed = first_of([f"{key} ({_tensors(_count(pairs))})" for key, pairs in found], FAULT_LIMIT)
    return WidenError(
        f"{name}: holds several dicts of tensors: {listed}; save the one to widen in a file of its own, "
        f"as torch.save(torch.load(file)[{found[-1][0]}], other)"
    )


def _key(key: object) -> str:
    """A dict's key for a message; one that may be nested is not walked through."""
    return shown(key) if isinstance(key, str) else str(key) if type(key) is int else f"a {type(key).__name__}"


def _count(pairs: PickledDict) -> int:
    return sum(isinstance(value, _Tensor) for _, value in pairs)


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' if count > 1 else ''}"


def _split(pairs: PickledDict, name: str) -> tuple[list[tuple[str, _Tensor]], list[object]]:
    """The tensors by name, and the keys of what is none; WidenError for a name that cannot be one."""
    named: dict[str, _Tensor] = {}
    others: list[object] = []
    for key, value in pairs:
        if not isinstance(value, _Tensor):
            others.append(key)
        elif not isinstance(key, str) or _is_broken(key) or key == "__metadata__":
            raise WidenError(f"{name}: {_key(key)} cannot be the name of a tensor; {RESAVE}")
        elif key in named:
            raise WidenError(f"{name}: its dict names {shown(key)} twice; {AGAIN}")
        else:
            named[key] = value
    return list(named.items()), others


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _stored(tensors: Sequence[tuple[str, _Tensor]], place: _Place, source: Source) -> tuple[StoredTensor, ...]:
    """The tensors as ranges of the file, in the order of their data; WidenError with the first faults of them."""
    held = HeldBytes(source)
    placed: list[tuple[int, int, StoredTensor]] = []
    faults: list[str] = []
    more = 0
    for name, tensor in tensors:
        reason = _unfit(tensor, place)
        if reason and len(faults) == FAULT_LIMIT:
            more += 1
        elif reason:
            faults.append(f"{source.name}: {shown(name)} {reason}")
        elif isinstance(tensor, PickledTensor):
            stored, begin = _located(name, tensor, place(tensor.storage)[0], held)
            placed.append((begin, stored.nbytes, stored))
    if faults:
        raise WidenError(*faults, *([f"{source.name}: ... and {more} more"] if more else []))
    placed.sort(key=lambda one: (one[0], one[0] + one[1]))
    return tuple(stored for _, _, stored in placed)


def _unfit(tensor: _Tensor, place: _Place) -> str:
    """Why a tensor cannot be read, empty when it can."""
    if isinstance(tensor, OddTensor):
        return f"has no plain elements ({shown(tensor.kind)[1:-1]}); make it dense and unquantised, and save it again"
    if tensor.dtype not in STORED:
        return f"has the type {shown(tensor.dtype)}, which is not known; save it in another one"
    dtype, storage = STORED[tensor.dtype], tensor.storage
    _, held = place(storage)
    promised = storage.numel * _itemsize(storage.dtype)
    if held < promised or storage.numel < 0:
        return f"lies in the storage {shown(storage.key)} of {held} bytes, its pickle says {promised}; {AGAIN}"
    form = f"{dtype.name} [{', '.join(map(str, tensor.shape))}]"
    needed = sum(max(size - 1, 0) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    needed = (tensor.start + needed + 1) * dtype.bits // 8 if 0 not in tensor.shape else 0
    if needed > promised:
        return f"({form}) reaches to byte {needed} of its storage {shown(storage.key)}, which has {promised}; {AGAIN}"
    if dtype.nbytes(tensor.shape) > max(promised, _REPEATED_LIMIT):
        return f"({form}) repeats the {promised} bytes of its storage; save it after .contiguous()"
    return ""


def _located(name: str, tensor: PickledTensor, begin: int, held: HeldBytes) -> tuple[StoredTensor, int]:
    """A tensor that fits, and where its first element lies in the file."""
    dtype: DType = STORED[tensor.dtype]
    itemsize, nbytes = dtype.bits // 8, dtype.nbytes(tensor.shape)
    first = begin + tensor.start * itemsize if nbytes else begin
    if not nbytes or _in_order(tensor):
        return StoredTensor(name, dtype, tensor.shape, first, nbytes, held.source), first
    axes = [(size, step) for size, step in zip(tensor.shape, tensor.strides, strict=True) if size > 1]
    shape, strides = tuple(size for size, _ in axes), tuple(step for _, step in axes)
    view = StridedSource(held, first, shape, strides, itemsize)
    return StoredTensor(name, dtype, tensor.shape, 0, nbytes, view), first


def _in_order(tensor: PickledTensor) -> bool:
    """Whether the elements follow one another; the step along an axis of size 1 does not count."""
    return all(
        size == 1 or step == prod(tensor.shape[axis + 1 :])
        for axis, (size, step) in enumerate(zip(tensor.shape, tensor.strides, strict=True))
    )
