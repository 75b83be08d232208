"""How heads grow under rotary positions: what becomes of the pairs of q and k, of the base and of the frequencies.

With `theta` the old pairs come first and keep their angles, since the base is raised to the r-th power: base**(-2j/d) is
(base**r)**(-2j/(r d)). With `spread` old pair j goes to r*j and keeps its angle under the old base. Either way the new pairs
of one side of q.k are zero. With `frequencies` all copies of a pair stand side by side, and numbers that the runtime
divides frequencies by give each of them the old one's angle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from widen_cli.config import ModelConfig, is_number
from widen_cli.errors import WidenError, printable
from widen_cli.formulas import Formula, UnknownValueError, evaluate
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.match import config_lookup
from widen_cli.plan.result import EXACT, ROUNDS, ConfigChange


@dataclass(frozen=True)
class Rotary:
    """The way taken; `axes` are those of the pairs, `factor` is by how much they grow (1: nothing is to be done)."""

    method: str = ""
    axes: frozenset[str] = frozenset()
    factor: int = 1

    @property
    def once(self) -> frozenset[str]:
        """The axes along which q.k counts each old pair once, the new pairs of one side being zero."""
        return self.axes if self.factor > 1 and self.method in ("theta", "spread") else frozenset()

    def tiles(self, axis: str, otherwise: bool) -> bool:
        """Whether the copies of an axis come after all of it; `otherwise` is the layout of what is not rotated."""
        if self.factor == 1 or axis not in self.axes:
            return otherwise
        return self.method == "theta"


def rotary_method(architecture: ArchitectureMap, config: ModelConfig, asked: str | None) -> str | None:
    """The way that was asked for, else the first of the map that keeps the function; None where there is none.

    Raises WidenError where what was asked for does not keep it.
    """
    known = architecture.rope.methods if architecture.rope else {}
    exact = [name for name, condition in known.items() if _holds(architecture, config, condition)]
    if asked is None:
        return exact[0] if exact else None
    if asked not in exact:
        instead = f"these are: {', '.join(exact)}" if exact else "none is"
        why = "with this model's frequency scaling" if asked in known else f"for '{architecture.architecture}'"
        raise WidenError(f"--rope {asked}: is not exact {why}; {instead}")
    return asked


def _holds(architecture: ArchitectureMap, config: ModelConfig, condition: Formula) -> bool:
    try:
        return bool(evaluate(condition, config_lookup(architecture, config)))
    except (UnknownValueError, ValueError):
        return False


def base_changes(architecture: ArchitectureMap, config: ModelConfig, rotary: Rotary) -> list[ConfigChange]:
    """The raised bases. Raises WidenError for one that is no number, or leaves float32, in which runtimes compute."""
    if rotary.factor == 1 or rotary.method != "theta" or architecture.rope is None:
        return []
    changes = []
    for key in (key for names in architecture.rope.keys for key in _held(config, names)):
        old = _base(architecture, config, key)
        try:
            new = old**rotary.factor
            exact = struct.unpack("<f", struct.pack("<f", new))[0] == new
        except OverflowError:
            raise WidenError(
                f"{printable(config.name)}: {key} {config.get(key, old)} to the power of {rotary.factor} is too large for a float32; "
                "grow heads instead, or take another --rope that is exact"
            ) from None
        changes.append(ConfigChange(key, config.get(key), new, EXACT if exact else ROUNDS))
    return changes


def _base(architecture: ArchitectureMap, config: ModelConfig, key: str) -> float:
    """The base that a key holds, or the map's default; WidenError where it is no positive number."""
    base = config.get(key, architecture.defaults.get(key))
    if not is_number(base) or base <= 0:
        raise WidenError(f"{printable(config.name)}: {key} is {base!r}, where a positive number is needed")
    return float(base)


def _held(config: ModelConfig, names: tuple[str, ...]) -> list[str]:
    """Those of a key's names that the config has; the first where it has none."""
    return [name for name in names if config.get(name) is not None] or [names[0]]


def divisors(config: ModelConfig, architecture: ArchitectureMap, factor: int, head: int) -> tuple[float, ...]:
    """By what the frequencies of a pair's r copies have to be divided, beside what the old pair's was.

    Copy k of pair j stands at r*j + k of r*d/2, where the runtime has base**(-2(r j + k)/(r d)); the old one had
    base**(-2j/d). `head` is d, the old number of rotated values.
    """
    assert architecture.rope is not None
    (key, *_) = _held(config, architecture.rope.keys[0])
    base = _base(architecture, config, key)
    return tuple(base ** (-2 * copy / (factor * head)) for copy in range(factor))
