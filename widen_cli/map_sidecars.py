"""A map's `sidecars` section, checked: what files beside the model state of widths, and of heads by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from widen_cli.errors import did_you_mean
from widen_cli.map_file import Keys
from widen_cli.map_schema import MapDocument, NumberedSection

Widths = dict[str, dict[str, str]]
Numbers = dict[str, dict[str, tuple[str, str]]]


def sidecar_sections(document: MapDocument, fault: Callable[[Keys, str], None]) -> tuple[Widths, Numbers]:
    """By file and key the axis of a width, and the stack of layers and the axis of numbered heads; every fault is told to `fault`."""
    widths: Widths = {}
    numbers: Numbers = {}

    def check(path: Keys, word: str, known: Iterable[str], what: str) -> None:
        if word not in known:
            fault(path, f"'{word}' is {what}{did_you_mean(word, known)}")

    for file, keys in document.sidecars.items():
        for key, said in keys.items():
            path = ("sidecars", file, key)
            if isinstance(said, NumberedSection):
                check((*path, "layers"), said.layers, document.repeats, "none of 'repeats'")
                check((*path, "heads"), said.heads, document.axes, "no axis of this map")
                numbers.setdefault(file, {})[key] = (said.layers, said.heads)
            else:
                check(path, said, document.axes, "no axis of this map")
                widths.setdefault(file, {})[key] = said
    return widths, numbers
