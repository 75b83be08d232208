"""What a map's formulas and names must be beyond their syntax: each check yields the fault and the column it stands at."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from widen_cli.formulas import Formula, dotted, letters

# How a function passes a scale on: f(s x) = s**degree f(x). Functions that are not named here are not homogeneous,
# so their argument has to keep scale 1, which is right for every function.
HOMOGENEOUS = {"relu": 1, "leaky_relu": 1, "relu2": 2, "relu_squared": 2, "linear": 1, "identity": 1}
NOT_HOMOGENEOUS = ("softmax", "tanh", "gelu", "silu", "sigmoid", "softplus", "exp")
POSITIONS = ("rope", "alibi", "sinusoid")
FORMULA_FUNCTIONS = (*HOMOGENEOUS, *NOT_HOMOGENEOUS, *POSITIONS, "norm", "sqrt")
CONDITION_FUNCTIONS = ("is_class", "has")
VALUE = "value"  # what a config key holds, in the formula of the size that it means
# What a norm does besides dividing: nothing (the root of the mean square), or it subtracts the mean first.
NORMS = ("rms", "layer")
# How heads grow under rotary positions: old pairs stay where they are and the base is raised; old pair j goes to r*j;
# every pair stands r times and numbers divide the frequencies; or it stands r times under the runtime's own frequencies,
# which is another function.
ROPE_METHODS = ("theta", "spread", "frequencies", "pairs")
PAIRS = ROPE_METHODS[-1]

Fault = tuple[str, int]


class SpaceFormula:
    """Checks the formula of a space: only what the planner gives a meaning to is let through."""

    def __init__(self, name: str, formula: Formula, spaces: Iterable[str], axes: Iterable[str]) -> None:
        self.name = name
        self.formula = formula
        self.spaces = set(spaces)
        self.axes = set(axes)

    def faults(self) -> Iterator[Fault]:
        """Every fault. A formula that names no other space gives its space no axis, so that it could never grow."""
        tree = self.formula.tree
        if self.name not in self.axes and not self.spaces & {*self.formula.words} - {self.name}:
            yield (
                f"space '{self.name}' lies on no axis: its formula names no other space; a norm that a whole stream passes "
                "is that of its axis, as in hidden: norm(hidden, eps)",
                0,
            )
            return
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "norm":
            yield from self.norm(tree)
            return
        if self.name in self.formula.words:
            yield f"space '{self.name}' cannot come out of itself, but by a norm", 0
        yield from self.expression(tree)

    def fault(self, message: str, node: ast.expr) -> Fault:
        return message, letters(node, self.formula.text)

    def norm(self, node: ast.Call) -> Iterator[Fault]:
        if not 1 <= len(node.args) <= 2:
            yield self.fault("norm takes a space and the config key of its epsilon (or the number in the code)", node)
            return
        yield from self.expression(node.args[0])
        for epsilon in node.args[1:]:
            number = isinstance(epsilon, ast.Constant) and isinstance(epsilon.value, int | float)
            key = isinstance(epsilon, ast.Name | ast.Attribute) and dotted(epsilon) not in self.spaces
            if not number and not key:
                yield self.fault(f"an epsilon is a config key or a number, not '{ast.unparse(epsilon)}'", epsilon)

    def expression(self, node: ast.expr) -> Iterator[Fault]:
        match node:
            case ast.Name() | ast.Attribute() | ast.Constant(value=int() | float()):
                return
            case ast.BinOp(op=ast.Mult() | ast.Div() | ast.MatMult() | ast.Add() | ast.Sub()):
                yield from self.expression(node.left)
                yield from self.expression(node.right)
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int(exponent))) if 1 <= exponent <= 8:
                yield from self.expression(node.left)
            case ast.UnaryOp(op=ast.USub()):
                yield from self.expression(node.operand)
            case ast.IfExp():
                for name in ast.walk(node.test):
                    if isinstance(name, ast.Name) and name.id in self.spaces - self.axes:
                        yield self.fault(f"'{name.id}' is a space; a condition is over config keys and axes", name)
                yield from self.expression(node.body)
                yield from self.expression(node.orelse)
            case ast.Call(func=function):
                yield from self.call(dotted(function), node)
            case _:
                yield self.fault(f"'{ast.unparse(node)}' says nothing about scales", node)

    def call(self, function: str, node: ast.Call) -> Iterator[Fault]:
        if function == "norm":
            yield self.fault("a norm stands alone: give its output a space of its own", node)
        elif len(node.args) != 1:
            yield self.fault(f"{function} takes one argument, not {len(node.args)}", node)
        elif function in ("sqrt", "alibi", "sinusoid", "rope"):
            known, what = (self.spaces, "a space") if function == "rope" else (self.axes, "an axis")
            argument = node.args[0]
            if not isinstance(argument, ast.Name) or argument.id not in known:
                yield self.fault(f"{function} takes {what}, not '{ast.unparse(argument)}'", argument)
        else:
            yield from self.expression(node.args[0])


def multiplier_faults(formula: Formula, axes: Iterable[str]) -> Iterator[Fault]:
    """The faults of a `times` formula: axes, numbers and config keys, their products, quotients and square roots."""
    known = set(axes)
    for node in ast.walk(formula.tree):
        column = letters(node, formula.text)
        if isinstance(node, ast.Call):
            argument = node.args[0] if len(node.args) == 1 else None
            if not isinstance(argument, ast.Name) or argument.id not in known:
                yield f"sqrt takes an axis, not '{', '.join(ast.unparse(one) for one in node.args)}'", column
        elif isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Attribute | ast.Constant | ast.BinOp):
            yield f"'{ast.unparse(node)}' is no run-time multiplier", column
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Mult | ast.Div):
            yield f"'{ast.unparse(node)}' is no product of widths; write it with *, / and sqrt(axis)", column


def stored_names(formula: Formula) -> Iterator[tuple[str, int]]:
    """The tensor names that a condition asks `has("...")` about, with their columns."""
    for node in ast.walk(formula.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "has":
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value), letters(argument, formula.text)


def endless(name: str, inner: Mapping[str, set[str]]) -> bool:
    """Whether a space comes out of itself by way of others; `inner` are the spaces in each space's formula."""
    seen: set[str] = set()
    waiting = set(inner.get(name, set())) - {name}
    while waiting:
        found = waiting.pop()
        if found == name:
            return True
        if found not in seen:
            seen.add(found)
            waiting |= set(inner.get(found, set()))
    return False
