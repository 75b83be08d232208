"""`widen-ckpt verify`: derives a wide model again and compares it, and runs both where asked."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from widen_cli.commands.help import Sectioned
from widen_cli.commands.options import bar, options_of, settle_all, threads
from widen_cli.conversion_options import conversion_options
from widen_cli.errors import printable
from widen_cli.options import Options
from widen_cli.output_checks import is_stream
from widen_cli.run_options import run_lines, run_options
from widen_cli.running import Asked, Known, RunResult
from widen_cli.shell import FAULT_LINES, reporting
from widen_cli.verification import NotRecordedError, Verification, verify


@click.command("verify", cls=Sectioned)
@click.argument("narrow", metavar="NARROW")
@click.argument("wide", metavar="WIDE")
@conversion_options
@run_options
@threads("read, widen and compare")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option("-q", "--quiet", count=True, help="Nothing but differences.")
@reporting
def verify_command(narrow: str, wide: str, asked: Asked | None, as_json: bool, quiet: int, **given: Any) -> None:
    """Derive every tensor of WIDE again from NARROW and compare all bytes, and the config's values.

    WIDE records how it was made; options are needed only where it does not, and count before the record. With --run both
    are run as well, or are only run where nothing says how WIDE was made. Exit code 3 when something differs.
    """
    options = options_of({"input": narrow, "output": wide, **given})
    if asked is not None and is_stream(narrow):
        raise click.UsageError("--run reads NARROW again; name a file or a folder for it")
    settle_all(options, quiet, asked.wide_base if asked else None)
    if asked is not None:
        from widen_cli.running.both import check_runnable  # imported when used: other commands need none of it

        check_runnable(options, asked)
    found = None
    try:
        found = verified(options, quiet)
    except NotRecordedError as error:
        if asked is None:
            raise
        click.echo(f"warning: {error}; its bytes are not compared", err=True)
    if found is not None:
        tell_verdict(found, options, quiet, told=as_json)
    ran = _ran(options, asked, found) if asked else None
    if as_json:
        click.echo(json.dumps(_as_json(found, ran), indent=2))
    if ran is not None and not (as_json and not ran.same):
        for line in run_lines(ran, wide, narrow, differing=quiet > 0):
            click.echo(line, err=True)
    if not _all_same(found, ran):
        sys.exit(3)


def _ran(options: Options, asked: Asked, found: Verification | None) -> RunResult:
    from widen_cli.running.both import run_both

    return run_both(options, asked, Known(found.rounded, found.scales) if found else None)


def _as_json(found: Verification | None, ran: RunResult | None) -> dict[str, Any]:
    """Everything that was compared; `same` speaks of all of it."""
    parts = (found.as_json() if found else {}), ({"run": ran.as_json()} if ran else {})
    return {**parts[0], **parts[1], "same": _all_same(found, ran)}


def _all_same(found: Verification | None, ran: RunResult | None) -> bool:
    return not (found and found.differences) and (ran is None or ran.same)


def verified(options: Options, quiet: int) -> Verification:
    with bar(None, quiet) as advance:
        return verify(options, advance)


def tell_verdict(found: Verification, options: Options, quiet: int, told: bool = False) -> None:
    """The verdict on stderr: that all is well, or the differences; `told`: these stand on stdout."""
    wide = printable(options.output)
    if not found.differences and quiet == 0:
        click.echo(f"{wide}: verified: {found.compared} are what widening {printable(options.input)} gives", err=True)
    told_first = [found.likely] if found.likely else []
    lines = [f"{wide}: {text}" for text in (*told_first, *found.differences) if not told]
    for line in lines[:FAULT_LINES]:
        click.echo(line, err=True)
    if len(lines) > FAULT_LINES:
        click.echo(f"... and {len(lines) - FAULT_LINES} more differences", err=True)
