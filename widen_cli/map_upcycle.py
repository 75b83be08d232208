"""A map's `upcycle` and `layered` sections, checked: how other models become models of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from widen_cli.errors import did_you_mean
from widen_cli.formulas import Formula
from widen_cli.map_file import Keys, MapData, map_names
from widen_cli.map_rules import Layered, Upcycle, WholeLayers
from widen_cli.map_schema import LayeredSection, MapDocument, UpcycleSection

# What a config key of the new model may hold: how many experts there are and work at a time, and how much of the dense
# feed-forward width one of them has.
SIZES = ("experts", "top_k", "slice", "whole")
Fault = tuple[Keys, str, bool]


class Condition(Protocol):
    """Parses a condition, which may name config keys of the map and `more`."""

    def __call__(self, text: str, path: Keys, document: MapDocument, *, more: Iterable[str]) -> Formula: ...


def upcycle_section(
    document: MapDocument,
    data: MapData,
    fault: Callable[[Keys, str], None],
    key_fault: Callable[[Keys, str], None],
    condition: Condition,
) -> Upcycle | None:
    """The section as rules, None for a map that has none; every fault is told to `fault`, or `key_fault` for one of a key."""
    for path, message, of_key in _faults(document):
        (key_fault if of_key else fault)(path, message)
    section = document.upcycle
    if section is None:
        return None
    told = {"model_type", *(key for absent in section.sources.values() for key in absent)}
    return Upcycle(
        sources=section.sources,
        axis=section.axis,
        sizes=section.sizes,
        config=section.config,
        classes=section.classes,
        weights=section.weights,
        shared=section.shared,
        routers=tuple(section.routers),
        gates=tuple(section.gates),
        without=tuple(section.without),
        needs=tuple(section.needs),
        refuses=tuple(
            (condition(str(reason.condition), ("upcycle", "refuses", n, "if"), document, more=told), reason.why)
            for n, reason in enumerate(section.refuses)
        ),
        normalised=section.normalised,
        place=data.key_place(("upcycle",)),
    )


def layered_section(document: MapDocument, condition: Condition) -> Layered | None:
    """Which axes may differ from layer to layer, None for a map of models in which none may."""
    section = document.layered
    if section is None:
        return None
    whole = {
        axis: WholeLayers(
            condition(str(reason.condition), ("layered", "whole", axis, "if"), document, more=()), reason.why
        )
        for axis, reason in section.whole.items()
    }
    return Layered(tuple(section.axes), tuple(section.sources), whole)


def _faults(document: MapDocument) -> Iterator[Fault]:
    """Every fault of the sections: where it stands, what it is, and whether the key is at fault and not its value."""
    if document.layered is not None:
        yield from _unknown_axes(document.layered, document)
    section = document.upcycle
    if section is None:
        return
    for key, held in section.sizes.items():
        if held not in SIZES:
            yield ("upcycle", "sizes", key), f"'{held}' is none of {', '.join(SIZES)}{did_you_mean(held, SIZES)}", False
    for needed in ("experts", "top_k", "slice"):
        if needed not in section.sizes.values():
            yield ("upcycle", "sizes"), f"no config key is said to hold '{needed}'", True
    families = {name.removesuffix(".gguf") for name in map_names()}
    for family in section.sources:
        if family not in families and (near := did_you_mean(family, families)):
            yield ("upcycle", "from", family), f"there is no map '{family}'{near}", True
    yield from _unknown_tensors(document, section)


def _unknown_axes(section: LayeredSection, document: MapDocument) -> Iterator[Fault]:
    for n, axis in enumerate(section.axes):
        if axis not in document.axes:
            yield ("layered", "axes", n), f"'{axis}' is no axis of this map{did_you_mean(axis, document.axes)}", False
    for axis in section.whole:
        if axis not in section.axes:
            near = did_you_mean(axis, section.axes)
            yield ("layered", "whole", axis), f"'{axis}' is none of the axes that may differ{near}", True


def _unknown_tensors(document: MapDocument, section: UpcycleSection) -> Iterator[Fault]:
    """The tensors of the new model that this map does not know, or that count experts otherwise than it does."""
    patterns = {name.rstrip("?") for name in document.tensors}
    uses: list[tuple[Keys, str]] = [
        *((("upcycle", "weights", dense), new) for dense, new in section.weights.items()),
        *((("upcycle", "shared", dense), new) for dense, new in section.shared.items()),
        *((("upcycle", "routers", n), name) for n, name in enumerate(section.routers)),
        *((("upcycle", "gates", n), name) for n, name in enumerate(section.gates)),
        *((("upcycle", "needs", n), name) for n, name in enumerate(section.needs)),
    ]
    for path, name in uses:
        if name not in patterns:
            yield path, f"'{name}' is no tensor of this map{did_you_mean(name, patterns)}", False
    for dense, new in section.weights.items():
        if new in patterns and new.count("*") - dense.count("*") not in (0, 1):
            yield ("upcycle", "weights", dense), f"'{new}' has to count the layers of '{dense}', and the experts", False
    for dense, new in section.shared.items():
        if new in patterns and new.count("*") != dense.count("*"):
            yield ("upcycle", "shared", dense), f"'{new}' has to count the layers of '{dense}'", False
        if dense not in section.weights:
            near = did_you_mean(dense, section.weights)
            yield ("upcycle", "shared", dense), f"'{dense}' is none of the 'weights'{near}", True
