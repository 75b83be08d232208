"""Carries a job out: every tensor streams through the transform to its place, and all files are put in place together."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from widen_cli.complete import told_complete
from widen_cli.folders import DirectoryOutput, PartsOutput, Staging
from widen_cli.jobs import Job, Progress, Report
from widen_cli.output_checks import is_stream
from widen_cli.outputs import FileOutput, StreamOutput, commit
from widen_cli.plan import TensorPlan
from widen_cli.plan.match import StoredHeader
from widen_cli.plan.result import Ones, Twin
from widen_cli.resuming import resumed
from widen_cli.safetensors_file import StoredTensor
from widen_cli.sharding import index_bytes
from widen_cli.shards import INDEX, Shard
from widen_cli.sources import HeldSource
from widen_cli.stream import Stream, Target, TensorStream, Writer
from widen_cli.tied import tied_digests, unequal
from widen_cli.transform import Counts
from widen_cli.views import ViewSource


def run(job: Job, progress: Progress, stream: Stream | None = None) -> Report:
    """Carries a job out, by `stream` if it is not to be widened. Nothing stands at the target before all of it is written;
    raises WidenError when the system refuses."""
    if job.complete:
        job.checkpoint.close()
        return Report(job, {}, (told_complete(job),))
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
        self.hashing = tied_digests(job.checkpoint, job.plan)
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
        again = stored.source.sequential and (len(tensor.names) > 1 or name in self.twinned)
        if isinstance(stored.source, ViewSource):
            stored = replace(stored, source=stored.source.taken())
            if again:
                self.stored[name] = stored
            return stored
        if again:
            held = HeldSource(stored.source.name, stored.source.read(stored.offset, stored.nbytes))
            stored = self.stored[name] = replace(stored, source=held, offset=0)
        return stored

    def finish(self) -> None:
        """Reads a pipe to its end and compares its tied weights, before anything is put in place."""
        self.job.checkpoint.read_to_end()
        for head, table in self.job.plan.equal_pairs if self.hashing else ():
            if self.hashing[head].digest() != self.hashing[table].digest():
                raise unequal(self.job.checkpoint, head, table)


def _write_file(job: Job, writing: _Writing) -> None:
    (shard,) = job.shards
    with ExitStack() as stack:
        beside = _open_beside(job, stack)
        if is_stream(job.options.output):
            with StreamOutput(job.options.output) as output:
                writing.shard(shard, output, forward_only=True)
                writing.finish()
            commit(*beside)
            return
        file = stack.enter_context(FileOutput(job.options.output, shard.nbytes, job.options.force))
        writing.shard(shard, file, forward_only=False)
        writing.finish()
        commit(file, *beside)


def _write_parts(job: Job, writing: _Writing) -> None:
    """The numbered parts of a GGUF."""
    with ExitStack() as stack:
        beside = _open_beside(job, stack)
        names = [shard.name for shard in job.shards]
        parts = PartsOutput(job.options.output, names, job.options.force, job.identity, job.leftover)
        writing.shards(stack.enter_context(parts))
        commit(parts, *beside)


def _open_beside(job: Job, stack: ExitStack, folder: DirectoryOutput | None = None) -> list[FileOutput]:
    """Writes a config of its own and what else is no part of the model; what is to be put in place with the weights."""
    return [*_open_config(job, stack), *(output for each in job.beside for output in each.write(stack, folder))]


def _open_config(job: Job, stack: ExitStack) -> list[FileOutput]:
    """Writes a config of its own; what is to be put in place with the weights, and before them."""
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
        target = job.options.output.rstrip("/")
        folder = stack.enter_context(DirectoryOutput(target, job.options.force, job.identity, job.leftover))
        writing.shards(folder)
        beside = _open_beside(job, stack, folder)
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
        commit(folder, *beside)


def _write_bytes(folder: DirectoryOutput, name: str, data: bytes) -> None:
    with folder.open(name, len(data)) as output:
        output.write_at(0, data)
