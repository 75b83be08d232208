"""What a map's conditions and formulas ask of a model: config values by key, and the sizes of axes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from widen_cli.config import MISSING, ModelConfig
from widen_cli.formulas import Lookup, UnknownValueError, evaluate
from widen_cli.map_rules import ArchitectureMap, Axis


def config_lookup(
    architecture: ArchitectureMap, config: ModelConfig, known: Mapping[str, int] = MappingProxyType({})
) -> Lookup:
    """The sizes of axes, and config values by key: what the config holds, in the first of a key's places, else the default.

    An axis has the size that is `known`, else the one that its keys or formulas say. The defaults say what a key means that
    a config leaves out; where there is no config they say nothing. Raises UnknownValueError for what none of them tells.
    """

    def lookup(key: str, inside: tuple[str, ...] = ()) -> Any:
        if key in inside:
            raise UnknownValueError(key)
        if (axis := architecture.axes.get(key)) is not None:
            return known[key] if key in known else size(axis, (*inside, key))
        if key == "architectures" and architecture.section:
            key = ".architectures"  # the class of the whole model, whatever that of the part would be by itself
        value = next(iter(held(architecture, config, key).values()), config.get(key, MISSING))
        if value is MISSING and config.present:
            value = architecture.defaults.get(key, MISSING)
        if value is MISSING:
            raise UnknownValueError(key)
        return value

    def size(axis: Axis, inside: tuple[str, ...]) -> Any:
        said = next((value for key in axis.keys if (value := config.get(key)) is not None), None)
        formula = axis.size or (axis.otherwise if config.present else None)
        if said is None and formula is None:
            raise UnknownValueError(axis.name)
        return evaluate(formula, lambda name: lookup(name, inside)) if said is None and formula else said

    return lookup


def held(architecture: ArchitectureMap, config: ModelConfig, key: str) -> dict[str, Any]:
    """A key's values, by the places at which the config holds one, in the order in which the model looks."""
    found = {place: config.get(place) for place in places_of(architecture, key)}
    return {place: value for place, value in found.items() if value is not None}


def places_of(architecture: ArchitectureMap, key: str) -> tuple[str, ...]:
    """Where a config may hold a key's value, in the order in which the model looks."""
    return (*architecture.places.get(key, ()), key)
