"""Makes the plan: matches, sizes, growth, laws, then a growth tree for every tensor and the config's changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.changes import ConfigChanges, wide_sizes
from widen_cli.plan.checks import check_input, check_requirements
from widen_cli.plan.equalities import equalities
from widen_cli.plan.factors import Factor, is_whole
from widen_cli.plan.filling import COPY, Filling
from widen_cli.plan.gradients import GradientBuilder
from widen_cli.plan.grids import UnfitGridError, apart, block_size, with_grid
from widen_cli.plan.growth import AxisGrowth, axis_growth, growing_axes, position_axes, position_calls
from widen_cli.plan.layer_growth import LayerGrowth, by_layer, layer_factors
from widen_cli.plan.layouts import Arrangement, arrange, side_by_side
from widen_cli.plan.made import scaled_scalars, with_divisors, with_scalars
from widen_cli.plan.match import Match, StoredHeader, match_tensors, surplus_layers
from widen_cli.plan.modes import MODES
from widen_cli.plan.numbered import numbered_heads
from widen_cli.plan.offers import NoScalingError, exact_alone, with_offer
from widen_cli.plan.packed import NUMBERS, PackedWeight
from widen_cli.plan.parallel import undivided
from widen_cli.plan.partial import Partials, partial_axes, partial_output
from widen_cli.plan.result import Gradient, Plan, TensorPlan
from widen_cli.plan.rotary import (
    Rotary,
    divisors,
    rotary_changes,
    rotary_fraction,
    rotary_method,
    slower_copies,
    why_none,
)
from widen_cli.plan.sizes import Sizes, told_by_no_tensor
from widen_cli.plan.spaces import SpaceScales, config_condition
from widen_cli.plan.splits import Asked, Ties, UnfitSplitError, with_split
from widen_cli.plan.trees import TreeBuilder, UnfitTypeError, UnknownSizeError, unfilled
from widen_cli.plan.untie import untied
from widen_cli.plan.wishes import Wish, wished
from widen_cli.plan.written import WrittenTypes
from widen_cli.scales import ONE, ContradictionError, Scale


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for and, in `settings`, said of the model; `file` is the input's name in messages.

    `root` stands in front of all tensor names that the map knows. `times` are factors of their own on
    tensors, by name; `layers` is what grows in some layers only. `approximate`: another function may come of it. With
    `gradients` the plan says what becomes of these too.

    `back`: of a model that was made before, whose types may be others since: they do not rule out the layout that was taken.
    `scalars` are the tensors that took factors in place of weights then, None where that is not known. `alone`: a growth that
    is only tried, for an offer.
    """

    file: str
    factor: int | None = None
    grow: Mapping[str, Wish | Factor] = field(default_factory=dict)
    scaling: str = "auto"
    types: WrittenTypes = field(default_factory=WrittenTypes)
    settings: dict[str, Any] = field(default_factory=dict)
    layout: str = "auto"
    rope: str | None = None
    approximate: bool = False
    root: str = ""
    untie: bool = False
    times: dict[str, Scale] = field(default_factory=dict)
    layers: tuple[LayerGrowth, ...] = ()
    fill: str = COPY
    seed: int = 0
    split: Asked = field(default_factory=Asked)
    back: bool = False
    scalars: frozenset[str] | None = None
    alone: bool = False
    gradients: bool = False


def make_plan(
    architecture: ArchitectureMap, tensors: Sequence[StoredHeader], config: ModelConfig, request: PlanRequest
) -> Plan:
    """The plan for a checkpoint. Raises WidenError with every fault of the input and the request."""
    match = match_tensors(architecture, tensors, config, request.root)
    faults = Faults()
    with faults:
        sizes = check_input(architecture, match, tensors, config, printable(request.file), faults)
    if request.untie:
        loose = untied(architecture, match, tensors, config, request.file)
        plan = make_plan(architecture, loose.tensors, loose.config, replace(request, untie=False))
        return loose.told(plan, request.file)
    grown = growing(architecture, match, sizes, config, request)
    layered = layer_factors(architecture, sizes, grown.growth.factors, request.layers)
    check_requirements(architecture, sizes, grown.growth.factors, printable(request.file), layered)
    planner = _Planner(architecture, match, sizes, grown, config, request, layered)
    try:
        plan = planner.plan(tensors)
    except NoScalingError as error:
        if request.alone:
            raise
        single = replace(request, factor=None, scaling="auto", alone=True)
        alone = exact_alone(
            architecture,
            request.grow,
            lambda grow: make_plan(architecture, tensors, config, replace(single, grow=grow)),
        )
        raise WidenError(f"{error}{alone}") from None
    if plan.exact or plan.mode == "orthogonal" or not planner.spaces.ties:
        return plan
    return with_offer(plan, lambda: make_plan(architecture, tensors, config, replace(request, untie=True)))


@dataclass(frozen=True)
class Growing:
    """The factor of every axis, how heads grow under rotary positions, where copies go that are no whole number, and whether the
    stored types decide if there are more heads or larger ones."""

    growth: AxisGrowth
    rotary: Rotary
    partials: Partials
    by_types: bool


def growing(
    architecture: ArchitectureMap, match: Match, sizes: Sizes, config: ModelConfig, request: PlanRequest
) -> Growing:
    """What the request makes grow. Raises WidenError with every axis that cannot grow so."""
    stored = [item.rule for item in match.matched]
    calls = list(position_calls(architecture, stored, lambda node: config_condition(architecture, config, node)))
    positions = position_axes(architecture, calls)
    method = rotary_method(architecture, config, request.rope, request.approximate)
    fixed = {kind: axes for kind, axes in positions.items() if kind != "rope" or method is None}
    by_types, by_heads = _by_heads(architecture, match, positions, request)
    equal = equalities(architecture, sizes)
    why = why_none(architecture, config)
    asked = wished(architecture, sizes, request.grow)
    growth = axis_growth(architecture, request.factor, asked, by_heads, fixed, equal, why, sizes.known)
    axes = frozenset(axis for kind, axis in calls if kind == "rope")
    factor = max((growth.factors[axis] for axis in axes), default=1)
    if not is_whole(factor):
        method = rotary_fraction(architecture, config, request.rope, factor)
    rotary = Rotary(method or "", axes, factor)
    partials = partial_axes(architecture, sizes, growth.factors, rotary.axes)
    return Growing(growth, rotary, partials, by_types)


def _by_heads(
    architecture: ArchitectureMap, match: Match, positions: dict[str, set[str]], request: PlanRequest
) -> tuple[bool, bool]:
    """Whether the types decide how attention grows by default, and whether it does by more heads, if it can: under rotary
    positions, and for less than 32 bits.

    The factor that a larger head size needs, r**(-1/4), would be rounded in half precision.
    """
    growth, types = architecture.growth, request.types
    head_dim = growth.head_dim
    if head_dim is None or {head_dim, *growth.with_head_dim} & positions.get("rope", set()):
        return False, True
    if not growth.heads or any(axis in positions.get("alibi", set()) for axis in growth.heads):
        return False, False
    open_still = not {*growth.heads, head_dim} & request.grow.keys()
    return open_still, any(types.cast(item.tensor.dtype).bits < 32 for item in match.matched)


class _Planner:
    def __init__(
        self,
        architecture: ArchitectureMap,
        match: Match,
        sizes: Sizes,
        grown: Growing,
        config: ModelConfig,
        request: PlanRequest,
        layered: dict[str, tuple[int, ...]],
    ) -> None:
        self.architecture = architecture
        self.layered = layered
        self.rotary = grown.rotary
        self.match = match
        self.sizes = sizes
        self.growth = grown.growth
        self.config = config
        self.request = request
        self.file = printable(request.file)
        self.spaces = SpaceScales(architecture, match, self.growth.factors, config, self.rotary, grown.partials)
        self.changes = ConfigChanges(sizes, self.growth.factors, self.spaces, config, request.types.dtype, layered)
        self.filling = Filling(architecture, self.spaces, grown.partials, request.fill)
        if faults := [f"{self.file}: {fault}" for fault in self.filling.faults()]:
            raise WidenError(*faults)
        self.warnings: list[str] = []

    def plan(self, tensors: Sequence[StoredHeader]) -> Plan:
        if unmade := self.spaces.unmade():
            raise WidenError(
                *(
                    f"{self.file}: tensor '{printable(self.match.written(pattern))}' reads {name}, which no tensor of the file makes; "
                    "what the config says of the model is not so, or the map is that of another"
                    for pattern, name in unmade
                )
            )
        mode, why, scales = self.choose_mode()
        arranged = self.arranged(tensors, mode, scales)
        config = self.changes.all(scales) + rotary_changes(self.architecture, self.config, self.rotary, self.pairs())
        self.warn()
        if not self.config.present and config:
            listed = ", ".join(f"{change.key} = {change.new}" for change in config)
            self.warnings.append(
                f"{self.file}: no config was found, so none is written; whatever loads the result needs {listed}"
            )
        sidecars = {
            file: {key: self.growth.factors[axis] for key, axis in keys.items()}
            for file, keys in self.architecture.sidecars.items()
        }
        axes = growing_axes(self.architecture)
        return Plan(
            architecture=self.architecture.architecture,
            mode=mode,
            why=why,
            factors=self.growth.factors,
            scales={name: scale for name, scale in scales.items() if name not in self.spaces.multipliers},
            tensors=apart(arranged.tensors, [tensor.name for tensor in tensors]),
            dropped=tuple(tensor.name for tensor in self.match.dropped),
            config=tuple(config),
            sidecars=sidecars,
            notes=(
                *self.growth.notes,
                *arranged.notes,
                *self.slower(),
                *self.assumptions(),
                *self.wide_outputs(scales, arranged.layout),
                *self.parting(arranged.tensors),
            ),
            warnings=tuple(self.warnings),
            axes=tuple(
                name
                for name, axis in self.architecture.axes.items()
                if name in axes or (axis.padded and self.growth.factors[name] != 1)
            ),
            equal_pairs=self.spaces.stored_ties(),
            output=self.output(scales),
            outputs=self.architecture.outputs,
            layout=arranged.layout,
            scalars=scaled_scalars(self.architecture, arranged.tensors),
            layers=tuple(map(str, self.request.layers)),
            approximate=self.rotary.approximate,
            gradients=self.gradients(mode, scales, arranged.layout) if self.request.gradients else {},
            numbered=numbered_heads(
                self.sizes,
                self.growth.factors,
                self.filling.partials,
                lambda axis: self.rotary.tiles(axis, arranged.layout == "tile"),
            ),
        )

    def gradients(self, mode: str, scales: dict[str, Any], layout: str) -> dict[str, Gradient]:
        """What becomes of every matched tensor's gradient."""
        builders: dict[int | None, GradientBuilder] = {}
        found: dict[str, Gradient] = {}
        for item in self.match.matched:
            layer = item.layer(self.architecture) if self.layered else None
            if layer not in builders:
                sizes = self.sizes.at(layer)
                own = {axis: each[layer] for axis, each in self.layered.items()} if layer is not None else {}
                factors = {**self.growth.factors, **own}
                builders[layer] = GradientBuilder(
                    sizes, factors, scales, self.spaces, MODES[mode], layout, self.rotary, self.filling
                )
            found[item.tensor.name] = builders[layer].gradient(item, self.match)
        return found

    def arranged(self, tensors: Sequence[StoredHeader], mode: str, scales: dict[str, Any]) -> Arrangement:
        """The tensors' plans, with copies laid as was asked for or as quantised blocks allow."""
        factors = [self.growth.factors, *by_layer(self.growth.factors, self.layered)]
        uneven = side_by_side(self.sizes, self.match, factors, self.filling.partials)
        return arrange(
            self.request.layout,
            lambda layout: self.tensor_plans(tensors, mode, scales, layout),
            uneven,
            self.file,
            anyhow=self.request.back,
        )

    def choose_mode(self) -> tuple[str, str, dict[str, Any]]:
        if self.request.scaling != "auto":
            try:
                return self.request.scaling, "as asked", self.spaces.solve(MODES[self.request.scaling])
            except ContradictionError as error:
                raise WidenError(
                    f"--scaling {self.request.scaling}: not function-exact for this checkpoint, because {_listed(error.equations)}"
                    f"{self.otherwise(self.request.scaling)}"
                ) from None
        why = ""
        if all(self.request.types.cast(item.tensor.dtype).bits >= 32 for item in self.match.matched):
            try:
                scales = self.spaces.solve(MODES["orthogonal"])
                if self.config.present or not self.changes.epsilons(scales):
                    return "orthogonal", "32 bits or wider are written, and every law holds", scales
                why = "orthogonal would change an epsilon, and there is no config to write it to; "
            except ContradictionError as error:
                why = f"orthogonal is not function-exact here, because {_listed(error.equations)}; "
        return self.fewest_rounded(why)

    def otherwise(self, mode: str) -> str:
        """What to do where a mode that was asked for does not keep the function."""
        if any(self.spaces.solves(other) for other in MODES.values()):
            return "; --scaling auto takes a mode that is"
        return self.untying(mode) or self.untying("copy") or "; no other mode is either"

    def untying(self, mode: str) -> str:
        """That --untie would help a mode, where it would."""
        names = " and ".join(f"'{printable(name)}'" for name in self.spaces.freed(MODES[mode]))
        return (
            f"; with --untie, which writes {names} as a weight of its own, {mode} keeps the function" if names else ""
        )

    def fewest_rounded(self, why: str) -> tuple[str, str, dict[str, Any]]:
        """The function-exact mode under which the fewest stored values are rounded, by header facts alone.

        Of quantised blocks, those whose scales shrink may be: they are often subnormal halves.
        """
        rounded: dict[str, int] = {}
        solved: dict[str, dict[str, Any]] = {}
        reasons: list[str] = []
        refusals: list[str] = []
        blocks = any(item.tensor.dtype.kind == "blocks" for item in self.match.matched)
        for name in ("sum", "quiet", "copy") if blocks else ("copy", "sum", "quiet"):
            try:
                solved[name] = self.spaces.solve(MODES[name])
            except ContradictionError as error:
                reasons = reasons or error.equations
                continue
            try:
                tensors = self.arranged([item.tensor for item in self.match.matched], name, solved[name]).tensors
            except WidenError as error:
                refusals += error.faults
                continue
            rounded[name] = sum(math.prod(tensor.source.shape) for tensor in tensors if tensor.may_round)
        if not rounded and refusals:
            raise WidenError(*dict.fromkeys(refusals))
        if not rounded:
            untying = self.untying("copy")
            told = f"{self.file}: no scaling keeps the function of this checkpoint, because {_listed(reasons)}{untying}"
            raise WidenError(told) if untying else NoScalingError(told)
        best = min(rounded, key=lambda name: rounded[name])
        counts = ", ".join(f"{name} {number}" for name, number in rounded.items())
        return (
            best,
            f"{why}it rounds the fewest stored values for certain ({counts}; of equals the first)",
            solved[best],
        )

    def tensor_plans(
        self, tensors: Sequence[StoredHeader], mode: str, scales: dict[str, Any], layout: str
    ) -> tuple[TensorPlan, ...]:
        silent, first = self.spaces.silent(MODES[mode]), self.spaces.first_copies()
        builder = TreeBuilder(
            self.sizes,
            self.growth.factors,
            scales,
            silent,
            layout,
            self.rotary,
            first,
            filling=self.filling,
            layered=self.layered,
        )
        matched = {item.tensor.name: item for item in self.match.matched}
        carried = {tensor.name for tensor in self.match.carried}
        grids = {grid.name for grid in self.match.grids.values()}
        planned: list[TensorPlan] = []
        unknown: dict[str, str] = {}
        unfit = Faults()
        tied = self.spaces.tied_names()
        for tensor in tensors:
            if tensor.name in grids:
                continue
            if tensor.name in carried:
                planned.append(TensorPlan(tensor, (tensor.name,), tensor.name, tensor.dtype))
            elif item := matched.get(tensor.name):
                target = self.request.types.of(self.architecture, item)
                try:
                    made = builder.tensor_plan(item, self.match, target)
                    times = self.request.times.get(tensor.name, ONE)
                    made = replace(made, scale=made.scale * times, seed=self.request.seed)
                    planned += self.with_grid(
                        with_split(made, item, self.request.split, tied, self.filling.without_copies)
                    )
                except (UnfitTypeError, UnfitGridError, UnfitSplitError) as error:
                    unfit.add(f"{self.file}: {error}")
                except UnknownSizeError as error:
                    unknown.update({axis: tensor.name for axis in error.axes if axis not in unknown})
        for text in unfilled(planned):
            unfit.add(f"{self.file}: {text}")
        if unfit.texts:
            raise WidenError(*unfit.texts)
        if unknown:
            raise WidenError(f"{self.file}: {told_by_no_tensor(self.sizes, unknown)}")
        return self.with_made(with_scalars(self.architecture, planned, self.request.scalars))

    def with_grid(self, plan: TensorPlan) -> tuple[TensorPlan, ...]:
        """A weight's plan, and where it is block-scaled FP8 that of its scales.

        A weight in MXFP4 blocks stays one until a layout is found for it.
        """
        if isinstance(plan.source, PackedWeight):
            if plan.dtype != plan.source.dtype:
                raise UnfitGridError(
                    f"tensor '{printable(plan.source.name)}' holds MXFP4 blocks, which are not written as {plan.dtype.name}; {NUMBERS}"
                )
            return (plan,)
        grid = self.match.grids.get(plan.source.name)
        if grid is None:
            return (plan,)
        if plan.dtype != plan.source.dtype:
            raise UnfitGridError(
                f"tensor '{printable(plan.source.name)}' is block-scaled FP8, which --dtype cannot turn into {plan.dtype.name}; "
                "leave --dtype out, or dequantise the model first"
            )
        return with_grid(plan, grid, block_size(self.config))

    def with_made(self, planned: tuple[TensorPlan, ...]) -> tuple[TensorPlan, ...]:
        """The plans with the tensor that divides frequencies, where heads grow by it."""
        rope, factor = self.architecture.rope, int(self.rotary.factor)
        if rope is None or rope.tensor is None or self.rotary.method != "frequencies" or factor == 1:
            return planned
        pairs = self.pairs()
        return with_divisors(planned, rope.tensor, pairs, divisors(self.config, self.architecture, factor, 2 * pairs))

    def pairs(self) -> int:
        """How many rotary pairs an old head has; 0 where there is none, or nothing tells."""
        return next((self.sizes.known.get(axis, 0) for axis in self.rotary.axes), 0)

    def slower(self) -> list[str]:
        """What copies of pairs do under frequencies that are not the old ones."""
        return slower_copies(self.architecture, self.config, self.rotary, self.pairs())

    def assumptions(self) -> list[str]:
        """What was taken on the user's word: no shape can tell it."""
        settings = ", ".join(f"{key} = {value}" for key, value in self.request.settings.items())
        return [f"taken from --set: {settings}"] if settings else []

    def wide_outputs(self, scales: dict[str, Any], layout: str) -> Iterator[str]:
        """How a bare model's hidden states come out, and what else it puts out that grows; heads undo it."""
        hidden = self.output(scales)
        if hidden is not None and (how := self.wide_output(hidden, scales, layout)):
            yield f"hidden states, where they are the output, {how}"
        for name, space in self.architecture.outputs.items():
            if how := self.wide_output(space, scales, layout):
                yield f"{name}, where it is an output: its values {how}"

    def output(self, scales: dict[str, Any]) -> str | None:
        """The space of a bare model's hidden states."""
        return next((space for space in self.architecture.output if space in scales), None)

    def wide_output(self, space: str, scales: dict[str, Any], layout: str) -> str:
        if space not in scales:
            return ""
        copies = self.spaces.copies(space)
        if (axis := self.filling.axis(space)) != "":
            return partial_output(self.filling.partials[axis], space in self.filling.meant, scales[space], layout)
        if copies == 1 and scales[space].is_one:
            return ""
        how = "as a whole (x0 x1 x0 x1)" if layout == "tile" else "side by side (x0 x0 x1 x1)"
        times = "" if scales[space].is_one else f", times {scales[space]}"
        return f"stand {copies}x {how}{times}"

    def parting(self, plans: Sequence[TensorPlan]) -> list[str]:
        """What a split does to the ties between copies; a warning where it does nothing."""
        matched = {item.tensor.name: item for item in self.match.matched}
        pairs, axes = self.spaces.reading.contractions, growing_axes(self.architecture)
        ties = Ties(self.sizes, self.growth.factors, axes, pairs, self.rotary.once)
        note = ties.note(self.request.split, plans, matched)
        if self.request.split and note is None:
            self.warnings.append(f"{self.request.split}: no weight reads an axis that grows, so it has no effect")
        return [note] if note else []

    def warn(self) -> None:
        axes = self.architecture.axes
        if self.request.gradients and any(axes[axis].padded and by != 1 for axis, by in self.growth.factors.items()):
            self.warnings.append(
                "--optimizer: a larger vocabulary adds to the sum under the softmax, so the gradients are those of another loss"
            )
        self.warnings += undivided(self.sizes, wide_sizes(self.sizes, self.growth.factors))
        odd = [tensor for tensor in self.match.carried if tensor.shape and 0 not in tensor.shape]
        plain = [tensor for tensor in self.match.carried if tensor not in odd]
        for tensors, what in ((odd, "integers"), (plain, "scalars or empty")):
            if tensors:
                self.warnings.append(f"{self.file}: not in the map, copied unchanged ({what}): {_names(tensors)}")
        if self.request.types.dtype and any(isinstance(item.tensor, PackedWeight) for item in self.match.matched):
            self.warnings.append(
                f"{self.file}: --dtype {self.request.types.dtype.name} leaves weights in MXFP4 blocks as they are; for numbers, {NUMBERS}"
            )
        if self.request.rope and self.rotary.factor == 1:
            self.warnings.append(
                f"--rope {self.request.rope}: no head grows, so it has no effect; --grow head_dim=N grows them"
            )
        if surplus := surplus_layers(self.architecture, self.match, self.config):
            shown = ", ".join(printable(name) for name in surplus[:6]) + (" ..." if len(surplus) > 6 else "")
            self.warnings.append(f"{self.file}: more than the config counts, widened all the same: {shown}")
        if self.match.dropped:
            self.warnings.append(
                f"{self.file}: buffers that are computed anew when the model loads, left out: {_names(self.match.dropped)}"
            )
        for tie in self.spaces.ties:
            if (
                not self.config.present
                and self.match.by_name(tie.tensor) is None
                and self.spaces.tie_law(tie).power.spaces
            ):
                self.warnings.append(
                    f"{self.file}: no config says so, but '{tie.tensor}' is not stored and is taken as tied to '{tie.to}'"
                )


def _names(tensors: Sequence[StoredHeader], limit: int = 6) -> str:
    shown = ", ".join(printable(tensor.name) for tensor in tensors[:limit])
    return shown + (f" and {len(tensors) - limit} more" if len(tensors) > limit else "")


def _listed(equations: Sequence[str]) -> str:
    return ", and ".join(equations)
