"""The scaling modes: what each asks of the stream, and what it prefers for the spaces that the laws leave free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from widen_cli.plan.laws import Law, Reading
from widen_cli.scales import ONE, ContradictionError, Equations, Scale


@dataclass(frozen=True)
class Roles:
    """What a space is in this checkpoint, for a mode to judge by.

    `streams` are read by a norm and written by matrices; `growth` is the factor of a space's axis;
    `read_growth` the factor of the whole dimension in which it is read; `writers_growth` that of the
    dimensions read by the matrices which write a stream. `multipliers` are config keys that may take a factor, `filled` the
    spaces on axes whose new size is no multiple.
    """

    streams: tuple[str, ...]
    norm_outputs: frozenset[str]
    contractions: tuple[tuple[str, str], ...]
    others: tuple[str, ...]
    growth: dict[str, int]
    read_growth: dict[str, int]
    writers_growth: dict[str, int]
    multipliers: tuple[str, ...] = ()
    filled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Mode:
    """A scaling mode.

    `stream`, `norm_output` and `other` give a space's scale; the stream's is a demand, the others wishes.
    `share`: query and key take equal parts of their factor. `silent_copies`: copies of what is no norm's output are not read.
    `yields`: a stream on a filled axis takes the scale that the laws ask for.
    """

    name: str
    stream: Callable[[Roles, str], Scale]
    norm_output: Callable[[Roles, str], Scale]
    other: Callable[[Roles, str], Scale]
    share: bool = False
    silent_copies: bool = False
    yields: bool = False


def _one(roles: Roles, space: str) -> Scale:
    return ONE


def _root(roles: Roles, space: str) -> Scale:
    return Scale.of(roles.growth[space]) ** Fraction(-1, 2)


def _root_of_read(roles: Roles, space: str) -> Scale:
    return Scale.of(roles.read_growth.get(space, roles.growth[space])) ** Fraction(-1, 2)


def _inverse(roles: Roles, space: str) -> Scale:
    return Scale.of(roles.growth[space]) ** -1


def _writers_sum(roles: Roles, space: str) -> Scale:
    # A stream that keeps its width keeps its scale too: a bare model's output would change at an unchanged shape.
    return Scale.of(roles.writers_growth.get(space, 1)) if roles.growth[space] > 1 else ONE


MODES = {
    mode.name: mode
    for mode in (
        Mode("orthogonal", _root, _root, _root_of_read, share=True),
        Mode("copy", _one, _one, _one, yields=True),
        Mode("sum", _writers_sum, _inverse, _one),
        Mode("quiet", _one, _inverse, _one, silent_copies=True, yields=True),
    )
}


def solve(mode: Mode, laws: list[Law], reading: Reading, roles: Roles) -> dict[str, Scale]:
    """The scale of every space under a mode.

    Raises ContradictionError with the equations that rule the mode out.
    """
    equations = Equations()
    for law in laws:
        equations.require(law.power.spaces, law.power.known**-1, law.text)
    for space in roles.streams:
        scale = mode.stream(roles, space)
        # An epsilon that cannot change asks for another scale where a filled axis changes what a norm finds.
        if mode.yields and space in roles.filled and equations.value(space) is not None:
            continue
        equations.require({space: 1}, scale, f"{mode.name} sets s({space}) = {scale}")
    for query, key in roles.contractions:
        if mode.share and equations.value(query) is None and equations.value(key) is None:
            try:
                equations.require({query: 1, key: -1}, ONE, f"{query} and {key} share their factor")
            except ContradictionError:
                continue
        equations.prefer(query, ONE, f"{mode.name} leaves {query} alone")
    wishes = [(space, mode.norm_output) for space in sorted(roles.norm_outputs)] + [
        (space, mode.other) for space in roles.others
    ]
    for space, wish in wishes:
        equations.prefer(space, wish(roles, space), f"{mode.name} sets s({space})")
    for key in roles.multipliers:
        equations.prefer(key, ONE, f"{mode.name} leaves {key} alone")
    names = {
        *roles.multipliers,
        *roles.streams,
        *roles.norm_outputs,
        *roles.others,
        *(name for pair in roles.contractions for name in pair),
    }
    solved = {name: equations.value(name) for name in sorted(names)}
    return {name: scale for name, scale in solved.items() if scale is not None}
