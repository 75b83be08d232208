"""Products of sizes that a map's `requires` keeps equal: axes that were not asked for follow those that were."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from widen_cli.formulas import Formula, UnknownValueError, dotted
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import NO_SIZES, Factor, factor_of, unfit_size
from widen_cli.plan.sizes import Sizes


@dataclass(frozen=True)
class Equality:
    """Two products of names, each written as often as it is a factor; `text` is the map's."""

    text: str
    left: tuple[str, ...]
    right: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(dict.fromkeys(self.left + self.right))

    def ratio(self, factors: Mapping[str, Factor]) -> Fraction:
        """By how much more the left side grows than the right one."""
        left, right = (math.prod(Fraction(factors.get(name, 1)) for name in side) for side in (self.left, self.right))
        return Fraction(left) / right

    def mended(
        self, factors: Mapping[str, Factor], free: Iterable[str], sizes: Mapping[str, int] = NO_SIZES
    ) -> tuple[str, Factor] | None:
        """The first free axis that can make both sides equal, with its factor; None where none can by a whole size."""
        ratio = self.ratio(factors)
        for axis in free:
            power = self.right.count(axis) - self.left.count(axis)
            factor = factors[axis] * (ratio if power == 1 else 1 / ratio)
            if abs(power) == 1 and unfit_size(axis, factor, sizes) is None:
                return axis, factor_of(factor)
        return None


def equalities(architecture: ArchitectureMap, sizes: Sizes) -> tuple[Equality, ...]:
    """What has to stay equal in this model: of the map's requirements the equations of products that hold in it."""
    found = (
        equality
        for formula in architecture.requires
        for layer in sizes.layers()
        for equality in _binding(formula.tree, formula, layer)
    )
    return tuple(dict.fromkeys(found))


def _binding(node: ast.expr, formula: Formula, sizes: Sizes) -> Iterator[Equality]:
    """The equations in a requirement without which it would not hold."""
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            for value in values:
                yield from _binding(value, formula, sizes)
        case ast.BoolOp(op=ast.Or(), values=values):
            holding = [value for value in values if _holds(value, sizes)]
            if len(holding) == 1:
                yield from _binding(holding[0], formula, sizes)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]) if _holds(node, sizes):
            products = _factors(left), _factors(right)
            if products[0] is not None and products[1] is not None:
                yield Equality(ast.unparse(node), products[0], products[1])


def _holds(node: ast.expr, sizes: Sizes) -> bool:
    """Whether a part of a requirement holds, of sizes that are known and not zero, as in a layer without heads."""
    part = Formula(ast.unparse(node), node)
    if any(sizes.known.get(name) == 0 for name in part.words):
        return False
    try:
        return bool(sizes.evaluate(part))
    except (UnknownValueError, ValueError):
        return False


def _factors(node: ast.expr) -> tuple[str, ...] | None:
    """The names in a product of names and numbers, None for anything else."""
    match node:
        case ast.Name() | ast.Attribute():
            return (dotted(node),)
        case ast.Constant():
            return ()
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            sides = _factors(left), _factors(right)
            return None if sides[0] is None or sides[1] is None else sides[0] + sides[1]
    return None


def followers(
    asked: Mapping[str, Factor], found: Sequence[Equality], growing: Iterable[str]
) -> dict[str, tuple[Factor, str]]:
    """The axes that an equation of two single axes makes equal to one asked for: the factor of each, and the equation."""
    known, causes = dict(asked), dict[str, str]()
    for _ in found:
        for equality in found:
            if len(equality.left) != 1 or len(equality.right) != 1:
                continue
            for axis, other in ((*equality.left, *equality.right), (*equality.right, *equality.left)):
                if axis in known and other not in known and other in growing:
                    known[other] = known[axis]
                    causes[other] = equality.text
    return {axis: (known[axis], text) for axis, text in causes.items()}
