"""By what factor the gradient of a loss by a wide weight differs from that by the narrow weight it is a copy of.

The wide model computes the narrow one's function, so a loss is the same function of an activation x, whatever its k copies
s x are: the sum of s times the gradients by the copies is the gradient by x. Copies that are written alike and read alike
could change places, so they have equal gradients, each 1/(k s) of that by x; of copies of which only the first is read, the
first has 1/s of it and the others have none. A weight w of y = m w x (m: a multiplier of the run time) then has

    dL/dw' = g dL/dw,    g = (m'/m) * s(x) / (k(y) s(y)),    where the weight itself has the factor f = (m/m') * s(y) / (k(x) s(x)),

so f g is 1 over the number of copies. A bias reads 1, a gain what its norm has made even: their s(x) is 1. What is learned
of gradients in the first power (Adam's exp_avg) takes g, in the second power (exp_avg_sq) g squared.

Not all copies could change places. Keys and values that are shared by several heads are copied in place, so each copy serves
other heads; new rotary pairs of a key are zero where those of the query are not; under a norm of q and k such pairs are
uneven; what fills a size that is no multiple is no copy. There nothing follows from the narrow gradient.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from widen_cli.dimensions import Fill, Growth, Laid
from widen_cli.formulas import dotted
from widen_cli.plan.factors import is_whole
from widen_cli.plan.filling import COPY, RANDOM, is_gain
from widen_cli.plan.in_layers import InLayer
from widen_cli.plan.laws import is_norm, taken, width_power
from widen_cli.plan.match import Match, Matched
from widen_cli.plan.modes import Mode
from widen_cli.plan.partial import Partial, Segment, shared_keys
from widen_cli.plan.result import Gradient, Twin
from widen_cli.plan.rotary import Rotary
from widen_cli.plan.spaces import SpaceScales, carrier, paths
from widen_cli.plan.trees import TreeBuilder
from widen_cli.scales import ONE, Scale
from widen_cli.shapes import Dimension

EVEN, FIRST, BESIDE, UNEVEN = "even", "first", "beside", "uneven"
SHARED = "keys and values are shared by several heads, so that their copies serve different ones"
PAIRS = "its copies are not used alike: of the other side of q.k new pairs are zero"
SUMMED = "its copies are not used alike"
MEANT = "new positions hold the mean of the others, so a LayerNorm mixes their gradients"
HEADS = "its copies are tensors of their own"
CARRIED = "it multiplies copies that are not read"
TIED = "it was tied, and the gradients of both its uses were added up"


@dataclass(frozen=True)
class Share:
    """Which copies of a space have a gradient: along the axes around its own, and along its own.

    EVEN: all alike; FIRST: the first alone, the others none; BESIDE: the first, and the others one that is not known;
    UNEVEN: nothing is known; "": nothing is known yet.
    """

    outer: str = EVEN
    own: str = EVEN

    @classmethod
    def joined(cls, uses: Collection[Share]) -> Share:
        """That of a space that is used in all of these ways; "" where of none anything is known."""
        parts = [{getattr(use, part) for use in uses} - {""} for part in ("outer", "own")]
        return cls(*(next(iter(found), "") if len(found) <= 1 else UNEVEN for found in parts))


class GradientBuilder(TreeBuilder):
    """Makes trees of gradients' factors, for the same copies as a TreeBuilder makes of the weights themselves."""

    def __init__(
        self, here: InLayer, scales: dict[str, Any], spaces: SpaceScales, mode: Mode, layout: str, rotary: Rotary
    ) -> None:
        super().__init__(here, scales, spaces.silent(mode), layout, rotary, spaces.first_copies())
        self.spaces = spaces
        self.mode = mode
        self.shares: dict[str, Share] = {}
        self.beside = False

    def gradient(self, item: Matched, match: Match) -> Gradient:
        """What becomes of a matched tensor's gradient."""
        rule, tensor = item.rule, item.tensor
        reason = self.reason(item, match)
        if reason:
            return Gradient(reason=reason)
        self.rule = rule
        trees: list[Growth] = []
        unknown: list[int] = []
        for dimension, size in zip(rule.shape.dimensions, tensor.shape, strict=True):
            self.beside = False
            tree = self.dimension(dimension, size)
            trees.append(tree)
            unknown.append(tree.new if self.beside else live(tree))
        multiplier = ONE if rule.times is None else width_power(rule.times.tree, self.factor)
        scale = multiplier * self.filling.gain(rule) ** -1
        return Gradient(tuple(trees), scale, unknown=math.prod(unknown) - math.prod(map(live, trees)))

    # Where nothing follows from the narrow gradient.

    def reason(self, item: Matched, match: Match) -> str:
        """Why nothing is known of a tensor's gradient; empty where it is."""
        if isinstance(item.tensor, Twin) or any(
            isinstance(other.tensor, Twin) and other.tensor.table.name == item.tensor.name for other in match.matched
        ):
            return TIED
        if len(self.names(item)) > 1:
            return HEADS
        for dimension in item.rule.shape.dimensions:
            for path in paths(dimension.term):
                grown = [name for name in path if self.factor(name) != 1]
                if grown and (found := self.unknown_of(item, dimension, path)):
                    return found
        return ""

    def unknown_of(self, item: Matched, dimension: Dimension, path: tuple[str, ...]) -> str:
        """The same of one dimension, along a path in which something grows."""
        space = carrier(self.sizes.architecture, path)
        if dimension.role == "carried":
            filled = any(self.partial(name) for name in path)
            return CARRIED if self.mode.silent_copies or filled else ""
        if dimension.role == "in":
            return ""
        if any(self.uneven(name) for name in path):
            return SHARED
        share = self.share(space)
        if share.own == UNEVEN and self.factor(space) != 1:
            return PAIRS if self.contracted(space) else SUMMED
        if share.outer == UNEVEN and any(self.factor(name) != 1 for name in path if name != space):
            return SUMMED
        meant = self.filling.meant
        return MEANT if any(self.filling.axis(name) and name in meant for name in (space, *path)) else ""

    def uneven(self, name: str) -> bool:
        """Whether copies along an axis serve different heads, as those of shared keys do unless they are tiled with them."""
        architecture, axis = self.sizes.architecture, None if name.isdigit() else self.sizes.axis_of(name)
        for heads, keys in shared_keys(architecture).items():
            if axis is not None and axis.name == keys and self.factors[keys] != 1 and not self.tiled:
                known = self.sizes.known
                return heads not in known or keys not in known or known[heads] != known[keys]
        return False

    def contracted(self, name: str) -> bool:
        """Whether q.k is taken of a space, or of what a norm makes of it."""
        pairs = {space for pair in self.spaces.reading.contractions for space in pair}
        return name in pairs or any(name in self.sources(pair) for pair in pairs)

    def sources(self, name: str) -> set[str]:
        """The spaces in the formula of a space."""
        space = self.sizes.architecture.spaces.get(name)
        if space is None or space.formula is None:
            return set()
        nodes = taken(space.formula.tree, self.spaces.condition)
        known = {*self.sizes.architecture.spaces, *self.sizes.architecture.axes}
        return {dotted(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)} & known

    # Who uses a space, and which copies of it.

    def share(self, name: str) -> Share:
        """Which copies of a space have a gradient, told by all that uses it."""
        self.assumed(name)
        before: dict[str, Share] = {}
        # Spaces are made of each other in circles, as a stream that passes norms: from nothing on, until no use adds to it.
        while before != self.shares:
            before = dict(self.shares)
            for each in before:
                self.shares[each] = Share.joined(self.uses(each))
        found = self.shares[name]
        return Share(found.outer or EVEN, found.own or EVEN)

    def assumed(self, name: str) -> Share:
        """What is known of a space so far."""
        return self.shares.setdefault(name, Share("", ""))

    def uses(self, name: str) -> set[Share]:
        found = self.told_uses(name)
        architecture = self.sizes.architecture
        put_out = {space for spaces in architecture.outputs.values() for space in spaces}
        if found or name in (*architecture.output, *put_out):
            return found or {Share()}
        # No rule says where it goes, as of a sum that becomes the stream: it may be to any other space of its size, or,
        # unless one lies on its axis, to none.
        size, axis = self.sizes.size(name), self.sizes.axis_of(name)
        others = sorted(other for other in self.spaces.present() - {name} if self.sizes.size(other) == size)
        told = [other for other in others if size is not None and self.told_uses(other, without=name)]
        found = {self.assumed(other) for other in told}
        return found if any(self.sizes.axis_of(other) == axis for other in told) else {*found, Share()}

    def told_uses(self, name: str, without: str = "") -> set[Share]:
        """How rules and formulas say that a space is used, but for the formula of the one that is named."""
        found: set[Share] = set()
        if any(name == read for rule in self.spaces.rules for read, _ in self.spaces.carriers(rule, "in")):
            found.add(Share(FIRST, FIRST) if name in self.silent else Share())
        present = self.spaces.present()
        for made, space in self.sizes.architecture.spaces.items():
            if space.formula is None or made not in present - {without} or name not in self.sources(made):
                continue
            if is_norm(space.formula.tree):
                found.add(Share() if made == name else self.through_norm(made))
            elif any(name in pair for pair in self.spaces.reading.contractions) and self.meets(
                space.formula.tree, name
            ):
                found.add(self.in_attention(name))
            elif made != name:
                found.add(self.assumed(made))
        return found

    def meets(self, tree: ast.expr, name: str) -> bool:
        """Whether a formula takes q.k of a space."""
        return any(
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) and name in _names(node)
            for node in taken(tree, self.spaces.condition)
        )

    def in_attention(self, name: str) -> Share:
        """Heads that are not read get no gradient; along the axis that q.k sums over, it is the other side that counts."""
        outer = self.heads_read()
        axis = self.sizes.axis_of(name)
        if axis is not None and axis.name in self.partials:
            return Share(outer, UNEVEN)
        if axis is not None and axis.name in self.rotary.once:
            return Share(outer, BESIDE if name in self.first else FIRST)
        return Share(outer, EVEN)

    def heads_read(self) -> str:
        """Which copies of heads are read by what comes behind attention; all, where a norm has made its values."""
        heads = self.sizes.architecture.growth.heads
        read = {
            FIRST if space in self.silent else EVEN
            for rule in self.spaces.rules
            for space, path in self.spaces.carriers(rule, "in")
            if any((axis := self.sizes.axis_of(part)) is not None and axis.name in heads for part in path[:-1])
        }
        return next(iter(read), FIRST if self.mode.silent_copies else EVEN) if len(read) < 2 else UNEVEN

    def through_norm(self, made: str) -> Share:
        """A norm takes the mean over its axis, so all copies have a gradient, and one that is alike only if theirs behind it is."""
        behind = self.assumed(made)
        over = {
            name
            for rule in self.spaces.rules
            for written, path in self.spaces.carriers(rule, "out")
            if written == made and is_gain(rule)
            for name in path
        }
        together = any(self.factor(name) != 1 for name in over - {made})
        outer = UNEVEN if together and behind.outer not in ("", EVEN) else behind.outer
        return Share(outer, behind.own if behind.own in ("", EVEN) else UNEVEN)

    # The trees.

    def leaf_scale(self, path: tuple[str, ...], role: str) -> Scale:
        """s of what is read, 1/(k s) of what is written, 1/k of what is carried."""
        name = carrier(self.sizes.architecture, path)
        copies = ONE
        for part in path:
            if self.counted(part, path, role) and is_whole(self.factor(part)) and not self.partial(part):
                copies = copies * Scale.of(self.factor(part))
        if name.isdigit() or role == "carried":
            return copies**-1 if role != "in" else ONE
        scale = self.scales.get(name, ONE)
        return scale if role == "in" else (copies * scale) ** -1

    def counted(self, part: str, path: tuple[str, ...], role: str) -> bool:
        """Whether all copies along an axis have a gradient, not the first alone."""
        if role != "out":
            return role == "carried"
        space = carrier(self.sizes.architecture, path)
        share = self.share(space)
        return (share.own if part == space else share.outer) == EVEN

    def node(
        self,
        size: int,
        name: str,
        first_only: bool,
        scale: Scale,
        inner: Growth | None,
        at: tuple[tuple[str, ...], str],
    ) -> Growth:
        path, role = at
        space = carrier(self.sizes.architecture, path)
        first_only = role == "out" and self.factor(name) != 1 and not self.counted(name, path, role)
        if first_only and name == space and self.share(space).own == BESIDE:
            self.beside = True
        return super().node(size, name, first_only, scale, inner, at)

    def parts(
        self,
        partial: Partial,
        size: int,
        first_only: bool,
        scale: Scale,
        inner: Growth | None,
        path: tuple[str, ...],
        role: str,
    ) -> Growth:
        """The same of an axis whose new size is no multiple; what fills it has no gradient that is known, or reads nothing."""
        assert self.rule is not None
        filling = self.filling
        padded, filled = filling.padded(partial.axis), partial.axis in filling.filled
        if role == "in":
            # Zeros are read there, a mean, or what was drawn; copies have their values.
            drawn = filling.fill == RANDOM and filling.drawn(partial.axis)
            only = padded or filled or drawn
            self.beside = self.beside or (drawn and not filled)
        else:
            only = padded or filled or first_only or filling.fill != COPY
            self.beside = self.beside or ((padded or filled) and not is_gain(self.rule))
        tiled = self.tiles(partial.axis) or ((padded or filled) and partial.whole == 1)

        def how(segment: Segment) -> tuple[Scale, int, Fill]:
            kept = 1 if first_only else segment.kept if only else segment.copies
            return ONE if role == "in" else Scale.of(kept) ** -1, kept if kept < segment.copies else 0, Fill.ZERO

        return partial.laid(tiled, scale, inner, how)


def live(growth: Growth) -> int:
    """How many new positions hold a value."""
    if isinstance(growth, Laid):
        return sum(live(part) for part in growth.parts)
    return growth.size * growth.live * (live(growth.inner) if growth.inner is not None else 1)


def first_copies(growth: Growth) -> Growth:
    """The same growth in which only the first copy of every position holds a value."""
    if isinstance(growth, Laid):
        return Laid(tuple(first_copies(part) for part in growth.parts))
    inner = first_copies(growth.inner) if growth.inner is not None else None
    return replace(growth, first_only=True, fill=Fill.ZERO, inner=inner)


def _names(node: ast.AST) -> set[str]:
    return {dotted(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}
