"""What becomes of every parameter's moments: which grow, by what factors, and which begin anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from widen_cli.dimensions import raised
from widen_cli.errors import WidenError, first_of, printable
from widen_cli.moments.orders import Numbered, Order, numbered
from widen_cli.moments.parts import Part, UnevenPartsError, joined
from widen_cli.plan import Plan, TensorPlan
from widen_cli.plan.gradients import first_copies
from widen_cli.plan.result import Gradient
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
    found = _loaded(plan, wide, state)
    sources = {name: narrow.owners[each.origins] for name, each in found.items() if each.origins in narrow.owners}
    names = numbered(state, narrow, wide, {name: owner for name, (owner, _) in sources.items()})
    numbers = _numbers(state, names)
    moments: list[Moment] = []
    origins: dict[int, int] = {}
    groups: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    anew: dict[str, list[str]] = {}
    unknown: dict[str, int] = {}
    number = 0
    for group in names.wide:
        groups.append((tuple(range(number, number + len(group))), group))
        for name in group:
            loaded, (owner, parts) = found[name], sources.get(name, ("", ()))
            origin = numbers.get(owner)
            gradient = _gradient(loaded, parts, narrow, owner, state)
            if gradient.reason and (origin is None or origin in state.moments):
                anew.setdefault(gradient.reason, []).append(loaded.pattern)
            elif origin is not None and origin in state.moments:
                origins[number] = origin
                moments += _grown(number, state.moments[origin], loaded.pattern, gradient, choice)
                if gradient.unknown and choice == KEEP:
                    unknown[loaded.pattern] = unknown.get(loaded.pattern, 0) + gradient.unknown
            number += 1
    told = tuple(_told(anew, unknown, moments, choice))
    return GrownState(tuple(moments), origins, tuple(groups), told)


@dataclass(frozen=True)
class Loaded:
    """What a wide parameter is loaded from: the plans of its tensors, in order, and their gradients."""

    tensors: tuple[TensorPlan, ...]
    gradients: tuple[Gradient, ...]

    @property
    def origins(self) -> tuple[str, ...]:
        """The narrow tensors that they come from."""
        pairs = zip(self.tensors, self.gradients, strict=True)
        return tuple(gradient.origin or tensor.stored_name for tensor, gradient in pairs)

    @property
    def pattern(self) -> str:
        return " and ".join(dict.fromkeys(tensor.pattern for tensor in self.tensors))


def _loaded(plan: Plan, wide: Order, state: OptimizerState) -> dict[str, Loaded]:
    """What every wide parameter is loaded from. Raises WidenError for those that are not in the checkpoint."""
    written = {name: tensor for tensor in plan.tensors for name in tensor.names}
    found: dict[str, Loaded] = {}
    faults: list[str] = []
    for name in wide.names:
        for parts in wide.made_of(name):
            tensors = tuple(written[part.name] for part in parts if part.name in written)
            if tuple(tensor.shape for tensor in tensors) == tuple(part.shape for part in parts):
                found[name] = Loaded(tensors, tuple(_gradient_of(plan, tensor) for tensor in tensors))
                break
        else:
            parts = next(wide.made_of(name))
            missing = next((part for part in parts if part.name not in written), parts[0])
            told = f"'{printable(name)}' {list(wide.shapes[name])}"
            faults.append(told if missing.name == name else f"{told} (of '{printable(missing.name)}')")
    if faults:
        raise WidenError(
            f"{state.name}: --optimizer goes by names, and {wide.kind} has parameters that are no tensors of the checkpoint: "
            f"{first_of(faults, SHOWN)}; leave it out to begin with a new one"
        )
    return found


def _gradient_of(plan: Plan, tensor: TensorPlan) -> Gradient:
    return plan.gradients.get(tensor.source.name, Gradient(reason="the plan says nothing of it"))


def _gradient(loaded: Loaded, parts: tuple[Part, ...], narrow: Order, owner: str, state: OptimizerState) -> Gradient:
    """What becomes of the gradient of a parameter, whose tensors lie in the narrow `owner` as `parts` say, if it has one."""
    if not parts:
        reasons = (gradient.reason for gradient in loaded.gradients if gradient.reason)
        return Gradient(reason=next(reasons, ""))
    try:
        return joined(narrow.shapes[owner], list(zip(parts, loaded.gradients, strict=True)))
    except UnevenPartsError:
        raise WidenError(
            f"{state.name}: '{printable(owner)}' is one parameter of {narrow.kind}'s, and its parts ({printable(loaded.pattern)}) "
            "grow each in its own way; leave --optimizer out to begin with a new one"
        ) from None


def _numbers(state: OptimizerState, names: Numbered) -> dict[str, int]:
    """The number of every narrow parameter."""
    return {
        name: number
        for group, called in zip(state.groups, names.narrow, strict=True)
        for number, name in zip(group.numbers, called, strict=True)
    }


def _grown(
    number: int, stored: Mapping[str, StoredTensor], pattern: str, gradient: Gradient, choice: str
) -> Iterator[Moment]:
    """A parameter's moments: each entry the narrow one's times the gradients' factor, in the power that the moment has of them."""
    for key, moment in stored.items():
        growth = tuple(raised(tree, POWERS[key]) for tree in gradient.growth)
        if choice == RESET_NEW:
            growth = tuple(first_copies(tree) for tree in growth)
        source = replace(moment, name=f"{number}.{key}")
        scale = gradient.scale ** POWERS[key]
        yield Moment(source, TensorPlan(source, (source.name,), pattern, moment.dtype, growth, scale))


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
