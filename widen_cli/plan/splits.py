"""Which weights take parts instead of equal copies, and which axes' copies part by that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from widen_cli.dimensions import Fill, Growth, Laid, Split
from widen_cli.plan.factors import Factor
from widen_cli.plan.match import Matched
from widen_cli.plan.result import TensorPlan
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.spaces import paths
from widen_cli.scales import Scale

WAYS = ("even", "uneven")


@dataclass(frozen=True)
class Asked:
    """How ties between copies are to be broken: a way of splitting, or noise of so many decibels; nothing by default."""

    way: str | None = None
    noise: float | None = None
    seed: int = 0

    def __bool__(self) -> bool:
        return self.way is not None or self.noise is not None

    def __str__(self) -> str:
        return f"--split {self.way}" if self.noise is None else f"--noise {self.noise:g}"

    def of(self, name: str, dimension: int) -> Split:
        """The same for one dimension of a tensor."""
        if self.noise is None:
            return Split(self.way or "", dimension, self.seed, name)
        return Split("noise", dimension, self.seed, name, float(Decimal(10) ** (Decimal(self.noise) / 20)))


class UnfitSplitError(Exception):
    """A weight whose numbers cannot be split; the text says what it holds and why not, and is that of every such weight."""


def with_split(
    plan: TensorPlan, item: Matched, asked: Asked, whole: Collection[str], empty: Callable[[str], bool]
) -> TensorPlan:
    """The plan with parts in the place of copies along the dimension that the weight reads, where that grows.

    `whole` are tensors that also write, as tied ones do: theirs have to be copies. `empty` tells of what is read whether its
    new positions hold something else than copies. Raises UnfitSplitError for blocks.
    """
    if not asked or plan.growth is None or plan.source.name in whole:
        return plan
    number = _dimension(plan, item)
    # What new rows are, means or drawn values, is made of copies.
    if number is None or plan.fills - {Fill.ZERO} or any(map(empty, _names(item, number))):
        return plan
    if plan.dtype.kind == "blocks":
        remedy = (
            "give --dequantize f32"
            if plan.source.dtype.name != "MXFP4"
            else "save the model as numbers from transformers"
        )
        raise UnfitSplitError(
            f"{plan.dtype.name} blocks, whose numbers share a scale, so {asked} cannot split them one by one; {remedy} or leave it out"
        )
    growth = tuple(_shared(tree) if at == number else tree for at, tree in enumerate(plan.growth))
    return replace(plan, growth=growth, split=asked.of(plan.source.name, number))


@dataclass(frozen=True)
class Ties:
    """What is known of the copies of axes: by how much those that can be named grow, and the pairs whose product is summed over
    all copies, as query and key are. `once` are axes along which that counts old positions once."""

    sizes: Sizes
    factors: Mapping[str, Factor]
    axes: Collection[str]
    contractions: Collection[tuple[str, str]] = ()
    once: Collection[str] = ()

    def note(self, asked: Asked, plans: Iterable[TensorPlan], matched: Mapping[str, Matched]) -> str | None:
        """What a split does to the ties between the copies of each axis that grows; None where nothing is split."""
        split = [plan for plan in plans if plan.split is not None]
        read: set[str] = set()
        for plan in split:
            assert plan.split is not None
            names = _names(matched[plan.source.name], plan.split.dimension)
            read |= {axis.name for name in names if (axis := self.sizes.axis_of(name)) is not None}
        grown = [name for name in self.axes if self.factors[name] != 1]
        parted, others = [name for name in grown if name in read], [name for name in grown if name not in read]
        if not split:
            return None
        if asked.way == "even":
            return (
                f"{asked}: weights that read {' and '.join(parted)} hold parts that differ in their last places alone"
            )
        text = f"{asked}: the copies of {' and '.join(parted)} part, since weights that read them hold unequal parts of one sum"
        text += f"; no such weight reads {' and '.join(others)}" if others else ""
        for pair, name in self.kept(split, matched):
            text += f"; the copies of {' and '.join(pair)} along {name} stay equal, since no weight that writes them is split"
        return text

    def kept(
        self, split: Collection[TensorPlan], matched: Mapping[str, Matched]
    ) -> Iterator[tuple[tuple[str, str], str]]:
        """The pairs whose copies training cannot part, each with its axis: those of equal rows that read equal values."""
        written: set[str] = set()
        for item in (matched[plan.source.name] for plan in split):
            for number, dimension in enumerate(item.rule.shape.dimensions):
                written |= _names(item, number) if dimension.role == "out" else set()
        for pair in self.contractions:
            axis = self.sizes.axis_of(pair[0])
            grows = axis is not None and self.factors[axis.name] != 1 and axis.name not in self.once
            if axis is not None and grows and not written & {*pair}:
                yield pair, axis.name


def _names(item: Matched, dimension: int) -> set[str]:
    return {name for path in paths(item.rule.shape.dimensions[dimension].term) for name in path if not name.isdigit()}


def _dimension(plan: TensorPlan, item: Matched) -> int | None:
    """The number of the last dimension that is read and has several copies that are read."""
    found = [
        number
        for number, dimension in enumerate(item.rule.shape.dimensions)
        if dimension.role == "in" and max(_counts((plan.growth or ())[number]), default=1) > 1
    ]
    return found[-1] if found else None


def _counts(growth: Growth) -> list[int]:
    """How many copies hold the values of each leaf."""
    if isinstance(growth, Laid):
        return [count for part in growth.parts for count in _counts(part)]
    return [growth.live * count for count in _counts(growth.inner)] if growth.inner is not None else [growth.live]


def _shared(growth: Growth, copies: int = 1) -> Growth:
    """The same growth with factors for the sum of all copies, where they were those of each."""
    if isinstance(growth, Laid):
        return Laid(tuple(_shared(part, copies) for part in growth.parts))
    copies *= growth.live
    if growth.inner is not None:
        return replace(growth, inner=_shared(growth.inner, copies))
    return replace(growth, scale=growth.scale * Scale.of(copies))
