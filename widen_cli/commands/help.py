"""The help text of commands with many options: under headings, those first that say what grows."""

from __future__ import annotations

import click

# Of an option that several commands have, the one place; what is not named here is of the command itself.
HEADINGS = {
    "What grows": ("factor", "grow", "like", "target_params", "depth", "experts", "top_k", "slices", "router", "upcycle", "recipe"),
    "How": ("scaling", "rope", "layout", "fill", "untie", "allow_approximate", "split", "noise", "seed"),
    "Types": ("dtype", "dequantize", "embedding_type"),
    "What is read": ("config", "set", "settings", "map", "base", "strip_prefix", "record"),
    "Running both models": ("run", "text", "run_dtype", "tolerance", "wide_base"),
}  # fmt: skip
OTHERS = "Output"


class Sectioned(click.Command):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        place = {name: heading for heading, names in HEADINGS.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*HEADINGS, OTHERS)}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                sections[place.get(param.name or "", OTHERS)].append(record)
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
