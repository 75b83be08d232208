"""What the model's class decides, which a checkpoint without a config does not tell."""

from __future__ import annotations

from widen_cli.config import ModelConfig
from widen_cli.formulas import UnknownValueError
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.lookup import config_lookup
from widen_cli.plan.match import Conditions, Match, Matched


def by_class(architecture: ArchitectureMap, match: Match, config: ModelConfig) -> list[Matched]:
    """The stored tensors that would follow another rule in a model of another class; none where the class is known."""
    lookup = config_lookup(architecture, config)
    try:
        lookup("architectures")
    except UnknownValueError:
        conditions = Conditions(lookup, frozenset(item.tensor.name for item in match.matched), match, config.name)
    else:
        return []
    asking = {rule.pattern for rule in architecture.tensors if rule.condition and "is_class" in rule.condition.text}
    found = []
    for item in match.matched:
        rules = [rule for rule in architecture.tensors if rule.pattern == item.rule.pattern and rule.pattern in asking]
        other = next((rule for rule in rules if conditions.hold(rule.condition, unknown=True)), item.rule)
        if other.shape.text != item.rule.shape.text:
            found.append(item)
    return found
