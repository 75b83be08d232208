"""Makes the plan: matches, sizes, growth, laws, then a growth tree for every tensor and the config's changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.map_rules import OF_LAYERS, ArchitectureMap
from widen_cli.plan.changes import ConfigChanges
from widen_cli.plan.checks import check_input, check_requirements
from widen_cli.plan.choice import Choice
from widen_cli.plan.doubts import Doubts
from widen_cli.plan.factors import Factor
from widen_cli.plan.filling import Filling
from widen_cli.plan.gradients import GradientBuilder
from widen_cli.plan.grids import UnfitGridError, apart, block_size, with_grid
from widen_cli.plan.growing import Growing, growing
from widen_cli.plan.growth import growing_axes
from widen_cli.plan.in_layers import InLayer, InLayers, grown_most, shared_partials, unfit_layers
from widen_cli.plan.layer_growth import by_range, layer_count, layer_factors, said_ranges
from widen_cli.plan.layouts import Arrangement, arrange, side_by_side
from widen_cli.plan.made import scaled_scalars, with_divisors, with_scalars
from widen_cli.plan.match import Match, StoredHeader, match_tensors
from widen_cli.plan.modes import MODES
from widen_cli.plan.numbered import numbered_heads
from widen_cli.plan.offers import NoScalingError, exact_alone, with_offer
from widen_cli.plan.packed import NUMBERS, PackedWeight
from widen_cli.plan.partial import Partials, partial_output
from widen_cli.plan.request import PlanRequest
from widen_cli.plan.result import Gradient, Plan, TensorPlan
from widen_cli.plan.rotary import (
    divisors,
    rotary_changes,
    slower_copies,
)
from widen_cli.plan.shares import share_changes
from widen_cli.plan.sizes import Sizes, told_by_no_tensor
from widen_cli.plan.spaces import SpaceScales
from widen_cli.plan.splits import Ties, UnfitSplitError, with_split
from widen_cli.plan.trees import TreeBuilder, UnfitTypeError, UnknownSizeError, unfilled
from widen_cli.plan.untie import untied
from widen_cli.scales import ONE


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
    grow, ranges = by_range(architecture, sizes, request.grow, request.layers)
    request = replace(request, grow=grow, layers=ranges)
    grown = growing(architecture, match, sizes, config, request)
    layered = layer_factors(architecture, sizes, grown.growth.factors, request.layers)
    shared = shared_partials(sizes, grown.growth.factors, layered, grown.rotary.axes)
    check_requirements(architecture, sizes, grown.growth.factors, printable(request.file), layered)
    planner = _Planner(architecture, match, sizes, grown, config, request, layered, shared)
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


class _Planner:
    def __init__(
        self,
        architecture: ArchitectureMap,
        match: Match,
        sizes: Sizes,
        grown: Growing,
        config: ModelConfig,
        request: PlanRequest,
        layered: dict[str, tuple[Factor, ...]],
        shared: Partials,
    ) -> None:
        self.architecture = architecture
        self.rotary = grown.rotary
        self.match = match
        self.sizes = sizes
        self.growth = grown.growth
        self.config = config
        self.request = request
        self.file = printable(request.file)
        self.spaces = SpaceScales(architecture, match, self.growth.factors, config, self.rotary, shared)
        self.changes = ConfigChanges(sizes, self.growth.factors, self.spaces, config, request.types.dtype, layered)
        self.in_layers = InLayers(
            sizes,
            self.growth.factors,
            layered,
            self.rotary.axes,
            shared,
            lambda partials: Filling(architecture, self.spaces, partials, request.fill),
        )
        self.kinds = tuple(self.in_layers.kinds())
        self.filling = self.in_layers.everywhere.filling
        layers = layer_count(architecture, sizes) or 0
        faults = dict.fromkeys(
            f"{self.said(kind, axis)}: {why}" for kind in self.kinds for axis, why in kind.filling.faults()
        )
        faults |= dict.fromkeys(unfit_layers(self.in_layers, layers, config))
        if faults:
            raise WidenError(*(f"{self.file}: {text}" for text in faults))
        self.warnings: list[str] = []

    def said(self, kind: InLayer, axis: str) -> str:
        """What makes an axis grow, as it was written or as it follows."""
        if axis in self.in_layers.layered:
            return f"--grow {axis}={kind.factors[axis]}{kind.at}"
        grows = f"{axis}={kind.factors[axis]}"
        return f"--grow {grows}" if axis in self.request.grow else f"{grows}, which follows from what was asked for"

    def plan(self, tensors: Sequence[StoredHeader]) -> Plan:
        if unmade := self.spaces.unmade():
            raise WidenError(
                *(
                    f"{self.file}: tensor '{printable(self.match.written(pattern))}' reads {name}, which no tensor of the file makes; "
                    "what the config says of the model is not so, or the map is that of another"
                    for pattern, name in unmade
                )
            )
        mode, why, scales = self.choice().of(self.request.scaling)
        arranged = self.arranged(tensors, mode, scales)
        config = self.changes.all(scales) + rotary_changes(self.architecture, self.config, self.rotary, self.pairs())
        config += share_changes(self.architecture, self.config, self.rotary, self.pairs())
        factors, layered = self.growth.factors, self.in_layers.layered
        doubts = Doubts(self.match, self.sizes, self.spaces, factors, layered, self.rotary, self.config, self.request)
        self.warnings += doubts.lines()
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
            outputs=self.outputs(scales),
            layout=arranged.layout,
            scalars=scaled_scalars(self.architecture, arranged.tensors),
            layers=tuple(map(str, said_ranges(self.in_layers.layered, self.request.layers, self.sizes))),
            approximate=self.rotary.approximate,
            gradients=self.gradients(mode, scales, arranged.layout) if self.request.gradients else {},
            numbered=numbered_heads(
                self.sizes,
                self.growth.factors,
                self.filling.partials,
                lambda axis: self.rotary.tiles(axis, arranged.layout == "tile"),
            ),
        )

    def choice(self) -> Choice:
        """What the laws of this checkpoint leave to choose from."""
        stored = [item.tensor for item in self.match.matched]
        return Choice(
            self.spaces,
            self.match,
            self.request.types,
            self.file,
            writable=lambda scales: self.config.present or not self.changes.epsilons(scales),
            plans=lambda mode, scales: self.arranged(stored, mode, scales).tensors,
        )

    def gradients(self, mode: str, scales: dict[str, Any], layout: str) -> dict[str, Gradient]:
        """What becomes of every matched tensor's gradient."""
        builders: dict[int, GradientBuilder] = {}
        found: dict[str, Gradient] = {}
        for item in self.match.matched:
            here = self.in_layers.at(item.layer(self.architecture))
            if id(here) not in builders:
                builders[id(here)] = GradientBuilder(here, scales, self.spaces, MODES[mode], layout, self.rotary)
            found[item.tensor.name] = builders[id(here)].gradient(item, self.match)
        return found

    def arranged(self, tensors: Sequence[StoredHeader], mode: str, scales: dict[str, Any]) -> Arrangement:
        """The tensors' plans, with copies laid as was asked for or as quantised blocks allow."""
        uneven = side_by_side(self.match, self.kinds)
        return arrange(
            self.request.layout,
            lambda layout: self.tensor_plans(tensors, mode, scales, layout),
            uneven,
            self.file,
            anyhow=self.request.back,
        )

    def tensor_plans(
        self, tensors: Sequence[StoredHeader], mode: str, scales: dict[str, Any], layout: str
    ) -> tuple[TensorPlan, ...]:
        silent, first = self.spaces.silent(MODES[mode]), self.spaces.first_copies()
        builders = {id(kind): TreeBuilder(kind, scales, silent, layout, self.rotary, first) for kind in self.kinds}
        matched = {item.tensor.name: item for item in self.match.matched}
        carried = {tensor.name for tensor in self.match.carried}
        grids = {grid.name for grid in self.match.grids.values()}
        planned: list[TensorPlan] = []
        unknown: dict[str, str] = {}
        unsplit: dict[str, list[StoredHeader]] = {}
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
                    here = self.in_layers.at(item.layer(self.architecture))
                    made = builders[id(here)].tensor_plan(item, self.match, target)
                    times = self.request.times.get(tensor.name, ONE)
                    made = replace(made, scale=made.scale * times, seed=self.request.seed)
                    planned += self.with_grid(
                        with_split(made, item, self.request.split, tied, here.filling.without_copies)
                    )
                except (UnfitTypeError, UnfitGridError) as error:
                    unfit.add(f"{self.file}: {error}")
                except UnfitSplitError as error:
                    unsplit.setdefault(str(error), []).append(tensor)
                except UnknownSizeError as error:
                    unknown.update({axis: tensor.name for axis in error.axes if axis not in unknown})
        for text, those in unsplit.items():
            hold = "tensor '{}' holds" if len(those) == 1 else f"tensor '{{}}' and {len(those) - 1} more hold"
            unfit.add(f"{self.file}: {hold.format(printable(those[0].name))} {text}")
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
        last = "" if hidden is None else self.wide_output(hidden, scales, layout)
        if last:
            yield f"hidden states, where they are the output, {last}"
        for name, space in self.outputs(scales).items():
            how = self.wide_output(space, scales, layout)
            if name == OF_LAYERS:
                if how and how != last:
                    yield f"hidden states of layers, where they are an output ({name}), but for the last, {how}"
            elif how:
                yield f"{name}, where it is an output: its values {how}"

    def output(self, scales: dict[str, Any]) -> str | None:
        """The space of a bare model's hidden states."""
        return next((space for space in self.architecture.output if space in scales), None)

    def outputs(self, scales: dict[str, Any]) -> dict[str, str]:
        """The spaces of what else the model puts out."""
        named = self.architecture.outputs.items()
        return {
            name: found for name, spaces in named if (found := next((one for one in spaces if one in scales), None))
        }

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
        ties = Ties(self.sizes, grown_most(self.kinds), axes, pairs, self.rotary.once)
        note = ties.note(self.request.split, plans, matched)
        if self.request.split and note is None:
            self.warnings.append(f"{self.request.split}: no weight reads an axis that grows, so it has no effect")
        return [note] if note else []
