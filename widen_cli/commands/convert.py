"""`widen-ckpt convert`: widens one input or several, proves it where asked, and sums up what happened to the values."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

import click

from widen_cli.commands.help import Sectioned
from widen_cli.commands.options import bar, max_shard_size, options_of, settle_all, threads
from widen_cli.commands.verify import tell_verdict, verified
from widen_cli.conversion_options import conversion_options, conversion_params
from widen_cli.convert import prepare
from widen_cli.errors import WidenError, printable
from widen_cli.jobs import Job, Report
from widen_cli.moments.attach import attach
from widen_cli.moments.growth import CHOICES
from widen_cli.output_checks import is_stream
from widen_cli.plan.text import plan_json, plan_text
from widen_cli.recipes import recipe_text
from widen_cli.several import targets_in
from widen_cli.shell import Terminated, reporting, tell
from widen_cli.writing import run


@click.command("convert", cls=Sectioned)
@click.argument("paths", metavar="IN [OUT]", nargs=-1, required=True)
@conversion_options
@click.option("--into", metavar="FOLDER", help="Widen every path named, each under its own name in FOLDER.")
@click.option("--config-out", metavar="FILE", help="Where to write the new config.")
@max_shard_size
@threads("read, widen and write")
@click.option(
    "--optimizer",
    type=click.Choice(CHOICES),
    help="Grow the Adam moments in IN's optimizer.pt too: keep gives every copy its share, reset-new begins with the new ones at 0.",
)
@click.option(
    "--new-parameters", metavar="FILE", help="Where to write a mask of the parameters that are new (safetensors)."
)
@click.option("--force", is_flag=True, help="Replace OUT where it exists, in one step.")
@click.option("--resume", is_flag=True, help="Go on from the files that an interrupted run of the same had finished.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the bytes needed; write nothing.")
@click.option("--as-recipe", is_flag=True, help="With --dry-run: print a recipe of it instead, for --recipe.")
@click.option(
    "--verify", "proof", is_flag=True, help="Derive everything again from IN and compare it with what was written."
)
@click.option("--json", "as_json", is_flag=True, help="Print plan and result as JSON on stdout.")
@click.option("-q", "--quiet", count=True, help="No summary; twice: no warnings either.")
@reporting
def convert_command(paths: tuple[str, ...], into: str | None, **given: Any) -> None:
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
    if given["new_parameters"] is not None:
        raise click.UsageError("--into takes no --new-parameters, which speaks of one output")
    if given["as_json"] or given["config_out"] is not None:
        raise click.UsageError("--into takes neither --json nor --config-out, which speak of one output")
    try:
        targets = targets_in(into, paths)
    except WidenError as error:
        raise click.UsageError(str(error)) from None
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
    source: str,
    target: str | None,
    dry_run: bool,
    as_recipe: bool,
    as_json: bool,
    proof: bool,
    quiet: int,
    **given: Any,
) -> bool:
    """One conversion; False where --verify found a difference."""
    if target is None and not dry_run:
        raise click.UsageError("OUT is missing; a dry run alone does without it")
    if as_recipe and (as_json or not dry_run):
        raise click.UsageError(
            "--as-recipe prints on stdout what a dry run plans; give --dry-run, and leave --json out"
        )
    unnamed = "-" if source == "-" else source.rstrip("/") + ".wide"
    paths = {"input": source, "output": unnamed if target is None else target}
    options = options_of({**given, **paths}, dry_run=dry_run, named=target is not None)
    if proof and (dry_run or is_stream(options.output) or options.input == "-"):
        raise click.UsageError("--verify reads IN and OUT again; name files for both, and leave --dry-run out")
    if as_json and is_stream(options.output) and not dry_run:
        raise click.UsageError("--json prints on stdout, where OUT goes too; name a file for OUT")
    settle_all(options, quiet)
    job = attach(prepare(options))
    for warning in job.warnings if quiet < 2 else ():
        click.echo(f"warning: {warning}", err=True)
    plan = job.plan
    rebuilt = plan.rebuilt or plan.made_of or plan.layers
    if quiet < 2 and not rebuilt and not any(factor != 1 for factor in plan.factors.values()):
        click.echo("warning: nothing grows: every factor asked for is 1, so this only writes the model again", err=True)
    if dry_run:
        job.checkpoint.close()
        if as_recipe:
            click.echo(recipe_text(job.options, conversion_params()), nl=False)
        else:
            _print_plan(job, as_json)
        return True
    report = _run(job, quiet)
    try:
        found = verified(options, quiet) if proof else None
    except (KeyboardInterrupt, Terminated) as stopped:
        stopped.add_note(f"{_shown_output(report)} is complete, but was not verified")
        raise
    if as_json:
        done = {**plan_json(job.plan), "bytes": job.nbytes, "values": _counted(report), "was_complete": job.complete}
        click.echo(json.dumps(done | ({"verification": found.as_json()} if found else {}), indent=2))
    if job.complete:
        for note in report.notes if quiet == 0 else ():
            click.echo(note, err=True)
    else:
        _summary(report, quiet)
    if found is not None:
        tell_verdict(found, options, quiet)
    return found is None or not found.differences


def _run(job: Job, quiet: int) -> Report:
    with bar(job.nbytes, quiet) as advance:
        return run(job, advance)


def _print_plan(job: Job, as_json: bool) -> None:
    if as_json:
        aim = job.aim.values if job.aim else {}
        click.echo(json.dumps({**plan_json(job.plan), **aim, "bytes": job.nbytes}, indent=2))
    else:
        for line in (*job.aim.lines, "") if job.aim else ():
            click.echo(line)
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
        exactness = f"approximate, by {printable(plan.approximate)}" if plan.approximate else exactness
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
