"""The command-line options that say how a wide model is made: those of `convert`, and of `verify` where nothing recorded it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec

import click

from widen_cli.config import parse_settings
from widen_cli.dtypes import CONFIG_NAMES
from widen_cli.errors import WidenError
from widen_cli.map_checks import ROPE_METHODS
from widen_cli.plan.filling import COPY, FILLS
from widen_cli.plan.growth import FACTOR_LIMIT
from widen_cli.plan.layer_growth import parse_growth
from widen_cli.plan.layouts import LAYOUTS
from widen_cli.plan.modes import MODES
from widen_cli.plan.splits import WAYS
from widen_cli.proposals import parse_params
from widen_cli.rebuild.layers_wished import parse_depth
from widen_cli.rebuild.options import EXPERT_OPTIONS
from widen_cli.recipes import recipe_option
from widen_cli.records import NUMBERS

P = ParamSpec("P")

SEED_LIMIT = 2**63 - 1

# What files, configs and people call the types.
_TYPES = {alias.lower(): name for name, other in CONFIG_NAMES.items() for alias in (name, other)}
_TYPES |= {"fp64": "F64", "fp32": "F32", "fp16": "F16", "half": "F16"}


def _dtype(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    if value.lower() not in _TYPES:
        raise click.BadParameter(f"'{value}' is none of {', '.join(CONFIG_NAMES)}")
    return _TYPES[value.lower()]


def readable(parse: Callable[[Any], object]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """An option whose text is read here, so that what cannot be read is wrong usage and not a refusal of the input."""

    def check(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
        try:
            if value is not None:
                parse(value)
        except WidenError as error:
            raise click.UsageError(str(error)) from None
        return value

    return check


class _Factor(click.IntRange):
    """The factor of the whole width; what is none is told what is possible instead."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            text = f"'{value}' is no whole number from 2 to {FACTOR_LIMIT}; --grow says by how much single axes grow"
            raise click.BadParameter(text, ctx, param) from None


CONVERSION = (
    click.option(
        "--factor",
        type=_Factor(min=2, max=FACTOR_LIMIT),
        help="Grow the model's width by this whole number, as its family does by default.  [default: 2]",
    ),
    click.option(
        "--grow",
        callback=readable(parse_growth),
        metavar="AXIS=WISH,...",
        help="Grow single axes, by a factor (hidden=2x, 1.5x), to a size (hidden=5120, heads=to:12), by so many more (heads=+4) or "
        "to the next multiple (intermediate=round:256, 2x:round:256). Say 2x or to:2 where a small number could be either. "
        "Without --factor the others stay. "
        "intermediate=2x@8-15 (or 5120@8-15, +4@3) is for layers 8 to 15, each from its own size.",
    ),
    click.option(
        "--like",
        metavar="MODEL",
        help="Grow every axis to the size it has in another model: its config.json, its folder, or a GGUF. --grow beside it "
        "sets single axes.",
    ),
    click.option(
        "--target-params",
        callback=readable(parse_params),
        metavar="NUMBER",
        help="Grow to about so many parameters, such as 1.3B or 350M. --dry-run lists the nearest growths.",
    ),
    click.option(
        "--depth",
        callback=readable(parse_depth),
        metavar="[STACK:]N",
        multiple=True,
        help="Add layers that pass the stream on as it is: 2x, +4 (spread), +4@end, +4@7 (behind layer 7) or a new total; or lay "
        "layers anew, which changes the function: 0-23,8-31 or drop:5,7-9, with --allow-approximate. Alone, the width stays.",
    ),
    click.option(
        "--allow-approximate",
        is_flag=True,
        help="Take what changes the function: --rope pairs, and --depth that repeats or drops layers.",
    ),
    click.option(
        "--scaling",
        type=click.Choice(["auto", *MODES]),
        default="auto",
        show_default=True,
        help="How the factors are spread over the weights.",
    ),
    click.option(
        "--dtype",
        callback=_dtype,
        metavar="TYPE",
        help="Write floating-point weights in this type: F32, BF16, F16 (or bfloat16, fp16, ...), F64, F8_E4M3, F8_E5M2.",
    ),
    click.option(
        "--dequantize",
        type=click.Choice(NUMBERS, case_sensitive=False),
        help="Of a GGUF: write quantised blocks as numbers of this type.",
    ),
    click.option(
        "--embedding-type",
        type=click.Choice(NUMBERS, case_sensitive=False),
        help="Of a GGUF: write quantised embedding tables in this type, where their block scales would round.",
    ),
    click.option(
        "--map",
        "map",
        metavar="NAME|FILE",
        help="Architecture map to go by, where the config does not say or none fits.",
    ),
    click.option(
        "--config",
        metavar="FILE",
        help="The model's config, where it is not beside IN as <stem>.config.json or config.json.",
    ),
    click.option(
        "--set",
        "settings",
        callback=readable(parse_settings),
        metavar="KEY=VALUE",
        multiple=True,
        help="A config value to go by, such as num_attention_heads=12. Repeatable.",
    ),
    click.option(
        "--base",
        metavar="MODEL",
        help="Of a LoRA adapter IN: its narrow base; every other option as for widening that base.",
    ),
    click.option("--strip-prefix", metavar="TEXT", help="Take this prefix off the tensor names, such as _orig_mod."),
    click.option(
        "--layout",
        type=click.Choice(LAYOUTS),
        default="auto",
        show_default=True,
        help="Where copies go: side by side, or an axis as a whole after itself. Quantised blocks may need the latter.",
    ),
    click.option(
        "--rope",
        type=click.Choice(ROPE_METHODS),
        help="How heads grow under rotary positions: a raised base, pairs moved apart with zeros between, copies of pairs "
        "with numbers that divide their frequencies, or copies under the runtime's own frequencies (pairs: another function).  "
        "[default: the first that is exact]",
    ),
    click.option(
        "--untie",
        is_flag=True,
        help="Write a head that is tied to the embedding as a tensor of its own, and say so in the config.",
    ),
    *EXPERT_OPTIONS,
    click.option(
        "--fill",
        type=click.Choice(FILLS),
        default=COPY,
        show_default=True,
        help="What new units are where a size is no multiple: copies that share the work, or units with zero output weights, "
        "themselves copies (zero) or drawn from their matrix (random).",
    ),
    click.option(
        "--split",
        type=click.Choice(WAYS),
        help="Let copies hold unequal parts of what they held together, so that training moves them apart; even parts differ in "
        "their last places alone.",
    ),
    click.option(
        "--noise",
        type=click.FloatRange(min=-200, max=20),
        metavar="DB",
        help="The same by noise whose sum over the copies is zero, so many decibels above the copies' own level, such as -30.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0, max=SEED_LIMIT),
        help="What parts, noise, --fill random, routers, and the inputs of verify --run are drawn by.  [default: 0]",
    ),
)


def conversion_options(command: Callable[P, None]) -> Callable[P, None]:
    """The command with every option that says how a wide model is made, and with a recipe of them."""
    command = recipe_option(conversion_params())(command)
    for option in reversed(CONVERSION):
        command = option(command)
    return command


@cache
def conversion_params() -> tuple[click.Parameter, ...]:
    """The options themselves, in their order."""

    def nothing() -> None: ...

    for option in reversed(CONVERSION):
        option(nothing)
    found: list[click.Parameter] = nothing.__click_params__  # type: ignore[attr-defined]
    return tuple(reversed(found))
