"""Rotary pairs that turn by positions of several kinds, as time, height and width: a config list says how many do by each.

A pair's kind is told by its number. Where old pairs move to r times their number, each kind has r times as many; where they
stay in front, the new ones behind them, whose keys are zero, may turn by any, and are counted to one.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.errors import WidenError, brief, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.lookup import held
from widen_cli.plan.result import EXACT, ConfigChange
from widen_cli.plan.rotary import Rotary


def share_changes(architecture: ArchitectureMap, config: ModelConfig, rotary: Rotary, pairs: int) -> list[ConfigChange]:
    """The lists of how many pairs turn by each kind of position, for the larger heads; `pairs` is how many an old head has.

    Raises WidenError for a list that counts others, and where the config has none.
    """
    if rotary.factor == 1 or architecture.rope is None:
        return []
    changes = []
    for key, taker in architecture.rope.shares.items():
        places = held(architecture, config, key)
        if not places and config.present:
            raise WidenError(
                f"{printable(config.name)}: {key} is not there; it says how many rotary pairs turn by each kind of position, "
                f"and heads cannot grow without it: write the list that the model uses, which has a sum of {pairs}"
            )
        for place, old in places.items():
            if not _counts(old) or sum(old) != pairs:
                raise WidenError(
                    f"{printable(config.name)}: {place} is {brief(old)}, where whole numbers with a sum of {pairs} are needed, "
                    "the rotary pairs of a head"
                )
            changes.append(ConfigChange(place, old, _grown(old, taker, rotary, pairs), EXACT))
    return changes


def _counts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(number) is int and number >= 0 for number in value)


def _grown(old: list[int], taker: str, rotary: Rotary, pairs: int) -> list[int]:
    if rotary.method != "theta":
        return [number * int(rotary.factor) for number in old]
    return _with(old, taker, int(pairs * rotary.factor) - pairs)


def old_shares(new: Any, taker: str, rotary: Rotary) -> Any:
    """What such a list was before it grew; itself where it is none."""
    if not _counts(new):
        return new
    factor = Fraction(rotary.factor)
    if rotary.method != "theta":
        return [int(number / factor) for number in new]
    return _with(new, taker, int(sum(new) / factor) - sum(new))


def _with(counts: list[int], taker: str, more: int) -> list[int]:
    if taker == "first":
        return [counts[0] + more, *counts[1:]]
    return [*counts[:-1], counts[-1] + more]
