"""Adds to a planned run what is to be written beside the model: the grown optimizer, and a mask of new parameters."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from widen_cli.config import read_json
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.folders import DirectoryOutput
from widen_cli.jobs import Job
from widen_cli.moments.growth import GrownState, grown_state
from widen_cli.moments.mask import NewParameters
from widen_cli.moments.orders import Order
from widen_cli.options import Options
from widen_cli.output_checks import check_output, check_space, is_stream
from widen_cli.outputs import FileOutput
from widen_cli.running.child import answer_of, require
from widen_cli.safetensors_file import header_bytes
from widen_cli.stream import Target, TensorStream
from widen_cli.torch_optimizer import OptimizerState, open_optimizer

STATE = "optimizer.pt"
# What a Trainer loads beside it, none of which depends on a width: the learning rate's schedule, loss scale, random numbers.
BESIDE = ("scheduler.pt", "scaler.pt", "training_args.bin")
RANDOM = ("rng_state", ".pth")
CHILD = "optimizer_child"


def attach(job: Job) -> Job:
    """The job with what the options ask for beside the model. Raises WidenError where that cannot be written, and closes the
    job's input then."""
    options = job.options
    try:
        with Faults() as faults:
            with faults.collecting():
                refuse(options, job)
            with faults.collecting():
                _check_mask(options, job)
        if options.optimizer is not None:
            job = _with_optimizer(job)
        if options.new_parameters is not None:
            job = replace(job, beside=(*job.beside, NewParameters(options.new_parameters, job.plan, options.force)))
    except BaseException:
        job.checkpoint.close()
        raise
    return job


def refuse(options: Options, job: Job) -> None:
    """Raises WidenError for what has no moments to grow, or none that follow the weights."""
    if options.optimizer is None:
        return
    said = f"--optimizer {options.optimizer}"
    apart = {
        "--base": options.base is not None,
        "--strip-prefix": options.strip_prefix is not None,
        # Of copies that are read with unequal parts only the sum of all gradients follows from the narrow one. Parts that
        # differ in their last places have gradients that do.
        "--split uneven": options.split == "uneven",
        "--noise": options.noise is not None,
    }
    for other in (option for option, given in apart.items() if given):
        raise WidenError(
            f"{said}: does not go together with {other}; widen in a run of its own, or leave --optimizer out"
        )
    if job.plan.approximate:
        raise WidenError(
            f"{said}: the result computes another function ({job.plan.approximate}), whose gradients do not follow from the old "
            "ones; leave --optimizer out to begin with a new one"
        )
    if job.checkpoint.gguf is not None or job.checkpoint.directory is None:
        raise WidenError(
            f"{said}: is for a folder that a Trainer saved, with {STATE} beside the weights; "
            f"{printable(job.checkpoint.name)} is none"
        )
    path = Path(options.input, STATE)
    if not path.is_file():
        raise WidenError(
            f"{printable(str(path))}: is not there, and {said} grows it; give the folder of a Trainer's checkpoint, "
            "or leave --optimizer out (a state of several files, as FSDP and DeepSpeed write, is not read)"
        )
    if not job.checkpoint.config.present:
        raise WidenError(
            f"{said}: the order of its parameters is told by the model's class, which the config names; give --config"
        )


def _check_mask(options: Options, job: Job) -> None:
    target = options.new_parameters
    if target is None:
        return
    if options.depth or options.experts is not None:
        raise WidenError(
            "--new-parameters: tells copies of what is widened, not of layers or experts that are made anew; leave it out"
        )
    if is_stream(target):
        raise WidenError(f"--new-parameters {printable(target)}: is no file; name one")
    taken = _taken(os.path.realpath(target), options, job)
    if taken:
        raise WidenError(f"--new-parameters {printable(target)}: {taken}; choose another place")
    check_output(target, job.checkpoint.files, options.force, False)


def _taken(mask: str, options: Options, job: Job) -> str:
    """What else is, or is looked for, where the mask is to go; nothing where the place is free."""
    folders = [] if options.output == "-" else [options.output.rstrip("/")]
    if job.checkpoint.directory is not None:
        folders.append(options.input)
    if any(mask.startswith(os.path.realpath(folder) + os.sep) for folder in folders):
        return "would be taken for weights in the model's folder"
    if options.output != "-":
        output = os.path.realpath(options.output.rstrip("/"))
        parts = [os.path.join(os.path.dirname(output), shard.name) for shard in job.shards]
        if mask in (output, *([] if job.directory or not parts[1:] else parts)):
            return "is where the weights go"
    return "is where the config goes" if job.config_target and mask == os.path.realpath(job.config_target) else ""


def _with_optimizer(job: Job) -> Job:
    options = job.options
    require("--optimizer: asks transformers for the order of a model's parameters", "torch", "transformers")
    configs = [_narrow_config(options), json.loads(job.config.to_bytes())]
    with tempfile.TemporaryDirectory() as folder:
        answer = json.loads(answer_of(CHILD, {"configs": configs}, Path(folder), job.checkpoint.name).read_text())
    narrow, wide = (Order.of(each, job.checkpoint.name) for each in answer)
    state = open_optimizer(Path(options.input, STATE))
    try:
        grown = grown_state(job.plan, state, narrow, wide, str(options.optimizer))
        if not options.dry_run:
            folder_of = Path(os.path.realpath(options.output.rstrip("/"))).parent
            # The moments stand there twice for a while.
            check_space(
                folder_of, job.nbytes + 2 * grown.nbytes, max(grown.nbytes, *(each.nbytes for each in job.shards))
            )
    except BaseException:
        state.close()
        raise
    beside = {path.name: path for path in sorted(Path(options.input).iterdir()) if _goes_along(path)}
    return replace(
        job,
        companions={**job.companions, **beside},
        warnings=(*job.warnings, *grown.told),
        beside=(*job.beside, GrownOptimizer(state, grown, options.threads)),
    )


def _narrow_config(options: Options) -> Any:
    """The config of the model that the optimizer was made for, as it stands in its folder: layers and experts may be made since."""
    return read_json(Path(options.config or Path(options.input, "config.json")), "a model's config")


def _goes_along(path: Path) -> bool:
    start, ending = RANDOM
    return path.is_file() and (path.name in BESIDE or (path.name.startswith(start) and path.name.endswith(ending)))


@dataclass(frozen=True)
class GrownOptimizer:
    """The grown state, on its way into the output folder: its moments as a file of tensors, which torch then saves."""

    state: OptimizerState
    grown: GrownState
    threads: int

    @property
    def nbytes(self) -> int:
        return self.grown.nbytes

    def write(self, stack: ExitStack, folder: DirectoryOutput | None) -> list[FileOutput]:
        assert folder is not None
        stack.callback(self.state.close)
        with folder.workshop() as shop:
            moments, output = shop / "moments.safetensors", shop / STATE
            self.write_moments(moments)
            request = {
                "state": str(self.state.path.absolute()),
                "moments": str(moments),
                "output": str(output),
                "origins": {str(number): origin for number, origin in self.grown.origins.items()},
                "groups": [[list(numbers), list(names)] for numbers, names in self.grown.groups],
            }
            answer_of(CHILD, request, shop, self.state.name)
            self.state.source.expect_unchanged()
            folder.take(output, STATE)
        return []

    def write_moments(self, path: Path) -> None:
        entries = [(moment.plan.names[0], moment.plan.dtype, moment.plan.shape) for moment in self.grown.moments]
        header, offsets = header_bytes(entries, {})
        stream = TensorStream(self.threads)
        try:
            with FileOutput(path, len(header) + self.nbytes) as output:
                try:
                    output.write_at(0, header)
                    for moment, offset in zip(self.grown.moments, offsets, strict=True):
                        stream.run(moment.plan, moment.stored, [Target(output, offset)], forward_only=False)
                    stream.finish()
                except BaseException:
                    stream.abandon()
                    raise
        finally:
            stream.close()
