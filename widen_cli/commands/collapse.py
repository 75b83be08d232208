"""`widen-ckpt collapse`: folds a wide model back.

The conversion's options say how the wide model was made, but for the types, which are those that the narrow one is written in.
"""

from __future__ import annotations

import json
from typing import Any

import click

from widen_cli.collapse import collapse
from widen_cli.collapse.report import as_json as as_values
from widen_cli.collapse.report import summary, table
from widen_cli.commands.help import Sectioned
from widen_cli.commands.options import bar, max_shard_size, options_of, settle_all, threads
from widen_cli.conversion_options import conversion_options
from widen_cli.output_checks import is_stream
from widen_cli.shell import reporting


@click.command("collapse", cls=Sectioned)
@click.argument("wide", metavar="WIDE")
@click.argument("narrow", metavar="NARROW")
@conversion_options
@click.option(
    "--record", metavar="MODEL", help="Go by what MODEL records, the wide model as it was before it was trained."
)
@click.option("--config-out", metavar="FILE", help="Where to write the narrow config.")
@max_shard_size
@threads("read, fold and write")
@click.option("--force", is_flag=True, help="Replace NARROW where it exists, in one step.")
@click.option("--json", "as_json", is_flag=True, help="Print the distances of all tensors as JSON on stdout.")
@click.option("-q", "--quiet", count=True, help="No summary; twice: no warnings either.")
@reporting
def collapse_command(wide: str, narrow: str, record: str | None, as_json: bool, quiet: int, **given: Any) -> None:
    """Fold the widened checkpoint WIDE back into a narrow one, NARROW: the copies of each value are averaged.

    Of a model that was not trained since, NARROW is what was widened, bit for bit where nothing was rounded. WIDE records how it
    was made; options are needed only where it does not. --dtype and --dequantize are the types to write. Prints how far the
    copies have moved apart.
    """
    if as_json and is_stream(narrow):
        raise click.UsageError("--json prints on stdout, where NARROW goes too; name a file for NARROW")
    options = options_of({"input": wide, "output": narrow, **_checked(given)})
    settle_all(options, quiet, record)
    with bar(None, quiet) as advance:
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


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """What was said, without what the way back has no use for. Raises click.UsageError where that was said."""
    rest = dict(given)
    if rest.pop("embedding_type"):
        raise click.UsageError("--embedding-type is for a conversion; --dequantize folds quantised weights as numbers")
    if rest["like"] or rest["target_params"]:
        raise click.UsageError("--like and --target-params are for a conversion; --grow says what each axis grew by")
    return rest
