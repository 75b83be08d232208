"""By which factor each axis grows: what was asked, what the family does by default, what the config ties together."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from widen_cli.errors import WidenError, did_you_mean
from widen_cli.formulas import dotted
from widen_cli.map_checks import POSITIONS
from widen_cli.map_rules import ArchitectureMap, TensorRule
from widen_cli.plan.equalities import Equality, followers
from widen_cli.plan.factors import NO_SIZES, Factor, factor_of, is_whole, unfit_size
from widen_cli.plan.laws import taken

PLAIN = "its rotary angles depend on the head size, and a plain repeat gives the copies other angles"
FACTOR_LIMIT = 65536  # beyond any model, and small enough that its primes are found at once


@dataclass(frozen=True)
class AxisGrowth:
    """The factor of every axis, a whole number or a fraction, and in words what followed from what."""

    factors: dict[str, Factor]
    notes: tuple[str, ...]


def axis_growth(
    architecture: ArchitectureMap,
    factor: int | None,
    asked: Mapping[str, Factor],
    by_heads: bool,
    positions: Mapping[str, set[str]],
    equal: Sequence[Equality] = (),
    rope: str = PLAIN,
    sizes: Mapping[str, int] = NO_SIZES,
) -> AxisGrowth:
    """The factor of every axis.

    `factor` grows the family's width axes and its attention, by heads or by head size as `by_heads` says;
    `asked` sets single axes, which `check_asked` let pass. An axis that the config ties to others (hidden = heads * head_dim) follows them.
    `positions` names the axes that rotary angles, ALiBi slopes or run-time sinusoids stand on, `rope` says what the first
    speak against; `equal` are the products of sizes that have to stay equal: what was not asked for follows.
    `sizes` are the old sizes that are known: a factor may be a fraction where the new size is whole.
    Raises WidenError with every axis that cannot grow so, and why.
    """
    growth = architecture.growth
    wanted: dict[str, Factor] = {**{axis: factor for axis in growth.width if factor}, **asked}
    hidden = growth.width[0]
    if factor:
        wanted = {**dict.fromkeys(_attention(architecture, asked, by_heads), factor), **wanted}
    growing = [axis for axis in growing_axes(architecture) if axis not in asked and architecture.axes[axis].keys]
    following = followers(asked, equal, growing)
    wanted_too = wanted | {axis: number for axis, (number, _) in following.items()}
    standing = {axis for axes in positions.values() for axis in axes}
    order = dict.fromkeys((*_attention(architecture, asked, by_heads), *growth.heads, *growing))
    free = [axis for axis in order if axis in growing and axis not in standing]
    torn: list[Equality] = []
    ways = _completions(architecture, wanted_too, asked, by_heads, hidden)
    # Fractions are for those who ask for one; what whole factors do stays what it is.
    tried = [(way, NO_SIZES) for way in ways]
    tried += [(way, sizes) for way in ways if not all(map(is_whole, asked.values()))]
    for completion, known in tried:
        # What the family's default, or this way, has set is moved last.
        own = sorted(free, key=completion.__contains__)
        balanced = _balanced(architecture, completion, equal, own, known)
        if isinstance(balanced, Equality):
            torn.append(balanced)
        elif balanced is not None and all(balanced.factors[axis] == number for axis, number in asked.items()):
            _check_positions(architecture, balanced.factors, positions, rope)
            causes = {axis: text for axis, (_, text) in following.items()} | balanced.causes
            return AxisGrowth(balanced.factors, _notes(architecture, balanced.factors, wanted, causes))
    if faults := [fault for axis, number in asked.items() if (fault := unfit_size(axis, number, sizes))]:
        raise WidenError(*faults)
    if tried[len(ways) :] and not torn and (uneven := _uneven(architecture, ways, asked, sizes)):
        raise WidenError(uneven)
    raise WidenError(_unequal(architecture, asked or wanted, torn[0]) if torn else _impossible(architecture, wanted))


@dataclass(frozen=True)
class _Balanced:
    """The factor of every axis, and the equation by which an axis was moved."""

    factors: dict[str, Factor]
    causes: dict[str, str]


def _balanced(
    architecture: ArchitectureMap,
    chosen: Mapping[str, Factor],
    equal: Sequence[Equality],
    free: Sequence[str],
    sizes: Mapping[str, int],
) -> _Balanced | Equality | None:
    """The factors after free axes were moved, each once, until all of `equal` hold; an equation that cannot hold; None where
    new sizes are not whole."""
    chosen, causes = dict(chosen), dict[str, str]()
    while (factors := _all_factors(architecture, chosen, sizes)) is not None:
        broken = next((equality for equality in equal if equality.ratio(factors) != 1), None)
        if broken is None:
            return _Balanced(factors, causes)
        moved = broken.mended(factors, [axis for axis in free if axis not in causes], sizes)
        if moved is None:
            return broken
        chosen[moved[0]], causes[moved[0]] = moved[1], broken.text
    return None


def _attention(architecture: ArchitectureMap, asked: Mapping[str, Factor], by_heads: bool) -> tuple[str, ...]:
    """The axes by which attention follows a factor, unless the other way was asked for; a computed one follows by itself."""
    growth = architecture.growth
    if by_heads:
        return () if growth.head_dim in asked else growth.heads
    if (
        growth.head_dim is None
        or architecture.axes[growth.head_dim].computed
        or any(axis in asked for axis in growth.heads)
    ):
        return ()
    return (growth.head_dim,)


def growing_axes(architecture: ArchitectureMap) -> list[str]:
    """The axes that can be asked for."""
    return [
        name
        for name, axis in architecture.axes.items()
        if not axis.fixed and (axis.keys or name == architecture.growth.head_dim)
    ]


def check_asked(architecture: ArchitectureMap, asked: Mapping[str, Factor]) -> None:
    """Raises WidenError with every axis that there is not, or that cannot be asked for."""
    growing = growing_axes(architecture)
    faults = []
    for axis in asked:
        if axis not in architecture.axes:
            keyed = [name for name in growing if axis in architecture.axes[name].keys]
            near = did_you_mean(keyed[0] if keyed else axis, growing)
            faults.append(
                f"--grow {axis}: map '{architecture.architecture}' has no such axis{near}; it has {', '.join(growing)}"
            )
        elif axis not in growing and asked[axis] != 1 and not (architecture.axes[axis].padded and asked[axis] < 2):
            how = "is only padded, to less than twice its size" if architecture.axes[axis].padded else "cannot grow"
            faults.append(f"--grow {axis}: '{axis}' {how}; these can grow: {', '.join(growing)}")
    if faults:
        raise WidenError(*faults)


def _completions(
    architecture: ArchitectureMap,
    wanted: Mapping[str, Factor],
    asked: Mapping[str, Factor],
    by_heads: bool,
    hidden: str,
) -> list[dict[str, Factor]]:
    """Ways to fill in the axes that were not asked for, the family's own way first."""
    growth = architecture.growth
    head_dim = growth.head_dim
    tied = head_dim is not None and architecture.axes[head_dim].computed
    width = wanted.get(hidden, 1)
    ways: list[dict[str, Factor]] = []
    free_heads = not any(axis in asked for axis in growth.heads)
    if tied and head_dim is not None:
        if free_heads and head_dim in wanted and width % wanted[head_dim] == 0 and width > 1:
            ways.append(dict.fromkeys(growth.heads, factor_of(Fraction(width) / wanted[head_dim])))
        if free_heads and head_dim not in wanted and by_heads:
            ways.append(dict.fromkeys(growth.heads, width))
    ways.append({})
    if tied and free_heads and head_dim not in wanted and not is_whole(width):
        ways.append(dict.fromkeys(growth.heads, width))
    if tied and hidden not in asked:
        ways.append({hidden: math.prod(wanted.get(axis, 1) for axis in (*growth.heads[:1], str(head_dim)))})
    return [{**way, **wanted, **({hidden: way[hidden]} if hidden in way else {})} for way in ways]


def _all_factors(
    architecture: ArchitectureMap, chosen: Mapping[str, Factor], sizes: Mapping[str, int]
) -> dict[str, Factor] | None:
    """Factors of every axis from those of the ones with keys; None where a new size would be no whole number."""
    factors = _following(architecture, chosen)
    if any(unfit_size(name, factor, sizes) or factor < 1 for name, factor in factors.items()):
        return None
    return {name: factor_of(factor) for name, factor in factors.items()}


def _following(architecture: ArchitectureMap, chosen: Mapping[str, Factor]) -> dict[str, Fraction]:
    """Factors of every axis from those of the ones with keys, whatever sizes they make."""
    factors = {
        name: Fraction(chosen.get(name, 1) if axis.padded or not axis.fixed else 1)
        for name, axis in architecture.axes.items()
    }
    growth = architecture.growth
    for _ in architecture.axes:
        if growth.head_dim is not None:
            factors |= {name: factors[growth.head_dim] for name in growth.with_head_dim if name not in chosen}
        for name, axis in architecture.axes.items():
            if axis.computed and axis.size is not None and not axis.fixed:
                factors[name] = _factor_of(axis.size.tree, factors)
    return factors


def _uneven(
    architecture: ArchitectureMap,
    ways: Sequence[Mapping[str, Factor]],
    asked: Mapping[str, Factor],
    sizes: Mapping[str, int],
) -> str | None:
    """What to say where a fraction that was asked for leaves an axis that follows no whole size; None for other reasons."""
    for way in ways:
        for axis, factor in _following(architecture, way).items():
            formula = architecture.axes[axis].size
            if formula and axis in sizes and factor >= 1 and unfit_size(axis, factor, sizes):
                told = ",".join(f"{name}={number}" for name, number in asked.items())
                return f"--grow {told}: {axis} = {formula.text} would be {sizes[axis] * factor}, which is no whole size"
    return None


def _factor_of(node: ast.expr, factors: Mapping[str, Fraction]) -> Fraction:
    """By how much a size formula grows; a product of axes grows by the product of their factors."""
    match node:
        case ast.Name() | ast.Attribute():
            return factors.get(dotted(node), Fraction(1))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _factor_of(left, factors) * _factor_of(right, factors)
        case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right):
            return _factor_of(left, factors) / _factor_of(right, factors)
        case ast.BinOp(left=left, right=right):
            both = {_factor_of(left, factors), _factor_of(right, factors)}
            return both.pop() if len(both) == 1 else Fraction(0)
        case ast.UnaryOp(operand=operand):
            return _factor_of(operand, factors)
    return Fraction(1)


def _check_positions(
    architecture: ArchitectureMap, factors: Mapping[str, Factor], positions: Mapping[str, set[str]], rope: str
) -> None:
    others = [axis for axis in architecture.growth.width if axis not in positions.get("sinusoid", set())]
    instead = f"; grow {' and '.join(others)} instead" if others else ""
    reasons = {
        "rope": f"{rope}; grow heads instead",
        "alibi": "ALiBi's slopes depend on the number of heads; grow head_dim instead",
        "sinusoid": f"its positions are sinusoids computed at run time, which do not follow a repeat{instead}",
    }
    faults = [
        f"--grow {axis}={factors[axis]}: '{axis}' cannot grow exactly: {reasons[kind]}"
        for kind in POSITIONS
        for axis in sorted(positions.get(kind, set()))
        if factors[axis] != 1
    ]
    if faults:
        raise WidenError(*faults)


def _notes(
    architecture: ArchitectureMap,
    factors: Mapping[str, Factor],
    wanted: Mapping[str, Factor],
    causes: Mapping[str, str],
) -> tuple[str, ...]:
    """Which axes grow without having been asked for, and by which tie; `causes` are those of axes that follow an equation."""
    ties = {name: axis.size.text for name, axis in architecture.axes.items() if axis.computed and axis.size}
    notes = []
    followers = architecture.growth.with_head_dim
    for name, number in factors.items():
        if name in followers and number != wanted.get(name, 1):
            notes.append(f"{name} grows {number}x, as {architecture.growth.head_dim} does")
            continue
        if name in causes and number != wanted.get(name, 1):
            notes.append(f"{name} grows {number}x, since {causes[name]}")
            continue
        tie = next((f"{other} = {text}" for other, text in ties.items() if name == other or name in text.split()), None)
        shown = architecture.axes[name].keys or name == architecture.growth.head_dim
        if number != wanted.get(name, 1) and tie and shown:
            notes.append(f"{name} grows {number}x, since {tie}")
    return tuple(notes)


def _impossible(architecture: ArchitectureMap, wanted: Mapping[str, Factor]) -> str:
    tied = [
        f"{name} = {axis.size.text}"
        for name, axis in architecture.axes.items()
        if axis.computed and axis.size and not axis.size.text.isdigit()
    ]
    asked = ",".join(f"{axis}={number}" for axis, number in wanted.items())
    return (
        f"--grow {asked}: does not go with {' and '.join(tied)}, which the config of '{architecture.architecture}' fixes; "
        "no axis may shrink, and every size has to be a whole number"
    )


def _unequal(architecture: ArchitectureMap, asked: Mapping[str, Factor], torn: Equality) -> str:
    """What to say of factors that would make two sides unequal, with those asked for that are in it."""
    named = [f"{axis}={asked[axis]}" for axis in torn.names if axis in asked]
    return (
        f"--grow {','.join(named)}: '{architecture.architecture}' needs {torn.text}; give factors that keep both sides equal"
        + (", or leave one out, so that it follows" if len(named) > 1 else "")
    )


def position_calls(
    architecture: ArchitectureMap, stored: Iterable[TensorRule], condition: Callable[[ast.expr], bool]
) -> Iterator[tuple[str, str]]:
    """The axes that rotary angles, ALiBi slopes or sinusoids stand on, each with its kind; `condition` decides `x if c else y`.

    `stored` are the rules that tensors follow: a formula of spaces that only other rules speak of is not there.
    """
    absent = _named(architecture.tensors) - _named(stored) - architecture.axes.keys()
    for space in architecture.spaces.values():
        if space.formula is None or absent.intersection(space.formula.words):
            continue
        for node in taken(space.formula.tree, condition):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in POSITIONS:
                axes = (architecture.axis_of(dotted(argument)) for argument in node.args)
                yield from ((node.func.id, axis.name) for axis in axes if axis is not None)


def _named(rules: Iterable[TensorRule]) -> set[str]:
    """The spaces and axes in the shapes of rules."""
    return {name.text for rule in rules for name, _ in rule.shape.names()}


def position_axes(architecture: ArchitectureMap, calls: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The axes of `calls` by kind, with the axes those are computed from."""
    found: dict[str, set[str]] = {}
    for kind, axis in calls:
        found.setdefault(kind, set()).update(_roots(architecture, axis))
    return found


def _roots(architecture: ArchitectureMap, name: str) -> set[str]:
    axis = architecture.axes[name]
    if name == architecture.growth.head_dim or not axis.computed or axis.size is None:
        return {name}
    inner = {word for word in axis.size.words if word in architecture.axes}
    return set().union(*(_roots(architecture, word) for word in inner)) if inner else {name}
