"""What stands at new positions where no copy does, and what a norm over a filled axis makes of the scales.

Along an axis that a norm runs over, new positions add nothing to it: zero under RMSNorm; under LayerNorm the mean of what
is written along the axis, so that mean and deviations stay. Along any other axis new positions are copies, which are read
with so much less weight, or are read with none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fractions import Fraction

from widen_cli.dimensions import Fill
from widen_cli.errors import printable
from widen_cli.formulas import dotted
from widen_cli.map_checks import NORMS
from widen_cli.map_rules import ArchitectureMap, TensorRule
from widen_cli.plan.laws import is_norm, taken
from widen_cli.plan.partial import Partials, shared_keys
from widen_cli.plan.spaces import SpaceScales
from widen_cli.scales import ONE, Scale

COPY, ZERO, RANDOM = FILLS = ("copy", "zero", "random")
RMS, LAYER = NORMS
# Functions whose value at 0 is 0, by words in the names that configs have for them.
_ZERO_AT_ZERO = ("relu", "gelu", "silu", "swish", "tanh", "linear", "identity", "mish", "sqrt")


class Filling:
    """Decides for the spaces of a checkpoint; `fill` is what the user asked for."""

    def __init__(self, architecture: ArchitectureMap, spaces: SpaceScales, partials: Partials, fill: str) -> None:
        self.architecture = architecture
        self.spaces = spaces
        self.partials = partials
        self.fill = fill
        self.norms = {
            name: space.formula.tree.args[0]
            for name in spaces.present()
            if (space := architecture.spaces.get(name)) and space.formula and is_norm(space.formula.tree)
        }
        self.normed = {
            axis for argument in self.norms.values() for word in self.words(argument) if (axis := self.axis(word))
        }
        self.once = spaces.first_copies() if partials else frozenset()
        self.meant = self.summed_up(
            {
                word
                for argument in self.norms.values()
                for word in self.words(argument)
                if self.kind(self.axis(word)) == LAYER and self.axis(word) not in spaces.evened
            }
        )
        self.stored = spaces.written()
        self.evened = self.normed & spaces.evened
        # A tied weight is written and read, so what it has at new positions cannot be shared out; zeros can.
        tied = {name for tie in spaces.ties for name in (*spaces.read_by(tie), *spaces.written_by(tie))}
        self.filled = (self.normed - self.evened) | {axis for name in tied | self.meant if (axis := self.axis(name))}

    def summed_up(self, meant: set[str]) -> set[str]:
        """The spaces that have to hold their mean at new positions: `meant`, and what is a sum of such or part of one."""
        for _ in self.architecture.spaces:
            for name, space in self.architecture.spaces.items():
                if space.formula is None or name in self.norms or not self.axis(name):
                    continue
                words = {word for word in self.words(space.formula.tree) if self.axis(word)}
                if self.linear(space.formula.tree) and meant & (words | {name}):
                    meant = meant | words | {name}
        return meant

    def linear(self, node: ast.expr) -> bool:
        """Whether a formula is a sum of spaces, each times numbers."""
        match node:
            case ast.Name() | ast.Attribute():
                return True
            case ast.IfExp():
                return self.linear(node.body if self.spaces.condition(node.test) else node.orelse)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self.linear(left) and self.linear(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                sides = [any(map(self.axis, self.words(side))) for side in (left, right)]
                return not all(sides) and all(
                    self.linear(side) for side, has in zip((left, right), sides, strict=True) if has
                )
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self.linear(left) and not any(map(self.axis, self.words(right)))
        return False

    def words(self, node: ast.expr) -> list[str]:
        """The spaces in an expression, but for those of branches that are not taken; a root is of a size."""
        roots = [part for part in ast.walk(node) if isinstance(part, ast.Call) and dotted(part.func) == "sqrt"]
        sizes = [inner for root in roots for inner in ast.walk(root)]
        names = (
            dotted(part)
            for part in taken(node, self.spaces.condition)
            if isinstance(part, ast.Name | ast.Attribute) and part not in sizes
        )
        return [name for name in names if name in self.architecture.spaces or name in self.architecture.axes]

    def axis(self, name: str) -> str:
        """The axis of a space, if it grows by a fraction, else nothing."""
        found = None if name.isdigit() else self.architecture.axis_of(name)
        return found.name if found is not None and found.name in self.partials else ""

    def kind(self, axis: str) -> str | None:
        """Which norm runs over an axis, as far as the map says."""
        return self.architecture.norms.get(axis, self.architecture.norms.get("", None)) if axis else None

    # What a tensor is to be.

    def gain(self, rule: TensorRule) -> Scale:
        """The factor on a norm's gain: what was normed over more places comes out so much larger."""
        if not is_gain(rule) or not self.partials:
            return ONE
        for space, _ in self.spaces.carriers(rule, "out"):
            if space in self.norms:
                return self.spaces.spread(self.norms[space])
        return ONE

    def evening(self, space: str, axis: str, rule: TensorRule, copies: int) -> Scale:
        """The factor on what is written of positions that stand `copies` times under a norm, which then finds the same
        mean square, and its inverse on the gain."""
        if axis not in self.evened or self.axis(space) != axis:
            return ONE
        even = Scale.of(self.partials[axis].ratio / copies) ** Fraction(1, 2)
        if any(space in self.words(argument) for argument in self.norms.values()):
            return even
        return even**-1 if space in self.norms and is_gain(rule) else ONE

    def written(self, space: str, axis: str, rule: TensorRule) -> Fill | None:
        """What a tensor writes to new positions of an axis; None for copies."""
        if space in self.once and self.axis(space) == axis:
            return Fill.ZERO
        if self.padded(axis):
            return Fill.MEAN
        if axis in self.filled:
            if is_gain(rule):
                return None
            return Fill.MEAN if space in self.meant and self.axis(space) == axis else Fill.ZERO
        return Fill.RANDOM if self.fill == RANDOM and self.drawn(axis) else None

    def without_copies(self, name: str) -> bool:
        """Whether new positions of a space or an axis hold no copies, so that nothing is summed over them."""
        axis = self.axis(name)
        return axis != "" and (axis in self.filled or name in self.once)

    def padded(self, axis: str) -> bool:
        """Whether new positions are rows of a vocabulary: a row that is the mean of all makes the mean of all logits, which
        is below the largest one."""
        return self.architecture.axes[axis].padded

    def read(self, space: str, axis: str) -> Fill | None:
        """With what a tensor reads new positions of an axis; None for the weights of the positions that they copy."""
        if self.padded(axis):
            return Fill.MEAN
        if axis not in self.filled:
            return None if self.fill == COPY else Fill.ZERO
        if self.fill == ZERO or not self.empty(space, frozenset()):
            return Fill.ZERO
        return Fill.RANDOM if self.fill == RANDOM else None

    def drawn(self, axis: str) -> bool:
        """Whether new positions may hold anything, as they are not read: those of keys are, by copies of queries."""
        growth, keys = self.architecture.growth, shared_keys(self.architecture).values()
        return axis not in (*keys, growth.head_dim, *growth.with_head_dim) and not any(
            self.axis(name) == axis for pair in self.spaces.reading.contractions for name in pair
        )

    def empty(self, name: str, seen: frozenset[str]) -> bool:
        """Whether a space is zero at new positions of a filled axis."""
        space = self.architecture.spaces.get(name)
        if name in seen:
            return True
        if space is None or space.formula is None:
            # What no tensor writes comes from elsewhere, and may hold anything.
            return name in self.stored and name not in self.meant
        if name in self.norms and self.kind(self.axis(name)) == LAYER:
            return True
        tree = self.norms.get(name, space.formula.tree)
        return self.is_zero(tree, seen | {name})

    def is_zero(self, node: ast.expr, seen: frozenset[str]) -> bool:
        match node:
            case ast.Name() | ast.Attribute():
                return bool(self.axis(dotted(node))) and self.empty(dotted(node), seen)
            case ast.IfExp():
                return self.is_zero(node.body if self.spaces.condition(node.test) else node.orelse, seen)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self.is_zero(left, seen) or self.is_zero(right, seen)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self.is_zero(left, seen) and self.is_zero(right, seen)
            case ast.BinOp(left=left, op=ast.Div() | ast.Pow()) | ast.UnaryOp(operand=left):
                return self.is_zero(left, seen)
            case ast.Call(func=function, args=[argument]):
                called = self.spaces.function(dotted(function))
                return any(word in called for word in _ZERO_AT_ZERO) and self.is_zero(argument, seen)
        return False

    # What cannot be.

    def faults(self) -> Iterator[tuple[str, str]]:
        """The axes that cannot grow by the fractions that they are to grow by, and why."""
        for axis in self.partials:
            why = next(self.reasons(axis), None)
            if why is not None:
                yield axis, why

    def reasons(self, axis: str) -> Iterator[str]:
        architecture = self.architecture
        for rule in self.spaces.rules:
            if is_gain(rule) and any(
                axis in (self.axis(name) for name in path) and self.axis(space) != axis and space in self.norms
                for space, path in self.spaces.carriers(rule, "out")
            ):
                yield f"the norm of '{printable(rule.pattern)}' runs over all of them at once; give a whole factor"
        for rule in self.spaces.rules:
            for space, _ in self.spaces.carriers(rule, "out"):
                if not is_gain(rule) or self.axis(space) != axis or axis not in self.filled or space in self.norms:
                    continue
                # A vector that meets another one is a weight; it meets zeros.
                if not any(space in pair for pair in self.spaces.reading.contractions):
                    yield self.unsaid(rule, space)
        if axis not in self.normed:
            return
        kind = self.kind(axis)
        if axis in self.evened and kind == LAYER:
            yield "a LayerNorm runs over it, whose mean some more copies would move; give a whole factor"
        elif axis in self.evened and kind == RMS:
            return
        if kind is None:
            yield (
                f"a norm runs over '{axis}', and map '{architecture.architecture}' does not say whether it subtracts the mean "
                "('norms', docs/maps.md); give a whole factor"
            )
        elif kind == LAYER:
            yield from self.reasons_for_mean(axis)
        else:
            for argument in self.norms.values():
                for name in self.words(argument):
                    if self.axis(name) == axis and not self.empty(name, frozenset()):
                        yield f"'{name}', over which a norm runs, would not be zero at new positions; give a whole factor"

    def reasons_for_mean(self, axis: str) -> Iterator[str]:
        for argument in self.norms.values():
            for name in self.words(argument):
                if self.axis(name) != axis:
                    continue
                space = self.architecture.spaces.get(name)
                if name in self.norms and self.behind_norm(name):
                    yield self.post_norm(name)
                elif space is not None and space.formula is not None and name not in {*self.norms, *self.meant}:
                    yield f"a LayerNorm runs over {space.formula.text}, whose mean no stored number can say; give a whole factor"
        for rule in self.spaces.rules:
            for written, path in self.spaces.carriers(rule, "out"):
                if written in self.meant and self.axis(written) == axis and len(path) > 1:
                    yield f"'{printable(rule.pattern)}' writes it together with other axes; give a whole factor"
            if any(self.axis(name) == axis for _, path in self.spaces.carriers(rule, "carried") for name in path):
                yield f"'{printable(rule.pattern)}' multiplies it, which does not keep its mean; give a whole factor"

    def unsaid(self, rule: TensorRule, space: str) -> str:
        if space in self.meant:
            return self.post_norm(space)
        return (
            f"'{printable(rule.pattern)}' writes '{space}', and map '{self.architecture.architecture}' does not say that this comes out "
            "of a norm; give a whole factor"
        )

    def post_norm(self, space: str) -> str:
        return (
            f"a LayerNorm writes '{space}', over which another LayerNorm runs: new positions would have to hold the mean "
            "of what its gain and bias make, which no stored number can say; give a whole factor"
        )

    def behind_norm(self, space: str) -> bool:
        """Whether a norm writes a space that may come out of one: a gain does, or norms have no gains that would tell."""
        gains = [
            written
            for rule in self.spaces.rules
            for written, _ in self.spaces.carriers(rule, "out")
            if is_gain(rule) and written in self.norms and self.axis(written) == self.axis(space)
        ]
        return space in gains or not gains


def is_gain(rule: TensorRule) -> bool:
    """Whether a tensor is the gain of a norm, if it writes what comes out of one: a vector that is no bias."""
    dimensions = rule.shape.dimensions
    vector = len(dimensions) == 1 and dimensions[0].role == "out"
    return vector and (bool(rule.offset) or rule.pattern.rpartition(".")[2] == "weight")
