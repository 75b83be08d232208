"""What the shell sees of every command: messages in place of exceptions, exit codes, signals, a reader that went away."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec

import click

from widen_cli.errors import WidenError, did_you_mean, printable

FAULT_LINES = 18
P = ParamSpec("P")


class DefaultCommand(click.Group):
    """A group in which `widen-ckpt IN OUT` means `widen-ckpt convert IN OUT`."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError:
            _drop_stdout()
            sys.exit(141)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _drop_stdout()
            sys.exit(141)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            click.echo(f"{ctx.get_usage()}\nTry 'widen-ckpt --help' for what it can do.", err=True)
            ctx.exit(2)
        if args[0] not in self.commands and args[0] not in ("--help", "-h", "--version"):
            meant = (
                ""
                if args[0].startswith("-") or os.path.lexists(args[0])
                else did_you_mean(args[0], self.commands, 0.75)
            )
            if meant:
                raise click.UsageError(f"neither a command nor a file: {printable(args[0])}{meant}")
            args = ["convert", *args]
        return super().parse_args(ctx, args)


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Turns refusals and signals into messages and exit codes; no traceback reaches a user who gave bad input."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()
        except WidenError as error:
            tell(error)
            sys.exit(1)
        except BrokenPipeError:
            _drop_stdout()
            sys.exit(141)
        except OSError as error:
            _drop_stdout()
            at = (
                "standard output: cannot be written"
                if error.filename is None
                else printable(os.fsdecode(error.filename))
            )
            click.echo(f"{at}: {error.strerror}", err=True)
            sys.exit(1)
        except KeyboardInterrupt as stopped:
            click.echo(f"interrupted; {'; '.join(_notes(stopped)) or 'nothing was written'}", err=True)
            sys.exit(130)
        except Terminated as stopped:
            click.echo(f"terminated; {'; '.join(_notes(stopped)) or 'nothing was written'}", err=True)
            raise
        # What was asked for is done: from here on an interruption must not turn it into a failure.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    return wrapped


def tell(error: WidenError) -> None:
    """Says what was refused, and what was kept."""
    lines = [line for fault in error.faults for line in fault.splitlines()]
    for line in lines[:FAULT_LINES]:
        click.echo(line, err=True)
    if len(lines) > FAULT_LINES:
        click.echo(f"... and {len(lines) - FAULT_LINES} more", err=True)
    for note in _notes(error):
        click.echo(note, err=True)


def _drop_stdout() -> None:
    """Python flushes stdout at exit; onto a closed pipe or a full disk that would print a traceback."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminated(SystemExit):
    """A signal other than Ctrl-C; its code is the exit code. What there is to say of it is said when all is cleaned up."""


def terminated(number: int, frame: FrameType | None) -> None:
    """What a signal does: everything that is open cleans up after itself."""
    raise Terminated(128 + number)


def _notes(stopped: BaseException) -> list[str]:
    """What was noted of files that stand or are kept in spite of an error."""
    return list(getattr(stopped, "__notes__", []))
