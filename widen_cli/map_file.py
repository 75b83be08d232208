"""Where the maps are, and their YAML as plain data that still knows the line and column of every key and value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from widen_cli.errors import WidenError, did_you_mean, printable

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: type[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_PLAIN_FLOAT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
Keys = tuple[str | int, ...]
MAP_LIMIT = 1_000_000  # a real map has some thousand bytes
VALUES_LIMIT = 100_000  # aliases of aliases grow without bound; a real map has some hundred values


@dataclass(frozen=True)
class Kind:
    """What a YAML file is called in messages, and what it has to be; `texts`: its scalars are read as they are written."""

    name: str
    form: str
    texts: bool = False


MAP = Kind("map", "a map is a YAML mapping of sections; see `widen-ckpt maps llama` for one")


@dataclass(frozen=True)
class Place:
    """Where a value stands; prints as `file:line:column`, both counted from 1."""

    file: str
    line: int
    column: int

    def plus(self, columns: int) -> Place:
        return Place(self.file, self.line, self.column + columns)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass
class MapData:
    """A document as nested dicts, lists and scalars, and the place of every key path in it.

    `places` holds for a path the place of its value, `keys` that of its key.
    """

    value: dict[str, Any]
    places: dict[Keys, Place] = field(default_factory=dict)
    keys: dict[Keys, Place] = field(default_factory=dict)

    def place(self, path: Keys) -> Place:
        """The place of a path, or of its nearest known parent."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]

    def key_place(self, path: Keys) -> Place:
        return self.keys.get(path) or self.place(path)


def read_map_data(path: Path, shown: str, kind: Kind = MAP) -> MapData:
    """The YAML mapping in `path`. Raises WidenError with `shown:line:column` for what is no such thing."""
    if path.exists() and not path.is_file():
        raise WidenError(f"{printable(shown)}: cannot read the {kind.name}: it is no regular file")
    try:
        with path.open("rb") as file:
            data = file.read(MAP_LIMIT + 1)
        text = "" if len(data) > MAP_LIMIT else data.decode()
    except OSError as error:
        raise WidenError(f"{printable(shown)}: cannot read the {kind.name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WidenError(
            f"{printable(shown)}: the {kind.name} is not UTF-8 text; is it the right file for --{kind.name}?"
        ) from None
    if len(data) > MAP_LIMIT:
        raise WidenError(
            f"{printable(shown)}: the {kind.name} has more than {MAP_LIMIT} bytes; is it the right file for --{kind.name}?"
        )
    return parse_map_data(text, printable(shown), kind)


def parse_map_data(text: str, shown: str, kind: Kind = MAP) -> MapData:
    """As `read_map_data`, for a text."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise WidenError(f"{shown}{at}: {printable(error.problem or error.context or 'no valid YAML')}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        raise WidenError(
            f"{shown}:{line}:{column}: a character that YAML does not allow, U+{error.character:04X}"
        ) from None
    except yaml.YAMLError as error:
        raise WidenError(f"{shown}: no valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise WidenError(f"{shown}: the YAML is nested too deeply") from None
    if not isinstance(node, yaml.MappingNode):
        raise WidenError(f"{shown}:1:1: {kind.form}")
    data = MapData({})
    try:
        data.value = _Builder(shown, data, kind.texts).build(node, ())
    except RecursionError:
        raise WidenError(f"{shown}: the YAML is nested too deeply") from None
    return data


class _Builder:
    def __init__(self, shown: str, data: MapData, texts: bool) -> None:
        self.shown = shown
        self.texts = texts
        self.data = data
        self.scalars = yaml.constructor.SafeConstructor()
        self.open: set[int] = set()
        self.built = 0

    def at(self, node: yaml.Node) -> Place:
        quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
        return Place(self.shown, node.start_mark.line + 1, node.start_mark.column + 1 + quoted)

    def build(self, node: yaml.Node, path: Keys) -> Any:
        self.data.places[path] = self.at(node)
        self.built += 1
        if self.built > VALUES_LIMIT:
            raise WidenError(
                f"{self.at(node)}: the YAML unfolds to more than {VALUES_LIMIT} values; write out what its aliases mean"
            )
        if id(node) in self.open:
            raise WidenError(f"{self.at(node)}: an alias may not contain itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, number)) for number, item in enumerate(node.value)]
            return self.scalar(node)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Keys) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.at(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise WidenError(f"{place}: a key is a plain word")
            key = key_node.value
            if key in built:
                raise WidenError(f"{place}: '{key}' stands twice; the first is at {self.data.keys[(*path, key)]}")
            self.data.keys[(*path, key)] = place
            built[key] = self.build(value_node, (*path, key))
        return built

    def scalar(self, node: Any) -> Any:
        if self.texts:
            return node.value
        try:
            value = self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise WidenError(f"{self.at(node)}: cannot read '{node.value}': {str(error).splitlines()[0]}") from None
        # YAML 1.1 reads `1e-5` as text for want of a dot; people write it as a number.
        if isinstance(value, str) and not node.style and _PLAIN_FLOAT.fullmatch(value):
            return float(value)
        return value


def document_text(value: dict[str, Any]) -> str:
    """A document as YAML that stands alone: without the name of the one it extends, which it holds already."""
    alone = {key: section for key, section in value.items() if key != "extends"}
    return str(yaml.dump(alone, Dumper=_Dumper, sort_keys=False, width=200, allow_unicode=True))


def merged(parent: MapData, child: MapData) -> MapData:
    """The child laid over the parent: sections merge key by key, other values replace, null removes.

    Raises WidenError for a null that removes nothing.
    """
    result = MapData({}, dict(parent.places), dict(parent.keys))
    result.places.update(child.places)
    result.keys.update(child.keys)
    result.value = _overlaid(parent.value, child.value, (), child)
    return result


def _overlaid(parent: dict[str, Any], child: dict[str, Any], path: Keys, data: MapData) -> dict[str, Any]:
    combined = dict(parent)
    for key, value in child.items():
        inherited = combined.get(key)
        if not path and isinstance(value, dict) and isinstance(inherited, dict):
            combined[key] = _overlaid(inherited, value, (key,), data)
        elif value is None and (not path or path[0] != "config"):
            if key not in combined:
                near = did_you_mean(key, combined)
                raise WidenError(f"{data.key_place((*path, key))}: there is no '{key}' to remove{near}")
            del combined[key]
        else:
            combined[key] = value
    return combined


def _configs() -> Path:
    """The folder of maps: inside the package in a wheel, beside it in a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def map_names() -> list[str]:
    """The names of the maps that come with the tool, sorted."""
    return sorted(path.stem for path in _configs().glob("*.yaml"))


def catalog_path(name: str) -> Path | None:
    """The file of a map that comes with the tool, or None."""
    return _configs() / f"{name}.yaml" if name in map_names() else None


def map_text(name: str) -> str:
    """The YAML text of a map that comes with the tool. Raises WidenError as `known_path` does."""
    return known_path(name).read_text(encoding="utf-8")


def known_path(name: str) -> Path:
    """The file of a map that comes with the tool. Raises WidenError with a near miss for an unknown name."""
    path = catalog_path(name)
    if path is None:
        raise WidenError(
            f"map '{name}': there is no such map{did_you_mean(name, map_names())}; `widen-ckpt maps` lists them"
        )
    return path
