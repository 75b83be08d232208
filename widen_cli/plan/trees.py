"""Builds the growth tree of every stored dimension from a rule's shape, the factors and the solved scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from widen_cli.blocks import block_type, can_dequantize, can_scale, can_widen
from widen_cli.dimensions import Copies, Fill, Growth, Laid, leaf_scales
from widen_cli.dtypes import DType
from widen_cli.errors import printable
from widen_cli.map_rules import TensorRule
from widen_cli.plan.factors import Factor, is_whole
from widen_cli.plan.in_layers import InLayer
from widen_cli.plan.laws import width_power
from widen_cli.plan.match import Match, Matched
from widen_cli.plan.partial import Partial, Partials, Segment
from widen_cli.plan.result import TensorPlan, Twin
from widen_cli.plan.rotary import Rotary
from widen_cli.plan.spaces import carrier, paths
from widen_cli.scales import ONE, Scale
from widen_cli.shapes import Dimension, Name, Parts, Product, Term


class UnknownSizeError(Exception):
    """A dimension cannot be taken apart, since neither config nor tensors tell the sizes of `axes`."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        super().__init__(", ".join(axes))
        self.axes = axes


class UnfitTypeError(Exception):
    """A weight in a type that holds no numbers to scale; the text says so."""


class TreeBuilder:
    """Makes plans of the tensors in one layer, or in layers like it; `silent` are the spaces of which only the first copies are
    read, `first` those of which only they are written.

    `layout` is `interleave`, copies side by side, or `tile`, an axis as a whole after itself; what is rotated goes its own way.
    """

    def __init__(
        self,
        here: InLayer,
        scales: dict[str, Scale],
        silent: frozenset[str],
        layout: str = "interleave",
        rotary: Rotary | None = None,
        first: frozenset[str] = frozenset(),
    ) -> None:
        self.tiled = layout == "tile"
        self.rotary = rotary or Rotary()
        self.first = first
        self.sizes = here.sizes
        self.factors = here.factors
        self.scales = scales
        self.silent = silent
        self.filling = here.filling
        self.partials: Partials = here.filling.partials
        heads = self.sizes.architecture.growth.heads
        self.unmoved = frozenset(heads) if self.partials.keys() & {*heads} else frozenset[str]()
        self.rule: TensorRule | None = None

    def tensor_plan(self, item: Matched, match: Match, target: DType) -> TensorPlan:
        """The plan of a matched tensor that is written in the type `target`.

        Raises UnknownSizeError where a size is needed that nothing tells, UnfitTypeError for integers and the like.
        """
        if (table := self.table(item, match)) is not None:
            # The same bytes serve both, so what fills the table is what its head reads.
            plan = self.tensor_plan(table, match, target)
            return replace(plan, source=item.tensor, names=self.names(item), pattern=match.written(item.rule.pattern))
        rule, tensor = item.rule, item.tensor
        self.rule = rule
        growth = tuple(
            self.dimension(dimension, size) for dimension, size in zip(rule.shape.dimensions, tensor.shape, strict=True)
        )
        multiplier = ONE if rule.times is None else width_power(rule.times.tree, self.factor)
        scale = multiplier**-1 * (tensor.scale if isinstance(tensor, Twin) else ONE) * self.filling.gain(rule)
        weight = any(dimension.role != "carried" for dimension in rule.shape.dimensions)
        if tensor.dtype.kind == "opaque" or (weight and tensor.dtype.kind == "integer"):
            raise UnfitTypeError(
                f"tensor '{printable(tensor.name)}' is a weight in the map and holds {tensor.dtype.name}, which cannot be "
                "widened; use a checkpoint with floating-point weights (F64, F32, F16, BF16, F8_E4M3, F8_E5M2)"
            )
        return TensorPlan(tensor, self.names(item), match.written(rule.pattern), target, growth, scale, rule.offset)

    def table(self, item: Matched, match: Match) -> Matched | None:
        """The stored weight that a stored head is tied to, where what fills it could differ."""
        ties = self.filling.spaces.ties if self.partials else []
        found = next((match.by_name(tie.to) for tie in ties if tie.tensor == item.rule.pattern), None)
        return found if found is not None and found.tensor.shape == item.tensor.shape else None

    def names(self, item: Matched) -> tuple[str, ...]:
        """The names written: one, or one for each copy of a head that is numbered in the name."""
        names = [item.tensor.name]
        for axis, (start, stop) in item.numbers.items():
            factor, name = int(self.factors[axis]), item.tensor.name
            number = int(name[start:stop])
            partial = self.partials.get(axis)
            places = partial.places(number) if partial else range(number * factor, (number + 1) * factor)
            names = [f"{name[:start]}{place}{name[stop:]}" for place in places]
        return tuple(names)

    def factor(self, name: str) -> Factor:
        axis = None if name.isdigit() else self.sizes.axis_of(name)
        return 1 if axis is None else self.factors[axis.name]

    def partial(self, name: str) -> bool:
        """Whether a name's axis has parts with copies of their own."""
        axis = None if name.isdigit() else self.sizes.axis_of(name)
        return axis is not None and axis.name in self.partials

    def dimension(self, dimension: Dimension, stored: int) -> Growth:
        return self.tree((dimension.term,), (), dimension.role, stored)

    def tree(self, terms: tuple[Term, ...], before: tuple[str, ...], role: str, total: int | None) -> Growth:
        """The tree of the product of `terms`, which covers `total` old positions; `before` are the names outside of it."""
        head, rest = terms[0], terms[1:]
        if isinstance(head, Product):
            return self.tree(head.items + rest, before, role, total)
        if isinstance(head, Parts):
            return self.laid(head, before, role, total)
        path = (*before, head.text)
        size, copies = self.size(head.text, bool(before or rest)), self.factor(head.text)
        if not rest:
            whole = total if size is None or not before else size
            if whole is None:
                raise UnknownSizeError(self.unknown(terms))
            first_only = self.silences(path, role) or self.written_once(head.text, role)
            return self.node(whole, head.text, first_only, self.leaf_scale(path, role), None, (path, role))
        inner_total = None if total is None or not size else total // size
        if copies == 1 and size is None:
            return self.merged_into_next(terms, before, role, total)
        if size is None:
            size = self.divided(terms, total)
        inner = self.tree(
            rest,
            path,
            role,
            inner_total if inner_total is not None else (None if total is None or not size else total // size),
        )
        if copies == 1 and isinstance(inner, Copies):
            return replace(inner, size=size * inner.size)
        first_only = self.silences((*path, *_first_path(rest)), role) or self.written_once(head.text, role)
        return self.node(size, head.text, first_only, ONE, inner, ((*path, *_first_path(rest)), role))

    def node(
        self,
        size: int,
        name: str,
        first_only: bool,
        scale: Scale,
        inner: Growth | None,
        at: tuple[tuple[str, ...], str],
    ) -> Growth:
        """`size` positions of the axis that a name lies on, repeated as it grows and as it is laid; `at` is path and role."""
        axis = self.sizes.axis_of(name)
        if axis is not None and axis.name in self.partials:
            return self.parts(self.partials[axis.name], size, first_only, scale, inner, *at)
        copies = int(self.factor(name))
        if copies == 1:
            return Copies(size, 1, False, scale, inner)
        if self.tiles(axis.name if axis else name):
            return Copies(1, copies, first_only, ONE, Copies(size, 1, False, scale, inner))
        return Copies(size, copies, first_only, scale, inner)

    def tiles(self, axis: str) -> bool:
        """Whether an axis stands as a whole after itself."""
        return axis not in self.unmoved and self.rotary.tiles(axis, self.tiled)

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
        """The same of an axis whose new size is no multiple: its positions in parts with as many copies each."""
        filling, rule = self.filling, self.rule
        assert rule is not None
        if size != partial.old:
            raise UnknownSizeError((partial.axis,))
        space = carrier(self.sizes.architecture, path)
        padded = filling.padded(partial.axis)
        fill: Fill | None = None
        if role == "out":
            fill = filling.written(space, partial.axis, rule)
        elif role == "in":
            fill = Fill.ZERO if first_only else filling.read(space, partial.axis)
        elif padded:
            fill = Fill.MEAN
        # What is added along a filled axis has to stand behind all of it: hidden states then begin with the old ones.
        filled = padded or partial.axis in filling.filled
        tiled = self.tiles(partial.axis) or (filled and partial.whole == 1)

        def how(segment: Segment) -> tuple[Scale, int, Fill]:
            kept = 1 if first_only and role == "in" else segment.kept if fill is not None or filled else segment.copies
            factor = ONE if role != "in" or first_only else Scale.of(kept) ** -1
            live = 0 if fill is None or kept == segment.copies else kept
            if role == "out":
                factor = filling.evening(space, partial.axis, rule, segment.copies)
            return factor, live, fill or Fill.ZERO

        return partial.laid(tiled, scale, inner, how)

    def merged_into_next(
        self, terms: tuple[Term, ...], before: tuple[str, ...], role: str, total: int | None
    ) -> Growth:
        """A product whose outer axis keeps its size needs no knowledge of it: [h, d] repeated in d is [h*d] repeated."""
        head, rest = terms[0], terms[1:]
        if total is not None and (scale := self.still(Product(terms), before, role)) is not None:
            return Copies(total, 1, False, scale)
        if total is None or not isinstance(head, Name) or any(isinstance(term, Parts) for term in rest):
            raise UnknownSizeError(self.unknown(terms))
        outer = [term.text for term in terms[:-1] if isinstance(term, Name)]
        if len(outer) != len(terms) - 1 or any(self.factor(name) != 1 for name in outer):
            raise UnknownSizeError(self.unknown(terms))
        last = terms[-1]
        path = (*before, *outer, last.text if isinstance(last, Name) else "")
        axis = self.sizes.axis_of(path[-1])
        if self.factor(path[-1]) > 1 and self.rotary.tiles(axis.name if axis else "", self.tiled):
            raise UnknownSizeError(self.unknown(terms))
        return self.node(total, path[-1], self.silences(path, role), self.leaf_scale(path, role), None, (path, role))

    def divided(self, terms: tuple[Term, ...], total: int | None) -> int:
        rest = self.sizes.total(Product(terms[1:]))
        if total is None or not rest or total % rest:
            raise UnknownSizeError(self.unknown(terms))
        return total // rest

    def laid(self, head: Parts, before: tuple[str, ...], role: str, total: int | None) -> Growth:
        totals = [self.sizes.total(part) for part in head.parts]
        if any(size is None for size in totals) and (together := self.together(head, before, role, total)) is not None:
            return together
        if any(size is None for size in totals) and total is not None:
            axes = {tuple(self.axes((part,))) for part in head.parts}
            if len(axes) != 1 or total % len(head.parts):
                raise UnknownSizeError(self.unknown(head.parts))
            totals = [total // len(head.parts)] * len(head.parts)
        return Laid(
            tuple(self.tree((part,), before, role, size) for part, size in zip(head.parts, totals, strict=True))
        )

    def together(self, head: Parts, before: tuple[str, ...], role: str, total: int | None) -> Growth | None:
        """Parts of unknown sizes, where neighbours that do not grow and have one factor can be taken as one part."""
        grouped = [
            (scale, tuple(parts)) for scale, parts in groupby(head.parts, lambda part: self.still(part, before, role))
        ]
        trees: list[Growth] = []
        for scale, parts in grouped:
            size = total if len(grouped) == 1 else self.sizes.total(Parts(parts))
            if size is None or (scale is None and len(parts) > 1):
                return None
            trees.append(Copies(size, 1, False, scale) if scale else self.tree((parts[0],), before, role, size))
        return Laid(tuple(trees)) if len(trees) > 1 else trees[0]

    def still(self, term: Term, before: tuple[str, ...], role: str) -> Scale | None:
        """The one factor on all of a term within which nothing grows; None for another term."""
        found = list(paths(term))
        scales = {self.leaf_scale((*before, *path), role) for path in found}
        grows = any(self.factor(name) != 1 for path in found for name in path)
        return None if grows or len(scales) > 1 else scales.pop()

    def size(self, name: str, inside_product: bool) -> int | None:
        """The size of a name; alone in its dimension it is what is stored, as for labels of any number."""
        return self.sizes.size(name) if inside_product else None

    def axes(self, terms: tuple[Term, ...]) -> list[str]:
        names = [name for path in paths(Product(terms)) for name in path]
        return [axis.name for name in names if not name.isdigit() and (axis := self.sizes.axis_of(name))]

    def unknown(self, terms: tuple[Term, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis for axis in self.axes(terms) if axis not in self.sizes.known))

    def silences(self, path: tuple[str, ...], role: str) -> bool:
        return role == "in" and carrier(self.sizes.architecture, path) in self.silent

    def written_once(self, name: str, role: str) -> bool:
        """Whether the copies of a space along its own axis are to be zero, as those of keys under rotary positions are."""
        return role == "out" and name in self.first

    def leaf_scale(self, path: tuple[str, ...], role: str) -> Scale:
        """s of the space written, 1/(r s) of the space read, 1 for what is carried."""
        name = carrier(self.sizes.architecture, path)
        if role == "carried" or name.isdigit():
            return ONE
        scale = self.scales.get(name, ONE)
        if role == "out":
            return scale
        copies = ONE
        for part in path if name not in self.silent else ():
            # Of an axis that grows by a fraction, each part of it has its own.
            factor = self.factor(part)
            copies = copies * Scale.of(factor) if is_whole(factor) and not self.partial(part) else copies
        return (copies * scale) ** -1


def unfilled(planned: Iterable[TensorPlan]) -> list[str]:
    """Why tensors of quantised blocks cannot be filled as planned."""
    return [
        f"tensor '{printable(plan.source.name)}': {plan.source.dtype.name} holds no numbers to take a mean of or to draw from; "
        "make numbers of it (of a GGUF, --dequantize F32), or give --fill zero or copy where it is to be drawn"
        for plan in planned
        if plan.dtype.kind == "blocks" and plan.fills - {Fill.ZERO}
    ]


def _first_path(terms: tuple[Term, ...]) -> tuple[str, ...]:
    return next(paths(Product(terms)))


def block_reasons(planned: Iterable[TensorPlan]) -> list[str]:
    """Why tensors of quantised blocks cannot be written as planned; by sizes alone."""
    reasons = ((plan, _block_reason(plan, plan.growth[-1])) for plan in planned if plan.growth)
    return [f"tensor '{printable(plan.source.name)}': {reason}" for plan, reason in reasons if reason is not None]


def _block_reason(plan: TensorPlan, row: Growth) -> str | None:
    """The same of one tensor, None where it can be written or has no blocks."""
    if plan.source.dtype.kind != "blocks":
        return None
    kind = block_type(plan.source.dtype.name)
    if plan.dtype.kind != "blocks":
        return can_dequantize(kind)
    if (reason := can_widen(kind, row)) is not None:
        return reason
    if len({plan.scale * leaf for leaf in leaf_scales(row)}) > 1:
        return f"{plan.dtype.name}: a row's blocks cannot take several factors"
    return next((reason for scale in plan.scales if (reason := can_scale(kind, scale)) is not None), None)
