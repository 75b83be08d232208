"""Opens what the user names: a safetensors or PyTorch file, a Hugging Face directory, or a pipe; with the config that goes with it."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from widen_cli.config import ModelConfig, read_config
from widen_cli.errors import Faults, WidenError, is_text, printable
from widen_cli.gguf.checkpoint import metadata_config, stored_tensors
from widen_cli.gguf.header import GGUF_MAGIC, expect_end
from widen_cli.gguf.model import GgufModel, open_gguf
from widen_cli.gguf.values import GgufValue, ValueType
from widen_cli.hf_directory import HfDirectory, open_directory
from widen_cli.plan.match import WITH_BASE
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
