"""Whether what stands at an output is already what a run would write, so that `--resume` after a finished run has nothing to do."""

from __future__ import annotations

import filecmp
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from widen_cli.errors import WidenError, printable
from widen_cli.hidden import remove_leftover_files
from widen_cli.jobs import Job
from widen_cli.journal import remove_leftover_folders
from widen_cli.options import Options
from widen_cli.output_checks import is_stream
from widen_cli.shards import INDEX


def may_be_complete(options: Options, directory: bool) -> bool:
    """Whether --resume meets an output that stands, and is not to be replaced."""
    if not options.resume or options.force or options.dry_run or is_stream(options.output) or options.input == "-":
        return False
    real = Path(os.path.realpath(options.output.rstrip("/")))
    if directory:
        return real.is_dir() and any(real.iterdir())
    return real.is_file() or bool(_parts(real))


def _parts(real: Path) -> list[Path]:
    """The numbered parts that stand for a GGUF."""
    return [*real.parent.glob(f"{glob.escape(real.stem)}-00001-of-*{glob.escape(real.suffix)}")]


def expect_complete(job: Job) -> None:
    """Raises WidenError where the output is not what the job makes.

    That it is, is told as `make` does: by the files' headers, which hold the record of the conversion, by their sizes and
    by the config, and by no input being newer. `verify` compares the bytes.
    """
    name = printable(job.options.output)
    if (fault := next(_faults(job), None)) is not None:
        raise WidenError(f"{name}: exists, and {fault}; use --force to replace it, or choose another output")


def told_complete(job: Job) -> str:
    """What is said of an output that was complete; what interrupted runs left for it is removed, as by one that writes it."""
    output = Path(os.path.realpath(job.options.output.rstrip("/")))
    for real in {output, *(path.resolve() for path in _written(job) if not job.directory)}:
        remove_leftover_files(real)
        remove_leftover_folders(real, finished_too=True)
    return (
        f"{printable(job.options.output)}: is complete: it records this conversion, and no input was changed since; nothing was written "
        "(widen-ckpt verify compares the bytes)"
    )


def _written(job: Job) -> list[Path]:
    output = Path(job.options.output.rstrip("/"))
    if job.directory:
        return [output / shard.name for shard in job.shards]
    return [output.with_name(shard.name) for shard in job.shards] if len(job.shards) > 1 else [output]


def _faults(job: Job) -> Iterator[str]:
    output, written = Path(job.options.output.rstrip("/")), _written(job)
    for path, shard in zip(written, job.shards, strict=True):
        if not _begins(path, shard.header, shard.nbytes):
            yield f"{printable(path.name)} is not of this conversion"
    if job.directory and len(job.shards) > 1 and not job.checkpoint.gguf and not (output / INDEX).is_file():
        yield f"{INDEX} is missing"
    if job.config.present and not job.checkpoint.gguf:
        config = Path(job.config_target) if job.config_target else output / "config.json" if job.directory else None
        if config is not None and not _holds(config, job.config.to_bytes()):
            yield f"{printable(config.name)} is not of this conversion"
    for relative, content in job.companions.items():
        path = output / relative
        if not (_holds(path, content) if isinstance(content, bytes) else _same(path, content)):
            yield f"{printable(relative)} in it is not the input's"
    made = min(path.stat().st_mtime_ns for path in written)
    for path in job.checkpoint.files:
        if path.is_file() and path.stat().st_mtime_ns > made:
            yield f"{printable(str(path))} was changed since"


def _begins(path: Path, header: bytes, nbytes: int) -> bool:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size == nbytes and file.read(len(header)) == header
    except OSError:
        return False


def _holds(path: Path, data: bytes) -> bool:
    return _begins(path, data, len(data))


def _same(path: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(path, other, shallow=False)
    except OSError:
        return False
