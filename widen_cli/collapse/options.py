"""The command line of the way back: how the wide model was made, where nothing records it, and how the narrow one is written.

The conversion's options say how the wide model was made, but for the types, which are those that the narrow one is written in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import click

from widen_cli.conversion_options import conversion_options, readable
from widen_cli.hf_directory import parse_size

P = ParamSpec("P")

_OWN = (
    click.option(
        "--record", metavar="MODEL", help="Go by what MODEL records, the wide model as it was before it was trained."
    ),
    click.option("--config-out", metavar="FILE", help="Where to write the narrow config."),
    click.option(
        "--max-shard-size",
        callback=readable(parse_size),
        metavar="SIZE",
        help="Largest file of an output directory, 5GB by default; of a GGUF, one file by default.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="Threads that read, fold and write.  [default: the cores, up to 4]",
    ),
    click.option("--force", is_flag=True, help="Replace NARROW where it exists, in one step."),
    click.option("--json", "as_json", is_flag=True, help="Print the distances of all tensors as JSON on stdout."),
    click.option("-q", "--quiet", count=True, help="No summary; twice: no warnings either."),
)


def collapse_options(command: Callable[P, None]) -> Callable[P, None]:
    """The command with every option of a conversion and its own."""
    for option in reversed(_OWN):
        command = option(command)
    return conversion_options(command)


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """What was said, without what the way back has no use for. Raises click.UsageError where that was said."""
    rest = dict(given)
    if rest.pop("embedding_type"):
        raise click.UsageError("--embedding-type is for a conversion; --dequantize folds quantised weights as numbers")
    if rest["like"] or rest["target_params"]:
        raise click.UsageError("--like and --target-params are for a conversion; --grow says what each axis grew by")
    return rest
