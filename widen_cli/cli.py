"""The command line. Results go to stdout, everything else to stderr; exit codes stand in the help text."""

from __future__ import annotations

import signal
import sys

import click

from widen_cli import __version__
from widen_cli.commands.collapse import collapse_command
from widen_cli.commands.convert import convert_command
from widen_cli.commands.maps import maps_command
from widen_cli.commands.verify import verify_command
from widen_cli.demo import demonstration
from widen_cli.shell import DefaultCommand, reporting, terminated

EXIT_CODES = """\b
Exit codes:
  0    done
  1    refused or failed; OUT is as it was
  2    wrong usage of the command line
  3    a verification found a difference
  4    some of several inputs (--into) failed
  130  interrupted (Ctrl-C), 143 terminated, 129 hung up, 141 the reader of a pipe went away"""


@click.group(
    cls=DefaultCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="widen-ckpt")
def cli() -> None:
    """Make transformer checkpoints wider without changing the function they compute, directly on files.

    `widen-ckpt IN OUT` is short for `widen-ckpt convert IN OUT`; `widen-ckpt convert --help` lists its options.
    """


@cli.command()
@click.argument("folder", required=False, metavar="[FOLDER]")
@reporting
def demo(folder: str | None) -> None:
    """Make a tiny model, widen it, run both and compare; FOLDER keeps the files."""
    text, same = demonstration(folder)
    click.echo(text)
    if not same:
        sys.exit(3)


for _command in (convert_command, verify_command, collapse_command, maps_command):
    cli.add_command(_command)


def main() -> None:
    """Runs the command line and exits with the documented codes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A run under nohup ignores the hang-up and goes on.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, terminated)
    try:
        cli.main(prog_name="widen-ckpt")
    except KeyboardInterrupt:
        sys.exit(130)
