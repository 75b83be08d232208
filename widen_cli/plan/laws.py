"""The laws that bind the scales of a model's spaces, and the modes that set what they leave free.

Each copy of an activation x of a space holds s * x in the wide model. A weight that writes a space is multiplied by its s,
a weight that reads one by 1/(r * s). What the formulas of the map say becomes equations between the logarithms of the s.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeGuard

from widen_cli.formulas import Formula, dotted
from widen_cli.map_checks import HOMOGENEOUS, POSITIONS
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import Factor
from widen_cli.scales import ONE, Scale


@dataclass(frozen=True)
class Power:
    """A product of space scales, each to a power, times a known scale."""

    spaces: Mapping[str, Fraction] = field(default_factory=dict)
    known: Scale = ONE

    def __mul__(self, other: Power) -> Power:
        spaces = dict(self.spaces)
        for name, power in other.spaces.items():
            spaces[name] = spaces.get(name, Fraction(0)) + power
        return Power({name: power for name, power in spaces.items() if power}, self.known * other.known)

    def __pow__(self, exponent: Fraction | int) -> Power:
        return Power({name: power * exponent for name, power in self.spaces.items()}, self.known**exponent)


@dataclass(frozen=True)
class Law:
    """The power has to be 1; `text` says so in the map's words."""

    power: Power
    text: str


@dataclass(frozen=True)
class NormLaw:
    """A norm reads `power` with the epsilon of a config key, or with a number in the code."""

    power: Power
    epsilon: str | float
    space: str


@dataclass
class Reading:
    """What the formulas of a map say, for one config and one growth."""

    laws: list[Law] = field(default_factory=list)
    norms: list[NormLaw] = field(default_factory=list)
    contractions: list[tuple[str, str]] = field(default_factory=list)
    norm_outputs: set[str] = field(default_factory=set)

    def powers(self) -> Iterator[Power]:
        """What the laws and the norms speak of."""
        yield from (law.power for law in self.laws)
        yield from (norm.power for norm in self.norms)


class FormulaReader:
    """Turns the formulas of spaces into laws.

    `factor` gives the growth of the axis a name lies on, `condition` decides `x if c else y`,
    `function` the activation that a config key names. `once` are axes whose new positions are zero on one side of q.k,
    `multipliers` the config keys that may take a factor. `copies` says how many copies of an axis are summed at least, and
    `spread` by what a norm's root mean square changes where its axis is filled up.
    """

    def __init__(
        self,
        architecture: ArchitectureMap,
        factor: Callable[[str], Factor],
        condition: Callable[[ast.expr], bool],
        function: Callable[[str], str],
        once: frozenset[str] = frozenset(),
        multipliers: frozenset[str] = frozenset(),
        copies: Callable[[str], int] = lambda name: 1,
        spread: Callable[[ast.expr], Scale] = lambda node: ONE,
    ) -> None:
        self.architecture = architecture
        self.factor = factor
        self.condition = condition
        self.function = function
        self.once = once
        self.multipliers = multipliers
        self.copies = copies
        self.spread = spread
        self.reading = Reading()

    def read(self, present: set[str], written: set[str]) -> Reading:
        """The laws of all formulas whose spaces the checkpoint has.

        `present` are the spaces in use, `written` those that some tensor writes.
        """
        for name, space in self.architecture.spaces.items():
            formula = space.formula
            if formula is None or not self.applies(name, formula, present):
                continue
            normed = self.as_norm(formula.tree, name)
            if normed:
                if name not in written:
                    known = self.spread(formula.tree)
                    text = f"the norm behind {name} has no gain: s({name}) = {known**-1}"
                    self.reading.laws.append(Law(Power({name: Fraction(1)}, known), text))
                continue
            result = self.power(formula.tree, formula)
            outcome = "" if result.spaces else f": s({name}) = {result.known}"
            self.reading.laws.append(Law(Power({name: Fraction(1)}) * result**-1, f"{name} is {formula.text}{outcome}"))
        return self.reading

    def applies(self, name: str, formula: Formula, present: set[str]) -> bool:
        others = {word for word in formula.words if word in self.architecture.spaces} - {name}
        return others <= present and (name in present or bool(others))

    def as_norm(self, node: ast.expr, name: str) -> bool:
        """Notes `norm(space, epsilon)`; a norm's gain sets the scale of what comes out, so no equation ties it to what goes in."""
        if not is_norm(node):
            return False
        argument, *epsilons = node.args
        inner = self.power(argument, None) * Power(known=self.spread(argument))
        for epsilon in epsilons:
            literal = epsilon.value if isinstance(epsilon, ast.Constant) else None
            key = float(literal) if isinstance(literal, int | float) else dotted(epsilon)
            self.reading.norms.append(NormLaw(inner, key, ast.unparse(argument)))
        if name not in inner.spaces:
            self.reading.norm_outputs.add(name)
        return True

    def power(self, node: ast.expr, formula: Formula | None) -> Power:
        match node:
            case ast.Name() | ast.Attribute():
                return self.named(dotted(node))
            case ast.IfExp():
                return self.power(node.body if self.condition(node.test) else node.orelse, formula)
            case ast.BinOp(op=ast.Mult()):
                return self.power(node.left, formula) * self.power(node.right, formula)
            case ast.BinOp(op=ast.Div()):
                return self.power(node.left, formula) * self.power(node.right, formula) ** -1
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int(exponent))):
                return self.power(node.left, formula) ** exponent
            case ast.UnaryOp(operand=inner):
                return self.power(inner, formula)
            case ast.BinOp(op=ast.MatMult()):
                return self.contraction(node, formula)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                left, right = self.power(node.left, formula), self.power(node.right, formula)
                self.reading.laws.append(
                    Law(left * right**-1, f"{ast.unparse(node)} is a sum: both sides have one scale")
                )
                return left
            case ast.Call(func=function):
                return self.called(dotted(function), node, formula)
        return Power()

    def named(self, name: str) -> Power:
        if name in self.multipliers or name in self.architecture.spaces or name in self.architecture.axes:
            return Power({name: Fraction(1)})
        return Power()

    def contraction(self, node: ast.BinOp, formula: Formula | None) -> Power:
        left, right = self.power(node.left, formula), self.power(node.right, formula)
        if len(left.spaces) == 1 and len(right.spaces) == 1:
            pair = (next(iter(left.spaces)), next(iter(right.spaces)))
            self.reading.contractions.append(pair)
            axis = self.architecture.axis_of(pair[0])
            summed = 1 if axis is not None and axis.name in self.once else self.copies(pair[0])
            return left * right * Power(known=Scale.of(summed))
        return left * right

    def called(self, name: str, node: ast.Call, formula: Formula | None) -> Power:
        if name == "sqrt" and (key := dotted(node.args[0])) in self.multipliers:
            return Power({key: Fraction(1, 2)})
        if name == "sqrt":
            return Power(known=Scale.of(self.factor(dotted(node.args[0]))) ** Fraction(1, 2))
        if name == "rope":
            return self.power(node.args[0], formula)
        if name in POSITIONS:
            return Power()
        function = self.function(name)
        inner = self.power(node.args[0], formula)
        if function in HOMOGENEOUS:
            return inner ** HOMOGENEOUS[function]
        what = ast.unparse(node.args[0])
        self.reading.laws.append(Law(inner, f"{function} acts on {what}: its scale is 1"))
        return Power()


def is_norm(node: ast.expr) -> TypeGuard[ast.Call]:
    """Whether a formula is a norm, which stands alone."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "norm"


def taken(node: ast.expr, condition: Callable[[ast.expr], bool]) -> Iterator[ast.AST]:
    """The nodes of a formula but for those of branches that are not taken; `condition` decides `x if c else y`."""
    if isinstance(node, ast.IfExp):
        yield from taken(node.body if condition(node.test) else node.orelse, condition)
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.expr):
            yield from taken(inner, condition)


def width_power(node: ast.expr, factor: Callable[[str], Factor], power: Fraction = Fraction(1)) -> Scale:
    """By how much a run-time multiplier such as `sqrt(hidden)` or `1 / sqrt(d_model)` grows."""
    match node:
        case ast.Name() | ast.Attribute():
            return Scale.of(factor(dotted(node))) ** power
        case ast.BinOp(op=ast.Mult()):
            return width_power(node.left, factor, power) * width_power(node.right, factor, power)
        case ast.BinOp(op=ast.Div()):
            return width_power(node.left, factor, power) * width_power(node.right, factor, -power)
        case ast.Call(func=ast.Name(id="sqrt")):
            return width_power(node.args[0], factor, power / 2)
    return ONE


def epsilon_laws(norms: list[NormLaw]) -> Iterator[Law]:
    """One epsilon serves all its norms, so the scales that these read are equal; one that is a number in the code fixes them at 1."""
    first: dict[str, NormLaw] = {}
    for norm in norms:
        if isinstance(norm.epsilon, float):
            yield Law(
                norm.power,
                f"the norm of {norm.space} has its epsilon {norm.epsilon:g} in the code: s({norm.space}) = {norm.power.known**-1}",
            )
        elif norm.epsilon not in first:
            first[norm.epsilon] = norm
        elif norm.power != first[norm.epsilon].power:
            other = first[norm.epsilon]
            yield Law(
                other.power * norm.power**-1,
                f"one {norm.epsilon} serves the norms of {other.space} and {norm.space}: s({other.space}) = s({norm.space})",
            )
