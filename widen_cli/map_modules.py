"""A map's `modules` section, checked: what modules are called in memory whose weights have other names in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from widen_cli.errors import did_you_mean
from widen_cli.map_file import Keys
from widen_cli.map_rules import Module, TensorRule
from widen_cli.map_schema import MapDocument
from widen_cli.shapes import Parts

_PART = re.compile(r"(?P<name>.+?)(?:\[(?P<part>[0-9]{1,3})\])?")


def module_section(
    document: MapDocument, rules: tuple[TensorRule, ...], fault: Callable[[Keys, str], None]
) -> dict[str, Module]:
    """The modules by their names in memory; every fault is told to `fault`."""
    known = {rule.pattern.rpartition(".")[0] for rule in rules}
    modules = {}
    for called, text in document.modules.items():
        path = ("modules", called)
        hit = _PART.fullmatch(text)
        name, part = (hit["name"], hit["part"]) if hit else (text, None)
        modules[called] = Module(name, None if part is None else int(part))
        if name not in known:
            fault(path, f"no tensor of this map stands in '{name}'{did_you_mean(name, known)}")
        elif part is not None and int(part) >= (parts := _parts(rules, name)):
            fault(path, f"'{name}' is no packed weight with a part {part}; it has {parts}, counted from 0")
        if called.count("*") != name.count("*"):
            fault(path, f"'{name}' and '{called}' have to count the same layers")
    return modules


def _parts(rules: tuple[TensorRule, ...], module: str) -> int:
    """How many parts each weight of a module writes, one where a rule has no parts."""
    written = [
        len(dimension.term.parts) if isinstance(dimension.term, Parts) else 1
        for rule in rules
        if rule.pattern.rpartition(".")[0] == module
        for dimension in rule.shape.dimensions
        if dimension.role == "out"
    ]
    return min(written, default=0)


def drop_orphans(inherited: dict[str, Any], own: dict[str, Any]) -> None:
    """Takes modules out of an inherited map whose tensors the map laid over it takes out."""
    modules, sections = inherited.get("modules"), [inherited.get("tensors"), own.get("tensors")]
    if not isinstance(modules, dict):
        return
    tensors: dict[str, Any] = {}
    for section in sections:
        tensors |= section if isinstance(section, dict) else {}
    known = {name.rstrip("?").rpartition(".")[0] for name, rule in tensors.items() if rule is not None}
    for called, text in list(modules.items()):
        if isinstance(text, str) and (hit := _PART.fullmatch(text)) and hit["name"] not in known:
            del modules[called]
