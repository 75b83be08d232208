"""Slips in a map's names that leave it a map, of another model: each is told by the path it stands at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from widen_cli.errors import did_you_mean
from widen_cli.map_file import Keys
from widen_cli.map_schema import MapDocument

SLIP = 0.85  # a letter or two
Fault = tuple[Keys, str]
_WORD = re.compile(r"[A-Za-z_][\w.]*")


def slips(document: MapDocument) -> Iterator[Fault]:
    """Every key that names nothing of the map, and every name in it that nothing reads and that looks like one which something does."""
    yield from _beginnings(document)
    yield from _counted(document)
    yield from _unread(document)
    yield from _unused(document)


def _beginnings(document: MapDocument) -> Iterator[Fault]:
    """Prefixes and parts are beginnings of names, whole parts of them, or whole names."""
    names = {name.rstrip("?") for name in document.tensors}
    known = names | {name[: dot.end()] for name in names for dot in re.finditer(r"\.", name)}
    for section, keys in (("prefixes", document.prefixes), ("parts", document.parts)):
        for key in keys:
            if key not in known:
                near = did_you_mean(key, known, SLIP)
                yield (section, key), f"no tensor of this map begins with '{key}'{near}"


def _counted(document: MapDocument) -> Iterator[Fault]:
    """What is repeated is counted up to a star in names of tensors."""
    known = {name[: star.end()] for name in document.tensors for star in re.finditer(r"\*", name)}
    for key in document.repeats:
        if key not in known:
            near = did_you_mean(key, known, SLIP)
            yield ("repeats", key), f"no tensor of this map has a number at the end of '{key}'{near}"


def _unread(document: MapDocument) -> Iterator[Fault]:
    """Defaults of config keys that nothing reads, where what counts or holds something reads one of nearly that name."""
    said = document.model_dump(exclude={"config": True, "places": True})
    read = {word for text in _texts(said) for word in _WORD.findall(text)}
    keys = {key for keys in document.repeats.values() for key in _listed(keys)}
    keys |= {key for axis in document.axes.values() for key in _listed(axis.key)} | document.places.keys()
    for key in document.config:
        if key not in read and (near := did_you_mean(key, keys - document.config.keys(), SLIP)):
            yield ("config", key), f"nothing in this map reads '{key}'{near}"


def _unused(document: MapDocument) -> Iterator[Fault]:
    """Axes, and spaces that only lie on one, which nothing speaks of."""
    said = document.model_dump(exclude={"axes": True, "spaces": True, "config": True})
    read = {word for text in _texts(said) for word in _WORD.findall(text)}
    read |= {word for name, text in document.spaces.items() for word in _WORD.findall(text) if word != name}
    read |= {
        word
        for axis in document.axes.values()
        for text in _texts(axis.model_dump(exclude={"key"}))
        for word in _WORD.findall(text)
    }
    for section, names in (("axes", document.axes), ("spaces", document.spaces)):
        for name in names:
            plain = section == "axes" or document.spaces[name] in document.axes
            if plain and name not in read and (near := did_you_mean(name, {*names} - {name}, SLIP)):
                yield (section, name), f"nothing in this map speaks of '{name}'{near}"


def _listed(keys: str | list[str] | None) -> list[str]:
    return [keys] if isinstance(keys, str) else keys or []


def _texts(value: Any) -> Iterator[str]:
    """All texts in a section, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner)
