"""Names in a map that stand for something else of it: those that stand for nothing are told where they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from widen_cli.errors import did_you_mean
from widen_cli.map_file import Keys
from widen_cli.map_rules import OF_LAYERS
from widen_cli.map_schema import MapDocument

Fault = tuple[Keys, str]
Use = tuple[Keys, str, Iterable[str]]


def misnamed(document: MapDocument) -> Iterator[Fault]:
    """Every value that names nothing of its kind, by its path; and every scalar that counts other layers than its weight."""
    for path, word, known in _uses(document):
        if word not in known:
            what = _WHAT.get(".".join(map(str, path[:2])), _WHAT.get(str(path[0]), "axis"))
            yield path, f"'{word}' is no {what} of this map{did_you_mean(word, known)}"
    for weight, scalar in document.scalars.items():
        if weight.count("*") != scalar.count("*"):
            yield ("scalars", weight), f"'{scalar}' and its weight '{weight}' have to count the same layers"


def misnamed_keys(document: MapDocument) -> Iterator[Fault]:
    """Every key that names nothing of its kind, by its path."""
    patterns = _patterns(document)
    for weight in document.scalars:
        if weight not in patterns:
            yield ("scalars", weight), f"'{weight}' is no tensor of this map{did_you_mean(weight, patterns)}"
    read = _read_keys(document)
    for key in document.places:
        if key not in read:
            yield ("places", key), f"'{key}' is no config key of this map{did_you_mean(key, read)}"


def outputs_named(document: MapDocument) -> tuple[str, ...]:
    """The spaces that a bare model's hidden states may be, the first that it has."""
    return _listed(document.output)


def other_outputs(document: MapDocument) -> dict[str, tuple[str, ...]]:
    """The spaces of what else a model of transformers puts out: what its layers give, which is the stream, and what the map names."""
    layers = document.growth.width[:1] if document.match.model_type else []
    named = {name: _listed(spaces) for name, spaces in document.outputs.items()}
    return {**({OF_LAYERS: (layers[0],)} if layers else {}), **named}


def _listed(spaces: str | Sequence[str]) -> tuple[str, ...]:
    return (spaces,) if isinstance(spaces, str) else tuple(spaces)


def _uses(document: MapDocument) -> Iterator[Use]:
    """Each value that is a name, with those it may be."""
    growth, patterns = document.growth, _patterns(document)
    spaces = {*document.axes, *document.spaces}
    for word, axes in (("width", growth.width), ("heads", growth.heads), ("head_dim", growth.named)):
        yield from ((("growth", word, n), axis, document.axes) for n, axis in enumerate(axes))
    if isinstance(document.norms, dict):
        yield from ((("norms", axis), axis, document.axes) for axis in document.norms)
    for section, keys in (("multipliers", document.multipliers), ("untie", document.untie)):
        yield from (((section, n), key, document.config) for n, key in enumerate(keys))
    for n, tie in enumerate(document.tied):
        yield ("tied", n, "tensor"), tie.tensor, patterns
        yield ("tied", n, "to"), tie.to, patterns
    yield from ((("scalars", weight), scalar, patterns) for weight, scalar in document.scalars.items())
    yield from _rope_uses(document, patterns)
    listed = isinstance(document.output, list)
    for n, space in enumerate(outputs_named(document)):
        yield ("output", n) if listed else ("output",), space, spaces
    for name, others in document.outputs.items():
        yield from ((("outputs", name), space, spaces) for space in _listed(others))
    yield from ((("synonyms", other), word, _ends(patterns)) for other, word in document.synonyms.items())


def _rope_uses(document: MapDocument, patterns: set[str]) -> Iterator[Use]:
    rope = document.rope
    if rope is None:
        return
    if rope.tensor is not None:
        yield ("rope", "tensor"), rope.tensor, patterns
    known = [*document.config, *document.places]
    for word, keys in (("keys", rope.keys), ("lists", rope.lists)):
        yield from ((("rope", word, n), key, known) for n, key in enumerate(keys))
    yield from ((("rope", "shares", key), key, known) for key in rope.shares)


def _patterns(document: MapDocument) -> set[str]:
    return {name.rstrip("?") for name in document.tensors}


_WHAT = {
    "tied": "tensor",
    "scalars": "tensor",
    "rope.tensor": "tensor",
    "rope.keys": "config key",
    "rope.lists": "config key",
    "rope.shares": "config key",
    "multipliers": "config key",
    "untie": "config key",
    "synonyms": "end of a tensor's name",
    "output": "axis or space",
    "outputs": "axis or space",
}


def _read_keys(document: MapDocument) -> set[str]:
    """The config keys that a map reads by way of their places."""
    rope = document.rope
    return {*document.config, *((*rope.keys, *rope.lists, *rope.shares) if rope else ())}


def _ends(names: Iterable[str]) -> set[str]:
    """The ends of tensors' names, from each part on."""
    parts = [name.split(".") for name in names]
    return {".".join(one[start:]) for one in parts for start in range(len(one))}
