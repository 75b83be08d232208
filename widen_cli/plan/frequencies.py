"""Numbers that divide the frequencies of rotary pairs, for a config that has none: copies of a pair then turn as the pair did.

The config says by formula how frequencies are scaled (linear, Llama 3); under `longrope` the same is said by a number for
each pair, and there a copy can have the old pair's frequency wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from widen_cli.config import ModelConfig, is_number
from widen_cli.errors import WidenError, brief, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.result import ROUNDS, ConfigChange

LISTED = "longrope"


def listed_frequencies(
    architecture: ArchitectureMap, config: ModelConfig, divisors: tuple[float, ...], base: float, pairs: int
) -> list[ConfigChange]:
    """The section of the config that scales frequencies, with a number for every copy of each of the `pairs` old pairs.

    `divisors` are those of one pair's copies. Empty where the config has such numbers. Raises WidenError where it has no place
    for them, or does not say how it scales.
    """
    assert architecture.rope is not None
    place = next((key for key in architecture.rope.sections if config.get(key)), None)
    section = config.get(place, {}) if place else {}
    if not isinstance(section, dict):
        raise WidenError(f"{printable(config.name)}: {place} is {brief(section)}, where an object is needed")
    kind = "type" if "type" in section and "rope_type" not in section else "rope_type"
    if section.get(kind) == LISTED:
        return []
    scaling = _Scaling(config, place or architecture.rope.sections[0], section, str(section.get(kind, "default")))
    frequencies = [base ** (-pair / pairs) for pair in range(pairs)]
    numbers = [divisor / scaling.speed(frequency) for frequency in frequencies for divisor in divisors]
    # What else the section holds stays: a model may read it for another purpose.
    new = {"factor": 1.0, **section, kind: LISTED, "short_factor": numbers, "long_factor": numbers}
    return [ConfigChange(scaling.place, config.get(scaling.place), {**new, "attention_factor": 1.0}, ROUNDS)]


class _Scaling:
    """How a section of a config scales the frequencies of rotary pairs."""

    def __init__(self, config: ModelConfig, place: str, section: Mapping[str, Any], kind: str) -> None:
        self.config = config
        self.place = place
        self.section = section
        self.kind = kind

    def number(self, key: str) -> float:
        """A number of the section; the trained length counts at the top of the config, if it stands there."""
        above = ".".join([*self.place.split(".")[:-1], key])
        value: Any = self.config.get(above) if key.startswith("original_") else None
        value = self.section.get(key) if value is None else value
        if not is_number(value) or value <= 0:
            raise WidenError(
                f"{printable(self.config.name)}: {self.place}.{key} is {brief(value)}, where a positive number is needed"
            )
        return float(value)

    def speed(self, frequency: float) -> float:
        """By how much a pair of this frequency turns faster than it would without scaling."""
        if self.kind == "default":
            return 1.0
        factor = self.number("factor")
        if self.kind == "linear":
            return 1 / factor
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        turns = self.number("original_max_position_embeddings") * frequency / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0) if low != high else float(turns > low)
        return (1 - smooth) / factor + smooth
