"""The command-line options of `verify --run`, and how its result is told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from widen_cli.errors import printable
from widen_cli.plan.filling import RANDOM
from widen_cli.running import Asked, RunResult

RUN = (
    click.option("--run", is_flag=True, help="Run both models as well, in transformers or llama.cpp, and compare."),
    click.option("--text", metavar="FILE|TEXT", help="With --run: a text to run on, instead of seeded tokens."),
    click.option(
        "--run-dtype",
        type=click.Choice(["float64", "float32", "bfloat16"]),
        help="With --run: the type to compute in.  [default: float64 for weights in it, else float32; a GGUF as stored]",
    ),
    click.option(
        "--tolerance",
        type=click.FloatRange(min=0),
        metavar="X",
        help="With --run: the largest difference over the largest value that counts as none.  [default: measured]",
    ),
    click.option("--wide-base", metavar="MODEL", help="With --run, of a LoRA adapter: the wide base it runs on."),
)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a run, which it is given as `asked`: None without --run."""

    @functools.wraps(command)
    def collected(*args: Any, **given: Any) -> None:
        names = ("run", "text", "run_dtype", "tolerance", "wide_base")
        run, *others = (given.pop(name) for name in names)
        if not run:
            for name, value in zip(names[1:], others, strict=True):
                if value is not None:
                    raise click.UsageError(f"--{name.replace('_', '-')} goes with --run")
        text, dtype, tolerance, wide_base = others
        asked = Asked(_read(text), given["seed"] or 0, dtype, tolerance, wide_base) if run else None
        drawn = given["fill"] == RANDOM or any(given[name] is not None for name in ("split", "noise", "experts"))
        if given["seed"] is not None and not drawn:
            # Of how WIDE was made only what it records counts then.
            if not run:
                raise click.UsageError("--seed goes with --run, or with --split, --noise, --fill random or --experts")
            given["seed"] = None
        command(*args, asked=asked, **given)

    for option in reversed(RUN):
        collected = option(collected)
    return collected


def _read(text: str | None) -> str | None:
    """The text, of a file that is called so if there is one."""
    try:
        if text is None or not Path(text).is_file():
            return text
        return Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise click.UsageError(f"--text {text}: is no UTF-8 text") from None
    except OSError as error:
        # A text may be too long for a name.
        if Path(text or "").name != text or len(text or "") > 255:
            return text
        raise click.UsageError(f"--text {text}: cannot be read: {error.strerror}") from None


def run_lines(ran: RunResult, wide: str, narrow: str, differing: bool = False) -> Iterator[str]:
    """What came of a run, line by line; `differing`: of the outputs that differ alone."""
    name = printable(wide)
    if not differing:
        yield f"{name}: ran both in {ran.runtime} on {ran.inputs}"
    for note in ran.notes if not differing else ():
        yield f"{name}: note: {printable(note)}"
    for outcome in ran.outputs:
        if not (differing and outcome.same):
            yield f"{name}: {'same' if outcome.same else 'differs'}: {outcome.told}"
    if ran.same and not differing:
        yield f"{name}: computes what {printable(narrow)} does"
