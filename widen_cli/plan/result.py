"""What a plan holds: for every tensor and config value what becomes of it, and how exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from widen_cli.blocks import block_type
from widen_cli.dimensions import Fill, Growth, Split, fills, leaf_scales, scaled
from widen_cli.dtypes import STORED, DType
from widen_cli.plan.factors import Factor
from widen_cli.plan.match import StoredHeader
from widen_cli.plan.numbered import Numbered
from widen_cli.scales import ONE, Scale

EXACT, ROUNDS, DEPENDS = "exact", "rounds", "depends on values"
HIDDEN_STATES = "last_hidden_state"  # what transformers calls them


@dataclass(frozen=True)
class Ones:
    """A tensor that the input lacks: float32, every value 1."""

    name: str
    shape: tuple[int, ...]
    dtype: ClassVar[DType] = STORED["F32"]


@dataclass(frozen=True)
class Twin:
    """A tied weight under its other name: the values of `table`, times `scale`."""

    name: str
    table: StoredHeader
    scale: Scale = ONE

    @property
    def dtype(self) -> DType:
        return self.table.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape


@dataclass(frozen=True)
class TensorPlan:
    """One stored tensor and what is written for it.

    `names` are the tensors written (several where heads are numbered in names), `growth` a tree for each stored dimension,
    None for a tensor that is copied as it is. `offset` is c for a gain that is stored as w and used as c + w.
    `copy_factors` multiply the copies of each value of a vector, one number for each copy. `seed` is for what is drawn. With a
    `split` the factors of the dimension it names are those of the sum of all copies.
    """

    source: StoredHeader | Ones
    names: tuple[str, ...]
    pattern: str
    dtype: DType
    growth: tuple[Growth, ...] | None = None
    scale: Scale = field(default_factory=Scale)
    offset: int = 0
    copy_factors: tuple[float, ...] = ()
    seed: int = 0
    split: Split | None = None

    @property
    def stored_name(self) -> str:
        """The stored tensor whose values are written."""
        return self.source.table.name if isinstance(self.source, Twin) else self.source.name

    @property
    def made(self) -> bool:
        """Whether the input lacks the tensor."""
        return isinstance(self.source, Ones)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape if self.growth is None else tuple(growth.new for growth in self.growth)

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """Type and shape in the input's header."""
        return self.source.dtype.entry(self.source.shape)

    @property
    def written(self) -> tuple[str, tuple[int, ...]]:
        """Type and shape in the output's header."""
        return self.dtype.entry(self.shape)

    @property
    def without_factors(self) -> TensorPlan:
        """The same copies with no factor on any value."""
        return replace(self, growth=tuple(scaled(tree, ONE) for tree in self.growth or ()), scale=ONE)

    @cached_property
    def scales(self) -> tuple[Scale, ...]:
        """The distinct factors on the stored values, in stored order."""
        products = [self.scale]
        for growth in self.growth or ():
            products = [product * leaf for product in products for leaf in dict.fromkeys(leaf_scales(growth))]
        return tuple(dict.fromkeys(products))

    @property
    def part_scales(self) -> tuple[Scale, ...]:
        """The factor of each part of a packed tensor, in stored order; one where there are no parts or all are alike."""
        products = [self.scale]
        for growth in self.growth or ():
            products = [product * leaf for product in products for leaf in leaf_scales(growth)]
        return tuple(products) if len(set(products)) > 1 else (products[0],)

    @property
    def may_round(self) -> bool:
        """Whether values are rounded for certain, or block scales shrink, which their small type often does not hold."""
        shrinks = any(float(scale) < 1 for scale in self.scales)
        return self.exactness == ROUNDS or (self.dtype.kind == "blocks" and shrinks)

    @cached_property
    def fills(self) -> frozenset[Fill]:
        """What stands where no copy does."""
        return frozenset().union(*(fills(growth) for growth in self.growth or ()))

    @property
    def exactness(self) -> str:
        """`exact`, `rounds` or `depends on values`, from the factors and the types alone."""
        return ROUNDS if Fill.MEAN in self.fills else self.exactness_of_copies

    @cached_property
    def exactness_of_copies(self) -> str:
        """The same of the copies alone, without what fills the places beside them."""
        if self.copy_factors:
            return ROUNDS
        if self.source.dtype == self.dtype and all(scale.is_one for scale in self.scales):
            return EXACT
        if self.offset or not all(scale.is_power_of_two for scale in self.scales):
            return ROUNDS
        if self.dtype.kind == "blocks":
            return DEPENDS
        if not _holds(self.dtype, self.held):
            return ROUNDS
        narrow = self.dtype.bits < 16 or self.dtype.name == "F16"
        return DEPENDS if narrow and not self.dtype.bits > self.held.bits else EXACT

    @property
    def rounding(self) -> tuple[int, int] | None:
        """How many stored numbers may be rounded and b, where each is by up to 2**-b of itself; None where none is for certain.

        Of quantised blocks the numbers are their scales. What falls among a type's subnormals loses more.
        """
        if self.exactness != ROUNDS:
            return None
        values = math.prod(self.source.shape) * max(1, len(self.copy_factors))
        if self.dtype.kind != "blocks":
            return values, _FORMAT[self.dtype.name][0]
        fields = block_type(self.dtype.name).scales
        bits = min(_SCALE_BITS[field.kind] for field in fields)
        return values // self.dtype.block * sum(field.count for field in fields if field.kind != "E8M0"), bits

    @property
    def held(self) -> DType:
        """The element type that the stored values are read in: quantised blocks that are to become numbers are float32."""
        return STORED["F32"] if self.source.dtype.kind == "blocks" else self.source.dtype


# Which types hold every value of another: significand bits and exponent bits.
_FORMAT = {"F64": (53, 11), "F32": (24, 8), "F16": (11, 5), "BF16": (8, 8), "F8_E4M3": (4, 4), "F8_E5M2": (3, 5)}
# The significand bits of the scales that blocks keep, by the kind of a ScaleField.
_SCALE_BITS = {"F16": 11, "F16_NIBBLES": 11, "F32": 24, "UE4M3": 4, "E8M0": 1}


def _holds(wide: DType, narrow: DType) -> bool:
    return all(w >= n for w, n in zip(_FORMAT[wide.name], _FORMAT[narrow.name], strict=True))


@dataclass(frozen=True)
class ConfigChange:
    """A config value that changes; `old` is None for a key that was absent."""

    key: str
    old: Any
    new: Any
    exactness: str


NEW_EXPERTS = "experts and their routers are new"


@dataclass(frozen=True)
class Gradient:
    """What becomes of a tensor's gradient: a tree of factors for each stored dimension, zeros where there is none.

    Of `unknown` entries the zeros say only that nothing follows from the narrow gradient; `reason` is why nothing does of any.
    `origin` is the narrow tensor that it comes from, where that is called otherwise.
    """

    growth: tuple[Growth, ...] = ()
    scale: Scale = ONE
    unknown: int = 0
    reason: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything that one run will write, resolved before a byte moves.

    `axes` are the ones a user can name; `scales` gives s of each space, `output` is that of a bare model's hidden states,
    `outputs` are those of what else it puts out, by transformers' names;
    `tensors` stands in the order of the input; `warnings` are for the user; `rebuilt` says what layers the model has in place
    of those it had, `made_of` what it was before it became one of another kind, `layers` what grows in some layers only.
    `approximate` says why the result computes another function, and is empty where it does not. `layout` is the one taken,
    `scalars` are tensors that take factors in place of weights. `gradients` are those of the tensors by their stored names,
    where they were asked for. `numbered` says of heads that files beside the model name by their numbers where they go.
    """

    architecture: str
    mode: str
    why: str
    factors: dict[str, Factor]
    scales: dict[str, Scale]
    tensors: tuple[TensorPlan, ...]
    dropped: tuple[str, ...]
    config: tuple[ConfigChange, ...]
    sidecars: dict[str, dict[str, Factor]]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    axes: tuple[str, ...] = ()
    equal_pairs: tuple[tuple[str, str], ...] = ()
    output: str | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    rebuilt: str = ""
    approximate: str = ""
    made_of: str = ""
    layers: tuple[str, ...] = ()
    layout: str = "interleave"
    scalars: tuple[str, ...] = ()
    gradients: dict[str, Gradient] = field(default_factory=dict)
    numbered: dict[str, dict[str, Numbered]] = field(default_factory=dict)

    @property
    def named_factors(self) -> dict[str, int | str]:
        """The factors of the axes that a user can name, fractions as text."""
        factors = {axis: self.factors[axis] for axis in self.axes}
        return {axis: factor if isinstance(factor, int) else str(factor) for axis, factor in factors.items()}

    @property
    def grown(self) -> str:
        """What the model was rebuilt to, and the axes that grow, in words."""
        before = [text for text in (self.rebuilt, self.made_of) if text]
        grown = [f"{axis} x{self.factors[axis]}" for axis in self.axes if self.factors[axis] != 1]
        return ", ".join([*before, *grown, *self.layers]) or "nothing grows"

    @property
    def output_scales(self) -> dict[str, float]:
        """What a bare model's outputs that grow are multiplied by, by transformers' names."""
        spaces = {**({} if self.output is None else {HIDDEN_STATES: self.output}), **self.outputs}
        return {name: float(self.scales[space]) for name, space in spaces.items() if space in self.scales}

    @property
    def exact(self) -> bool:
        """True where neither a tensor nor a config value is rounded for certain."""
        return all(tensor.exactness != ROUNDS for tensor in self.tensors) and all(
            change.exactness == EXACT for change in self.config
        )
