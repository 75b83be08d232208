"""The config of a mixture of experts, made of the dense model's."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from widen_cli.config import MISSING, ModelConfig
from widen_cli.errors import WidenError, brief, printable
from widen_cli.formulas import UnknownValueError, evaluate
from widen_cli.map_rules import ArchitectureMap, Upcycle
from widen_cli.plan.lookup import config_lookup, held
from widen_cli.plan.sizes import Sizes


def refused(source: ArchitectureMap, rules: Upcycle, target: str, config: ModelConfig) -> list[str]:
    """What of a dense config the new kind of model cannot say."""
    absent = rules.sources[source.architecture]
    known = config_lookup(source, config)

    def lookup(key: str) -> Any:
        try:
            return known(key)
        except UnknownValueError:
            return absent.get(key)

    faults = []
    for formula, why in rules.refuses:
        if evaluate(formula, lookup):
            told = ", ".join(f"{name} is {brief(lookup(name))}" for name in formula.words if name != "model_type")
            faults.append(f"{printable(config.name)}: {told}, and no '{target}' can be made of that: {why}")
    return faults


def changed_values(
    source: ArchitectureMap, target: ArchitectureMap, rules: Upcycle, config: ModelConfig, sizes: Sizes
) -> dict[str, Any]:
    """The keys that change in a dense config, but for sizes: what it is called, what the new kind needs, and what it would
    take otherwise where the dense config leaves it out."""
    values: dict[str, Any] = {
        key: value for key, value in rules.sources[source.architecture].items() if config.get(key, MISSING) is MISSING
    }
    values |= {
        key: value
        for key, value in source.defaults.items()
        if target.defaults.get(key, MISSING) != value and key in target.defaults and not held(source, config, key)
    }
    for name, axis in source.axes.items():
        absent = (
            axis.keys and axis.otherwise is not None and all(config.get(key, MISSING) is MISSING for key in axis.keys)
        )
        if absent and name in sizes.known:
            values[axis.keys[0]] = sizes.known[name]
    values |= rules.config
    values["model_type"] = target.model_types[0]
    classes = config.get("architectures")
    if isinstance(classes, list):
        values["architectures"] = [_class(str(name), rules, target, config) for name in classes]
    return values


def _class(name: str, rules: Upcycle, target: ArchitectureMap, config: ModelConfig) -> str:
    found = next((new for pattern, new in rules.classes.items() if fnmatchcase(name, pattern)), None)
    if found is None:
        raise WidenError(
            f"{printable(config.name)}: architectures says {printable(name)}, and '{target.architecture}' is made of "
            f"{', '.join(rules.classes)} alone"
        )
    return found
