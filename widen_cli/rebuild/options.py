"""The command-line options that make a dense model a mixture of experts."""

from __future__ import annotations

import click

EXPERTS_LIMIT = 4096

EXPERT_OPTIONS = (
    click.option(
        "--experts",
        type=click.IntRange(min=2, max=EXPERTS_LIMIT),
        help="Make the dense model a mixture of so many experts, copies of its feed-forward layers.",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=1, max=EXPERTS_LIMIT),
        help="With --experts: how many of them work for a token.  [default: 2, of slices that many sets]",
    ),
    click.option(
        "--slices",
        type=click.IntRange(min=1, max=EXPERTS_LIMIT),
        default=1,
        show_default=True,
        help="With --experts: cut each copy into so many fine-grained experts.",
    ),
    click.option(
        "--router",
        type=click.Choice(["random", "zero"]),
        default="random",
        show_default=True,
        help="With --experts: the router's weights, drawn by --seed, or zeros.",
    ),
    click.option(
        "--upcycle",
        metavar="MAP",
        help="With --experts: the kind of model that is made, such as mixtral.  [default: the first that fits]",
    ),
)
