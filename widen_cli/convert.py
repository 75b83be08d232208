"""The main job: open, plan, check, stream, commit. Everything written is resolved before a byte moves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from widen_cli.checkpoint import Checkpoint, choose_map, open_checkpoint
from widen_cli.config import ModelConfig, parse_settings, read_json
from widen_cli.dtypes import STORED
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.hf_directory import index_bytes, parse_size, plan_shards, shard_names
from widen_cli.outputs import DirectoryOutput, FileOutput, StreamOutput, check_output, check_space, is_stream
from widen_cli.plan import Plan, PlanRequest, TensorPlan, make_plan
from widen_cli.plan.growth import parse_grow
from widen_cli.safetensors_file import StoredTensor, header_bytes
from widen_cli.sources import HeldSource
from widen_cli.stream import BLOCK_BYTES, Target, TensorStream
from widen_cli.transform import Counts

INDEX = "model.safetensors.index.json"
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Options:
    """What the command line said. `output` is a path, a path ending in `/` for a directory, or `-`."""

    input: str
    output: str
    factor: int | None = None
    grow: str | None = None
    scaling: str = "auto"
    dtype: str | None = None
    map: str | None = None
    config: str | None = None
    settings: tuple[str, ...] = ()
    config_out: str | None = None
    strip_prefix: str | None = None
    max_shard_size: str = "5GB"
    force: bool = False
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))


@dataclass(frozen=True)
class Shard:
    """A file to be written: its tensors with their offsets, its header and its whole size."""

    name: str
    tensors: tuple[tuple[TensorPlan, str, int], ...]
    header: bytes
    nbytes: int


@dataclass(frozen=True)
class Job:
    """A run, resolved: what is read, what is planned, and every file that will be written."""

    options: Options
    checkpoint: Checkpoint
    plan: Plan
    shards: tuple[Shard, ...]
    config: ModelConfig
    config_target: Path | None
    directory: bool

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


@dataclass(frozen=True)
class Report:
    """What a run did: per stored tensor, what happened to its values."""

    job: Job
    counts: dict[str, Counts]

    @property
    def total(self) -> Counts:
        total = Counts()
        for counts in self.counts.values():
            total.add(counts)
        return total


def prepare(options: Options) -> Job:
    """Opens and plans, and checks input, request and output. Raises WidenError with all faults of the run together."""
    directory = options.output.endswith("/") or (options.input != "-" and Path(options.input).is_dir())
    request = _request(options)
    shard_limit = parse_size(options.max_shard_size)
    with Faults() as faults:
        inputs = [Path(options.input)] if options.input != "-" else []
        try:
            check_output(
                options.output, inputs + ([Path(options.config)] if options.config else []), options.force, directory
            )
        except WidenError as error:
            for text in error.faults:
                faults.add(text)
        checkpoint = open_checkpoint(
            options.input, options.config, parse_settings(options.settings), options.strip_prefix
        )
        plan = make_plan(choose_map(checkpoint, options.map), checkpoint.tensors, checkpoint.config, request)
        _check_equal(checkpoint, plan)
        config_target = _config_target(options, checkpoint, directory)
        if config_target is not None and not directory:
            check_output(str(config_target), checkpoint.files, options.force, False)
        shards = _shards(plan, checkpoint, shard_limit if directory else None)
    job = Job(options, checkpoint, plan, shards, _changed_config(checkpoint.config, plan), config_target, directory)
    if not is_stream(options.output):
        check_space(
            Path(os.path.realpath(options.output.rstrip("/"))).parent, job.nbytes, max(shard.nbytes for shard in shards)
        )
    return job


def _request(options: Options) -> PlanRequest:
    grow = parse_grow(options.grow) if options.grow else {}
    factor = options.factor if options.factor is not None or grow else 2
    dtype = STORED[options.dtype] if options.dtype else None
    return PlanRequest(options.input, factor, grow, options.scaling, dtype)


def _check_equal(checkpoint: Checkpoint, plan: Plan) -> None:
    """Two stored copies of one tied weight have to hold the same values, or the loader decides which of them counts."""
    stored = {tensor.name: tensor for tensor in checkpoint.tensors}
    for head, table in plan.equal_pairs:
        if not checkpoint.sequential and not _same_bytes(stored[head], stored[table]):
            raise WidenError(
                f"{printable(checkpoint.name)}: the config ties '{printable(head)}' to '{printable(table)}', but their values "
                f"differ, and loaders disagree on which counts; remove '{printable(head)}', or say --set tie_word_embeddings=false"
            )


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for start in range(0, one.nbytes, BLOCK_BYTES):
        length = min(BLOCK_BYTES, one.nbytes - start)
        if one.source.read(one.offset + start, length) != other.source.read(other.offset + start, length):
            return False
    return True


def _config_target(options: Options, checkpoint: Checkpoint, directory: bool) -> Path | None:
    if options.config_out:
        return Path(options.config_out)
    if not checkpoint.config.present or is_stream(options.output):
        return None
    if directory:
        return Path("config.json")
    return Path(options.output).with_name(f"{Path(options.output).stem}.config.json")


def _changed_config(config: ModelConfig, plan: Plan) -> ModelConfig:
    return config.with_values({change.key: change.new for change in plan.config})


def _shards(plan: Plan, checkpoint: Checkpoint, limit: int | None) -> tuple[Shard, ...]:
    written = [(tensor, name) for tensor in plan.tensors for name in tensor.names]
    sizes = [(name, tensor.dtype.nbytes(tensor.shape)) for tensor, name in written]
    groups = plan_shards(sizes, limit) if limit else [list(range(len(written)))]
    shards = []
    for file, group in zip(shard_names(len(groups)), groups, strict=True):
        chosen = [written[number] for number in group]
        header, offsets = header_bytes(
            [(name, tensor.dtype, tensor.shape) for tensor, name in chosen], checkpoint.metadata
        )
        nbytes = len(header) + sum(sizes[number][1] for number in group)
        placed = tuple((tensor, name, offset) for (tensor, name), offset in zip(chosen, offsets, strict=True))
        shards.append(Shard(file, placed, header, nbytes))
    return tuple(shards)


def run(job: Job, progress: Progress) -> Report:
    """Carries a job out. Nothing stands at the target before all of it is written; raises WidenError when the system refuses."""
    counts: dict[str, Counts] = {}
    stream = TensorStream(job.options.threads)
    try:
        if job.directory:
            _write_directory(job, stream, counts, progress)
        else:
            _write_file(job, stream, counts, progress)
    finally:
        stream.close()
        job.checkpoint.close()
    return Report(job, counts)


def _write_file(job: Job, stream: TensorStream, counts: dict[str, Counts], progress: Progress) -> None:
    (shard,) = job.shards
    with ExitStack() as stack:
        # The config is entered first, so that it is renamed last: weights without a config are seen, a config without weights misleads.
        if job.config_target is not None:
            stack.enter_context(FileOutput(job.config_target)).write_at(0, job.config.to_bytes())
        if is_stream(job.options.output):
            with StreamOutput(job.options.output) as output:
                _write_shard(job, shard, output, stream, counts, progress, forward_only=True)
                job.checkpoint.read_to_end()
        else:
            with FileOutput(job.options.output, shard.nbytes) as output:
                _write_shard(job, shard, output, stream, counts, progress, forward_only=False)
                job.checkpoint.read_to_end()


def _write_directory(job: Job, stream: TensorStream, counts: dict[str, Counts], progress: Progress) -> None:
    with DirectoryOutput(job.options.output.rstrip("/"), job.options.force) as folder, ExitStack() as stack:
        for shard in job.shards:
            with folder.open(shard.name, shard.nbytes) as output:
                _write_shard(job, shard, output, stream, counts, progress, forward_only=False)
        job.checkpoint.read_to_end()
        if len(job.shards) > 1:
            weight_map = {name: shard.name for shard in job.shards for _, name, _ in shard.tensors}
            total = sum(tensor.dtype.nbytes(tensor.shape) for shard in job.shards for tensor, _, _ in shard.tensors)
            _write_bytes(folder, INDEX, index_bytes(weight_map, total))
        if job.options.config_out and job.config_target is not None:
            stack.enter_context(FileOutput(job.config_target)).write_at(0, job.config.to_bytes())
        elif job.config.present:
            _write_bytes(folder, "config.json", job.config.to_bytes())
        _write_companions(job, folder)


def _write_bytes(folder: DirectoryOutput, name: str, data: bytes) -> None:
    with folder.open(name, len(data)) as output:
        output.write_at(0, data)


def _write_companions(job: Job, folder: DirectoryOutput) -> None:
    """Copies what lies beside the weights; a sidecar that states a width gets the new one."""
    if job.checkpoint.directory is None:
        return
    source = Path(job.options.input)
    for relative in job.checkpoint.directory.companions:
        grown = next(
            (keys for pattern, keys in job.plan.sidecars.items() if fnmatchcase(relative.as_posix(), pattern)), None
        )
        if grown is None:
            folder.copy(source / relative, relative.as_posix())
        else:
            values = read_json(source / relative, "a sidecar config")
            values = {
                key: value * grown.get(key, 1) if isinstance(value, int) and key in grown else value
                for key, value in values.items()
            }
            _write_bytes(folder, relative.as_posix(), (json.dumps(values, indent=2) + "\n").encode())


def _write_shard(
    job: Job,
    shard: Shard,
    output: FileOutput | StreamOutput,
    stream: TensorStream,
    counts: dict[str, Counts],
    progress: Progress,
    forward_only: bool,
) -> None:
    output.write_at(0, shard.header)
    stored = {tensor.name: tensor for tensor in job.checkpoint.tensors}
    for tensor, name, offset in shard.tensors:
        source = stored[tensor.source.name]
        if source.source.sequential and len(tensor.names) > 1:
            # A pipe passes once; what is written under several names (per-head vectors) is small enough to hold.
            held = HeldSource(source.source.name, source.source.read(source.offset, source.nbytes))
            source = stored[tensor.source.name] = replace(source, source=held, offset=0)
        counted = stream.run(tensor, source, [Target(output, offset)], forward_only)
        if name == tensor.names[0]:
            counts[tensor.source.name] = counted
        progress(tensor.dtype.nbytes(tensor.shape))
