"""The files that a run writes, resolved: which tensors go where, and each file's header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from widen_cli.checkpoint import Checkpoint
from widen_cli.errors import WidenError, printable
from widen_cli.gguf.checkpoint import changed_metadata, tensor_type
from widen_cli.gguf.model import GgufModel, plan_parts
from widen_cli.hf_directory import parse_size, plan_shards, shard_names
from widen_cli.output_checks import is_stream
from widen_cli.plan import Plan, TensorPlan
from widen_cli.safetensors_file import header_bytes

SHARD_SIZE = "5GB"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"  # the one file that PEFT looks for


@dataclass(frozen=True)
class Shard:
    """A file to be written: its tensors with their offsets, its header, where zeros fill gaps, and its whole size."""

    name: str
    tensors: tuple[tuple[TensorPlan, str, int], ...]
    header: bytes
    nbytes: int
    gaps: tuple[tuple[int, int], ...] = ()


def output_shards(
    plan: Plan, checkpoint: Checkpoint, given: str, output: str, max_size: str | None, directory: bool
) -> tuple[Shard, ...]:
    """The files of an output, in the input's format.

    A safetensors file is one, a directory's are of at most `max_size`; a GGUF is one, or numbered parts where `max_size` is
    given. Raises WidenError for a size that cannot be read, and for parts that would go into one stream.
    """
    limit = parse_size(max_size or SHARD_SIZE)
    if checkpoint.gguf is None:
        return _safetensors_shards(plan, checkpoint, limit if directory and not checkpoint.adapter else None)
    file = Path(given if directory else output).name
    shards = _gguf_shards(plan, checkpoint.gguf, printable(checkpoint.name), file, limit if max_size else None)
    if len(shards) > 1 and is_stream(output):
        raise WidenError(
            f"--max-shard-size {max_size}: {len(shards)} parts cannot go into one stream; leave it out, or name a file"
        )
    return shards


def _safetensors_shards(plan: Plan, checkpoint: Checkpoint, limit: int | None) -> tuple[Shard, ...]:
    written = [(tensor, name) for tensor in plan.tensors for name in tensor.names]
    sizes = [(name, tensor.dtype.nbytes(tensor.shape)) for tensor, name in written]
    groups = plan_shards(sizes, limit) if limit else [list(range(len(written)))]
    shards = []
    names = [ADAPTER] if checkpoint.adapter else shard_names(len(groups))
    for file, group in zip(names, groups, strict=True):
        chosen = [written[number] for number in group]
        header, offsets = header_bytes(
            [(name, tensor.dtype, tensor.shape) for tensor, name in chosen], checkpoint.metadata
        )
        nbytes = len(header) + sum(sizes[number][1] for number in group)
        placed = tuple((tensor, name, offset) for (tensor, name), offset in zip(chosen, offsets, strict=True))
        shards.append(Shard(file, placed, header, nbytes))
    return tuple(shards)


def _gguf_shards(plan: Plan, model: GgufModel, name: str, file: str, limit: int | None) -> tuple[Shard, ...]:
    """One file, or numbered parts where --max-shard-size asks for them."""
    values = changed_metadata(model, name, [(change.key, change.new) for change in plan.config])
    written = [(tensor, name) for tensor in plan.tensors for name in tensor.names]
    entries = [(name, tensor_type(tensor.dtype), tensor.shape) for tensor, name in written]
    shards = []
    for part in plan_parts(values, entries, file, limit):
        placed = tuple((*written[number], offset) for number, offset in zip(part.tensors, part.offsets, strict=True))
        shards.append(Shard(part.name, placed, part.header, part.nbytes, part.gaps))
    return tuple(shards)
