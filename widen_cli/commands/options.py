"""The options that several commands share beside those of a conversion, each stated once, and what they make."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import click
from tqdm import tqdm

from widen_cli.conversion_options import readable
from widen_cli.hf_directory import parse_size
from widen_cli.options import Options

P = ParamSpec("P")


def max_shard_size(command: Callable[P, None]) -> Callable[P, None]:
    """The command with the option of how large its output's files get."""
    return click.option(
        "--max-shard-size",
        callback=readable(parse_size),
        metavar="SIZE",
        help="Largest file of an output directory, 5GB by default; of a GGUF, one file by default.",
    )(command)


def threads(work: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """The option of how many threads do the work that is named."""
    return click.option(
        "--threads", type=click.IntRange(min=1), help=f"Threads that {work}.  [default: the cores, up to 4]"
    )


def options_of(given: dict[str, Any], **more: Any) -> Options:
    """The options of a command line; how many threads is ours to choose where it does not say."""
    return Options(**{name: value for name, value in given.items() if name != "threads" or value is not None}, **more)


@contextmanager
def bar(total: int | None, quiet: int) -> Iterator[Callable[[int], None]]:
    """Progress in bytes, on a terminal alone."""
    silent = True if quiet or sys.stderr is None or os.environ.get("TERM") == "dumb" else None
    with tqdm(total=total, unit="B", unit_scale=True, disable=silent, leave=False, file=sys.stderr) as shown:

        def advance(nbytes: int) -> None:
            shown.update(nbytes)

        yield advance
