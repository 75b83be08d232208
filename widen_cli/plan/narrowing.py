"""What a wide checkpoint was before: the headers and the config of the narrow one, of which the usual plan is made.

Shapes are divided as the map and the factors say. The config is what was recorded, else sizes and bases are taken back here,
and what a scale multiplied (epsilons, an attention's scale) once the plan tells the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from widen_cli.config import ModelConfig, is_number
from widen_cli.dtypes import DType
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.changes import told as told_anew
from widen_cli.plan.changes import wide_sizes
from widen_cli.plan.factors import Factor, is_whole
from widen_cli.plan.grids import block_size
from widen_cli.plan.growing import Growing, factors_asked
from widen_cli.plan.growth import growing_axes
from widen_cli.plan.layer_growth import layer_factors
from widen_cli.plan.lookup import held
from widen_cli.plan.match import Match, Matched, StoredHeader, match_tensors
from widen_cli.plan.packed import NUMBERS, PackedWeight
from widen_cli.plan.partial import Partials, partial_axes
from widen_cli.plan.request import PlanRequest
from widen_cli.plan.result import EXACT, ConfigChange, Plan
from widen_cli.plan.rotary import check_way_back
from widen_cli.plan.shares import old_shares
from widen_cli.plan.sizes import Sizes, resolve_sizes
from widen_cli.plan.spaces import paths
from widen_cli.plan.wishes import said_as_factors
from widen_cli.shapes import Dimension

FAULTS_SHOWN = 8


@dataclass(frozen=True)
class Header:
    """A tensor of the narrow checkpoint, in the type that the wide one holds."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Known:
    """What is recorded of the narrow model: old config values, keys that it had not, tensors that it lacked."""

    config: Mapping[str, Any] = field(default_factory=dict)
    added: Sequence[str] = ()
    made: Sequence[str] = ()


@dataclass(frozen=True)
class Narrow:
    """The narrow checkpoint's headers in the order of the wide one, its config, and the request that widens it.

    `told` is the config with what `--set` says of it. `by_types`: the stored types decided how attention grew.
    """

    headers: tuple[Header, ...]
    config: ModelConfig
    told: ModelConfig
    request: PlanRequest
    by_types: bool


def narrow_model(
    architecture: ArchitectureMap,
    tensors: Sequence[StoredHeader],
    config: ModelConfig,
    request: PlanRequest,
    known: Known | None,
) -> Narrow:
    """The narrow form of a wide checkpoint, of which `config` is the wide config, by the request that widened it.

    Raises WidenError where a size is no multiple of what its axes grow by: the checkpoint was not widened so; and where
    weights stand in MXFP4 blocks.
    """
    made = set(known.made) if known else set()
    kept = [tensor for tensor in tensors if tensor.name not in made]
    wide = config if config.present else config.with_values(_of_no_axis(architecture, request.settings))
    match = match_tensors(architecture, kept, wide, request.root)
    if packed := next((item.tensor for item in match.matched if isinstance(item.tensor, PackedWeight)), None):
        raise WidenError(
            f"{printable(request.file)}: tensor '{printable(packed.name)}' holds MXFP4 blocks, and means are taken of numbers; {NUMBERS}"
        )
    sizes = resolve_sizes(architecture, wide, match, Faults())
    request = replace(request, grow=said_as_factors(request.grow, sizes))
    grown = _grown(architecture, match, sizes, wide, request)
    by_types = request.factor is not None and grown.by_types
    found = grown.growth.factors
    layered = layer_factors(architecture, sizes, found, request.layers)
    if known is None and request.rope is None:
        check_way_back(architecture, wide, grown.rotary)
    narrow = _recorded(config, known) if known else _derived(architecture, config, sizes, grown, by_types, layered)
    told = narrow.with_values(request.settings)
    growing = growing_axes(architecture)
    factors = {
        axis: factor
        for axis, factor in found.items()
        if axis in growing or (architecture.axes[axis].padded and factor != 1)
    }
    headers = _Headers(architecture, kept, told, found, request, layered).all()
    return Narrow(headers, narrow, told, replace(request, factor=None, grow=factors), by_types)


def _grown(
    architecture: ArchitectureMap, match: Match, sizes: Sizes, wide: ModelConfig, request: PlanRequest
) -> Growing:
    """What the request made grow, as `sizes` are those that came of it. Raises WidenError for fractions that nothing grew by."""
    told = {axis: 1 / Fraction(by) for axis, by in request.grow.items() if isinstance(by, int | Fraction)}
    with Faults() as faults:
        for axis, by in request.grow.items():
            size = sizes.known.get(axis, 0)
            if isinstance(by, Fraction) and not is_whole(by) and not is_whole(size / by):
                faults.add(f"{printable(wide.name)}: {sizes.told_by[axis]} is {size}, {_not_so(axis, by)}")
    return factors_asked(architecture, match, sizes.grown(told), wide, request)


def _of_no_axis(architecture: ArchitectureMap, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of the narrow model that is true of the wide one too: all but sizes."""
    sizes = {key for axis in architecture.axes.values() for key in axis.keys}
    return {key: value for key, value in settings.items() if key not in sizes}


# The config.


def _recorded(config: ModelConfig, known: Known) -> ModelConfig:
    return config.without(known.added).with_values(dict(known.config)) if config.present else config


def _derived(
    architecture: ArchitectureMap,
    config: ModelConfig,
    sizes: Sizes,
    grown: Growing,
    by_types: bool,
    layered: Mapping[str, tuple[int, ...]],
) -> ModelConfig:
    """The config with its sizes divided, its bases and its lists of frequencies as they were."""
    if not config.present:
        return config
    values: dict[str, Any] = {}
    doubt = ", or stored in other types: then say --grow instead of --factor" if by_types else ""
    inverse = {name: 1 / Fraction(factor) for name, factor in grown.growth.factors.items()}
    before = wide_sizes(sizes, inverse, {name: [Fraction(1, by) for by in each] for name, each in layered.items()})
    with Faults() as faults:
        for name, axis in architecture.axes.items():
            factor = grown.growth.factors[name]
            for key in axis.keys if axis.means is not None else ():
                if config.get(key) is not None and (change := told_anew(axis, key, sizes, before, faults)) is not None:
                    values[key] = change.new
            for key in axis.keys if axis.means is None and (factor != 1 or name in layered) else ():
                size = config.get(key)
                if size is None or key in values:
                    continue
                each = size if isinstance(size, list) else [size]
                own: Sequence[Factor] = layered.get(name, ()) if isinstance(size, list) else ()
                factors = own if len(own) == len(each) else [factor] * len(each)
                old = [_divided(number, by) for number, by in zip(each, factors, strict=True)]
                if None in old:
                    faults.add(f"{printable(config.name)}: {key} is {size!r}, {_not_so(name, factor)}{doubt}")
                    continue
                values[key] = old if isinstance(size, list) else old[0]
    return config.with_values(values | _rotary(architecture, config, grown))


def _divided(size: Any, factor: Factor) -> int | None:
    """The size that grew by a factor to this one, None where there is none."""
    return int(size / Fraction(factor)) if isinstance(size, int) and is_whole(size / Fraction(factor)) else None


def _rotary(architecture: ArchitectureMap, config: ModelConfig, grown: Growing) -> dict[str, Any]:
    factor, method = grown.rotary.factor, grown.rotary.method
    if factor == 1 or architecture.rope is None:
        return {}
    values: dict[str, Any] = {}
    for key in architecture.rope.keys if method == "theta" else ():
        values |= {place: _root(base, factor) for place, base in held(architecture, config, key).items()}
    for key in architecture.rope.lists:
        for place, longer in held(architecture, config, key).items():
            if isinstance(longer, list):
                theta = method == "theta"
                values[place] = longer[: int(len(longer) / Fraction(factor))] if theta else longer[:: int(factor)]
    for key, taker in architecture.rope.shares.items():
        found = held(architecture, config, key)
        values |= {place: old_shares(counts, taker, grown.rotary) for place, counts in found.items()}
    return values


def _root(base: Any, factor: Factor) -> Any:
    """The base that was raised to `base`: the whole number, where there is one."""
    if not is_number(base) or base <= 0:
        return base
    root = float(base) ** float(1 / Fraction(factor))
    return float(round(root)) if float(float(round(root)) ** factor) == base else root


def _not_so(axis: str, factor: Factor) -> str:
    return f"no multiple of the {factor} that {axis} grows by; this model was not widened so"


def settled(narrow: Narrow, plan: Plan, wide: ModelConfig, recorded: bool) -> tuple[ModelConfig, tuple[str, ...]]:
    """The narrow config, with what the plan's scales tell of values that differ from what the plan makes of the narrow ones.

    And warnings where those had been `recorded`: somebody changed them since. Raises WidenError for a value that cannot be
    taken back.
    """
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for change in plan.config if wide.present else ():
        found = wide.get(change.key)
        if _same(found, change.new):
            continue
        if not _can_be_taken_back(found, change):
            raise WidenError(
                f"{printable(wide.name)}: {change.key} is {found!r}, where the conversion makes {change.new!r}; correct the config"
            )
        values[change.key] = _taken_back(found, change)
        if recorded:
            warnings.append(
                f"{printable(wide.name)}: {change.key} is {found!r}, where the recorded conversion made {change.new!r}; "
                f"the narrow model gets {values[change.key]!r}"
            )
    return narrow.config.with_values(values), tuple(warnings)


def _same(found: Any, made: Any) -> bool:
    """Whether two values are one, as far as a float32 tells; a GGUF's numbers are such."""
    if is_number(found) and is_number(made):
        return math.isclose(found, made, rel_tol=1e-6)
    return bool(found == made)


def _can_be_taken_back(found: Any, change: ConfigChange) -> bool:
    """Whether there is a value from which the conversion makes this one; of a count, a whole one."""
    if not (is_number(found) and is_number(change.old) and is_number(change.new) and change.new and change.old):
        return False
    counts = all(isinstance(number, int) for number in (found, change.old, change.new))
    return not counts or found * change.old % change.new == 0


def _taken_back(found: Any, change: ConfigChange) -> Any:
    value = found * (change.old / change.new)
    whole = isinstance(found, int) and value == int(value)
    return int(value) if whole else float(value)


def config_changes(wide: ModelConfig, narrow: ModelConfig, keys: Iterable[str]) -> tuple[ConfigChange, ...]:
    """What of these keys becomes another value on the way back; a key that is not there any more is none of them."""
    return tuple(
        ConfigChange(key, wide.get(key), narrow.get(key), EXACT)
        for key in dict.fromkeys(keys)
        if key in narrow and wide.get(key) != narrow.get(key)
    )


# The tensors.


def divided_shapes(
    architecture: ArchitectureMap,
    tensors: Sequence[StoredHeader],
    told: ModelConfig,
    factors: Mapping[str, Factor],
    request: PlanRequest,
) -> list[tuple[int, ...]]:
    """The narrow shape of each tensor, its own where no rule names it. Raises WidenError for sizes that are no multiples."""
    return [header.shape for header in _Headers(architecture, tensors, told, factors, request, {}).all()]


class _Headers:
    def __init__(
        self,
        architecture: ArchitectureMap,
        tensors: Sequence[StoredHeader],
        told: ModelConfig,
        factors: Mapping[str, Factor],
        request: PlanRequest,
        layered: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.architecture = architecture
        self.tensors = tensors
        self.factors = factors
        self.layered = layered
        self.file = printable(request.file)
        self.match = match_tensors(architecture, tensors, told, request.root)
        self.block = block_size(told)
        self.faults: list[str] = []
        self.sizes = self.known_sizes(told)
        self.partials: Partials = {}
        if any(not is_whole(factor) for factor in factors.values()):
            self.partials = partial_axes(architecture, self.sizes, factors)

    def known_sizes(self, told: ModelConfig) -> Sizes:
        """The narrow sizes, from the config and from what is divided by one number."""
        plain = [
            Matched(Header(item.tensor.name, item.tensor.dtype, tuple(size for size in shape if size)), item.rule)
            for item in self.match.matched
            if (shape := self.plain_shape(item)) is not None and all(shape)
        ]
        return resolve_sizes(self.architecture, told, Match(plain, root=self.match.root), Faults())

    def plain_shape(self, item: Matched) -> tuple[int | None, ...] | None:
        dimensions = item.rule.shape.dimensions
        if len(dimensions) != len(item.tensor.shape):
            return None
        return tuple(
            int(size / factor) if (factor := self.one_factor(dimension, item)) and is_whole(size / factor) else None
            for dimension, size in zip(dimensions, item.tensor.shape, strict=True)
        )

    def one_factor(self, dimension: Dimension, item: Matched) -> Fraction | None:
        """By how much a dimension of a tensor grows, where all of its parts grow alike."""
        layer = item.layer(self.architecture) if self.layered else None
        own = self.factors
        if layer is not None:
            own = {**own, **{axis: each[layer] for axis, each in self.layered.items() if layer < len(each)}}
        found = set()
        for path in paths(dimension.term):
            total = Fraction(1)
            for name in path:
                axis = None if name.isdigit() else self.architecture.axis_of(name)
                total *= own[axis.name] if axis else 1
            found.add(total)
        return found.pop() if len(found) == 1 else None

    def all(self) -> tuple[Header, ...]:
        items = {item.tensor.name: item for item in self.match.matched}
        shapes = {name: self.shape(item) for name, item in items.items()}
        grids = {grid.name: weight for weight, grid in self.match.grids.items()}
        headers: list[Header] = []
        for tensor in self.tensors:
            name: str | None = tensor.name
            shape = shapes.get(tensor.name, tensor.shape)
            if tensor.name in items:
                name = self.first_name(items[tensor.name])
            elif tensor.name in grids:
                weight = shapes.get(grids[tensor.name], ())
                shape = tuple(-(-size // side) for size, side in zip(weight, self.block, strict=False))
            if name is not None:
                headers.append(Header(name, tensor.dtype, shape))
        if self.faults:
            more = len(self.faults) - FAULTS_SHOWN
            raise WidenError(
                *self.faults[:FAULTS_SHOWN], *([f"{self.file}: ... and {more} more tensors"] if more > 0 else [])
            )
        return tuple(headers)

    def first_name(self, item: Matched) -> str | None:
        """The narrow name of a tensor whose heads are numbered, None for the further copies."""
        name = item.tensor.name
        for axis, (start, stop) in item.numbers.items():
            number = self.first_number(axis, int(name[start:stop]))
            if number is None:
                return None
            name = f"{name[:start]}{number}{name[stop:]}"
        return name

    def first_number(self, axis: str, place: int) -> int | None:
        """The old position whose first copy stands at a place, None for the further copies."""
        partial = self.partials.get(axis)
        if partial is None:
            number, copy = divmod(place, int(self.factors[axis]))
            return None if copy else number
        starts = (partial.places(number).start for number in range(partial.old))
        return next((number for number, start in enumerate(starts) if start == place), None)

    def shape(self, item: Matched) -> tuple[int, ...]:
        """The narrow shape; what does not fit the map is left to the planner to tell."""
        dimensions, stored = item.rule.shape.dimensions, item.tensor.shape
        if len(dimensions) != len(stored):
            return stored
        sizes = self.sizes.at(item.layer(self.architecture))
        shape: list[int] = []
        for dimension, size in zip(dimensions, stored, strict=True):
            factor = self.one_factor(dimension, item)
            if factor is None:
                shape.append(sizes.total(dimension.term) or size)
            elif not is_whole(size / factor):
                self.faults.append(
                    f"{self.file}: tensor '{printable(item.tensor.name)}' {list(stored)} has {size} where {item.rule.shape.text} "
                    f"grows {factor}x; it was not widened so"
                )
                return stored
            else:
                shape.append(int(size / factor))
        return tuple(shape)
