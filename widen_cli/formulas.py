"""The formulas of the maps: sizes, conditions, and how one space comes out of others.

One syntax, Python's expressions, of which only names, numbers, texts, arithmetic, comparisons, `and or not`,
`x if c else y` and calls by name are let through. Nothing is ever executed: a formula is walked.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any


class FormulaSyntaxError(Exception):
    """A formula that cannot be read; `column` counts from 0 within the text."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


class UnknownValueError(Exception):
    """A value that the formula needs is not known; `name` is the axis or config key."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


_ALLOWED = (
    ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Attribute, ast.List, ast.Tuple, ast.Call, ast.IfExp,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult,
    ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
)  # fmt: skip


@dataclass(frozen=True)
class Formula:
    """A parsed formula: its text and its syntax tree."""

    text: str
    tree: ast.expr

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The names that are not called, each once: axes, spaces and config keys."""
        return tuple(dict.fromkeys(name for name, _, called in self.names() if not called))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def names(self) -> Iterator[tuple[str, int, bool]]:
        """Every name in the formula, the column it stands at, and whether it is called."""
        called = {id(node.func) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
                yield dotted(node), letters(node, self.text), id(node) in called


LENGTH_LIMIT = 2000
EXPONENT_LIMIT = 64


def parse_formula(text: str | int | bool) -> Formula:
    """The formula in `text`. Raises FormulaSyntaxError with the column of the fault, counted in letters."""
    source = str(text)
    if len(source) > LENGTH_LIMIT:
        raise FormulaSyntaxError(f"a formula has at most {LENGTH_LIMIT} letters, this has {len(source)}", 0)
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        raise FormulaSyntaxError(
            f"cannot read the formula '{source}'", min((error.offset or 1) - 1, len(source))
        ) from None
    except (ValueError, RecursionError, MemoryError):
        raise FormulaSyntaxError(f"cannot read the formula '{source}'", 0) from None
    try:
        for node in ast.walk(tree):
            _check_node(node, source)
    except RecursionError:
        raise FormulaSyntaxError(f"the formula '{source}' is nested too deeply", 0) from None
    return Formula(source, tree.body)


def _check_node(node: ast.AST, source: str) -> None:
    allowed = isinstance(node, _ALLOWED)
    if isinstance(node, ast.Constant):
        allowed = node.value is None or isinstance(node.value, bool | int | float | str)
    if not allowed:
        raise FormulaSyntaxError(f"'{ast.unparse(node) or source}' has no meaning in a formula", letters(node, source))
    if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name | ast.Attribute)):
        raise FormulaSyntaxError(
            f"a call is a name and plain arguments, not '{ast.unparse(node)}'", letters(node, source)
        )
    if isinstance(node, ast.Attribute):
        dotted(node)


def letters(node: ast.AST, source: str) -> int:
    """The column of a node in letters; Python counts it in bytes of UTF-8."""
    return len(source.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore"))


def dotted(node: ast.expr) -> str:
    """The name `a.b.c` that a node spells."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    raise FormulaSyntaxError(f"'{ast.unparse(node)}' is no name", node.col_offset)


Lookup = Callable[[str], Any]


def evaluate(formula: Formula, lookup: Lookup) -> Any:
    """The formula's value; names are asked of `lookup`, which raises UnknownValueError for what it does not know.

    Values that do not fit the formula (null where a number is compared) raise ValueError.
    Division is exact: a quotient that is no whole number raises ValueError with the numbers in it.
    `and` and `or` decide where one side alone decides, so a known value can outvote an unknown one.
    """
    try:
        return _value(formula.tree, lookup)
    except (TypeError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"'{formula.text}' does not fit the values it meets ({error})") from None


def holds(formula: Formula, lookup: Lookup, unknown: bool, has: Callable[[str], bool]) -> bool:
    """Whether a condition holds; `unknown` is the answer where its values are not known.

    `has` answers `has("tensor")`.
    """

    def with_has(name: str) -> Any:
        return has if name == "has" else lookup(name)

    try:
        return bool(evaluate(formula, with_has))
    except UnknownValueError:
        return unknown


def _value(node: ast.expr, lookup: Lookup) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return lookup(dotted(node))
        case ast.List() | ast.Tuple():
            return [_value(item, lookup) for item in node.elts]
        case ast.BoolOp():
            return _boolean(node, lookup)
        case ast.UnaryOp():
            inner = _value(node.operand, lookup)
            return (not inner) if isinstance(node.op, ast.Not) else -inner
        case ast.IfExp():
            return _value(node.body if _value(node.test, lookup) else node.orelse, lookup)
        case ast.Compare():
            return _comparison(node, lookup)
        case ast.BinOp():
            return _arithmetic(node, _value(node.left, lookup), _value(node.right, lookup))
        case ast.Call(func=ast.Name(id="has")):
            return all(lookup("has")(_value(argument, lookup)) for argument in node.args)
        case ast.Call(func=ast.Name(id="is_class")):
            return _is_class(lookup("architectures"), [_value(argument, lookup) for argument in node.args])
    raise ValueError(f"'{ast.unparse(node)}' has no value")


def _is_class(architectures: Any, patterns: list[str]) -> bool:
    """Whether the first class that the config names matches one of the patterns."""
    first = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if not isinstance(first, str):
        raise UnknownValueError("architectures")
    return any(fnmatchcase(first, pattern) for pattern in patterns)


def _boolean(node: ast.BoolOp, lookup: Lookup) -> bool:
    decisive = isinstance(node.op, ast.Or)
    unknown: UnknownValueError | None = None
    for value in node.values:
        try:
            if bool(_value(value, lookup)) is decisive:
                return decisive
        except UnknownValueError as error:
            unknown = error
    if unknown is not None:
        raise unknown
    return not decisive


def _comparison(node: ast.Compare, lookup: Lookup) -> bool:
    left = _value(node.left, lookup)
    for operator, right_node in zip(node.ops, node.comparators, strict=True):
        right = _value(right_node, lookup)
        if not _compare(operator, left, right):
            return False
        left = right
    return True


def _compare(operator: ast.cmpop, left: Any, right: Any) -> bool:
    match operator:
        case ast.Eq() | ast.Is():
            return bool(left == right)
        case ast.NotEq() | ast.IsNot():
            return bool(left != right)
        case ast.In():
            return left in right
        case ast.NotIn():
            return left not in right
        case ast.Lt():
            return bool(left < right)
        case ast.LtE():
            return bool(left <= right)
        case ast.Gt():
            return bool(left > right)
    return bool(left >= right)


def _arithmetic(node: ast.BinOp, left: Any, right: Any) -> Any:
    if not all(isinstance(side, int | float) for side in (left, right)):
        raise TypeError(f"{ast.unparse(node)} is of {left!r} and {right!r}")
    if isinstance(node.op, ast.Pow) and abs(right) > EXPONENT_LIMIT:
        raise ValueError(f"{ast.unparse(node)} has an exponent above {EXPONENT_LIMIT}")
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Pow():
            return left**right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.Div():
            if right == 0 or left % right:
                raise ValueError(f"{ast.unparse(node)} = {left} / {right} is no whole number")
            return left // right
    raise ValueError(f"'{ast.unparse(node)}' has no value")
