"""A recipe: what the flags say of a conversion, in a YAML file. Its keys are the flags, so that click alone knows what there is.

The values are read as they are written (`heads: +4` is a text, not a number) and pass through the option of that name, as if they
stood on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from widen_cli.errors import Faults, WidenError, did_you_mean, printable
from widen_cli.map_file import Keys, Kind, MapData, read_map_data
from widen_cli.options import Options

RECIPE = Kind(
    "recipe",
    "a recipe is a YAML mapping of options; `widen-ckpt IN --dry-run --as-recipe` prints one",
    texts=True,
)


class RefusedRecipeError(click.ClickException):
    """A recipe that is refused while the command line is read."""

    def show(self, file: Any = None) -> None:
        click.echo(self.message, err=True)


def recipe_option(params: Sequence[click.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option that reads a recipe of the options `params`; what stands on the command line itself counts before it."""

    def follow(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is None:
            return
        try:
            said = read_recipe(value, params, ctx)
        except WidenError as error:
            raise RefusedRecipeError(str(error)) from None
        ctx.default_map = {**(ctx.default_map or {}), **said}

    return click.option(
        "--recipe",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=follow,
        help="A YAML file of these options, named as the flags are, without the dashes before them. Flags count before it.",
    )


def key_of(param: click.Parameter) -> str:
    """The key of an option in a recipe: its flag without the dashes before it."""
    return next(flag for flag in param.opts if flag.startswith("--"))[2:]


def read_recipe(given: str, params: Sequence[click.Parameter], ctx: click.Context) -> dict[str, Any]:
    """What a recipe says, by the names of the parameters. Raises WidenError with every fault and its file:line:column."""
    data = read_map_data(Path(given), given, RECIPE)
    options = {key_of(param): param for param in params}
    said: dict[str, Any] = {}
    with Faults() as faults:
        for key in data.value:
            if key not in options:
                faults.add(f"{data.key_place((key,))}: unknown key '{printable(key)}'{did_you_mean(key, options)}")
                continue
            with faults.collecting():
                said[str(options[key].name)] = _value(data, key, options[key], ctx)
    return said


def _value(data: MapData, key: str, param: click.Parameter, ctx: click.Context) -> Any:
    """The value of one option as the command line would have it, checked by the option itself, each of several by itself."""
    entries = dict(_entries(data, key))
    several = bool(getattr(param, "multiple", False))
    with Faults() as faults:
        for path, entry in entries.items():
            try:
                param.process_value(ctx, (entry,) if several else entry)
            except click.UsageError as error:
                told = error.message if error.message.startswith("--") else f"{key}: {error.message}"
                faults.add(f"{data.place(path)}: {told}")
        if several or faults.texts or len(entries) < 2:
            return tuple(entries.values()) if several else ",".join(entries.values())
        together = ",".join(entries.values())
        # What each says by itself may not go together, as two ranges of layers that meet.
        try:
            param.process_value(ctx, together)
        except click.UsageError as error:
            faults.add(f"{data.place((key,))}: {error.message}")
    return together


def _entries(data: MapData, key: str) -> list[tuple[Keys, str]]:
    """The texts that an option is given with the paths they stand at: one, the items of a list, or KEY=VALUE of a mapping."""
    value = data.value[key]
    found: list[tuple[Keys, Any]]
    if isinstance(value, dict):
        found = [((key, name), text) for name, text in value.items()]
    elif isinstance(value, list):
        found = [((key, number), text) for number, text in enumerate(value)]
    else:
        found = [((key,), value)]
    with Faults() as faults:
        for path, text in found:
            if not isinstance(text, str):
                faults.add(f"{data.place(path)}: '{'.'.join(map(str, path))}' has to be a text or a number")
            elif not text:
                faults.add(f"{data.key_place(path)}: '{'.'.join(map(str, path))}' has no value")
        if not found:
            faults.add(f"{data.key_place((key,))}: '{key}' has no value")
    return [(path, f"{path[1]}={text}" if isinstance(value, dict) else text) for path, text in found]


def recipe_text(options: Options, params: Sequence[click.Parameter]) -> str:
    """The recipe of what was said; what --like and --target-params were resolved to stands in their place."""
    plain = Options(options.input, options.output)
    said: dict[str, Any] = {}
    for param in params:
        value = getattr(options, str(param.name))
        if value != getattr(plain, str(param.name)):
            said[key_of(param)] = _written(value)
    if options.grows_by_default:
        said = {"factor": 2, **said}
    return str(yaml.safe_dump(said, sort_keys=False, width=200, allow_unicode=True))


def _written(value: Any) -> Any:
    """A value as it reads best: KEY=VALUE as a mapping, or where a key stands twice, as one of several layers, as a list."""
    if isinstance(value, bool | int):
        return value
    pieces = list(value) if isinstance(value, tuple) else str(value).split(",")
    pairs = [piece.partition("=") for piece in pieces]
    if all(equals and name and text for name, equals, text in pairs):
        once = len({pair[0] for pair in pairs}) == len(pairs)
        return {name: _number(text) for name, _, text in pairs} if once else pieces
    return pieces if isinstance(value, tuple) else _number(str(value))


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and str(int(text)) == text else text
