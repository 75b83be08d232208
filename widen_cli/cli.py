"""The command line. Results go to stdout, everything else to stderr; exit codes stand in the help text."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from tqdm import tqdm

from widen_cli import __version__
from widen_cli.checkpoint import open_checkpoint
from widen_cli.collapse import collapse
from widen_cli.collapse.options import checked, collapse_options
from widen_cli.collapse.report import as_json as as_values
from widen_cli.collapse.report import summary, table
from widen_cli.conversion_options import conversion_options, readable
from widen_cli.convert import prepare
from widen_cli.demo import demonstration
from widen_cli.drafts import draft as drafted
from widen_cli.errors import WidenError, printable
from widen_cli.hf_directory import parse_size
from widen_cli.jobs import Job, Report
from widen_cli.map_file import map_names, map_text
from widen_cli.options import Options
from widen_cli.output_checks import is_stream
from widen_cli.plan.text import plan_json, plan_text
from widen_cli.run_options import run_lines, run_options
from widen_cli.running import Asked, Known, RunResult
from widen_cli.shell import FAULT_LINES, DefaultCommand, Terminated, reporting, tell, terminated
from widen_cli.verification import NotRecordedError, Verification, verify
from widen_cli.writing import run

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
@click.argument("paths", metavar="IN [OUT]", nargs=-1, required=True)
@conversion_options
@click.option("--into", metavar="FOLDER", help="Widen every path named, each under its own name in FOLDER.")
@click.option("--config-out", metavar="FILE", help="Where to write the new config.")
@click.option(
    "--max-shard-size",
    callback=readable(parse_size),
    metavar="SIZE",
    help="Largest file of an output directory, 5GB by default; of a GGUF, one file by default.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads that read, widen and write.  [default: the cores, up to 4]"
)
@click.option("--force", is_flag=True, help="Replace OUT where it exists, in one step.")
@click.option("--resume", is_flag=True, help="Go on from the files that an interrupted run of the same had finished.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the bytes needed; write nothing.")
@click.option(
    "--verify", "proof", is_flag=True, help="Derive everything again from IN and compare it with what was written."
)
@click.option("--json", "as_json", is_flag=True, help="Print plan and result as JSON on stdout.")
@click.option("-q", "--quiet", count=True, help="No summary; twice: no warnings either.")
@reporting
def convert(paths: tuple[str, ...], into: str | None, **given: Any) -> None:
    """Widen the checkpoint IN and write it to OUT.

    IN is a safetensors, GGUF or PyTorch file, a Hugging Face directory, or - for standard input. OUT is a file, a
    directory (always for a directory IN, else with a / at its end), or - for standard output. A dry run does without OUT.
    What --grow takes, `widen-ckpt maps NAME` lists as axes.
    """
    if into is not None:
        _convert_each(paths, into, **given)
        return
    if len(paths) > 2:
        raise click.UsageError(
            f"more than IN and OUT ({' '.join(map(printable, paths[2:]))}); --into FOLDER takes several inputs"
        )
    if not _convert(paths[0], paths[1] if paths[1:] else None, **given):
        sys.exit(3)


def _convert_each(paths: tuple[str, ...], into: str, **given: Any) -> None:
    """Widens several inputs, the others too where one fails, and lists at the end those that did."""
    targets = [os.path.join(into, os.path.basename(path.rstrip("/"))) for path in paths]
    if given["as_json"] or given["config_out"] is not None:
        raise click.UsageError("--into takes neither --json nor --config-out, which speak of one output")
    if "-" in paths or len({*targets}) < len(targets):
        raise click.UsageError("--into needs inputs with names of their own: no -, and no name twice")
    made = not os.path.lexists(into)
    os.makedirs(into, exist_ok=True)
    failed: dict[str, int] = {}
    for number, (path, target) in enumerate(zip(paths, targets, strict=True)):
        try:
            if not _convert(path, target, **given):
                failed[path] = 3
        except WidenError as error:
            tell(error)
            failed[path] = 1
        except (KeyboardInterrupt, Terminated) as stopped:
            stopped.add_note(f"{number - len(failed)} of {len(paths)} inputs had been widened")
            raise
    if made:
        with suppress(OSError):
            os.rmdir(into)  # as long as nothing was put there
    if not failed:
        return
    click.echo(f"{len(failed)} of {len(paths)} inputs failed: {', '.join(map(printable, failed))}", err=True)
    sys.exit(4 if len(failed) < len(paths) else max(failed.values()))


def _convert(
    source: str, target: str | None, dry_run: bool, as_json: bool, proof: bool, quiet: int, **given: Any
) -> bool:
    """One conversion; False where --verify found a difference."""
    if target is None and not dry_run:
        raise click.UsageError("OUT is missing; a dry run alone does without it")
    unnamed = "-" if source == "-" else source.rstrip("/") + ".wide"
    paths = {"input": source, "output": unnamed if target is None else target}
    options = _options({**given, **paths}, dry_run=dry_run, named=target is not None)
    if proof and (dry_run or is_stream(options.output) or options.input == "-"):
        raise click.UsageError("--verify reads IN and OUT again; name files for both, and leave --dry-run out")
    if as_json and is_stream(options.output) and not dry_run:
        raise click.UsageError("--json prints on stdout, where OUT goes too; name a file for OUT")
    job = prepare(options)
    for warning in job.warnings if quiet < 2 else ():
        click.echo(f"warning: {warning}", err=True)
    if dry_run:
        job.checkpoint.close()
        _print_plan(job, as_json)
        return True
    report = _run(job, quiet)
    try:
        found = _verified(options, quiet) if proof else None
    except (KeyboardInterrupt, Terminated) as stopped:
        stopped.add_note(f"{_shown_output(report)} is complete, but was not verified")
        raise
    if as_json:
        done = {**plan_json(job.plan), "bytes": job.nbytes, "values": _counted(report)}
        click.echo(json.dumps(done | ({"verification": found.as_json()} if found else {}), indent=2))
    _summary(report, quiet)
    if found is not None:
        _tell(found, options, quiet)
    return found is None or not found.differences


def _options(given: dict[str, Any], **more: Any) -> Options:
    """The options of a command line; how many threads is ours to choose where it does not say."""
    if given["split"] is not None and given["noise"] is not None:
        raise click.UsageError("--split and --noise are two ways to one end; give one of them")
    ours = ("threads", "seed")
    return Options(**{name: value for name, value in given.items() if name not in ours or value is not None}, **more)


def _run(job: Job, quiet: int) -> Report:
    with _bar(job.nbytes, quiet) as advance:
        return run(job, advance)


@contextmanager
def _bar(total: int | None, quiet: int) -> Iterator[Callable[[int], None]]:
    """Progress in bytes, on a terminal alone."""
    silent = True if quiet or sys.stderr is None or os.environ.get("TERM") == "dumb" else None
    with tqdm(total=total, unit="B", unit_scale=True, disable=silent, leave=False, file=sys.stderr) as bar:

        def advance(nbytes: int) -> None:
            bar.update(nbytes)

        yield advance


def _print_plan(job: Job, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**plan_json(job.plan), "bytes": job.nbytes}, indent=2))
    else:
        click.echo(
            f"{plan_text(job.plan)}\n{job.nbytes} bytes in {len(job.shards)} file{'s' if len(job.shards) > 1 else ''}"
        )


def _counted(report: Report) -> dict[str, Any]:
    return {
        name: {"values": counts.values, "rounded": counts.rounded, "overflowed": counts.overflowed}
        for name, counts in report.counts.items()
    }


def _summary(report: Report, quiet: int) -> None:
    """The summary, and what was rounded: no rounding is silent."""
    plan, total = report.job.plan, report.total
    rounded = {name: counts for name, counts in report.counts.items() if counts.rounded}
    overflowed = [name for name, counts in report.counts.items() if counts.overflowed]
    if quiet < 2:
        for name in overflowed[:8]:
            counts = report.counts[name]
            click.echo(
                f"warning: '{printable(name)}': {counts.overflowed} of {counts.values} values became infinite; "
                "try --scaling copy or --dtype F32",
                err=True,
            )
        if len(overflowed) > 8:
            click.echo(
                f"warning: ... and {len(overflowed) - 8} more tensors with values that became infinite", err=True
            )
    for note in report.notes if quiet < 2 else ():
        click.echo(note, err=True)
    if quiet == 0:
        exactness = "function-exact" + ("" if rounded or overflowed or not plan.exact else " and bit-exact")
        click.echo(
            f"{_shown_output(report)}: {plan.architecture}, {plan.grown}, {plan.mode}; {exactness}; {_rounding(report)}",
            err=True,
        )
    elif quiet == 1 and total.rounded:
        click.echo(f"warning: {_shown_output(report)}: {_rounding(report)}", err=True)


def _rounding(report: Report) -> str:
    total = report.total
    tensors = sum(1 for counts in report.counts.values() if counts.rounded)
    if not total.rounded:
        return f"none of {total.values} stored values was rounded"
    return f"{total.rounded} of {total.values} stored values were rounded, in {tensors} of {len(report.counts)} tensors"


def _shown_output(report: Report) -> str:
    output = report.job.options.output
    return "standard output" if output == "-" else printable(output)


@cli.command("verify")
@click.argument("narrow", metavar="NARROW")
@click.argument("wide", metavar="WIDE")
@conversion_options
@run_options
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads that read, widen and compare.  [default: the cores, up to 4]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option("-q", "--quiet", count=True, help="Nothing but differences.")
@reporting
def verify_command(narrow: str, wide: str, asked: Asked | None, as_json: bool, quiet: int, **given: Any) -> None:
    """Derive every tensor of WIDE again from NARROW and compare all bytes, and the config's values.

    WIDE records how it was made; options are needed only where it does not, and count before the record. With --run both
    are run as well, or are only run where nothing says how WIDE was made. Exit code 3 when something differs.
    """
    options = _options({"input": narrow, "output": wide, **given})
    if asked is not None and is_stream(narrow):
        raise click.UsageError("--run reads NARROW again; name a file or a folder for it")
    found = None
    try:
        found = _verified(options, quiet)
    except NotRecordedError as error:
        if asked is None:
            raise
        click.echo(f"warning: {error}; its bytes are not compared", err=True)
    if found is not None:
        _tell(found, options, quiet, told=as_json)
    ran = _ran(options, asked, found) if asked else None
    if as_json:
        click.echo(json.dumps(_as_json(found, ran), indent=2))
    if ran is not None and not (as_json and not ran.same):
        for line in run_lines(ran, wide, narrow, differing=quiet > 0):
            click.echo(line, err=True)
    if not _all_same(found, ran):
        sys.exit(3)


def _ran(options: Options, asked: Asked, found: Verification | None) -> RunResult:
    from widen_cli.running.both import run_both  # imported when used: other commands need none of it

    return run_both(options, asked, Known(found.rounded, found.scale) if found else None)


def _as_json(found: Verification | None, ran: RunResult | None) -> dict[str, Any]:
    """Everything that was compared; `same` speaks of all of it."""
    parts = (found.as_json() if found else {}), ({"run": ran.as_json()} if ran else {})
    return {**parts[0], **parts[1], "same": _all_same(found, ran)}


def _all_same(found: Verification | None, ran: RunResult | None) -> bool:
    return not (found and found.differences) and (ran is None or ran.same)


def _verified(options: Options, quiet: int) -> Verification:
    with _bar(None, quiet) as advance:
        return verify(options, advance)


def _tell(found: Verification, options: Options, quiet: int, told: bool = False) -> None:
    """The verdict on stderr: that all is well, or the differences; `told`: these stand on stdout."""
    wide = printable(options.output)
    if not found.differences and quiet == 0:
        click.echo(f"{wide}: verified: {found.compared} are what widening {printable(options.input)} gives", err=True)
    lines = [f"{wide}: {difference}" for difference in found.differences if not told]
    for line in lines[:FAULT_LINES]:
        click.echo(line, err=True)
    if len(lines) > FAULT_LINES:
        click.echo(f"... and {len(lines) - FAULT_LINES} more differences", err=True)


@cli.command("collapse")
@click.argument("wide", metavar="WIDE")
@click.argument("narrow", metavar="NARROW")
@collapse_options
@reporting
def collapse_command(wide: str, narrow: str, record: str | None, as_json: bool, quiet: int, **given: Any) -> None:
    """Fold the widened checkpoint WIDE back into a narrow one, NARROW: the copies of each value are averaged.

    Of a model that was not trained since, NARROW is what was widened, bit for bit where nothing was rounded. WIDE records how it
    was made; options are needed only where it does not. --dtype and --dequantize are the types to write. Prints how far the
    copies have moved apart.
    """
    if as_json and is_stream(narrow):
        raise click.UsageError("--json prints on stdout, where NARROW goes too; name a file for NARROW")
    options = _options({"input": wide, "output": narrow, **checked(given)})
    with _bar(None, quiet) as advance:
        folded = collapse(options, record, advance, lambda text: _warn(text, quiet))
    if as_json:
        click.echo(json.dumps(as_values(folded), indent=2))
    for line in table(folded) if not as_json else ():
        click.echo(line, err=is_stream(narrow))
    if quiet == 0:
        click.echo(summary(folded), err=True)


def _warn(text: str, quiet: int) -> None:
    if quiet < 2:
        click.echo(f"warning: {text}", err=True)


@cli.command()
@click.argument("name", required=False)
@click.option(
    "--draft", metavar="MODEL", help="Print the draft of a map for MODEL, to be completed and given to --map."
)
@click.option("--config", metavar="FILE", help="With --draft: MODEL's config, where it is not beside it.")
@reporting
def maps(name: str | None, draft: str | None, config: str | None) -> None:
    """List the architecture maps, or print the one called NAME.

    `widen-ckpt maps --draft MODEL > mine.yaml` drafts a map for a model that has none. It extends the closest map (or NAME)
    where most tensors fit that; what is guessed in it is marked, and has to be decided before anything is converted.
    """
    if draft is not None:
        _draft(draft, config, name)
    elif config is not None:
        raise click.UsageError("--config goes with --draft")
    elif name is not None:
        click.echo(map_text(name), nl=False)
    else:
        for known in map_names():
            click.echo(f"{known:12} {map_text(known).splitlines()[0].lstrip('# ')}")


def _draft(model: str, config: str | None, name: str | None) -> None:
    """Prints the draft of a map on stdout, and on stderr what it is."""
    checkpoint = open_checkpoint(model, config, {})
    try:
        made = drafted(checkpoint, name)
    finally:
        checkpoint.close()
    click.echo(made.text, nl=False)
    click.echo(made.note, err=True)


@cli.command()
@click.argument("folder", required=False, metavar="[FOLDER]")
@reporting
def demo(folder: str | None) -> None:
    """Make a tiny model, widen it, run both and compare; FOLDER keeps the files."""
    text, same = demonstration(folder)
    click.echo(text)
    if not same:
        sys.exit(3)


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
