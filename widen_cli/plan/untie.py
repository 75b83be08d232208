"""Ties undone before anything is planned: the narrow model with every tied weight stored under each of its names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from widen_cli.config import ModelConfig
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.formulas import UnknownValueError
from widen_cli.map_rules import ArchitectureMap, TensorRule, Tie
from widen_cli.plan.laws import width_power
from widen_cli.plan.lookup import config_lookup, held, places_of
from widen_cli.plan.match import Match, StoredHeader, applying_rule, match_tensors
from widen_cli.plan.result import EXACT, ConfigChange, Plan, Twin
from widen_cli.plan.sizes import resolve_sizes
from widen_cli.plan.spaces import SpaceScales
from widen_cli.scales import ONE, Scale


@dataclass(frozen=True)
class Untied:
    """The same model without ties: its tensors, each twin behind the one whose values it has, and its config.

    `changes` are the config values that say so, `equal_pairs` the stored tensors that were tied, `notes` what is written anew.
    """

    tensors: tuple[StoredHeader, ...]
    config: ModelConfig
    changes: tuple[ConfigChange, ...]
    equal_pairs: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def told(self, plan: Plan, file: str) -> Plan:
        """The plan of this model, with what had to be said and changed for it; `file` is its name in messages."""
        warnings = plan.warnings
        if self.changes and not self.config.present:
            listed = ", ".join(f"{change.key} = {json.dumps(change.new)}" for change in self.changes)
            warnings += (f"{printable(file)}: no config is written, and whatever loads the result needs {listed} too",)
        return replace(
            plan,
            warnings=warnings,
            config=(*self.changes, *plan.config),
            notes=(*self.notes, *plan.notes),
            equal_pairs=(*self.equal_pairs, *plan.equal_pairs),
        )


def untied(
    architecture: ArchitectureMap, match: Match, tensors: Sequence[StoredHeader], config: ModelConfig, file: str
) -> Untied:
    """The matched model with its ties undone; `file` is its name in messages.

    Raises WidenError where it has none, or its code ties whatever the config says.
    """
    spaces = SpaceScales(architecture, match, dict.fromkeys(architecture.axes, 1), config)
    _check_ties(spaces, match, config, file)
    changes = tuple(
        ConfigChange(place, config.get(place), False, EXACT)
        for key in architecture.untie
        if _holds(architecture, config, key)
        for place in _said_at(architecture, config, key)
    )
    loose = config.with_values({change.key: change.new for change in changes})
    twins = _twins(spaces.ties, match)
    apart = tuple(each for tensor in tensors for each in (tensor, *twins.get(tensor.name, {}).values()))
    after = match_tensors(architecture, apart, loose, match.root)
    _check_apart(spaces.ties, after, file)
    factors = {match.written(tie.tensor): _kept(architecture, match, after, config, tie) for tie in spaces.ties}
    notes = [
        f"untied: '{printable(name)}' is written as a weight of its own, beside '{printable(table)}' whose values it has"
        for table, made in twins.items()
        for name in made
    ]
    return Untied(
        tuple(replace(each, scale=factors[each.name]) if isinstance(each, Twin) else each for each in apart),
        loose,
        changes,
        spaces.stored_ties(),
        tuple(notes),
    )


def _twins(ties: Sequence[Tie], match: Match) -> dict[str, dict[str, Twin]]:
    """The weights that are stored under another name alone: by that, then by their own."""
    twins: dict[str, dict[str, Twin]] = {}
    for tie in ties:
        name, table = match.written(tie.tensor), match.by_name(tie.to)
        made = any(name in others for others in twins.values())
        if table is not None and match.by_name(tie.tensor) is None and not made:
            twins.setdefault(table.tensor.name, {})[name] = Twin(name, table.tensor)
    return twins


def _check_ties(spaces: SpaceScales, match: Match, config: ModelConfig, file: str) -> None:
    told = f"{printable(file)}: --untie:"
    if config.inside and not spaces.architecture.section:
        raise WidenError(f"{told} the model is a part of another, whose class decides what is tied; leave it out")
    if not spaces.ties:
        raise WidenError(f"{told} no weight of this model is tied to another; leave it out")
    for tie in spaces.ties:
        if (table := match.written(tie.to)) in match.grids:
            raise WidenError(f"{told} '{printable(table)}' is block-scaled FP8; dequantise the model first")


def tie_places(architecture: ArchitectureMap) -> tuple[str, ...]:
    """Every place of a config that may say whether weights are tied, which is where untying writes that they are not."""
    return tuple(place for key in architecture.untie for place in places_of(architecture, key))


def _said_at(architecture: ArchitectureMap, config: ModelConfig, key: str) -> list[str]:
    """Every place that says whether weights are tied, or where nothing does the first at which the model looks."""
    return [*held(architecture, config, key)] or [places_of(architecture, key)[0]]


def _holds(architecture: ArchitectureMap, config: ModelConfig, key: str) -> bool:
    try:
        return bool(config_lookup(architecture, config)(key))
    except UnknownValueError:
        return not config.present


def _check_apart(ties: Sequence[Tie], after: Match, file: str) -> None:
    tensors = {tie.tensor for tie in ties}
    for tie in after.ties:
        if tie.tensor in tensors:
            raise WidenError(
                f"{printable(file)}: --untie: what runs this model ties '{printable(after.written(tie.tensor))}' to "
                f"'{printable(after.written(tie.to))}' in its code, and reads no weight of that name; leave it out"
            )
    lost = next((tie for tie in ties if after.by_name(tie.tensor) is None), None)
    if lost is not None:
        raise WidenError(
            f"{printable(file)}: --untie: an untied model of this kind has no '{printable(after.written(lost.tensor))}'; leave it out"
        )


def _kept(architecture: ArchitectureMap, before: Match, after: Match, config: ModelConfig, tie: Tie) -> Scale:
    """What the model multiplies a tied head by at run time and an untied one not, which goes into the weight."""
    new = after.by_name(tie.tensor)
    old = applying_rule(architecture, before, config, tie.tensor)
    if new is None or old.times == new.rule.times:
        return ONE
    sizes = resolve_sizes(architecture, config, before, Faults())

    def size(name: str) -> int:
        found = sizes.size(name)
        if found is None:
            raise WidenError(
                f"{printable(config.name)}: --untie: nothing tells {name}, which the head is multiplied by"
            )
        return found

    def at_run_time(rule: TensorRule) -> Scale:
        return ONE if rule.times is None else width_power(rule.times.tree, size)

    return at_run_time(old) / at_run_time(new.rule)
