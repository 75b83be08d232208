"""`widen-ckpt maps`: lists the maps that come with the tool, prints one, or drafts one."""

from __future__ import annotations

import itertools

import click

from widen_cli.checkpoint import open_checkpoint
from widen_cli.drafts import draft as drafted
from widen_cli.map_file import map_names, map_text
from widen_cli.shell import reporting


@click.command("maps")
@click.argument("name", required=False)
@click.option(
    "--draft", metavar="MODEL", help="Print the draft of a map for MODEL, to be completed and given to --map."
)
@click.option("--config", metavar="FILE", help="With --draft: MODEL's config, where it is not beside it.")
@reporting
def maps_command(name: str | None, draft: str | None, config: str | None) -> None:
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
        names = list(map_names())
        for known in names:
            click.echo(f"{known:{max(map(len, names))}} {_first_sentence(map_text(known))}")


def _first_sentence(text: str) -> str:
    """What a map's comment at its top begins with, whole although it may run over several lines."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    sentence, stop, _ = " ".join(line.lstrip("# ") for line in comment).partition(". ")
    return sentence + stop.rstrip()


def _draft(model: str, config: str | None, name: str | None) -> None:
    """Prints the draft of a map on stdout, and on stderr what it is."""
    checkpoint = open_checkpoint(model, config, {})
    try:
        made = drafted(checkpoint, name)
    finally:
        checkpoint.close()
    click.echo(made.text, nl=False)
    click.echo(made.note, err=True)
