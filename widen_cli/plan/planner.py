"""Makes the plan: matches, sizes, growth, laws, then a growth tree for every tensor and the config's changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.changes import ConfigChanges
from widen_cli.plan.checks import check_input, check_requirements
from widen_cli.plan.equalities import equalities
from widen_cli.plan.grids import UnfitGridError, apart, block_size, with_grid
from widen_cli.plan.growth import AxisGrowth, axis_growth, growing_axes, position_axes, position_calls
from widen_cli.plan.layouts import Arrangement, arrange
from widen_cli.plan.made import with_divisors, with_scalars
from widen_cli.plan.match import Match, StoredHeader, match_tensors, surplus_layers
from widen_cli.plan.modes import MODES
from widen_cli.plan.packed import NUMBERS, PackedWeight
from widen_cli.plan.result import Plan, TensorPlan
from widen_cli.plan.rotary import Rotary, divisors, rotary_changes, rotary_method, why_none
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.spaces import SpaceScales, config_condition
from widen_cli.plan.splits import Asked, Ties, UnfitSplitError, with_split
from widen_cli.plan.trees import TreeBuilder, UnfitTypeError, UnknownSizeError
from widen_cli.plan.untie import untied
from widen_cli.plan.written import WrittenTypes
from widen_cli.scales import ContradictionError


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for and, in `settings`, said of the model; `file` is the input's name in messages.

    `root` stands in front of all tensor names that the map knows.
    """

    file: str
    factor: int | None = None
    grow: dict[str, int] = field(default_factory=dict)
    scaling: str = "auto"
    types: WrittenTypes = field(default_factory=WrittenTypes)
    settings: dict[str, Any] = field(default_factory=dict)
    layout: str = "auto"
    rope: str | None = None
    root: str = ""
    untie: bool = False
    split: Asked = field(default_factory=Asked)


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
    check_requirements(architecture, sizes, grown.growth.factors, printable(request.file))
    planner = _Planner(architecture, match, sizes, grown.growth, config, request, grown.rotary)
    plan = planner.plan(tensors)
    if plan.exact or plan.mode == "orthogonal" or not planner.spaces.ties:
        return plan
    return _with_offer(plan, lambda: make_plan(architecture, tensors, config, replace(request, untie=True)))


def _with_offer(plan: Plan, untied_plan: Callable[[], Plan]) -> Plan:
    """The plan with a note where it rounds values and that of the untied model would not."""
    try:
        exact = untied_plan().exact
    except WidenError:
        return plan
    note = (
        "a tied weight takes a factor that rounds; with --untie, which writes it twice, nothing is rounded for certain"
    )
    return replace(plan, notes=(*plan.notes, note)) if exact else plan


@dataclass(frozen=True)
class Growing:
    """The factor of every axis, and how heads grow under rotary positions."""

    growth: AxisGrowth
    rotary: Rotary


def growing(
    architecture: ArchitectureMap, match: Match, sizes: Sizes, config: ModelConfig, request: PlanRequest
) -> Growing:
    """What the request makes grow. Raises WidenError with every axis that cannot grow so."""
    calls = list(position_calls(architecture, lambda node: config_condition(architecture, config, node)))
    positions = position_axes(architecture, calls)
    method = rotary_method(architecture, config, request.rope)
    fixed = {kind: axes for kind, axes in positions.items() if kind != "rope" or method is None}
    by_heads = _by_heads(architecture, match, positions, request.types)
    equal = equalities(architecture, sizes)
    why = why_none(architecture, config)
    growth = axis_growth(architecture, request.factor, request.grow, by_heads, fixed, equal, why)
    axes = frozenset(axis for kind, axis in calls if kind == "rope")
    rotary = Rotary(method or "", axes, max((growth.factors[axis] for axis in axes), default=1))
    return Growing(growth, rotary)


def _by_heads(architecture: ArchitectureMap, match: Match, positions: dict[str, set[str]], types: WrittenTypes) -> bool:
    """Whether attention grows by more heads by default, if it can: under rotary positions, and for less than 32 bits.

    The factor that a larger head size needs, r**(-1/4), would be rounded in half precision.
    """
    head_dim = architecture.growth.head_dim
    if head_dim is None or {head_dim, *architecture.growth.with_head_dim} & positions.get("rope", set()):
        return True
    heads = architecture.growth.heads
    if not heads or any(axis in positions.get("alibi", set()) for axis in heads):
        return False
    return any(types.cast(item.tensor.dtype).bits < 32 for item in match.matched)


class _Planner:
    def __init__(
        self,
        architecture: ArchitectureMap,
        match: Match,
        sizes: Sizes,
        growth: AxisGrowth,
        config: ModelConfig,
        request: PlanRequest,
        rotary: Rotary,
    ) -> None:
        self.architecture = architecture
        self.rotary = rotary
        self.match = match
        self.sizes = sizes
        self.growth = growth
        self.config = config
        self.request = request
        self.file = printable(request.file)
        self.spaces = SpaceScales(architecture, match, growth.factors, config, rotary)
        self.changes = ConfigChanges(sizes, growth.factors, self.spaces, config, request.types.dtype)
        self.warnings: list[str] = []

    def plan(self, tensors: Sequence[StoredHeader]) -> Plan:
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
                *self.assumptions(),
                *self.wide_output(scales, arranged.layout),
                *self.parting(arranged.tensors),
            ),
            warnings=tuple(self.warnings),
            axes=tuple(
                name
                for name, axis in self.architecture.axes.items()
                if not axis.fixed and (axis.keys or name == self.architecture.growth.head_dim)
            ),
            equal_pairs=self.spaces.stored_ties(),
            output=self.architecture.output,
        )

    def arranged(self, tensors: Sequence[StoredHeader], mode: str, scales: dict[str, Any]) -> Arrangement:
        """The tensors' plans, with copies laid as was asked for or as quantised blocks allow."""
        heads = [axis for axis in self.architecture.growth.heads if self.sizes.known.get(axis) != 1]
        uneven = None
        if len({self.growth.factors[axis] for axis in heads}) > 1:
            uneven = f"{' and '.join(heads)} have to grow by one factor, or heads would read others' keys"
        return arrange(
            self.request.layout, lambda layout: self.tensor_plans(tensors, mode, scales, layout), uneven, self.file
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
            raise WidenError(
                f"{self.file}: no scaling keeps the function of this checkpoint, because {_listed(reasons)}{self.untying('copy')}"
            )
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
        builder = TreeBuilder(self.sizes, self.growth.factors, scales, silent, layout, self.rotary, first)
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
                    plan = with_split(builder.tensor_plan(item, self.match, target), item, self.request.split, tied)
                    planned += self.with_grid(plan)
                except (UnfitTypeError, UnfitGridError, UnfitSplitError) as error:
                    unfit.add(f"{self.file}: {error}")
                except UnknownSizeError as error:
                    unknown.update({axis: tensor.name for axis in error.axes if axis not in unknown})
        if unfit.texts:
            raise WidenError(*unfit.texts)
        if unknown:
            raise WidenError(self.needs(unknown))
        return self.with_made(with_scalars(self.architecture, planned))

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
        rope, factor = self.architecture.rope, self.rotary.factor
        if rope is None or rope.tensor is None or self.rotary.method != "frequencies" or factor == 1:
            return planned
        pairs = self.pairs()
        return with_divisors(planned, rope.tensor, pairs, divisors(self.config, self.architecture, factor, 2 * pairs))

    def pairs(self) -> int:
        """How many rotary pairs an old head has; 0 where there is none, or nothing tells."""
        return next((self.sizes.known.get(axis, 0) for axis in self.rotary.axes), 0)

    def needs(self, unknown: dict[str, str]) -> str:
        """What to say of axes whose sizes nothing tells; `unknown` names for each a tensor that holds a product with it."""
        keys = list(
            dict.fromkeys(key for name in self.architecture.axes if name in unknown for key in self.telling(name))
        )
        more = f"; where that is not enough, {' and '.join(keys[1:])} too" if keys[1:] else ""
        return (
            f"{self.file}: the tensors alone do not tell {', '.join(unknown)} "
            f"('{printable(next(iter(unknown.values())))}' holds only a product with it); "
            f"give --config, or --set {keys[0] if keys else 'the missing size'}=N{more}"
        )

    def telling(self, name: str) -> list[str]:
        """The config keys that tell an unknown axis: its own, or for one that is computed those of what it comes from."""
        if name in self.sizes.known:
            return []
        axis = self.architecture.axes.get(name)
        if axis is None or not axis.computed or axis.size is None:
            return [name] if axis is None else list(axis.keys[:1])
        roots = [key for word in axis.size.words for key in self.telling(word)]
        return roots if name != self.architecture.growth.head_dim else []

    def assumptions(self) -> list[str]:
        """What was taken on the user's word: no shape can tell it."""
        settings = ", ".join(f"{key} = {value}" for key, value in self.request.settings.items())
        return [f"taken from --set: {settings}"] if settings else []

    def wide_output(self, scales: dict[str, Any], layout: str) -> list[str]:
        """How a bare model's hidden states come out; heads undo it."""
        space = self.architecture.output
        if space is None or space not in scales:
            return []
        copies = self.spaces.factor(space)
        if copies == 1 and scales[space].is_one:
            return []
        how = "as a whole (x0 x1 x0 x1)" if layout == "tile" else "side by side (x0 x0 x1 x1)"
        times = "" if scales[space].is_one else f", times {scales[space]}"
        return [f"hidden states, where they are the output, stand {copies}x {how}{times}"]

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
