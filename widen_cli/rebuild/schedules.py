"""What kind each layer is of (attention over a window, experts, no positions) once layers have other numbers.

A config tells it by a list with a value for each layer, which is laid anew, by a list of layers' numbers, or by a rule such as
every sixth. Under a rule every old layer has to come out as what it was; where it does not, the list that takes the rule's
place is written, if the model knows one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.errors import WidenError, printable
from widen_cli.formulas import Formula, UnknownValueError, evaluate
from widen_cli.map_rules import ArchitectureMap, DepthReason, Schedule
from widen_cli.plan.lookup import config_lookup, held
from widen_cli.plan.result import EXACT, ROUNDS, ConfigChange
from widen_cli.rebuild.layers_wished import Slot, Wish


class Schedules:
    """The layers' kinds of one checkpoint whose stack, named by its pattern, had `count` layers.

    Methods raise WidenError where an old layer would become another kind and no list can say otherwise.
    """

    def __init__(self, architecture: ArchitectureMap, config: ModelConfig, stack: str, count: int, wish: Wish) -> None:
        self.depth = architecture.depth
        self.rules = [rule for rule in self.depth.schedules if rule.stack in (None, stack)]
        self.architecture = architecture
        self.config = config
        self.count = count
        self.wish = wish
        self.lookup = config_lookup(architecture, config)

    def fitted(self, slots: Sequence[Slot]) -> tuple[Slot, ...]:
        """The slots, where each layer that passes the stream on takes its weights from the nearest one that has the right ones."""
        decisive = [schedule for schedule in self.rules if schedule.weights and self.counts(schedule)]
        return tuple(self._fitted(number, slot, decisive, len(slots)) for number, slot in enumerate(slots))

    def _fitted(self, number: int, slot: Slot, decisive: Sequence[Schedule], total: int) -> Slot:
        def kinds(layer: int, layers: int) -> list[Any]:
            return [self.kind(schedule, layer, layers) for schedule in decisive]

        wanted = kinds(number, total)
        for source in sorted(range(self.count), key=lambda layer: abs(layer - slot.source)) if slot.passes else ():
            if kinds(source, self.count) == wanted:
                return replace(slot, source=source)
        if slot.passes:
            raise WidenError(
                f"{self.wish.said}: no layer has the weights that a new layer {number} would need: {_listed(decisive)}; "
                "choose another place or number"
            )
        return slot

    def changes(self, slots: Sequence[Slot]) -> Iterator[ConfigChange]:
        """The values of the config that say what kind each layer is."""
        for key in self.depth.per_layer:
            for place, value in held(self.architecture, self.config, key).items():
                if isinstance(value, list):
                    yield self._changed(place, self._laid(place, value, slots))
        for key in self.depth.runs:
            yield from self._runs(key, slots)
        for key in self.depth.numbers:
            value = self.config.get(key)
            if isinstance(value, list) and value:
                yield self._changed(key, [number for number, slot in enumerate(slots) if slot.source in value])
        for key in self.depth.roots:
            yield from self._root(key, len(slots))
        for schedule in self.rules:
            if self.counts(schedule):
                yield from self._scheduled(schedule, slots)

    def counts(self, schedule: Schedule) -> bool:
        """Whether layers are by this rule: its values are known, and no list takes its place."""
        if schedule.key is not None and held(self.architecture, self.config, schedule.key):
            return False
        if any(isinstance(self.config.get(word), list) for word in schedule.kind.words):
            return False
        try:
            self.kind(schedule, 0, self.count)
        except UnknownValueError:
            return False
        return True

    def kind(self, schedule: Schedule, layer: int, layers: int) -> Any:
        """What a rule makes of a layer, in a stack of so many."""
        return self.value(schedule.kind, {"layer": layer, "layers": layers})

    def value(self, formula: Formula, numbers: dict[str, int]) -> Any:
        """A formula's value. Raises UnknownValueError where the config does not tell."""

        def known(name: str) -> Any:
            return numbers[name] if name in numbers else self.lookup(name)

        try:
            return evaluate(formula, known)
        except ValueError as error:
            raise WidenError(
                f"{printable(self.config.name)}: its values do not fit what the map asks: {error}"
            ) from None

    def _scheduled(self, schedule: Schedule, slots: Sequence[Slot]) -> Iterator[ConfigChange]:
        kinds = [self.kind(schedule, slot.source, self.count) for slot in slots]
        moved = [
            number
            for number, slot in enumerate(slots)
            if (not slot.passes or schedule.weights) and self.kind(schedule, number, len(slots)) != kinds[number]
        ]
        if not moved:
            return
        if schedule.key is None:
            number = moved[0]
            why = schedule.why or "layers are of different kinds by their numbers"
            source = slots[number].source
            if self.kind(schedule, source, len(slots)) != kinds[number]:
                raise WidenError(
                    f"{self.wish.said}: with {len(slots)} layers, layer {source} is of another kind: {why}"
                )
            told = f"layer {source} would be layer {number}, which is of another kind"
            raise WidenError(f"{self.wish.said}: {told}: {why}{self.instead()}")
        yield self._changed(schedule.key, [schedule.values[0 if kind else 1] for kind in kinds])

    def instead(self) -> str:
        """Where identity layers could go for certain, in words."""
        return "; +N@end moves no layer" if self.wish.keeps and not self.wish.text.endswith("@end") else ""

    def _laid(self, key: str, value: list[Any], slots: Sequence[Slot]) -> list[Any]:
        """A list's values in the new order, an object of its own for each layer; those of layers behind the last one stay behind."""
        if len(value) < self.count:
            raise WidenError(
                f"{printable(self.config.name)}: '{key}' holds {len(value)} values for {self.count} layers; correct it, or take it out"
            )
        return [*(deepcopy(value[slot.source]) for slot in slots), *value[self.count :]]

    def _runs(self, key: str, slots: Sequence[Slot]) -> Iterator[ConfigChange]:
        """A list of `[kinds, times]`, as GPT-Neo's."""
        try:
            kinds = list(chain.from_iterable(some * times for some, times in self.lookup(key)))
        except (UnknownValueError, TypeError, ValueError):
            return
        new = [(kind, len(list(same))) for kind, same in groupby(self._laid(key, kinds, slots))]
        yield self._changed(key, [[[kind], times] for kind, times in new])

    def _root(self, key: str, total: int) -> Iterator[ConfigChange]:
        """A number that the model divides by the root of how many layers it has."""
        try:
            value = self.lookup(key)
        except UnknownValueError:
            return
        if isinstance(value, int | float):
            ratio = math.sqrt(total / self.count)
            yield ConfigChange(key, self.config.get(key), value * ratio, EXACT if ratio.is_integer() else ROUNDS)

    def _changed(self, key: str, new: list[Any]) -> ConfigChange:
        return ConfigChange(key, self.config.get(key), new, EXACT)


def refusal(reasons: Sequence[DepthReason], stack: str, value: Callable[[Formula, dict[str, int]], Any]) -> str | None:
    """The first reason whose condition holds, of those that speak of the stack; None where none does."""
    for reason in reasons:
        if reason.stack in (None, stack):
            with suppress(UnknownValueError):
                if value(reason.condition, {}):
                    return reason.why
    return None


def _listed(schedules: Sequence[Schedule]) -> str:
    return ", and ".join(schedule.why or schedule.kind.text for schedule in schedules)
