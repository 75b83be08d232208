"""Architecture maps: the rules a family's checkpoints follow, read from YAML and checked. docs/maps.md is the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from widen_cli.errors import Faults, WidenError, did_you_mean, printable
from widen_cli.formulas import Formula, FormulaSyntaxError, parse_formula
from widen_cli.map_checks import (
    CONDITION_FUNCTIONS,
    FORMULA_FUNCTIONS,
    SpaceFormula,
    endless,
    multiplier_faults,
    stored_names,
)
from widen_cli.map_file import (
    Keys,
    MapData,
    Place,
    catalog_path,
    known_path,
    map_names,
    merged,
    read_map_data,
)
from widen_cli.map_schema import MapDocument, map_document, real_path
from widen_cli.shapes import Shape, ShapeSyntaxError, parse_shape

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Axis:
    """A size that may grow: the config keys that may hold it, or the formula that gives it."""

    name: str
    keys: tuple[str, ...]
    size: Formula | None
    otherwise: Formula | None
    fixed: bool

    @property
    def computed(self) -> bool:
        """True for a size that no key holds, so that it follows other sizes."""
        return not self.keys and self.size is not None


@dataclass(frozen=True)
class Space:
    """Activations that share one scale: the axis they lie on, or the formula they come out of."""

    name: str
    axis: str | None
    formula: Formula | None
    place: Place


@dataclass(frozen=True)
class TensorRule:
    """How the tensors of one name pattern are stored.

    `need` is `each` (a tensor for every layer), `all-or-none` (name?) or `any` (name??).
    """

    pattern: str
    shape: Shape
    condition: Formula | None
    when: Formula | None
    times: Formula | None
    offset: int
    need: str
    place: Place


@dataclass(frozen=True)
class Tie:
    """`tensor` is the same weight as `to` where `when` holds."""

    tensor: str
    to: str
    when: Formula


@dataclass(frozen=True)
class Growth:
    """Which axes make the model wider, and the two ways its attention can follow."""

    width: tuple[str, ...]
    heads: tuple[str, ...]
    head_dim: str | None


@dataclass(frozen=True)
class ArchitectureMap:
    """A checked map. Shapes and formulas are parsed, every name in them is known."""

    architecture: str
    file: str
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    prefixes: dict[str, tuple[str, ...]]
    synonyms: dict[str, str]
    repeats: dict[str, tuple[str, ...]]
    defaults: dict[str, Any]
    axes: dict[str, Axis]
    growth: Growth
    requires: tuple[Formula, ...]
    spaces: dict[str, Space]
    tensors: tuple[TensorRule, ...]
    tied: tuple[Tie, ...]
    drop: tuple[str, ...]
    output: str | None
    sidecars: dict[str, dict[str, str]]

    def axis_of(self, name: str) -> Axis | None:
        """The axis that a space (or an axis of that name) lies on, found through the formulas it comes out of."""
        seen: set[str] = set()
        while name not in self.axes:
            space = self.spaces.get(name)
            if space is None or name in seen:
                return None
            seen.add(name)
            if space.axis is not None:
                name = space.axis
            elif space.formula is not None:
                inner = [word for word, _, called in space.formula.names() if not called]
                name = next((word for word in inner if word in self.spaces or word in self.axes), "")
        return self.axes[name]

    def spellings(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """The ways a checkpoint may spell the map's prefixes, as (prefix, written) pairs; the map's own first."""
        yield ()
        for prefix, others in self.prefixes.items():
            for other in others:
                yield ((prefix, other),)


def name_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a name pattern: `*` is one part between dots, `{axis}` a number in the name."""
    parts = re.split(r"(\*|\{\w+\})", pattern)
    expression, seen = "", set()
    for part in parts:
        # An axis counted twice is a fault that the map's check reports; the pattern must not fail before it.
        expression += re.escape(part) if part in seen and part.startswith("{") else _part_expression(part)
        seen.add(part)
    return re.compile(expression)


def _part_expression(part: str) -> str:
    if part == "*":
        return r"([^.]+)"
    return rf"(?P<{part[1:-1]}>[0-9]+)" if part.startswith("{") else re.escape(part)


def load_map(path: Path, shown: str | None = None) -> ArchitectureMap:
    """The map in a file, laid over the one it extends. Raises WidenError with every fault and its file:line:column."""
    data = _with_parents(path, shown or path.name, ())
    return _Compiler(data, shown or path.name).compile(map_document(data))


def _with_parents(path: Path, shown: str, seen: tuple[Path, ...]) -> MapData:
    data = read_map_data(path, shown)
    parent = data.value.get("extends")
    if not isinstance(parent, str):
        return data
    place = data.place(("extends",))
    if not re.fullmatch(r"[\w.-]+", parent):
        raise WidenError(f"{place}: a map extends another by its name, such as llama, not '{printable(parent)}'")
    found = path.with_name(f"{parent}.yaml")
    if not found.is_file():
        found = catalog_path(parent) or found
    if not found.is_file():
        raise WidenError(f"{place}: there is no map '{parent}' to extend{did_you_mean(parent, map_names())}")
    if found.resolve() in (*seen, path.resolve()):
        raise WidenError(f"{place}: '{parent}' extends itself")
    return merged(_with_parents(found, found.name, (*seen, path.resolve())), data)


class _Compiler:
    def __init__(self, data: MapData, shown: str) -> None:
        self.data = data
        self.shown = shown
        self.faults = Faults()

    def compile(self, document: MapDocument) -> ArchitectureMap:
        with self.faults:
            axes = {name: self.axis(name, document) for name in document.axes}
            spaces = {name: self.space(name, text, document) for name, text in document.spaces.items()}
            tensors = tuple(self.tensor_rules(document))
            self.check_names(document)
            self.check_circles(spaces)
            return ArchitectureMap(
                architecture=document.architecture,
                file=self.shown,
                model_types=tuple(document.match.model_type),
                gguf_architectures=tuple(document.match.gguf),
                prefixes={prefix: tuple(others) for prefix, others in document.prefixes.items()},
                synonyms=document.synonyms,
                repeats={
                    name: (keys,) if isinstance(keys, str) else tuple(keys) for name, keys in document.repeats.items()
                },
                defaults=document.config,
                axes=axes,
                growth=Growth(tuple(document.growth.width), tuple(document.growth.heads), document.growth.head_dim),
                requires=tuple(
                    self.condition(text, ("requires", n), document) for n, text in enumerate(document.requires)
                ),
                spaces=spaces,
                tensors=tensors,
                tied=tuple(
                    Tie(tie.tensor, tie.to, self.condition(str(tie.when), ("tied", n, "when"), document))
                    for n, tie in enumerate(document.tied)
                ),
                drop=tuple(document.drop),
                output=document.output,
                sidecars=document.sidecars,
            )

    def fault(self, path: Keys, message: str, column: int = 0) -> None:
        self.faults.add(f"{self.data.place(real_path(self.data, path)).plus(column)}: {message}")

    def key_fault(self, path: Keys, message: str) -> None:
        self.faults.add(f"{self.data.key_place(path)}: {message}")

    def parsed(self, parse: Callable[[str], Parsed], text: str, path: Keys, instead: str) -> Parsed:
        try:
            return parse(text)
        except (ShapeSyntaxError, FormulaSyntaxError) as error:
            self.fault(path, error.message, error.column)
            return parse(instead)

    def axis(self, name: str, document: MapDocument) -> Axis:
        section = document.axes[name]
        keys = [section.key] if isinstance(section.key, str) else section.key or []
        size = self.optional(section.size, ("axes", name, "size"), document)
        otherwise = self.optional(section.otherwise, ("axes", name, "else"), document)
        if section.size is not None and keys:
            self.fault(
                ("axes", name), f"axis '{name}' has a 'key' and a 'size'; say 'else' for what an absent key means"
            )
        if section.size is not None and section.otherwise is not None:
            self.fault(("axes", name), f"axis '{name}' has a 'size' and an 'else'; an 'else' goes with a 'key'")
        if section.size is None and not keys and not section.fixed:
            self.fault(("axes", name), f"axis '{name}' needs a 'key', a 'size' or 'fixed: true'")
        return Axis(name, tuple(keys), size, otherwise, section.fixed)

    def space(self, name: str, text: str, document: MapDocument) -> Space:
        path = ("spaces", name)
        place = self.data.place(path)
        if text in document.axes:
            return Space(name, text, None, place)
        formula = self.parsed(parse_formula, text, path, "1")
        known = {*document.axes, *document.spaces, *document.config}
        if self.check_formula(formula, path, known, (*FORMULA_FUNCTIONS, *document.config)):
            spaces = {*document.spaces, *document.axes}
            for message, column in SpaceFormula(name, formula, spaces, document.axes).faults():
                self.fault(path, message, column)
        return Space(name, name if name in document.axes else None, formula, place)

    def optional(
        self,
        text: str | int | bool | None,
        path: Keys,
        document: MapDocument,
        functions: Iterable[str] = CONDITION_FUNCTIONS,
    ) -> Formula | None:
        return None if text is None else self.condition(str(text), path, document, functions)

    def condition(
        self, text: str, path: Keys, document: MapDocument, functions: Iterable[str] = CONDITION_FUNCTIONS
    ) -> Formula:
        formula = self.parsed(parse_formula, text, path, "True")
        keys = {
            key
            for axis in document.axes.values()
            for key in ([axis.key] if isinstance(axis.key, str) else axis.key or [])
        }
        self.check_formula(formula, path, {*document.axes, *document.config, *keys}, functions)
        patterns = {name.rstrip("?") for name in document.tensors}
        for name, column in stored_names(formula):
            if name not in patterns:
                self.fault(path, f"'{name}' is no tensor of this map{did_you_mean(name, patterns)}", column)
        return formula

    def multiplier(self, text: str | None, path: Keys, document: MapDocument) -> Formula | None:
        before = len(self.faults.texts)
        times = self.optional(text, path, document, ("sqrt",))
        if times is not None and len(self.faults.texts) == before:
            for message, column in multiplier_faults(times, document.axes):
                self.fault(path, message, column)
        return times

    def check_formula(self, formula: Formula, path: Keys, known: Iterable[str], functions: Iterable[str]) -> bool:
        known_all = True
        for name, column, called in formula.names():
            words = set(functions if called else known)
            if name not in words:
                what = "function or config key" if called else "axis, space or config key"
                self.fault(path, f"'{name}' is no {what} of this map{did_you_mean(name, words)}", column)
                known_all = False
        return known_all

    def tensor_rules(self, document: MapDocument) -> Iterator[TensorRule]:
        for name, sections in document.tensors.items():
            pattern = name.rstrip("?")
            need = {0: "each", 1: "all-or-none", 2: "any"}.get(len(name) - len(pattern))
            if need is None:
                self.key_fault(("tensors", name), "a name ends with at most two question marks")
            if not sections:
                self.key_fault(("tensors", name), "an empty list of rules; say what the tensor is, or leave it out")
            counted = re.findall(r"\{(\w+)\}", pattern)
            if len(set(counted)) < len(counted):
                self.key_fault(("tensors", name), "an axis is counted once in a name")
            for axis in counted:
                if axis not in document.axes:
                    self.key_fault(
                        ("tensors", name), f"'{axis}' is no axis of this map{did_you_mean(axis, document.axes)}"
                    )
            for number, section in enumerate(sections):
                path: Keys = ("tensors", name, number)
                shape = self.parsed(parse_shape, section.shape, (*path, "shape"), "1")
                self.check_shape(shape, (*path, "shape"), document)
                condition = self.optional(section.condition, (*path, "if"), document)
                when = self.optional(section.when, (*path, "when"), document)
                times = self.multiplier(section.times, (*path, "times"), document)
                place = self.data.key_place(("tensors", name))
                yield TensorRule(pattern, shape, condition, when, times, section.offset, need or "each", place)

    def check_shape(self, shape: Shape, path: Keys, document: MapDocument) -> None:
        words = {*document.axes, *document.spaces}
        for name, _ in shape.names():
            if not name.text.isdigit() and name.text not in words:
                self.fault(
                    path, f"'{name.text}' is no axis or space of this map{did_you_mean(name.text, words)}", name.column
                )

    def check_circles(self, spaces: dict[str, Space]) -> None:
        inner = {
            name: {word for word, _, called in space.formula.names() if not called and word in spaces}
            for name, space in spaces.items()
            if space.formula is not None
        }
        for name, space in spaces.items():
            if endless(name, inner):
                self.faults.add(f"{space.place}: space '{name}' comes out of itself by way of others")

    def check_names(self, document: MapDocument) -> None:
        growth = document.growth
        if not growth.width:
            self.fault(("growth", "width"), "growth needs a width axis, the stream's first")
        for section, prefixes in (("prefixes", document.prefixes), ("repeats", document.repeats)):
            for prefix in prefixes:
                if not any(name.startswith(prefix) for name in document.tensors):
                    self.key_fault((section, prefix), f"no tensor of this map begins with '{prefix}'")
        uses: list[tuple[Keys, str, Iterable[str]]] = [
            *((("growth", "width", n), axis, document.axes) for n, axis in enumerate(growth.width)),
            *((("growth", "heads", n), axis, document.axes) for n, axis in enumerate(growth.heads)),
            *([(("growth", "head_dim"), growth.head_dim, document.axes)] if growth.head_dim else []),
            *(
                (("sidecars", file, key), axis, document.axes)
                for file, keys in document.sidecars.items()
                for key, axis in keys.items()
            ),
        ]
        patterns = {name.rstrip("?") for name in document.tensors}
        for number, tie in enumerate(document.tied):
            uses += [(("tied", number, "tensor"), tie.tensor, patterns), (("tied", number, "to"), tie.to, patterns)]
        if document.output is not None:
            uses.append((("output",), document.output, {*document.axes, *document.spaces}))
        for path, word, known in uses:
            if word not in known:
                what = {"tied": "tensor", "output": "axis or space"}.get(str(path[0]), "axis")
                self.fault(path, f"'{word}' is no {what} of this map{did_you_mean(word, known)}")


@cache
def catalog_map(name: str) -> ArchitectureMap:
    """A map that comes with the tool. Raises WidenError with a near miss for an unknown name."""
    return load_map(known_path(name))


def map_for_gguf(architecture: str) -> ArchitectureMap | None:
    """The map whose `match` names a GGUF file's `general.architecture`, or None."""
    maps = (catalog_map(name) for name in map_names() if name.endswith(".gguf"))
    return next((found for found in maps if architecture in found.gguf_architectures), None)


def map_for_model_type(model_type: str) -> ArchitectureMap | None:
    """The map whose `match` names the config's `model_type`, or None."""
    named = catalog_path(model_type)
    candidates = ([model_type] if named else []) + [name for name in map_names() if name != model_type]
    return next((found for name in candidates if model_type in (found := catalog_map(name)).model_types), None)
