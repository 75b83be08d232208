"""How heads grow under rotary positions: what becomes of the pairs of q and k, of the base and of the frequencies.

With `theta` the old pairs come first and keep their angles, since the base is raised to the r-th power: base**(-2j/d) is
(base**r)**(-2j/(r d)). With `spread` old pair j goes to r*j and keeps its angle under the old base. Either way the new pairs
of one side of q.k are zero. With `frequencies` all copies of a pair stand side by side, and numbers that the runtime
divides frequencies by give each of them the old one's angle. With `pairs` they stand there without such numbers, as the
source has them: copy k of pair j is turned by base**(-2(r j + k)/(r d)), so the first as before and the others more slowly.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from widen_cli.config import ModelConfig, is_number
from widen_cli.errors import WidenError, brief, printable
from widen_cli.formulas import Formula, UnknownValueError, evaluate
from widen_cli.map_checks import PAIRS
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import Factor, is_whole
from widen_cli.plan.frequencies import listed_frequencies
from widen_cli.plan.growth import PLAIN
from widen_cli.plan.lookup import config_lookup, held
from widen_cli.plan.result import EXACT, ROUNDS, ConfigChange


@dataclass(frozen=True)
class Rotary:
    """The way taken; `axes` are those of the pairs, `factor` is by how much they grow (1: nothing is to be done)."""

    method: str = ""
    axes: frozenset[str] = frozenset()
    factor: Factor = 1

    @property
    def once(self) -> frozenset[str]:
        """The axes along which q.k counts each old pair once, the new pairs of one side being zero."""
        return self.axes if self.factor > 1 and self.method in ("theta", "spread") else frozenset()

    @property
    def approximate(self) -> str:
        """Why another function comes of it; empty where it is the same."""
        return f"--rope {PAIRS}" if self.factor > 1 and self.method == PAIRS else ""

    def tiles(self, axis: str, otherwise: bool) -> bool:
        """Whether the copies of an axis come after all of it; `otherwise` is the layout of what is not rotated."""
        if self.factor == 1 or axis not in self.axes:
            return otherwise
        return self.method == "theta"


def rotary_method(architecture: ArchitectureMap, config: ModelConfig, asked: str | None, allowed: bool) -> str | None:
    """The way that was asked for, else the first of the map that keeps the function; None where there is none.

    Raises WidenError where what was asked for does not keep it; of `pairs`, which never does, where that is not `allowed`.
    """
    known = architecture.rope.methods if architecture.rope else {}
    exact = _exact_ways(architecture, config)
    if asked is None:
        return exact[0] if exact else None
    if asked == PAIRS and asked in known:
        fits = _holds(architecture, config, known[asked])
        _check_pairs(None if fits else why_none(architecture, config), exact, allowed)
        return asked
    if asked not in exact and not any(
        "rope(" in space.formula.text for space in architecture.spaces.values() if space.formula
    ):
        raise WidenError(f"--rope {asked}: '{architecture.architecture}' has no rotary positions; leave --rope out")
    if asked not in exact:
        instead = f"these are: {', '.join(exact)}" if exact else "none is"
        why = "with this model's frequency scaling" if asked in known else f"for '{architecture.architecture}'"
        raise WidenError(f"--rope {asked}: is not exact {why}; {instead}")
    return asked


def _exact_ways(architecture: ArchitectureMap, config: ModelConfig) -> list[str]:
    """The ways of a map that keep the function of a model, in its order."""
    known = architecture.rope.methods if architecture.rope else {}
    return [name for name, condition in known.items() if name != PAIRS and _holds(architecture, config, condition)]


def _check_pairs(why_not: str | None, exact: list[str], allowed: bool) -> None:
    """Raises WidenError where pairs cannot be copied under the runtime's own frequencies, or it was not said that they may."""
    if why_not is not None:
        raise WidenError(f"--rope {PAIRS}: cannot be had, not even approximately: {why_not}; grow heads instead")
    if not allowed:
        keep = f", and --rope {' or '.join(exact)} keeps it" if exact else ""
        raise WidenError(
            f"--rope {PAIRS}: copies of a pair turn more slowly than the pair, which changes the function; "
            f"--allow-approximate takes that{keep}"
        )


def rotary_default(
    architecture: ArchitectureMap, config: ModelConfig, method: str | None, factor: Factor
) -> str | None:
    """The way by which heads grow where none was asked for: `method`, else the next that keeps the function where a raised base
    would leave float32, or is not known since there is no config."""
    if method == "theta" and any(True for _ in _not_raised(architecture, config, factor)):
        return _after_theta(architecture, config) or method
    return method


def check_way_back(architecture: ArchitectureMap, config: ModelConfig, rotary: Rotary) -> None:
    """Raises WidenError where a wide config does not tell by which way heads grew that were not told one: a base of which the
    power leaves float32 is a raised one, or one that was left as it was for that reason."""
    if rotary.factor == 1 or rotary.method == "theta" or not is_whole(rotary.factor):
        return
    for place, base in _not_raised(architecture, config, rotary.factor):
        if place in config and config.present:
            raise WidenError(
                f"{printable(config.name)}: {place} is {base}, which --rope theta may have made, or --rope {rotary.method} left; "
                "say which it was"
            )


def _not_raised(architecture: ArchitectureMap, config: ModelConfig, factor: Factor) -> Iterator[tuple[str, Any]]:
    """The bases, by their places, that have no power in float32, or that nothing tells, since there is no config."""
    for key in architecture.rope.keys if architecture.rope else ():
        for place in _places(architecture, config, key):
            base = _said(architecture, config, key, place)
            if (base is None and not config.present) or (
                is_number(base) and base > 0 and _raised(base, factor) is None
            ):
                yield place, base


def _after_theta(architecture: ArchitectureMap, config: ModelConfig) -> str | None:
    return next((way for way in _exact_ways(architecture, config) if way != "theta"), None)


def rotary_fraction(architecture: ArchitectureMap, config: ModelConfig, asked: str | None, factor: Factor) -> str:
    """The way by which heads grow by a fraction: only a raised base has places between the old pairs and the new ones.

    Raises WidenError where that does not keep the function.
    """
    if asked not in (None, "theta"):
        raise WidenError(
            f"--rope {asked}: cannot grow head_dim by {factor}; --rope theta can, or grow by a whole factor"
        )
    if "theta" not in _exact_ways(architecture, config):
        raise WidenError(
            f"--grow: head_dim cannot grow by {factor}: only a raised base does that exactly, and it is not exact for this model; "
            "grow by a whole factor"
        )
    return "theta"


def _holds(architecture: ArchitectureMap, config: ModelConfig, condition: Formula) -> bool:
    try:
        return bool(evaluate(condition, config_lookup(architecture, config)))
    except (UnknownValueError, ValueError):
        return False


def why_none(architecture: ArchitectureMap, config: ModelConfig) -> str:
    """Why no way keeps the function of a model, for where there is none."""
    if architecture.rope is None:
        return PLAIN
    said = (why for condition, why in architecture.rope.reasons if _holds(architecture, config, condition))
    if (why := next(said, None)) is not None:
        return why
    lookup = config_lookup(architecture, config)
    told: dict[str, str] = {}
    conditions = [condition for name, condition in architecture.rope.methods.items() if name != PAIRS]
    for word in (word for word in conditions[0].words if all(word in other.words for other in conditions)):
        try:
            told[word] = f"{word} is {brief(lookup(word))}"
        except UnknownValueError:
            told[word] = f"{word} is not known (--set {word}=... tells it)"
    return f"no way to do it is known to be exact, since {' and '.join(told.values())}"


def rotary_changes(
    architecture: ArchitectureMap, config: ModelConfig, rotary: Rotary, pairs: int
) -> list[ConfigChange]:
    """The raised bases, and the longer lists of numbers that divide the frequencies of the `pairs` old pairs.

    Raises WidenError for a base that is no number, or leaves float32, in which runtimes compute.
    """
    if rotary.factor == 1 or architecture.rope is None:
        return []
    changes = _bases(architecture, config, rotary.factor) if rotary.method == "theta" else []
    if rotary.method == "frequencies" and architecture.rope.sections and architecture.rope.lists:
        found = divisors(config, architecture, int(rotary.factor), 2 * pairs)
        changes += listed_frequencies(architecture, config, found, _first_base(architecture, config), pairs)
    for key in architecture.rope.lists:
        for place, old in held(architecture, config, key).items():
            if not isinstance(old, list) or not all(map(is_number, old)) or len(old) != pairs:
                raise WidenError(
                    f"{printable(config.name)}: {place} is no list of {pairs} numbers, one for each rotary pair of a head"
                )
            new = _longer(architecture, config, rotary, old)
            changes.append(ConfigChange(place, old, new, ROUNDS if rotary.method == "frequencies" else EXACT))
    return changes


def _bases(architecture: ArchitectureMap, config: ModelConfig, factor: Factor) -> list[ConfigChange]:
    """The raised bases, at every place that holds one; at the key itself, where only its default says what it is."""
    assert architecture.rope is not None
    changes = []
    for key in architecture.rope.keys:
        for place in _places(architecture, config, key):
            old = _base(architecture, config, key, place)
            new = _raised(old, factor)
            if new is None:
                other = _after_theta(architecture, config) if is_whole(factor) else None
                raise WidenError(
                    f"{printable(config.name)}: {place} {config.get(place, old)} to the power of {factor} is too large for a "
                    f"float32; grow heads instead{f', or take --rope {other}' if other else ''}"
                )
            exact = struct.unpack("<f", struct.pack("<f", new))[0] == new
            changes.append(ConfigChange(place, config.get(place), new, EXACT if exact else ROUNDS))
    return changes


def _places(architecture: ArchitectureMap, config: ModelConfig, key: str) -> tuple[str, ...]:
    """Where a base stands, or is to be written; nothing for one whose absence means that there is none."""
    return tuple(held(architecture, config, key)) or ((key,) if architecture.defaults.get(key) is not None else ())


def _raised(base: float, factor: Factor) -> float | None:
    """A base to the power of a factor; None where that is beyond float32, in which runtimes compute."""
    try:
        new = float(base**factor)
        struct.pack("<f", new)
    except OverflowError:
        return None
    return new


def _longer(architecture: ArchitectureMap, config: ModelConfig, rotary: Rotary, old: list[float]) -> list[float]:
    """One number for each new pair. A pair of zeros may have any, and has that of the pair whose place it shares."""
    if rotary.method == "theta":
        return (old * -(-rotary.factor // 1))[: int(len(old) * rotary.factor)]
    if rotary.method in ("spread", PAIRS):
        return [number for number in old for _ in range(int(rotary.factor))]
    factors = divisors(config, architecture, int(rotary.factor), 2 * len(old))
    return [number * factor for number in old for factor in factors]


def _said(architecture: ArchitectureMap, config: ModelConfig, key: str, place: str) -> Any:
    return config.get(place, architecture.defaults.get(key) if config.present else None)


def _base(architecture: ArchitectureMap, config: ModelConfig, key: str, place: str) -> float:
    """The base at a place of a key, or the map's default; WidenError where it is no positive number."""
    base = _said(architecture, config, key, place)
    if base is None and not config.present:
        raise WidenError(
            f"{printable(config.name)}: {key} is not known, and --rope theta raises it; tell it with --set {key}=..."
        )
    if not is_number(base) or base <= 0:
        raise WidenError(f"{printable(config.name)}: {place} is {brief(base)}, where a positive number is needed")
    return float(base)


def _first_base(architecture: ArchitectureMap, config: ModelConfig) -> float:
    assert architecture.rope is not None
    key = architecture.rope.keys[0]
    return _base(architecture, config, key, next(iter(held(architecture, config, key)), key))


def slower_copies(architecture: ArchitectureMap, config: ModelConfig, rotary: Rotary, pairs: int) -> list[str]:
    """How fast copies of pairs turn, against the old ones, where they take the runtime's own frequencies."""
    if not rotary.approximate or architecture.rope is None:
        return []
    copies, speeds = int(rotary.factor), ""
    if pairs and architecture.rope.keys and config.present:
        found = divisors(config, architecture, copies, 2 * pairs)[1:]
        speeds = f" ({', '.join(f'{speed:.3g}' for speed in found)} of the old frequency)"
    return [
        f"of {copies} copies of a rotary pair the first turns as before and the others more slowly{speeds}: attention changes "
        "the more the further apart two tokens are"
    ]


def divisors(config: ModelConfig, architecture: ArchitectureMap, factor: int, head: int) -> tuple[float, ...]:
    """By what the frequencies of a pair's r copies have to be divided, beside what the old pair's was.

    Copy k of pair j stands at r*j + k of r*d/2, where the runtime has base**(-2(r j + k)/(r d)); the old one had
    base**(-2j/d). `head` is d, the old number of rotated values.
    """
    base = _first_base(architecture, config)
    return tuple(base ** (-2 * copy / (factor * head)) for copy in range(factor))
