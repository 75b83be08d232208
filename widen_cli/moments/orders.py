"""Which parameter an optimizer's numbers mean: its file knows none by name, so the order of the model's parameters has to tell.

A Trainer has two groups, of parameters that decay and of those that do not; a loop over model.parameters() has one. The
numbers and shapes of all groups have to fit one of these orders and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widen_cli.errors import WidenError, printable
from widen_cli.torch_optimizer import OptimizerState

ONE_GROUP = "one group of all parameters"
SHOWN = 4


@dataclass(frozen=True)
class Order:
    """A model's parameters as its library orders them: all other names of each, its shape, and rules of which decay."""

    kind: str
    names: Mapping[str, Sequence[str]]
    shapes: Mapping[str, tuple[int, ...]]
    decays: Sequence[Sequence[str]]

    @classmethod
    def of(cls, answer: Mapping[str, Any], model: str) -> Order:
        """The order that a child process answered with; WidenError where its library does not know the `model`."""
        if "fault" in answer:
            raise WidenError(
                f"{printable(model)}: --optimizer needs the order of its parameters, and {printable(answer['fault'])}"
            )
        shapes = {name: tuple(shape) for name, shape in answer["shapes"].items()}
        return cls(answer["class"], answer["names"], shapes, answer["decays"])

    def groupings(self) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
        """The groups in which optimizers may number the parameters, each with what makes them so."""
        seen: list[Sequence[str]] = []
        for version, decay in zip(("5", "4"), self.decays, strict=True):
            if decay not in seen:
                seen.append(decay)
                rest = tuple(name for name in self.names if name not in {*decay})
                yield f"the Trainer of transformers {version}", (tuple(decay), rest)
        yield ONE_GROUP, (tuple(self.names),)


@dataclass(frozen=True)
class Numbered:
    """The names of a narrow model's and of its wide form's parameters, group by group, as their optimizers number them."""

    narrow: tuple[tuple[str, ...], ...]
    wide: tuple[tuple[str, ...], ...]


def numbered(state: OptimizerState, narrow: Order, wide: Order) -> Numbered:
    """What the numbers in a state mean. Raises WidenError where no order fits, or several do."""
    if any(group.names is not None for group in state.groups):
        return _by_names(state, narrow, wide)
    fitting: list[Numbered] = []
    faults: list[str] = []
    for (told, groups), (_, others) in zip(narrow.groupings(), wide.groupings(), strict=False):
        fault = _unfit(state, groups, narrow)
        if fault:
            faults.append(f"{told} has {fault}")
        else:
            fitting.append(Numbered(groups, others))
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise WidenError(
            f"{state.name}: several orders of {narrow.kind}'s parameters fit; save the state of an optimizer that is made of "
            "model.named_parameters(), which holds their names"
        )
    held = ", ".join(str(len(group.numbers)) for group in state.groups)
    raise WidenError(
        f"{state.name}: its groups of {held} parameters are no order of {narrow.kind}'s that is known: {'; '.join(faults)}; "
        "save the state of an optimizer that is made of model.named_parameters(), which holds their names"
    )


def _unfit(state: OptimizerState, groups: tuple[tuple[str, ...], ...], order: Order) -> str:
    """In what a state differs from an order, empty where it fits."""
    sizes = [len(group) for group in groups]
    if [len(group.numbers) for group in state.groups] != sizes:
        return f"{' and '.join(map(str, sizes))} parameters"
    for group, names in zip(state.groups, groups, strict=True):
        for number, name in zip(group.numbers, names, strict=True):
            held = next(iter(state.moments.get(number, {}).values()), None)
            if held is not None and held.shape != order.shapes[name]:
                return (
                    f"'{printable(name)}' {_shape(order.shapes[name])} where parameter {number} is {_shape(held.shape)}"
                )
    return ""


def _by_names(state: OptimizerState, narrow: Order, wide: Order) -> Numbered:
    """By the names that the file itself has."""
    if any(group.names is None for group in state.groups):
        raise WidenError(f"{state.name}: some of its groups have names of parameters (param_names) and some have none")
    groups = tuple(group.names or () for group in state.groups)
    unknown = [name for group in groups for name in group if name not in narrow.names]
    if unknown:
        shown = ", ".join(f"'{printable(name)}'" for name in unknown[:SHOWN]) + (" ..." if unknown[SHOWN:] else "")
        raise WidenError(f"{state.name}: names parameters that {narrow.kind} has not: {shown}")
    if narrow.names.keys() != wide.names.keys():
        raise WidenError(
            f"{state.name}: names its parameters, and the wide model has others (--untie); leave --optimizer or --untie out"
        )
    if fault := _unfit(state, groups, narrow):
        raise WidenError(f"{state.name}: {narrow.kind} has {fault}")
    return Numbered(groups, groups)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
