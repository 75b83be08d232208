"""Whether a run can go on from an interrupted one: only if both make the same bytes of the same input."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from widen_cli import __version__
from widen_cli.checkpoint import Checkpoint
from widen_cli.errors import WidenError, printable
from widen_cli.journal import Finished, Identity, Leftover, left_by_dead_runs
from widen_cli.options import Options
from widen_cli.output_checks import is_stream
from widen_cli.plan import Plan, TensorPlan
from widen_cli.shards import Shard

# Options that decide where the output goes and how it is made, not what it is.
_OTHER = {
    "input",
    "output",
    "config_out",
    "optimizer",
    "new_parameters",
    "recorded_map",
    "recorded_map_alone",
    "force",
    "resume",
    "dry_run",
    "named",
    "threads",
}


def identity_of(plan: Plan, checkpoint: Checkpoint, shards: tuple[Shard, ...], options: Options) -> Identity | None:
    """The identity of a run of several files; None for one that cannot be resumed: of one file, or of a pipe.

    Everything that is written follows from the headers, which hold the record of the run, from the plan and from the
    input. That the input is the same is told by its files' names, sizes and times: hashing it would take as long as
    reading it all once more.
    """
    if len(shards) == 1 or checkpoint.sequential or is_stream(options.output):
        return None
    made = hashlib.sha256()
    for shard in shards:
        header = hashlib.sha256(shard.header).hexdigest()
        made.update(repr((shard.name, shard.nbytes, header, shard.gaps)).encode("utf-8", "surrogatepass"))
    for tensor in plan.tensors:
        made.update(_written(tensor).encode("utf-8", "surrogatepass"))
    files = (path for path in checkpoint.files if path != checkpoint.config_path and path.is_file())
    inputs = {printable(path.name): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
    return Identity(tool=__version__, made=made.hexdigest(), inputs=inputs, asked=_asked(options))


def _asked(options: Options) -> str:
    """The options that decide what is written, as they are given on a command line."""
    words: list[str] = []
    for field in fields(options):
        value, flag = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if isinstance(value, tuple):
            words += [f"{'--set' if field.name == 'settings' else flag} {each}" for each in value]
        elif field.name not in _OTHER and value != field.default:
            words.append(flag if value is True else f"{flag} {value}")
    return printable(" ".join(words))


def _written(tensor: TensorPlan) -> str:
    """Everything that decides a tensor's bytes, but for the stored ones."""
    source = (tensor.source.name, tensor.source.dtype, tensor.source.shape, getattr(tensor.source, "offset", None))
    factors = (tensor.growth, tensor.scale, tensor.offset, tensor.copy_factors, tensor.seed, tensor.split)
    return repr((source, tensor.names, tensor.dtype, *factors))


def to_resume(options: Options, identity: Identity | None, directory: bool) -> tuple[Leftover | None, tuple[str, ...]]:
    """The interrupted run to go on from, and what is to be said where there is none or it is not asked for.

    Raises WidenError where --resume is asked for and all that is left was made with other options or of another input.
    """
    if identity is None:
        told = "--resume: only what is written as several files can be resumed, and not from a pipe; this is made anew"
        return None, (told,) if options.resume else ()
    found = left_by_dead_runs(staging_target(options.output, directory))
    same = [leftover for leftover in found if leftover.identity.is_that_of(identity)]
    best = max(same, key=lambda leftover: leftover.nbytes, default=None)
    if options.resume and best is None:
        if found:
            raise WidenError(*(_other(leftover, identity) for leftover in found))
        return None, (
            f"--resume: no interrupted run has left finished files for {printable(options.output)}; this is made anew",
        )
    if best is None or options.resume:
        return best, ()
    return None, (
        f"{printable(str(best.path))}: {len(best.finished)} finished files of an interrupted run of the same; --resume "
        "would go on from there; this run makes all of them anew, and removes those at its end",
    )


def staging_target(output: str, directory: bool) -> Path:
    """The path beside which a run's hidden folder stands."""
    path = Path(output.rstrip("/"))
    return Path(os.path.realpath(path)) if directory else Path(os.path.realpath(path.parent), path.name)


def _other(leftover: Leftover, identity: Identity) -> str:
    """What tells an interrupted run from this one."""
    if leftover.identity.tool != identity.tool:
        why = f"was made by version {printable(leftover.identity.tool)}, this is {identity.tool}"
    elif leftover.identity.inputs != identity.inputs:
        changed = sorted(dict(leftover.identity.inputs.items() ^ identity.inputs.items()))
        why = f"was made of another input: the size or time of {', '.join(changed[:3])} differs"
    elif leftover.identity.asked != identity.asked:
        theirs, ours = printable(leftover.identity.asked) or "no options", identity.asked or "none"
        why = f"was made with other options: {theirs}, where this run has {ours}"
    else:
        why = "was made with another config or map"
    return (
        f"--resume: what {printable(str(leftover.path))} holds {why}; "
        "make that the same again, or leave --resume out to begin anew"
    )


def resumed(shards: tuple[Shard, ...], kept: Mapping[str, Finished], changed: tuple[str, ...]) -> Iterator[str]:
    """What a run says of the files that it took over."""
    for name in changed:
        yield f"{printable(name)}: was not what the interrupted run had written; it was made anew"
    if kept:
        nbytes = sum(each.nbytes for each in kept.values())
        yield f"resumed: {len(kept)} of {len(shards)} files, {nbytes} bytes, were finished and are unchanged"
