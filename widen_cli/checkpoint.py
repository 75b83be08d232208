"""Opens what the user names: a safetensors or PyTorch file, a Hugging Face directory, or a pipe; with the config that goes with it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from widen_cli.config import ModelConfig, is_number, read_config
from widen_cli.errors import Faults, WidenError, did_you_mean, is_text, printable
from widen_cli.gguf.checkpoint import gguf_architecture, metadata_config, stored_tensors
from widen_cli.gguf.header import GGUF_MAGIC, expect_end
from widen_cli.gguf.model import GgufModel, open_gguf
from widen_cli.gguf.values import GgufValue, ValueType
from widen_cli.hf_directory import HfDirectory, open_directory
from widen_cli.map_file import map_names
from widen_cli.map_rules import ArchitectureMap
from widen_cli.maps import catalog_map, load_map, map_for_gguf, map_for_model_type
from widen_cli.nearest import Fit, known_names, name_ends, nearest, told
from widen_cli.plan.match import WITH_BASE, common_prefix, match_tensors, missing_tensors
from widen_cli.safetensors_file import SafetensorsHeader, StoredTensor
from widen_cli.sources import FileSource, PipeSource, Source
from widen_cli.torch_file import read_weights

RECORD = "widen_ckpt"  # in a safetensors file's __metadata__
GGUF_RECORD = "widen_ckpt.record"


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: its tensors' headers in the order of their bytes, its config, and what lies beside it.

    `config` holds what `--set` adds to `found_config`.
    `gguf` is the model of a GGUF file, whose metadata is its config. `directory` is None for a single file or a pipe;
    `files` are the inputs that no output may touch. `faults` are those of shards that cannot be read; with them the model
    can be looked at and not widened. `adapter`: what PEFT adds to a model, not a model. `stored` are the input's own
    tensors, where `tensors` are made of them.
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]
    config: ModelConfig
    found_config: ModelConfig
    config_path: Path | None
    directory: HfDirectory | None
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    faults: tuple[str, ...] = ()
    gguf: GgufModel | None = None
    adapter: bool = False
    stored: tuple[StoredTensor, ...] = ()

    @property
    def sequential(self) -> bool:
        return any(source.sequential for source in self.sources())

    @property
    def record(self) -> str | None:
        """What the model's metadata says of how it was widened."""
        if self.gguf is None:
            return self.metadata.get(RECORD)
        value = self.gguf.header.values.get(GGUF_RECORD)
        return value.value if value is not None and isinstance(value.value, str) else None

    def with_record(self, text: str) -> Checkpoint:
        """The model with another record in its metadata."""
        if self.gguf is None:
            return replace(self, metadata={**self.metadata, RECORD: text})
        values = {**self.gguf.header.values, GGUF_RECORD: GgufValue.of(ValueType.STRING, text)}
        return replace(self, gguf=replace(self.gguf, header=replace(self.gguf.header, values=values)))

    def sources(self) -> list[Source]:
        """The sources of the input's own tensors, each once."""
        return list({id(tensor.source): tensor.source for tensor in self.stored or self.tensors}.values())

    def read_to_end(self) -> None:
        """Of a pipe, reads what follows the last tensor that was needed; WidenError where that is cut short or too long, or
        where a file is not what it was when it was opened."""
        for source in self.sources():
            source.expect_unchanged()
            if isinstance(source, PipeSource):
                if self.gguf is not None:
                    expect_end(source, self.gguf.header)
                    continue
                source.read(max(tensor.offset + tensor.nbytes for tensor in self.stored or self.tensors), 0)
                source.expect_end()

    def close(self) -> None:
        if self.gguf is not None:
            self.gguf.close()
        for source in self.sources():
            source.close()


def open_checkpoint(
    given: str, config_option: str | None, settings: dict[str, Any], strip_prefix: str | None = None
) -> Checkpoint:
    """Opens a model and checks its headers.

    The config is `config_option`, or for a directory its config.json, for a file `<stem>.config.json` or `config.json`
    beside it. Raises WidenError with every fault found; those of single shards are the result's.
    """
    name = "standard input" if given == "-" else given
    pipe = _pipe(given)
    if pipe.starts_with(GGUF_MAGIC) if pipe else _is_gguf(given):
        return _open_gguf(pipe or Path(given), name, settings, strip_prefix)
    with ExitStack() as opened, Faults() as faults:
        weights = _Weights()
        with faults.collecting():
            weights = _weights(given, pipe)
            opened.callback(weights.close)
        config_path = Path(config_option) if config_option else weights.config_path
        found = ModelConfig({}, "no config", present=False)
        with faults.collecting():
            if config_option is None and config_path is not None and config_path.is_fifo():
                raise WidenError(f"{printable(str(config_path))}: is a pipe; where it is meant, name it with --config")
            found = _config(given, config_path, needed=weights.directory is not None and not settings)
        config = found.with_values(settings)
        with faults.collecting():
            _refuse_quantised(config)
        tensors, unreadable = weights.tensors, weights.directory.faults if weights.directory else ()
        if strip_prefix and tensors and not unreadable:
            with faults.collecting():
                tensors = _stripped(tensors, strip_prefix, name)
        for text in unreadable if faults.texts else ():
            faults.add(text)
        if not faults.texts:
            opened.pop_all()
    files = (*([Path(given)] if given != "-" else []), *([config_path] if config_path else []), *weights.files)
    return Checkpoint(
        name,
        tensors,
        weights.metadata,
        config,
        found,
        config_path,
        weights.directory,
        files,
        weights.warnings,
        unreadable,
    )


@dataclass(frozen=True)
class _Weights:
    """What was opened, before its config is read."""

    tensors: tuple[StoredTensor, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    config_path: Path | None = None
    directory: HfDirectory | None = None
    files: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()

    def close(self) -> None:
        for source in {id(tensor.source): tensor.source for tensor in self.tensors}.values():
            source.close()


def _pipe(given: str) -> PipeSource | None:
    """A stream for `-`, a fifo or a shell's <(command); None for what is on a disk."""
    if given == "-":
        if sys.stdin is None:
            raise WidenError("standard input: is closed; send the checkpoint to it, or name a file")
        return PipeSource(sys.stdin.buffer)
    with suppress(OSError):
        if stat.S_ISFIFO(os.stat(given).st_mode):
            return PipeSource(open(given, "rb"), given)
    return None


def _is_gguf(given: str) -> bool:
    """Whether a path is to be opened as a GGUF, by its first bytes or by its name; one that says .safetensors lies if it is."""
    if os.path.isdir(given) or given.endswith(".safetensors"):
        return False
    with suppress(OSError), open(given, "rb") as file:
        if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC:
            return True
    return given.endswith(".gguf")


def _weights(given: str, pipe: PipeSource | None) -> _Weights:
    if given != "-" and os.path.isdir(given):
        directory = open_directory(Path(given))
        files = tuple(Path(given, shard) for shard in directory.shards)
        return _Weights(
            directory.tensors, directory.metadata, directory.config_path, directory, files, directory.warnings
        )
    numbered = re.search(r"-\d{5}-of-(\d{5})\.(?:safetensors|bin)$", given)
    if numbered and int(numbered[1]) > 1 and os.path.exists(given):
        raise WidenError(f"{printable(given)}: is one of {int(numbered[1])} shards; give the folder they are in")
    header = _header(pipe or FileSource(Path(given)))
    beside = None if given == "-" else _config_beside(Path(given))
    return _Weights(header.tensors, header.metadata, beside, warnings=header.warnings)


def _header(source: Source) -> SafetensorsHeader:
    try:
        return read_weights(source)
    except WidenError:
        source.close()
        raise


def _config(given: str, path: Path | None, needed: bool) -> ModelConfig:
    if path is not None:
        return read_config(path)
    if needed:
        if Path(given, "adapter_config.json").is_file():
            raise WidenError(f"{printable(given)}: a PEFT adapter and no model; {WITH_BASE}")
        raise WidenError(
            f"{printable(given)}: no config.json; fetch it, give --config, or say with --set what the tensors do not tell"
        )
    return ModelConfig({}, "no config", present=False)


def _open_gguf(path: Path | PipeSource, given: str, settings: dict[str, Any], strip_prefix: str | None) -> Checkpoint:
    model = open_gguf(path)
    with ExitStack() as opened:
        opened.callback(model.close)
        found = metadata_config(model, printable(given))
        tensors = stored_tensors(model)
        tensors = _stripped(tensors, strip_prefix, given) if strip_prefix else tensors
        config = found.with_values(settings)
        opened.pop_all()
    return Checkpoint(given, tensors, {}, config, found, None, None, model.files, model.warnings, gguf=model)


def _config_beside(path: Path) -> Path | None:
    candidates = (path.with_name(f"{path.stem}.config.json"), path.with_name("config.json"))
    return next((candidate for candidate in candidates if os.path.lexists(candidate)), None)


def _stripped(tensors: Sequence[StoredTensor], prefix: str, name: str) -> tuple[StoredTensor, ...]:
    if not is_text(prefix):
        raise WidenError(f"--strip-prefix {printable(prefix)}: is no UTF-8 text")
    bare = tuple(replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in tensors)
    if len({tensor.name for tensor in bare}) < len(bare):
        raise WidenError(
            f"{printable(name)}: without the prefix '{printable(prefix)}' two tensors would have one name; give another --strip-prefix"
        )
    if all(a is b or a.name == b.name for a, b in zip(bare, tensors, strict=True)):
        raise WidenError(
            f"{printable(name)}: no tensor name starts with '{printable(prefix)}'; leave --strip-prefix out"
        )
    return bare


def _refuse_quantised(config: ModelConfig) -> None:
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict) and not _in_blocks(quantised):
        method = quantised.get("quant_method") or (
            "bitsandbytes" if quantised.get("load_in_4bit") or quantised.get("load_in_8bit") else "some"
        )
        packed = f"quantization_config says the weights are packed by {printable(str(method))}"
        raise WidenError(
            f"{printable(config.name)}: {packed}; packed codes must not be repeated; "
            "widen the unquantised model and quantise the result"
        )


def _in_blocks(quantised: dict[str, Any]) -> bool:
    """MXFP4, and FP8 with a grid of scales, are widened as they stand."""
    return quantised.get("quant_method") == "mxfp4" or _block_scaled(quantised)


def _block_scaled(quantised: dict[str, Any]) -> bool:
    return quantised.get("quant_method") == "fp8" and isinstance(quantised.get("weight_block_size"), list)


def check_settings(
    architecture: ArchitectureMap, config: ModelConfig, settings: Mapping[str, Any], stated: bool = False
) -> None:
    """Raises WidenError for a `--set` that neither the map nor the config knows, so that a slip is not taken for an answer.

    And for one that says another value than the config, where what that says counts (`stated`), as in a GGUF.
    """
    known = {key for axis in architecture.axes.values() for key in axis.keys}
    known |= {*architecture.defaults, *(key for keys in architecture.repeats.values() for key in keys)}
    known |= {"architectures", "model_type"}
    faults = [
        f"--set {key}: '{architecture.architecture}' has no such config key{did_you_mean(key, known)}; it reads {', '.join(sorted(known))}"
        for key in settings
        if key not in known and key not in config.values
    ]
    faults += [
        f"--set {key}={json.dumps(value)}: the file itself says {json.dumps(config.values[key])}, and a runtime goes by that; leave it out"
        for key, value in settings.items()
        if stated and key in config.values and not _same(value, config.values[key])
    ]
    if faults:
        raise WidenError(*faults)


def _same(said: Any, stated: Any) -> bool:
    """Whether two values are one, as far as a float32 tells."""
    if is_number(said) and is_number(stated):
        return math.isclose(float(said), float(stated), rel_tol=1e-6)
    return bool(said == stated)


@dataclass(frozen=True)
class Choice:
    """The map to go by; where the model is a part of another, the section of its config and what its names begin with.

    `warnings`: names alone may fit several maps.
    """

    architecture: ArchitectureMap
    warnings: tuple[str, ...] = ()
    section: str = ""
    root: str = ""

    @classmethod
    def of(cls, architecture: ArchitectureMap) -> Choice:
        """The choice of a map as it stands, with the section of the config that it speaks of."""
        return cls(architecture, section=architecture.section)


def choose_map(checkpoint: Checkpoint, option: str | None) -> Choice:
    """The map asked for, the one of the config's model_type (or of its text_config's), or the one that the tensor names fit.

    Raises WidenError where none fits, naming the nearest.
    """
    if option is not None:
        named = option.endswith((".yaml", ".yml")) or Path(option).is_file()
        return Choice.of(load_map(Path(option), option) if named else catalog_map(option))
    if checkpoint.gguf is not None:
        return Choice(_map_of_gguf(checkpoint, checkpoint.gguf))
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str):
        found = map_for_model_type(model_type)
        choice = Choice.of(found) if found else _nested(checkpoint)
        if choice is None:
            raise WidenError(_unknown_type(checkpoint, model_type))
        return choice
    return _map_by_names(checkpoint)


SECTION = "text_config"
PREFIX_PARTS = 4  # such as module._orig_mod.


def _nested(checkpoint: Checkpoint) -> Choice | None:
    """Of a model that holds a known one and nothing else, the choice for that part; None for every other."""
    model_type = checkpoint.config.get(f"{SECTION}.model_type")
    found = map_for_model_type(model_type) if isinstance(model_type, str) else None
    root = common_prefix(found, checkpoint.tensors) if found else None
    return Choice(found, (), SECTION, root) if found and root else None


def _map_of_gguf(checkpoint: Checkpoint, model: GgufModel) -> ArchitectureMap:
    architecture = gguf_architecture(model, printable(checkpoint.name))
    found = map_for_gguf(architecture)
    if found is None:
        known = [name.removesuffix(".gguf") for name in map_names() if name.endswith(".gguf")]
        head = (
            f"{printable(checkpoint.name)}: general.architecture '{printable(architecture)}' has no map"
            f"{did_you_mean(architecture, known)}; `widen-ckpt maps` lists those there are, and --map takes one of your own"
        )
        raise WidenError("\n".join([head, *_offer(checkpoint)]))
    return found


def _unknown_type(checkpoint: Checkpoint, model_type: str) -> str:
    config = printable(checkpoint.config.name)
    nested = (
        "; its sizes stand in text_config, and what its other parts are takes a map that knows them"
        if "text_config" in checkpoint.config
        else ""
    )
    head = (
        f"{config}: model_type '{printable(model_type)}' has no map{did_you_mean(model_type, map_names())}{nested}; "
        "`widen-ckpt maps` lists those there are, and --map takes one of your own"
    )
    return "\n".join([head, *_offer(checkpoint)])


def nearest_map(checkpoint: Checkpoint, among: Sequence[str] = ()) -> Fit | None:
    """The map that comes closest to a model by names and shapes; None where no map knows any of its tensors."""
    called = [checkpoint.config.get("general.architecture" if checkpoint.gguf else "model_type")]
    classes = checkpoint.config.get("architectures")
    called += classes if isinstance(classes, list) else []
    names = [name for name in called if isinstance(name, str)]
    return nearest(checkpoint.tensors, checkpoint.config, names, checkpoint.gguf is not None, among)


def _offer(checkpoint: Checkpoint) -> list[str]:
    """Of a model without a map, what to say of the closest one; nothing where its tensors could not all be read."""
    given = "MODEL" if checkpoint.name == "standard input" else shlex.quote(printable(checkpoint.name))
    return [] if checkpoint.faults or not checkpoint.tensors else told(nearest_map(checkpoint), given)


def _fitting(tensors: Sequence[StoredTensor], config: ModelConfig) -> list[str]:
    """The maps under which the fewest weights are unknown and missing; none where half of all are unknown."""
    scores: dict[str, tuple[int, int]] = {}
    ends = name_ends(tensors)
    for name in (name for name in map_names() if not name.endswith(".gguf") and known_names(catalog_map(name), ends)):
        match = match_tensors(catalog_map(name), tensors, config)
        if match.matched:
            scores[name] = (len(match.strangers), len(missing_tensors(catalog_map(name), match, config)))
    best = min(scores.values(), default=(0, 0))
    return [name for name, score in scores.items() if score == best] if best[0] <= len(tensors) // 2 else []


def _prefixed(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """A prefix of all names, such as that of torch.compile, and a map that knows them without it; None where there is none."""
    first = next((tensor.name for tensor in checkpoint.tensors), "")
    ends = [place + 1 for place, letter in enumerate(first) if letter == "."]
    for prefix in (first[:end] for end in ends[:PREFIX_PARTS]):
        if not all(tensor.name.startswith(prefix) for tensor in checkpoint.tensors):
            return None
        bare = [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in checkpoint.tensors]
        if fitting := _fitting(bare, checkpoint.config):
            return prefix, next((name for name in fitting if catalog_map(name).by_names), fitting[0])
    return None


def _map_by_names(checkpoint: Checkpoint) -> Choice:
    """The map under which no weight is unknown and the fewest are missing; of equals the one that may be taken by names."""
    fitting = _fitting(checkpoint.tensors, checkpoint.config)
    if not fitting:
        if found := _prefixed(checkpoint):
            raise WidenError(
                f"{printable(checkpoint.name)}: every tensor name starts with '{printable(found[0])}', and without it the names fit "
                f"the map '{found[1]}': give --strip-prefix {printable(found[0])}"
            )
        nested = "; its sizes stand in text_config" if "text_config" in checkpoint.config else ""
        head = (
            f"{printable(checkpoint.name)}: no config says what model this is, and its tensor names fit no map{nested}; "
            "give --config, or --map with one of `widen-ckpt maps` or of your own"
        )
        raise WidenError("\n".join([head, *_offer(checkpoint)]))
    if len(fitting) == 1:
        return Choice(catalog_map(fitting[0]))
    told = f"{printable(checkpoint.name)}: no config says what model this is, and its tensor names fit {', '.join(fitting)}"
    taken = next((name for name in fitting if catalog_map(name).by_names), None)
    if taken is None:
        raise WidenError(f"{told}; give --config, or --map with one of them")
    return Choice(catalog_map(taken), (f"{told}; taken as {taken}: give --config, or --map if it is another",))
