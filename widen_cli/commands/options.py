"""The options that several commands share beside those of a conversion, each stated once, and what they make."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec

import click
from tqdm import tqdm

from widen_cli.conversion_options import readable
from widen_cli.errors import printable
from widen_cli.moves import settle
from widen_cli.options import Options
from widen_cli.output_checks import is_stream
from widen_cli.placing import signals_held
from widen_cli.sharding import parse_size

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
    """The options of a command line; how many threads and which seed is ours to choose where it does not say."""
    if given["split"] is not None and given["noise"] is not None:
        raise click.UsageError("--split and --noise are two ways to one end; give one of them")
    ours = ("threads", "seed")
    return Options(**{name: value for name, value in given.items() if name not in ours or value is not None}, **more)


def settle_all(options: Options, quiet: int, *more: str | None) -> None:
    """Completes what interrupted runs had begun to put in place at any path that a command names; a dry run tells it only.

    What --resume can go on from is taken back instead. WidenError where neither is possible.
    """
    paths = dict.fromkeys((options.output, options.input, options.config, options.base, options.config_out, *more))
    for path in paths:
        if path is None or is_stream(path):
            continue
        with signals_held():
            found = settle(Path(path), back=options.resume and path == options.output, look=options.dry_run)
        if found and quiet < 2:
            begun = f"{printable(path)}: an interrupted run had begun to put it in place"
            done = "a run that is no dry run completes that" if options.dry_run else "that is settled"
            click.echo(f"note: {begun}; {done}", err=True)


@contextmanager
def bar(total: int | None, quiet: int) -> Iterator[Callable[[int], None]]:
    """Progress in bytes, on a terminal alone."""
    silent = True if quiet or sys.stderr is None or os.environ.get("TERM") == "dumb" else None
    with tqdm(total=total, unit="B", unit_scale=True, disable=silent, leave=False, file=sys.stderr) as shown:

        def advance(nbytes: int) -> None:
            shown.update(nbytes)

        yield advance
