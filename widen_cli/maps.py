"""Architecture maps: the rules a family's checkpoints follow, read from YAML and checked. docs/maps.md is the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from widen_cli.errors import Faults, WidenError, did_you_mean, printable
from widen_cli.formulas import Formula, FormulaSyntaxError, parse_formula
from widen_cli.map_checks import (
    CONDITION_FUNCTIONS,
    FORMULA_FUNCTIONS,
    NORMS,
    ROPE_METHODS,
    VALUE,
    SpaceFormula,
    endless,
    multiplier_faults,
    stored_names,
)
from widen_cli.map_depth import depth_section, reasons
from widen_cli.map_file import (
    Keys,
    MapData,
    catalog_path,
    known_path,
    map_names,
    merged,
    parse_map_data,
    read_map_data,
)
from widen_cli.map_modules import drop_orphans, module_section
from widen_cli.map_references import misnamed, misnamed_keys, other_outputs, outputs_named
from widen_cli.map_rules import (
    LAST,
    ArchitectureMap,
    Axis,
    Growth,
    Rope,
    Space,
    TensorRule,
    Tie,
    last_of,
    says_tied,
)
from widen_cli.map_schema import MapDocument, TensorSection, map_document, real_path
from widen_cli.map_sidecars import sidecar_sections
from widen_cli.map_slips import slips
from widen_cli.map_upcycle import layered_section, upcycle_section
from widen_cli.shapes import Shape, ShapeSyntaxError, parse_shape

Parsed = TypeVar("Parsed")


def load_map(path: Path, shown: str | None = None) -> ArchitectureMap:
    """The map in a file, laid over the one it extends. Raises WidenError with every fault and its file:line:column."""
    data = _with_parents(path, shown or path.name, ())
    return _Compiler(data, shown or path.name).compile(map_document(data))


def map_from_text(text: str, shown: str) -> ArchitectureMap:
    """The map in a text that extends no other, such as a record holds. Raises WidenError as `load_map` does."""
    data = parse_map_data(text, shown)
    return _Compiler(data, shown).compile(map_document(data))


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
    inherited = _with_parents(found, found.name, (*seen, path.resolve()))
    if isinstance(match := inherited.value.get("match"), dict):
        match.pop("by_names", None)  # it is the parent that is taken for a model without a config
    for own in ("upcycle", "layered"):  # and the parent that other models become
        inherited.value.pop(own, None)
    drop_orphans(inherited.value, data.value)
    return merged(inherited, data)


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
            self.check_circles(axes, spaces)
            tied = tuple(
                Tie(tie.tensor, tie.to, self.condition(str(tie.when), ("tied", n, "when"), document))
                for n, tie in enumerate(document.tied)
            )
            widths, numbered = sidecar_sections(document, self.fault)
            return ArchitectureMap(
                architecture=document.architecture,
                file=self.shown,
                model_types=tuple(document.match.model_type),
                gguf_architectures=tuple(document.match.gguf),
                by_names=document.match.by_names,
                prefixes={prefix: tuple(others) for prefix, others in document.prefixes.items()},
                synonyms=document.synonyms,
                repeats={
                    name: (keys,) if isinstance(keys, str) else tuple(keys) for name, keys in document.repeats.items()
                },
                defaults=document.config,
                axes=axes,
                growth=Growth(tuple(document.growth.width), tuple(document.growth.heads), *document.growth.head_dims),
                requires=tuple(
                    self.condition(text, ("requires", n), document) for n, text in enumerate(document.requires)
                ),
                supports=tuple(
                    self.condition(text, ("supports", n), document) for n, text in enumerate(document.supports)
                ),
                spaces=spaces,
                tensors=tensors,
                tied=tied,
                untie=tuple(dict.fromkeys([*says_tied(tied), *document.untie])),
                drop=tuple(document.drop),
                output=outputs_named(document),
                sidecars=widths,
                numbered=numbered,
                section=document.section,
                carried=tuple((text, self.data.place(("carried", n))) for n, text in enumerate(document.carried)),
                outputs=other_outputs(document),
                places={key: tuple(others) for key, others in document.places.items()},
                rope=self.rope(document),
                depth=depth_section(document, self.fault, self.condition),
                upcycle=upcycle_section(document, self.data, self.fault, self.key_fault, self.condition),
                layered=layered_section(document, self.condition),
                multipliers=tuple(document.multipliers),
                scalars=document.scalars,
                modules=module_section(document, tensors, self.fault),
                norms=self.norms(document),
                todo=tuple((text, self.data.place(("todo", n))) for n, text in enumerate(document.todo)),
                merged=self.data.value,
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
        if section.first and len(keys) < 2:
            self.fault(("axes", name), f"axis '{name}' has 'first', which goes with several keys")
        if section.means is not None and not keys:
            self.fault(("axes", name), f"axis '{name}' has 'means', which goes with a 'key'")
        grouped = self.optional(section.grouped, ("axes", name, "grouped"), document)
        means = None
        if section.means is not None:
            means = self.condition(section.means, ("axes", name, "means"), document, more=(VALUE,))
        return Axis(
            name,
            tuple(keys),
            size,
            otherwise,
            section.fixed,
            section.padded,
            section.first,
            grouped,
            means,
            section.whole,
        )

    def space(self, name: str, text: str, document: MapDocument) -> Space:
        path = ("spaces", name)
        place = self.data.place(path)
        if text in document.axes:
            return Space(name, text, None, place)
        formula = self.parsed(parse_formula, text, path, "1")
        known = {*document.axes, *document.spaces, *document.config}
        read = formula.text == text
        if read and self.check_formula(formula, path, known, (*FORMULA_FUNCTIONS, *document.config)):
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
        self,
        text: str,
        path: Keys,
        document: MapDocument,
        functions: Iterable[str] = CONDITION_FUNCTIONS,
        more: Iterable[str] = (),
    ) -> Formula:
        formula = self.parsed(parse_formula, text, path, "True")
        keys = {
            key
            for axis in document.axes.values()
            for key in ([axis.key] if isinstance(axis.key, str) else axis.key or [])
        }
        self.check_formula(formula, path, {*document.axes, *document.config, *keys, *more}, functions)
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

    def rope(self, document: MapDocument) -> Rope | None:
        section = document.rope
        if section is None:
            return None
        methods = {}
        for name, text in section.methods.items():
            if name not in ROPE_METHODS:
                self.key_fault(
                    ("rope", "methods", name), f"'{name}' is no way to grow{did_you_mean(name, ROPE_METHODS)}"
                )
            methods[name] = self.condition(str(text), ("rope", "methods", name), document)
        for method in ("theta", "frequencies"):
            if method in methods and not section.keys:
                self.key_fault(("rope",), f"{method} needs 'keys', the config keys of the angles' base")
        if "frequencies" in methods and section.tensor is None and not section.lists:
            self.key_fault(("rope",), "frequencies needs a 'tensor' or 'lists' of numbers that divide them")
        if section.sections and not section.lists:
            self.key_fault(("rope", "sections"), "'sections' need 'lists', which are written there")
        refused = reasons(section.reasons, ("rope", "reasons"), document, self.condition)
        return Rope(
            tuple(section.keys),
            tuple(section.lists),
            section.tensor,
            tuple(section.sections),
            methods,
            refused,
            dict(section.shares),
        )

    def norms(self, document: MapDocument) -> dict[str, str]:
        """Which norm runs over each axis; one word is for all of them."""
        said = {"": document.norms} if isinstance(document.norms, str) else document.norms or {}
        for axis, kind in said.items():
            if kind not in NORMS:
                path: Keys = ("norms", axis) if axis else ("norms",)
                self.fault(path, f"'{kind}' is no norm; it is {' or '.join(NORMS)}{did_you_mean(kind, NORMS)}")
        return said

    def tensor_rules(self, document: MapDocument) -> Iterator[TensorRule]:
        for name, sections in document.tensors.items():
            pattern = name.rstrip("?")
            need = {0: "each", 1: "all-or-none", 2: "any"}.get(len(name) - len(pattern))
            if need is None:
                self.key_fault(("tensors", name), "a name ends with at most two question marks")
            if not sections:
                self.key_fault(("tensors", name), "an empty list of rules; say what the tensor is, or leave it out")
            if f".{LAST}." in pattern and not any(pattern.startswith(last_of(many)) for many in document.repeats):
                self.key_fault(
                    ("tensors", name), f"'repeats' does not count the layers of which '{pattern}' names the last"
                )
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
                when = self.needed(pattern, section.when, (*path, "when"), document)
                times = self.multiplier(section.times, (*path, "times"), document)
                place = self.data.key_place(("tensors", name))
                packed = self.packed(section, path, document)
                yield TensorRule(pattern, shape, condition, when, times, section.offset, need or "each", place, packed)

    def packed(self, section: TensorSection, path: Keys, document: MapDocument) -> Shape | None:
        if section.packed is None:
            return None
        path = (*path, "packed")
        if section.offset:
            self.fault(path, "a weight with an 'offset' has no 'packed' form, since blocks hold no 1 + w")
        shape = self.parsed(parse_shape, section.packed, path, "1")
        self.check_shape(shape, path, document)
        return shape

    def needed(self, pattern: str, when: str | bool | None, path: Keys, document: MapDocument) -> Formula | None:
        """Where a tensor is required: by its rule, and by the smallest part of the model that it stands in."""
        own = self.optional(when, path, document)
        part = max((prefix for prefix in document.parts if pattern.startswith(prefix)), key=len, default=None)
        if part is None:
            return own
        whole = self.condition(str(document.parts[part]), ("parts", part), document)
        return whole if own is None else parse_formula(f"({whole.text}) and ({own.text})")

    def check_shape(self, shape: Shape, path: Keys, document: MapDocument) -> None:
        words = {*document.axes, *document.spaces}
        for name, _ in shape.names():
            if not name.text.isdigit() and name.text not in words:
                self.fault(
                    path, f"'{name.text}' is no axis or space of this map{did_you_mean(name.text, words)}", name.column
                )

    def check_circles(self, axes: dict[str, Axis], spaces: dict[str, Space]) -> None:
        inner = {
            name: {word for word in space.formula.words if word in spaces}
            for name, space in spaces.items()
            if space.formula is not None
        }
        for name, space in spaces.items():
            if endless(name, inner):
                self.faults.add(f"{space.place}: space '{name}' comes out of itself by way of others")
        sizes = {name: {*axis.size.words} & axes.keys() for name, axis in axes.items() if axis.size is not None}
        for name, words in sizes.items():
            if name in words or endless(name, sizes):
                self.key_fault(("axes", name), f"the size of axis '{name}' comes out of itself")

    def check_names(self, document: MapDocument) -> None:
        if not document.growth.width:
            self.fault(("growth", "width"), "growth needs a width axis, the stream's first")
        for path, message in (*slips(document), *misnamed_keys(document)):
            self.key_fault(path, message)
        for path, message in misnamed(document):
            self.fault(path, message)


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
