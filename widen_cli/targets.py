"""Where a run's files go: what speaks against the places, before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from widen_cli.checkpoint import Checkpoint
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.journal import Leftover
from widen_cli.options import Options
from widen_cli.output_checks import check_output, check_space, is_stream
from widen_cli.plan import Plan
from widen_cli.shards import Shard


def check_targets(
    options: Options, checkpoint: Checkpoint, config_target: str | None, directory: bool, faults: Faults
) -> None:
    """Adds what speaks against the output's name, the config's, and options that do not go with the input's format."""
    with faults.collecting():
        check_output(options.output, checkpoint.files, options.force, directory)
    if config_target is not None:
        with faults.collecting():
            _check_config_target(config_target, checkpoint, options)
    if directory and options.output.endswith((".safetensors", ".gguf")):
        faults.add(f"{printable(options.output)}: is a file's name, but a folder is written; choose a folder's name")
    other = ".safetensors" if checkpoint.gguf else ".gguf"
    if not directory and options.output.endswith(other):
        faults.add(
            f"{printable(options.output)}: the output has the input's format, which is not {other[1:]}; change the name"
        )
    if not directory and options.output.endswith((".bin", ".pt", ".pth")):
        faults.add(
            f"{printable(options.output)}: no PyTorch file is written, safetensors is; end the name with .safetensors"
        )
    if checkpoint.gguf and options.dtype:
        faults.add(
            f"--dtype {options.dtype}: a GGUF keeps its types; --dequantize f32 or f16 writes numbers, "
            "and llama.cpp's own tools quantise"
        )
    for option, value in (("--dequantize", options.dequantize), ("--embedding-type", options.embedding_type)):
        if value and not checkpoint.gguf:
            faults.add(
                f"{option} {value.lower()}: is for a GGUF; --dtype sets the type of a safetensors model's weights"
            )


def check_parts(options: Options, checkpoint: Checkpoint, shards: tuple[Shard, ...], directory: bool) -> None:
    """Numbered parts stand beside each other under names that the user did not give; none of them may hit a file."""
    with Faults() as faults:
        for shard in shards if checkpoint.gguf and len(shards) > 1 and not directory else ():
            target = Path(options.output).with_name(shard.name)
            with faults.collecting():
                if target.is_symlink() and target.exists() and target.stat().st_dev != target.parent.stat().st_dev:
                    faults.add(
                        f"{printable(str(target))}: is a link to another disk; remove it or choose another output"
                    )
                check_output(str(target), checkpoint.files, options.force, False)


def check_room(
    options: Options,
    shards: tuple[Shard, ...],
    companions: Mapping[str, Path | bytes],
    leftover: Leftover | None,
) -> None:
    """Raises WidenError where the output's disk, or the user's share of it, has no room for what is still to be written."""
    if not is_stream(options.output):
        folder = Path(os.path.realpath(options.output.rstrip("/"))).parent
        beside = sum(len(each) if isinstance(each, bytes) else _size(each) for each in companions.values())
        there = leftover.nbytes if leftover else 0
        needed = sum(shard.nbytes for shard in shards) + beside - there
        check_space(folder, needed, max(shard.nbytes for shard in shards))


def _size(path: Path) -> int:
    # One that has gone is told when it is to be copied.
    with suppress(OSError):
        return path.stat().st_size
    return 0


def unsaved(
    plan: Plan, checkpoint: Checkpoint, config_target: str | None, options: Options, directory: bool
) -> tuple[str, ...]:
    """A warning where the changed config goes nowhere."""
    if checkpoint.gguf or directory or config_target is not None or not plan.config or not checkpoint.config.present:
        return ()
    changes = ", ".join(f"{change.key} = {change.new}" for change in plan.config)
    return (
        f"{printable(checkpoint.name)}: the new config is not written; whatever loads the result needs {changes}; "
        "--config-out FILE writes it",
    )


def _check_config_target(target: str, checkpoint: Checkpoint, options: Options) -> None:
    """A config may not go where the weights go, over an input, or over a file that stands without --force."""
    check_output(target, checkpoint.files, options.force, False)
    both = ("-" if path == "-" else os.path.realpath(path) for path in (target, options.output))
    if len(set(both)) == 1:
        raise WidenError(f"--config-out {printable(target)}: is where the weights go; choose another file")


def config_target_of(options: Options, checkpoint: Checkpoint, directory: bool) -> str | None:
    """Where the config goes on its own: None where there is none, or where it goes into the output folder."""
    if options.config_out:
        return options.config_out if checkpoint.config.present else None
    if (
        checkpoint.gguf
        or not checkpoint.config.present
        or directory
        or is_stream(options.output)
        or not Path(options.output).name
    ):
        return None
    return str(Path(options.output).with_name(f"{Path(options.output).stem}.config.json"))
