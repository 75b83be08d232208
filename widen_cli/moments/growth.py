"""What becomes of every parameter's moments: which grow, by what factors, and which begin anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from widen_cli.dimensions import raised
from widen_cli.errors import WidenError, first_of, printable
from widen_cli.moments.orders import Numbered, Order, numbered
from widen_cli.plan import Plan, TensorPlan
from widen_cli.plan.gradients import first_copies
from widen_cli.plan.result import NEW_EXPERTS, Gradient
from widen_cli.safetensors_file import StoredTensor
from widen_cli.torch_optimizer import POWERS, OptimizerState

KEEP, RESET_NEW = CHOICES = ("keep", "reset-new")
SHOWN = 3
# Adam counts steps once for a tensor: entries whose moments are zero late in training move by more than the learning rate.
HASTE = (
    "they begin at zero while Adam's count of steps goes on, and so move by up to 6.6 times the learning rate at first"
)


@dataclass(frozen=True)
class Moment:
    """One tensor of the state: where its bytes are, and how they grow."""

    stored: StoredTensor
    plan: TensorPlan


@dataclass(frozen=True)
class GrownState:
    """The wide optimizer's state: the moments by `NUMBER.KEY`, the groups by numbers and names, and for each number the one
    in the narrow state that it comes from. `told` says what is not carried over."""

    moments: tuple[Moment, ...]
    origins: Mapping[int, int]
    groups: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    told: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(moment.plan.dtype.nbytes(moment.plan.shape) for moment in self.moments)


def grown_state(plan: Plan, state: OptimizerState, narrow: Order, wide: Order, choice: str) -> GrownState:
    """The state for the wide model of a plan. Raises WidenError where parameters and tensors do not belong together."""
    tensors = {name: tensor for tensor in plan.tensors for name in tensor.names}
    found = {name: _written(name, wide, tensors) for name in wide.names}
    names = numbered(state, narrow, wide, _sources(plan, found, narrow))
    numbers = _numbers(state, names, narrow)
    faults = [
        f"'{printable(name)}' {list(wide.shapes[name])}"
        for group in names.wide
        for name in group
        # Experts that are made anew are stored one by one, and loaded as one parameter.
        if found[name] is None and not plan.made_of
    ]
    if faults:
        raise WidenError(
            f"{state.name}: --optimizer goes by names, and {wide.kind} has parameters that are no tensors of the checkpoint: "
            f"{first_of(faults, SHOWN)}; leave it out to begin with a new one"
        )
    moments: list[Moment] = []
    origins: dict[int, int] = {}
    groups: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    anew: dict[str, list[str]] = {}
    unknown: dict[str, int] = {}
    number = 0
    for group in names.wide:
        groups.append((tuple(range(number, number + len(group))), group))
        for name in group:
            tensor = found[name]
            if tensor is None:
                anew.setdefault(NEW_EXPERTS, []).append(name)
                number += 1
                continue
            gradient = plan.gradients.get(tensor.source.name, Gradient(reason="the plan says nothing of it"))
            origin = numbers.get(gradient.origin or tensor.source.name)
            if gradient.reason and (origin is None or origin in state.moments):
                anew.setdefault(gradient.reason, []).append(tensor.pattern)
            elif origin is not None and origin in state.moments:
                origins[number] = origin
                moments += _grown(number, state.moments[origin], tensor, gradient, choice)
                if gradient.unknown and choice == KEEP:
                    unknown[tensor.pattern] = unknown.get(tensor.pattern, 0) + gradient.unknown
            number += 1
    told = tuple(_told(anew, unknown, moments, choice))
    return GrownState(tuple(moments), origins, tuple(groups), told)


def _numbers(state: OptimizerState, names: Numbered, narrow: Order) -> dict[str, int]:
    """The number of every narrow parameter, by all of its names."""
    pairs = (
        (number, name)
        for group, called in zip(state.groups, names.narrow, strict=True)
        for number, name in zip(group.numbers, called, strict=True)
    )
    return {alias: number for number, name in pairs for alias in narrow.names[name]}


def _written(name: str, wide: Order, tensors: Mapping[str, TensorPlan]) -> TensorPlan | None:
    """The plan of the tensor that a parameter is loaded from, under any of its names."""
    found = next((tensors[alias] for alias in wide.names[name] if alias in tensors), None)
    return found if found is not None and found.shape == wide.shapes[name] else None


def _sources(plan: Plan, found: Mapping[str, TensorPlan | None], narrow: Order) -> dict[str, str]:
    """The narrow parameter that each wide one is made of, where there is one."""
    own = {alias: name for name, aliases in narrow.names.items() for alias in aliases}
    stored = {
        name: (plan.gradients[tensor.source.name].origin if tensor.source.name in plan.gradients else "")
        or tensor.stored_name
        for name, tensor in found.items()
        if tensor is not None
    }
    return {name: own[origin] for name, origin in stored.items() if origin in own}


def _grown(
    number: int, stored: Mapping[str, StoredTensor], tensor: TensorPlan, gradient: Gradient, choice: str
) -> Iterator[Moment]:
    """A parameter's moments: each entry the narrow one's times the gradients' factor, in the power that the moment has of them."""
    for key, moment in stored.items():
        growth = tuple(raised(tree, POWERS[key]) for tree in gradient.growth)
        if choice == RESET_NEW:
            growth = tuple(first_copies(tree) for tree in growth)
        source = replace(moment, name=f"{number}.{key}")
        scale = gradient.scale ** POWERS[key]
        yield Moment(source, TensorPlan(source, (source.name,), tensor.pattern, moment.dtype, growth, scale))


def _told(
    anew: Mapping[str, list[str]], unknown: Mapping[str, int], moments: list[Moment], choice: str
) -> Iterator[str]:
    for reason, patterns in anew.items():
        yield f"--optimizer: the moments of {_counted(len(patterns), 'parameter')} begin anew: {reason}: {_listed(patterns)}"
    if unknown:
        yield (
            f"--optimizer: nothing is known of the gradients of {sum(unknown.values())} new entries: {HASTE}; warm up: "
            f"{_listed([*unknown])}"
        )
    if choice == RESET_NEW and any(moment.plan.shape != moment.plan.source.shape for moment in moments):
        yield f"--optimizer {RESET_NEW}: of the moments of new entries {HASTE}; warm up, or give keep"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _listed(patterns: list[str]) -> str:
    return first_of(list(dict.fromkeys(map(printable, patterns))), SHOWN)
