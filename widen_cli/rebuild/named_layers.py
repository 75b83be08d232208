"""What a config says of layers without a rule of the map: lists as long as the stack, and names with a layer's number in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.result import EXACT, ConfigChange
from widen_cli.rebuild.layers_wished import Slot

FEW = 2  # lists of so few values are nearly always something else
LISTED = ("architectures", "eos_token_id")  # lists of any model


def unsaid_lists(architecture: ArchitectureMap, config: ModelConfig, count: int) -> tuple[str, ...]:
    """The keys of lists with a value for each of `count` layers that no section of the map speaks of."""
    depth, rope = architecture.depth, architecture.rope
    keys = {*depth.per_layer, *depth.numbers, *depth.runs, *(rope.lists if rope else ()), *LISTED}
    keys |= {schedule.key for schedule in depth.schedules if schedule.key is not None}
    keys |= {place for key in keys for place in architecture.places.get(key, ())}
    return tuple(
        key
        for key, value in _values(config)
        if isinstance(value, list) and len(value) == count > FEW and key not in keys
    )


def renamed_layers(config: ModelConfig, stack: str, count: int, slots: Sequence[Slot]) -> Iterator[ConfigChange]:
    """Lists of names such as `modules_to_not_convert`, whose layers of `stack` (`model.layers.*`) get their new numbers."""
    path = stack.removesuffix("*")
    word = re.escape(path.removesuffix(".").rpartition(".")[2])
    numbered = re.compile(rf"((?:[\w.]*?\.)?{word}\.)(\d{{1,5}})(?=\.|$)")

    def new(item: Any) -> list[Any]:
        """A name for each layer that takes the one it speaks of; anything else as it is."""
        found = numbered.match(item) if isinstance(item, str) else None
        if found is None or not (path.endswith(found[1]) or found[1].endswith(path)):
            return [item]
        layer = int(found[2])
        behind = [layer - count + len(slots)] if layer >= count else []
        taking = [number for number, slot in enumerate(slots) if slot.source == layer] or behind
        return [f"{found[1]}{number}{item[found.end() :]}" for number in taking]

    for key, value in _values(config):
        if isinstance(value, list):
            names = [name for item in value for name in new(item)]
            if names != value:
                yield ConfigChange(key, value, names, EXACT)


def _values(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """All values that are no objects by dotted key, of the section alone where keys are looked for in one."""
    section = config.values.get(config.inside) if config.inside else None
    yield from _flat(section if isinstance(section, dict) else config.values, "")


def _flat(values: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
