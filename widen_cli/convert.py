"""The main job: open, plan, check, stream, commit. Everything written is resolved before a byte moves."""

from __future__ import annotations

import math
import os
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from widen_cli.adapters import open_adapter, plan_with_base, refuse_alone
from widen_cli.checkpoint import Checkpoint, Choice, check_settings, choose_map, open_checkpoint
from widen_cli.companions import companions_of
from widen_cli.config import ModelConfig, parse_settings
from widen_cli.dtypes import STORED
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.folders import DirectoryOutput, PartsOutput, Staging
from widen_cli.gguf.checkpoint import described_anew
from widen_cli.hf_directory import index_bytes
from widen_cli.journal import Identity, Leftover
from widen_cli.map_rules import ArchitectureMap
from widen_cli.maps import map_from_text
from widen_cli.options import Options
from widen_cli.output_checks import check_output, is_stream
from widen_cli.outputs import FileOutput, StreamOutput, commit
from widen_cli.plan import Plan, PlanRequest, TensorPlan, check_names, make_plan, unread_epsilons
from widen_cli.plan.growth import parse_grow
from widen_cli.plan.match import StoredHeader
from widen_cli.plan.result import EXACT, ConfigChange, Ones, Twin
from widen_cli.plan.written import WrittenTypes
from widen_cli.records import Record, Was
from widen_cli.resuming import identity_of, resumed, to_resume
from widen_cli.safetensors_file import StoredTensor
from widen_cli.shards import Shard, output_shards
from widen_cli.sources import HashingSource, HeldSource
from widen_cli.stream import BLOCK_BYTES, Stream, Target, TensorStream, Writer
from widen_cli.targets import check_parts, check_room, check_targets, config_target_of, unsaved
from widen_cli.transform import Counts

INDEX = "model.safetensors.index.json"
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """A run, resolved: what is read, what is planned, and every file that will be written.

    `config_target` is where the config goes if not into the output folder; `companions` are the folder's other files, to
    be copied or with their new content. `identity` is that of a run that can be resumed later, `leftover` the interrupted
    run that this one goes on from.
    """

    options: Options
    checkpoint: Checkpoint
    plan: Plan
    shards: tuple[Shard, ...]
    config: ModelConfig
    config_target: str | None
    directory: bool
    companions: dict[str, Path | bytes]
    warnings: tuple[str, ...]
    identity: Identity | None = None
    leftover: Leftover | None = None

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


@dataclass(frozen=True)
class Report:
    """What a run did: per stored tensor, what happened to its values; `notes` say what was made of an interrupted run."""

    job: Job
    counts: dict[str, Counts]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> Counts:
        total = Counts()
        for counts in self.counts.values():
            total.add(counts)
        return total


def prepare(options: Options) -> Job:
    """Opens and plans, and checks input, request and output. Raises WidenError with all faults of the run together.

    What speaks only against the output does not stop a dry run: it becomes a warning.
    """
    directory = options.output.endswith("/") or (options.input != "-" and os.path.isdir(options.input))
    with ExitStack() as refused, Faults() as faults:
        request = _request(options)
        checkpoint = _opened(options, request.settings, faults)
        refused.callback(checkpoint.close)
        config_target = config_target_of(options, checkpoint, directory)
        doubts = Faults() if options.dry_run else faults
        check_targets(options, checkpoint, config_target, directory, doubts)
        checkpoint, plan, doubtful = _planned(options, checkpoint, request, faults)
        companions = companions_of(checkpoint, options.input, options.output, plan.sidecars)
        shards = output_shards(plan, checkpoint, options.input, options.output, options.max_shard_size, directory)
        identity = identity_of(plan, checkpoint, shards, options)
        leftover: Leftover | None = None
        told: tuple[str, ...] = ()
        with doubts.collecting():
            leftover, told = to_resume(options, identity, directory)
        with doubts.collecting():
            check_parts(options, checkpoint, shards, directory, leftover)
            check_room(options, shards, companions, leftover)
        if not faults.texts:
            refused.pop_all()
    config = _changed_config(checkpoint.config, plan)
    warnings = (*checkpoint.warnings, *doubtful, *plan.warnings)
    if options.named:
        warnings += told
        warnings += unsaved(plan, checkpoint, config_target, options, directory)
        warnings += tuple(doubts.texts) if options.dry_run else ()
    return Job(
        options, checkpoint, plan, shards, config, config_target, directory, companions, warnings, identity, leftover
    )


def _planned(
    options: Options, checkpoint: Checkpoint, request: PlanRequest, faults: Faults
) -> tuple[Checkpoint, Plan, tuple[str, ...]]:
    """The input with its map's part of the config, its plan, and what is doubtful about either."""
    if options.base is not None:
        plan, told = plan_with_base(
            checkpoint, options.base, options.config, options.map, options.strip_prefix, request
        )
        return _recorded(options, checkpoint, plan, None), plan, told
    refuse_alone(checkpoint)
    choice = chosen_map(options, checkpoint)
    architecture, request = choice.architecture, replace(request, root=choice.root)
    checkpoint = replace(checkpoint, config=checkpoint.config.within(choice.section))
    with faults.collecting():
        check_settings(architecture, checkpoint.found_config, request.settings, checkpoint.gguf is not None)
    if checkpoint.faults:
        check_names(architecture, checkpoint.tensors, checkpoint.config, checkpoint.name, choice.root)
        raise WidenError(*checkpoint.faults)
    unread = () if options.map is None else unread_epsilons(architecture, checkpoint.config, options.map)
    plan = make_plan(architecture, checkpoint.tensors, checkpoint.config, request)
    plan = _described(plan, checkpoint, options)
    check_equal(checkpoint, plan)
    return _recorded(options, checkpoint, plan, architecture), plan, (*choice.warnings, *unread)


def chosen_map(options: Options, checkpoint: Checkpoint) -> Choice:
    """The map to go by; where an output is derived again, the one that it was made by."""
    if options.recorded_map is None:
        return choose_map(checkpoint, options.map)
    recorded = map_from_text(options.recorded_map, "the recorded map")
    return (
        Choice(recorded) if options.recorded_map_alone else replace(choose_map(checkpoint, None), architecture=recorded)
    )


def _recorded(options: Options, checkpoint: Checkpoint, plan: Plan, architecture: ArchitectureMap | None) -> Checkpoint:
    """The input with the record of this run in the metadata that is carried over."""
    found = checkpoint.found_config.within(checkpoint.config.inside)
    # A GGUF's metadata take no settings.
    settings = () if checkpoint.gguf else parse_settings(options.settings)
    was = Was.of(plan, found, _changed_config(checkpoint.config, plan), settings)
    record = Record.of(options, plan, architecture, checkpoint.record, was)
    return checkpoint.with_record(record.text)


def _opened(options: Options, settings: dict[str, Any], faults: Faults) -> Checkpoint:
    """The input; where it cannot be opened, the output is looked at all the same, so that all faults come together."""
    if options.output == "-" and sys.stdout is None and not options.dry_run:
        raise WidenError("standard output: is closed; send it somewhere, or name a file")
    try:
        if options.base is not None:
            checkpoint = open_adapter(options.input, options.base)
        else:
            checkpoint = open_checkpoint(options.input, options.config, settings, options.strip_prefix)
    except WidenError:
        known = tuple(Path(path) for path in (options.input, options.config) if path and path != "-")
        directory = options.output.endswith("/") or os.path.isdir(options.input)
        # What the output has to be is told by the input, so of one that is not there no more is said.
        if not options.dry_run and (options.input == "-" or os.path.lexists(options.input)):
            with faults.collecting():
                check_output(options.output, known, options.force, directory)
        raise
    for text in checkpoint.faults:
        faults.add(text)
    return checkpoint


def _request(options: Options) -> PlanRequest:
    grow = parse_grow(options.grow) if options.grow is not None else {}
    factor = options.factor if options.factor is not None or grow else 2
    asked = (options.dtype, options.dequantize, options.embedding_type)
    types = WrittenTypes(*(STORED[name] if name else None for name in asked))
    name = "standard input" if options.input == "-" else options.input
    settings = parse_settings(options.settings)
    asked_of = (options.scaling, types, settings, options.layout, options.rope)
    return PlanRequest(name, factor, grow, *asked_of, untie=options.untie)


def _described(plan: Plan, checkpoint: Checkpoint, options: Options) -> Plan:
    """The plan with what a GGUF's metadata says of the model as a whole."""
    if checkpoint.gguf is None:
        return plan
    shapes = [(name, tensor.shape) for tensor in plan.tensors for name in tensor.names]
    retyped = any(tensor.source.dtype != tensor.dtype for tensor in plan.tensors)
    changes = described_anew(checkpoint.found_config, shapes, options.dequantize if retyped else None)
    asked = {"--dequantize": options.dequantize, "--embedding-type": options.embedding_type}
    warnings = [
        f"{option} {value.lower()}: no tensor it is for holds quantised blocks or narrower numbers, so it has no effect"
        for option, value in asked.items()
        if value and not retyped
    ]
    config = (*plan.config, *(ConfigChange(key, old, new, EXACT) for key, old, new in changes))
    return replace(plan, config=config, warnings=(*plan.warnings, *warnings))


def check_equal(checkpoint: Checkpoint, plan: Plan) -> None:
    """Two stored copies of one tied weight have to hold the same values, or the loader decides which of them counts."""
    stored = {tensor.name: tensor for tensor in checkpoint.tensors}
    for head, table in plan.equal_pairs:
        if not checkpoint.sequential and not _same_bytes(stored[head], stored[table]):
            raise _unequal(checkpoint, head, table)


def _unequal(checkpoint: Checkpoint, head: str, table: str) -> WidenError:
    return WidenError(
        f"{printable(checkpoint.name)}: the config ties '{printable(head)}' to '{printable(table)}', but their values "
        f"differ, and loaders disagree on which counts; remove '{printable(head)}', or say --set tie_word_embeddings=false"
    )


def _tied_digests(job: Job) -> dict[str, HashingSource]:
    """Of a pipe, whose tied copies can be compared only as they pass: what hashes them."""
    if not job.checkpoint.sequential:
        return {}
    tied = {name for pair in job.plan.equal_pairs for name in pair}
    return {tensor.name: HashingSource(tensor.source) for tensor in job.checkpoint.tensors if tensor.name in tied}


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for start in range(0, one.nbytes, BLOCK_BYTES):
        length = min(BLOCK_BYTES, one.nbytes - start)
        if one.source.read(one.offset + start, length) != other.source.read(other.offset + start, length):
            return False
    return True


def _changed_config(config: ModelConfig, plan: Plan) -> ModelConfig:
    return config.with_values({change.key: change.new for change in plan.config})


def run(job: Job, progress: Progress, stream: Stream | None = None) -> Report:
    """Carries a job out, by `stream` if it is not to be widened. Nothing stands at the target before all of it is written;
    raises WidenError when the system refuses."""
    stream = stream or TensorStream(job.options.threads)
    writing = _Writing(job, stream, progress)
    try:
        if job.directory:
            _write_directory(job, writing)
        elif len(job.shards) > 1:
            _write_parts(job, writing)
        else:
            _write_file(job, writing)
    finally:
        stream.close()
        job.checkpoint.close()
    return Report(job, writing.counts, tuple(writing.notes))


def derive(job: Job, place: Callable[[str], Writer | None], progress: Progress) -> Report:
    """Hands every tensor's new bytes, from offset 0 on, to the writer that `place` gives for its name, and writes no file."""
    stream = TensorStream(job.options.threads)
    writing = _Writing(job, stream, progress)
    try:
        for tensor in job.plan.tensors:
            for name in tensor.names:
                writer = place(name)
                if writer is not None:
                    counted = stream.run(tensor, writing.source(tensor), [Target(writer, 0)], forward_only=False)
                    writing.counts[tensor.source.name] = counted
                progress(tensor.dtype.nbytes(tensor.shape))
        stream.finish()
        writing.finish()
    finally:
        stream.close()
    return Report(job, writing.counts)


def _ones(header: StoredHeader | Ones) -> StoredTensor:
    """A made tensor as if it had been stored."""
    data = struct.pack("<f", 1.0) * math.prod(header.shape)
    return StoredTensor(header.name, header.dtype, header.shape, 0, len(data), HeldSource(header.name, data))


class _Writing:
    """The tensors of one run on their way: what is read of the input is kept track of over all output files."""

    def __init__(self, job: Job, stream: Stream, progress: Progress) -> None:
        self.job = job
        self.stream = stream
        self.progress = progress
        self.counts: dict[str, Counts] = {}
        self.notes: list[str] = []
        self.hashing = _tied_digests(job)
        self.stored = {
            tensor.name: replace(tensor, source=self.hashing.get(tensor.name, tensor.source))
            for tensor in job.checkpoint.tensors
        }
        self.twinned = {plan.stored_name for plan in job.plan.tensors if isinstance(plan.source, Twin)}
        self.stored |= {plan.source.name: _ones(plan.source) for plan in job.plan.tensors if plan.made}

    def shard(self, shard: Shard, output: FileOutput | StreamOutput, forward_only: bool) -> None:
        """Writes one file: its header, its tensors, and zeros where its format wants gaps filled."""
        try:
            output.write_at(0, shard.header)
            self.tensors(shard, output, forward_only)
            self.stream.finish()
        except BaseException:
            # The output is about to be given up, and its descriptor may soon be another file's.
            self.stream.abandon()
            raise

    def shards(self, staging: Staging) -> None:
        """Writes every file of the output but those that an interrupted run had finished."""
        kept, changed = staging.recover(self.progress)
        self.notes += resumed(self.job.shards, kept, changed)
        for shard in self.job.shards:
            if shard.name in kept:
                self.counts |= {name: Counts(*counts) for name, counts in kept[shard.name].counts.items()}
                continue
            with staging.open(shard.name, shard.nbytes) as output:
                self.shard(shard, output, forward_only=False)
            staging.note(shard.name, output, self.counted(shard))
        self.finish()

    def counted(self, shard: Shard) -> dict[str, tuple[int, int, int]]:
        """What happened to the values of a file's tensors; of one written under several names, in the first one's file."""
        own = [tensor.source.name for tensor, name, _ in shard.tensors if name == tensor.names[0]]
        found = {name: self.counts[name] for name in own}
        return {name: (counts.values, counts.rounded, counts.overflowed) for name, counts in found.items()}

    def tensors(self, shard: Shard, output: FileOutput | StreamOutput, forward_only: bool) -> None:
        gaps = dict(zip((name for _, name, _ in shard.tensors), shard.gaps, strict=True)) if shard.gaps else {}
        for tensor, name, offset in shard.tensors:
            counted = self.stream.run(tensor, self.source(tensor), [Target(output, offset)], forward_only)
            if name == tensor.names[0]:
                self.counts[tensor.source.name] = counted
            self.progress(tensor.dtype.nbytes(tensor.shape))
            if name in gaps:
                where, zeros = gaps[name]
                output.write_at(where, bytes(zeros))

    def source(self, tensor: TensorPlan) -> StoredTensor:
        """The stored tensor; held in memory where a pipe, which passes once, is to be written under several names."""
        name = tensor.stored_name
        stored = self.stored[name]
        if stored.source.sequential and (len(tensor.names) > 1 or name in self.twinned):
            held = HeldSource(stored.source.name, stored.source.read(stored.offset, stored.nbytes))
            stored = self.stored[name] = replace(stored, source=held, offset=0)
        return stored

    def finish(self) -> None:
        """Reads a pipe to its end and compares its tied weights, before anything is put in place."""
        self.job.checkpoint.read_to_end()
        for head, table in self.job.plan.equal_pairs if self.hashing else ():
            if self.hashing[head].digest() != self.hashing[table].digest():
                raise _unequal(self.job.checkpoint, head, table)


def _write_file(job: Job, writing: _Writing) -> None:
    (shard,) = job.shards
    with ExitStack() as stack:
        config = _open_config(job, stack)
        if is_stream(job.options.output):
            with StreamOutput(job.options.output) as output:
                writing.shard(shard, output, forward_only=True)
                writing.finish()
            commit(*config)
            return
        file = stack.enter_context(FileOutput(job.options.output, shard.nbytes, job.options.force))
        writing.shard(shard, file, forward_only=False)
        writing.finish()
        commit(file, *config)


def _write_parts(job: Job, writing: _Writing) -> None:
    """The numbered parts of a GGUF."""
    with ExitStack() as stack:
        config = _open_config(job, stack)
        names = [shard.name for shard in job.shards]
        parts = PartsOutput(job.options.output, names, job.options.force, job.identity, job.leftover)
        writing.shards(stack.enter_context(parts))
        commit(parts, *config)


def _open_config(job: Job, stack: ExitStack) -> list[FileOutput]:
    """Writes a config of its own; what is to be put in place with the weights, and after them.

    Weights alone are seen to be alone, a config alone misleads.
    """
    if job.config_target is None:
        return []
    if is_stream(job.config_target):
        stack.enter_context(StreamOutput(job.config_target)).write_at(0, job.config.to_bytes())
        return []
    output = stack.enter_context(FileOutput(job.config_target, force=job.options.force))
    output.write_at(0, job.config.to_bytes())
    return [output]


def _write_directory(job: Job, writing: _Writing) -> None:
    with ExitStack() as stack:
        config = _open_config(job, stack)
        target = job.options.output.rstrip("/")
        folder = stack.enter_context(DirectoryOutput(target, job.options.force, job.identity, job.leftover))
        writing.shards(folder)
        # The parts of a GGUF name each other; an index and a config.json are safetensors affairs.
        if len(job.shards) > 1 and not job.checkpoint.gguf:
            weight_map = {name: shard.name for shard in job.shards for _, name, _ in shard.tensors}
            total = sum(tensor.dtype.nbytes(tensor.shape) for shard in job.shards for tensor, _, _ in shard.tensors)
            _write_bytes(folder, INDEX, index_bytes(weight_map, total))
        if job.config_target is None and job.config.present and not job.checkpoint.gguf:
            _write_bytes(folder, "config.json", job.config.to_bytes())
        for name, content in job.companions.items():
            if isinstance(content, bytes):
                _write_bytes(folder, name, content)
            else:
                folder.copy(content, name)
        commit(folder, *config)


def _write_bytes(folder: DirectoryOutput, name: str, data: bytes) -> None:
    with folder.open(name, len(data)) as output:
        output.write_at(0, data)
