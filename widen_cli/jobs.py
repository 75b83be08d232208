"""What a conversion is between its steps: the job that was resolved, and the report of what it did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from widen_cli.aims import Aim
from widen_cli.checkpoint import Checkpoint
from widen_cli.config import ModelConfig
from widen_cli.folders import DirectoryOutput
from widen_cli.journal import Identity, Leftover
from widen_cli.options import Options
from widen_cli.outputs import FileOutput
from widen_cli.plan import Plan
from widen_cli.shards import Shard
from widen_cli.transform import Counts

Progress = Callable[[int], None]


class Beside(Protocol):
    """What is written with a model that is no part of it."""

    @property
    def nbytes(self) -> int: ...

    def write(self, stack: ExitStack, folder: DirectoryOutput | None) -> list[FileOutput]:
        """Writes into the folder, if the model goes into one; the files elsewhere that are to be put in place with it."""


@dataclass(frozen=True)
class Job:
    """A run, resolved: what is read, what is planned, and every file that will be written.

    `config_target` is where the config goes if not into the output folder; `companions` are the folder's other files, to
    be copied or with their new content. `identity` is that of a run that can be resumed later, `leftover` the interrupted
    run that this one goes on from. `aim`: how the growth was found that another model, or a number of parameters, means.
    `complete`: the output stands already, and nothing is to be written. `beside` is what is written with the model and is no
    part of it.
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
    aim: Aim | None = None
    complete: bool = False
    beside: tuple[Beside, ...] = ()

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
