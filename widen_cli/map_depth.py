"""A map's `depth` section, checked: what more layers, or others, take in its family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from widen_cli.errors import did_you_mean
from widen_cli.formulas import Formula
from widen_cli.map_file import Keys
from widen_cli.map_rules import Depth, DepthReason, Schedule
from widen_cli.map_schema import DepthReasonSection, DepthSection, MapDocument, ReasonSection, ScheduleSection


class Condition(Protocol):
    """Parses a condition, which may name config keys of the map and `more`."""

    def __call__(self, text: str, path: Keys, document: MapDocument, *, more: Iterable[str] = ()) -> Formula: ...


def depth_section(document: MapDocument, fault: Callable[[Keys, str], None], condition: Condition) -> Depth:
    """The section as rules, empty ones for a map without it; every fault is told to `fault`."""
    section = document.depth
    patterns = {name.rstrip("?") for name in document.tensors}
    for number, name in enumerate(section.zero):
        if name not in patterns:
            fault(("depth", "zero", number), f"'{name}' is no tensor of this map{did_you_mean(name, patterns)}")
    for path, stack in _stacks(section):
        if stack not in document.repeats:
            fault(path, f"'{stack}' is none of 'repeats'{did_you_mean(stack, document.repeats)}")
    schedules = []
    for number, schedule in enumerate(section.schedules):
        path = ("depth", "schedules", number)
        if (schedule.key is None) != (len(schedule.values) != 2):
            fault(path, "a 'key' needs two 'values', for the layers of which 'kind' holds and for the others")
        kind = condition(schedule.kind, (*path, "kind"), document, more=("layer", "layers"))
        schedules.append(
            Schedule(kind, schedule.key, tuple(schedule.values), schedule.weights, schedule.why, schedule.stack)
        )
    if section.behind is not None and section.behind not in document.config:
        known = document.config
        fault(
            ("depth", "behind"), f"'{section.behind}' is no config key of this map{did_you_mean(section.behind, known)}"
        )
    return Depth(
        behind=section.behind,
        zero=tuple(section.zero),
        per_layer=tuple(section.per_layer),
        numbers=tuple(section.numbers),
        runs=tuple(section.runs),
        roots=tuple(section.roots),
        schedules=tuple(schedules),
        reasons=_reasons(section.reasons, "reasons", document, condition),
        fixed=_reasons(section.fixed, "fixed", document, condition),
    )


def reasons(
    sections: Sequence[ReasonSection], path: Keys, document: MapDocument, condition: Condition
) -> tuple[tuple[Formula, str], ...]:
    """Conditions under which something is refused, each with the reason."""
    return tuple(
        (condition(str(reason.condition), (*path, n, "if"), document), reason.why) for n, reason in enumerate(sections)
    )


def _reasons(
    sections: Sequence[DepthReasonSection], name: str, document: MapDocument, condition: Condition
) -> tuple[DepthReason, ...]:
    found = reasons(sections, ("depth", name), document, condition)
    return tuple(DepthReason(*pair, section.stack) for pair, section in zip(found, sections, strict=True))


def _stacks(section: DepthSection) -> Iterator[tuple[Keys, str]]:
    """The stacks that rules speak of alone, and where."""
    lists: Mapping[str, Sequence[ScheduleSection | DepthReasonSection]] = {
        "schedules": section.schedules,
        "reasons": section.reasons,
        "fixed": section.fixed,
    }
    for name, entries in lists.items():
        for number, entry in enumerate(entries):
            if entry.stack is not None:
                yield ("depth", name, number, "stack"), entry.stack
