"""A Hugging Face model folder: its shards, its index, and the files that belong beside the weights.

Source: https://huggingface.co/docs/transformers/big_models (shards, index), huggingface_hub's cache (links to blobs).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Never

from widen_cli.errors import Faults, WidenError, is_text, printable
from widen_cli.safetensors_file import (
    FAULT_LIMIT,
    JsonObject,
    SafetensorsHeader,
    StoredTensor,
    parse_json,
    shown,
)
from widen_cli.sharding import WEIGHTS
from widen_cli.sources import FileSource
from widen_cli.torch_file import read_weights

INDEX_LIMIT = 100_000_000
SHARDS_LIMIT = 99_999  # their numbers have five digits
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?:safetensors|bin)")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_COMPANION_ENDS = (".json", ".txt", ".model", ".py", ".jinja", ".tiktoken", ".bpe")
_COMPANION_STARTS = ("tokenizer", "chat_template", "readme", "license", "notice")
_WEIGHT_ENDS = (*_PICKLES, ".safetensors", ".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".npz", ".npy")
# Other formats of the weights, and what a training run leaves beside them.
_OTHER_FOLDERS = re.compile(r"\..*|onnx|openvino|original|runs|__pycache__|checkpoint-\d+")


@dataclass(frozen=True)
class HfDirectory:
    """A folder's weights and what lies beside them.

    `tensors` run shard after shard in the order of their data; `shards` are file names; `metadata` is that of the first
    shard; `config_path` is None without a config.json; `companions` are the files to copy, relative to the folder.
    `faults` are those of shards that are missing or damaged; then `tensors` are what the others hold, to be looked at only.
    """

    tensors: tuple[StoredTensor, ...]
    shards: tuple[str, ...]
    metadata: dict[str, str]
    config_path: Path | None
    companions: tuple[Path, ...]
    warnings: tuple[str, ...]
    faults: tuple[str, ...] = ()

    def close(self) -> None:
        """Closes every shard."""
        for source in {id(tensor.source): tensor.source for tensor in self.tensors}.values():
            source.close()


@dataclass(frozen=True)
class _Format:
    """How a format names its files: what one file for all is called, and what all begin and end with."""

    weights: str
    start: str
    ending: str

    @property
    def index_end(self) -> str:
        return self.ending + ".index.json"

    def files(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name.startswith(self.start) and name.endswith(self.ending)]


_SAFETENSORS = _Format(WEIGHTS, "", ".safetensors")
# A folder has other .bin files too: training_args.bin, optimizer.bin.
_TORCH = _Format("pytorch_model.bin", "pytorch_model", ".bin")


@dataclass(frozen=True)
class _Index:
    """A `*.safetensors.index.json` or `*.bin.index.json`: which shard holds a tensor, and what it says all tensors take."""

    name: str
    weight_map: dict[str, str]
    total_size: object


def open_directory(path: Path) -> HfDirectory:
    """The folder with every shard opened and its header checked.

    Raises WidenError where it is no such folder; the faults of its shards are the result's. PyTorch files count where
    there are no safetensors; nothing that their pickles ask for is run.
    """
    names = _listing(path)
    warnings: list[str] = []
    form = _format(names)
    index = _find_index(path, names, form, warnings)
    if index is None:
        shards = _without_index(path, names, form, warnings)
    else:
        shards = _shards_of(path, index)
        warnings += _strays(path, form.files(names), index, shards)
    config = path / "config.json"
    companions = _companions(path, warnings)
    dangling = [config] if config.is_symlink() and not config.exists() else []
    headers, faults = _open_shards(path, shards, index, dangling)
    if faults:
        tensors = tuple(tensor for header in headers.values() for tensor in header.tensors)
    else:
        try:
            tensors = _chosen(path, headers, index, warnings)
        except WidenError:
            _close(headers.values())
            raise
    warnings += [text for header in headers.values() for text in header.warnings]
    metadata = next((header.metadata for header in headers.values()), {})
    config_path = config if config.is_file() else None
    return HfDirectory(tensors, tuple(shards), metadata, config_path, companions, tuple(warnings), faults)


def _listing(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        link = f" (a link to {printable(os.path.realpath(path))})" if path.is_symlink() else ""
        raise WidenError(f"{_at(path)}{link}: cannot be read as a folder: {error.strerror}") from None


def _format(names: Sequence[str]) -> _Format:
    if any(name.endswith((_SAFETENSORS.ending, _SAFETENSORS.index_end)) for name in names):
        return _SAFETENSORS
    torch = _TORCH.files(names) or any(name.endswith(_TORCH.index_end) for name in names)
    return _TORCH if torch else _SAFETENSORS


def _at(path: Path, name: str = "") -> str:
    return printable(str(path / name))


def _find_index(path: Path, names: Sequence[str], form: _Format, warnings: list[str]) -> _Index | None:
    found = [name for name in names if name.endswith(form.index_end)]
    preferred = [name for name in found if name == form.weights + ".index.json"] or found
    if not preferred:
        return None
    if len(preferred) > 1:
        listed = ", ".join(map(printable, preferred))
        raise WidenError(f"{_at(path)}: several indexes and none is {form.weights}.index.json: {listed}; keep one")
    for name in found:
        if name != preferred[0]:
            warnings.append(f"{_at(path, name)}: not used, {preferred[0]} was taken")
    return _read_index(path, preferred[0])


def _read_index(path: Path, name: str) -> _Index:
    source = FileSource(path / name)
    try:
        if source.size is None or source.size > INDEX_LIMIT:
            raise WidenError(f"{source.name}: an index of {source.size} bytes is no index; download it again")
        table = parse_json(bytes(source.read(0, source.size)), f"{source.name}: the index")
    finally:
        source.close()
    fields = dict(table) if isinstance(table, JsonObject) else {}
    pairs = fields.get("weight_map")
    if not isinstance(pairs, JsonObject) or not pairs or not all(isinstance(shard, str) for _, shard in pairs):
        raise WidenError(f"{source.name}: has no weight_map from tensor names to file names; download it again")
    if pairs.repeated:
        raise WidenError(f"{source.name}: weight_map names {shown(pairs.repeated[0])} twice; download it again")
    # Normalised, so that ./a and a are one shard.
    weight_map = {tensor: str(PurePosixPath(str(shard))) for tensor, shard in pairs}
    metadata = fields.get("metadata")
    total = dict(metadata).get("total_size") if isinstance(metadata, JsonObject) else None
    return _Index(name, weight_map, total)


def _shards_of(path: Path, index: _Index) -> list[str]:
    """The shards the index names, sorted; WidenError when one leads out of the folder."""
    shards = sorted(set(index.weight_map.values()))
    if len(shards) > SHARDS_LIMIT:
        raise WidenError(
            f"{_at(path, index.name)}: names {len(shards)} files, more than {SHARDS_LIMIT}; download it again"
        )
    _raise_capped(
        _at(path, index.name),
        [
            f"{_at(path, index.name)}: weight_map leads out of the folder with {shown(shard)}; name a file in it"
            for shard in shards
            if _leads_out(shard)
        ],
    )
    return shards


def _leads_out(shard: str) -> bool:
    parts = PurePosixPath(shard).parts
    if not is_text(shard):
        return True  # no name that a file can have
    return not parts or ".." in parts or shard.startswith("/") or "\\" in shard or "\0" in shard


def _strays(path: Path, names: Sequence[str], index: _Index, shards: Sequence[str]) -> list[str]:
    return [
        f"{_at(path, name)}: not used, the shards that {printable(index.name)} names were taken"
        for name in names
        if name not in shards
    ]


def _without_index(path: Path, names: Sequence[str], form: _Format, warnings: list[str]) -> list[str]:
    """The weights of a folder without an index: the format's usual file, else the only file, else a full numbered set."""
    found = form.files(names)
    if not found:
        _refuse_no_weights(path, names)
    lone = [name for name in found if not _NUMBERED.fullmatch(name)]
    if form.weights in found or len(lone) == 1:
        taken = form.weights if form.weights in found else lone[0]
        warnings += [f"{_at(path, name)}: not used, {printable(taken)} was taken" for name in found if name != taken]
        return [taken]
    if lone:
        listed = ", ".join(map(printable, lone))
        raise WidenError(
            f"{_at(path)}: several weight files and none is {form.weights}: {listed}; give the file itself"
        )
    _check_numbers(path, found, form)
    warnings.append(f"{_at(path)}: no {form.weights}.index.json; the shards were taken by the numbers in their names")
    return found


def _refuse_no_weights(path: Path, names: Sequence[str]) -> Never:
    ggufs = [name for name in names if name.endswith(".gguf")]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if ggufs:
        raise WidenError(f"{_at(path, ggufs[0])}: the folder holds GGUF files; give the file itself")
    if pickles:
        raise WidenError(
            f"{_at(path, pickles[0])}: the folder has no *.safetensors and no pytorch_model*.bin; give the file itself"
        )
    raise WidenError(f"{_at(path)}: no *.safetensors file in the folder")


def _check_numbers(path: Path, names: Sequence[str], form: _Format) -> None:
    """Returns when the numbered files are one full set; WidenError that names what is missing."""
    sets: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        sets.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    if len(sets) > 1:
        listed = ", ".join(f"{printable(stem)}-*-of-{count:05d}" for stem, count in sets)
        raise WidenError(f"{_at(path)}: shards of several sets ({listed}) and no index; keep one set")
    ((stem, count), numbers) = next(iter(sets.items()))
    missing = [number for number in range(1, count + 1) if number not in numbers]
    files = [_at(path, f"{stem}-{number:05d}-of-{count:05d}{form.ending}") for number in missing]
    _raise_capped(_at(path), [f"{file}: missing, the others of its set are there; download it again" for file in files])


def _open_shards(
    path: Path, shards: Sequence[str], index: _Index | None, dangling: Sequence[Path]
) -> tuple[dict[str, SafetensorsHeader], tuple[str, ...]]:
    """The headers of the shards that can be read, and the faults of the others."""
    headers: dict[str, SafetensorsHeader] = {}
    faults = Faults()
    for file in [*dangling, *(path / shard for shard in shards)]:
        if index and not os.path.lexists(file):
            faults.add(f"{_at(file)}: missing, {printable(index.name)} names it; download it again")
            continue
        try:
            source = FileSource(file)
        except WidenError as error:
            faults.add(str(error))
            continue
        try:
            headers[file.relative_to(path).as_posix()] = read_weights(source)
        except WidenError as error:
            source.close()
            for fault in error.faults:
                faults.add(fault)
    return headers, tuple(_capped(_at(path), faults.texts))


def _close(headers: Iterable[SafetensorsHeader]) -> None:
    for header in headers:
        for tensor in header.tensors:
            tensor.source.close()


def _capped(name: str, texts: Sequence[str]) -> list[str]:
    """The first texts and the number of the others."""
    more = len(texts) - FAULT_LIMIT
    return [*texts[:FAULT_LIMIT], f"{name}: ... and {more} more"] if more > 0 else list(texts)


def _raise_capped(name: str, faults: Sequence[str]) -> None:
    if faults:
        raise WidenError(*_capped(name, faults))


def _chosen(
    path: Path, headers: Mapping[str, SafetensorsHeader], index: _Index | None, warnings: list[str]
) -> tuple[StoredTensor, ...]:
    """Each tensor once, from the shard the index points at; WidenError for a tensor that no shard holds."""
    holders: dict[str, list[str]] = {}
    for shard, header in headers.items():
        for tensor in header.tensors:
            holders.setdefault(tensor.name, []).append(shard)
    where = index.weight_map if index else {}
    at = _at(path, index.name) if index else _at(path)
    faults = [
        f"{at}: no shard holds {shown(name)}, which {shown(shard)} should; download the model again"
        for name, shard in where.items()
        if name not in holders
    ]
    taken: dict[str, str] = {}
    doubts: list[str] = []
    for name, shards in holders.items():
        wanted = where.get(name)
        if wanted not in shards and len(shards) > 1:
            faults.append(f"{at}: {shown(name)} is in {_listed(shards)} and nothing says which counts; keep one")
            continue
        taken[name] = wanted if wanted in shards else shards[0]
        doubts += _doubts(at, name, shards, wanted) if index else []
    _raise_capped(at, faults)
    warnings += _capped(at, doubts)
    tensors = tuple(t for shard, header in headers.items() for t in header.tensors if taken[t.name] == shard)
    total = sum(tensor.nbytes for tensor in tensors)
    if index and index.total_size not in (None, total):
        warnings.append(f"{at}: total_size is {shown(index.total_size)[1:-1]}, the tensors take {total} bytes")
    return tensors


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(printable, names))


def _doubts(at: str, name: str, shards: Sequence[str], wanted: str | None) -> list[str]:
    if wanted is None:
        return [f"{at}: does not list {shown(name)}, taken from {printable(shards[0])}"]
    if wanted not in shards:
        return [f"{at}: {shown(name)} is not in {printable(wanted)}, taken from {printable(shards[0])}"]
    if len(shards) > 1:
        return [f"{at}: {shown(name)} is in {_listed(shards)}, taken from {printable(wanted)}"]
    return []


def _companions(path: Path, warnings: list[str]) -> tuple[Path, ...]:
    """The files to copy, relative and sorted; a warning for a dangling link and for weights in a sub-folder."""
    found: list[Path] = []

    def unread(error: OSError) -> None:
        warnings.append(f"{printable(os.fsdecode(error.filename))}: not copied, cannot be read: {error.strerror}")

    for folder, folders, names in os.walk(path, onerror=unread):
        folders[:] = sorted(name for name in folders if not _OTHER_FOLDERS.fullmatch(name))
        for name in names:
            file = Path(folder, name)
            relative = file.relative_to(path)
            lower = name.lower()
            if lower.endswith(_WEIGHT_ENDS):
                if lower.endswith((".safetensors", "pytorch_model.bin")) and len(relative.parts) > 1:
                    warnings.append(f"{_at(file)}: weights in a sub-folder are not widened and not copied")
            elif _is_companion(relative):
                if file.is_file():
                    found.append(relative)
                elif file.is_symlink() and not file.exists():
                    warnings.append(
                        f"{_at(file)}: not copied, is a link to {printable(os.path.realpath(file))}, which is missing"
                    )
                else:
                    warnings.append(f"{_at(file)}: not copied, is a pipe or a device")
    return tuple(sorted(found))


def _is_companion(relative: Path) -> bool:
    name = relative.name.lower()
    if name.startswith(".") or name.endswith(".index.json") or relative == Path("config.json"):
        return False
    return name.endswith(_COMPANION_ENDS) or name.startswith(_COMPANION_STARTS)
