"""Which parameter an optimizer's numbers mean: its file knows none by name, so the order of the model's parameters has to tell.

A Trainer has two groups, of parameters that decay and of those that do not; a loop over model.parameters() has one. The
numbers and shapes of all groups have to fit one of these orders and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from widen_cli.errors import WidenError, printable
from widen_cli.moments.parts import Part
from widen_cli.torch_optimizer import OptimizerState

ONE_GROUP = "one group of all parameters"
SHOWN = 4


@dataclass(frozen=True)
class Order:
    """A model's parameters as its library orders them: all names of each in memory, its shape, rules of which decay, and the
    tensors that it is made of where these have other names in a checkpoint or are several."""

    kind: str
    names: Mapping[str, Sequence[str]]
    shapes: Mapping[str, tuple[int, ...]]
    decays: Sequence[Sequence[str]]
    stored: Mapping[str, tuple[Part, ...]]

    @classmethod
    def of(cls, answer: Mapping[str, Any], model: str) -> Order:
        """The order that a child process answered with; WidenError where its library does not know the `model`."""
        if "fault" in answer:
            raise WidenError(
                f"{printable(model)}: --optimizer needs the order of its parameters, and {printable(answer['fault'])}"
            )
        shapes = {name: tuple(shape) for name, shape in answer["shapes"].items()}
        stored = {name: tuple(map(Part.of, parts)) for name, parts in answer["stored"].items()}
        return cls(answer["class"], answer["names"], shapes, answer["decays"], stored)

    def made_of(self, name: str) -> Iterator[tuple[Part, ...]]:
        """What a parameter may be made of: the tensors that its library saves it as, or one under any of its names in memory."""
        if name in self.stored:
            yield self.stored[name]
        for alias in self.names[name]:
            yield (Part.whole(alias, self.shapes[name]),)

    @cached_property
    def owners(self) -> dict[tuple[str, ...], tuple[str, tuple[Part, ...]]]:
        """The parameter that is made of tensors of these names, in this order, and how."""
        found: dict[tuple[str, ...], tuple[str, tuple[Part, ...]]] = {}
        for parameter in self.names:
            for parts in self.made_of(parameter):
                found.setdefault(tuple(part.name for part in parts), (parameter, parts))
        return found

    def groupings(self) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
        """The groups in which optimizers may number the parameters, each with what makes them so."""
        for version, decay in zip(("5", "4"), self.decays, strict=True):
            rest = tuple(name for name in self.names if name not in {*decay})
            yield f"the Trainer of transformers {version}", (tuple(decay), rest)
        yield ONE_GROUP, (tuple(self.names),)


@dataclass(frozen=True)
class Numbered:
    """The names of a narrow model's and of its wide form's parameters, group by group, as their optimizers number them."""

    narrow: tuple[tuple[str, ...], ...]
    wide: tuple[tuple[str, ...], ...]


def numbered(state: OptimizerState, narrow: Order, wide: Order, sources: Mapping[str, str]) -> Numbered:
    """What the numbers in a state mean; `sources` are the narrow parameters that wide ones are made of. Raises WidenError where
    no order fits, or several do."""
    if any(group.names is not None for group in state.groups):
        return _by_names(state, narrow, wide, sources)
    fitting: list[Numbered] = []
    faults: list[str] = []
    for (told, groups), (_, others) in zip(narrow.groupings(), wide.groupings(), strict=True):
        fault = _unfit(state, groups, narrow)
        if fault:
            faults.append(f"{told} has {fault}")
        elif Numbered(groups, others) not in fitting:
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


def _by_names(state: OptimizerState, narrow: Order, wide: Order, sources: Mapping[str, str]) -> Numbered:
    """By the names that the file itself has: a wide parameter is in the group of the one it is made of, and has its rank there."""
    if any(group.names is None for group in state.groups):
        raise WidenError(f"{state.name}: some of its groups have names of parameters (param_names) and some have none")
    groups = tuple(group.names or () for group in state.groups)
    unknown = [name for group in groups for name in group if name not in narrow.names]
    if unknown:
        raise WidenError(f"{state.name}: names parameters that {narrow.kind} has not: {_listed(unknown)}")
    if fault := _unfit(state, groups, narrow):
        raise WidenError(f"{state.name}: {narrow.kind} has {fault}")
    if narrow.names.keys() == wide.names.keys():
        return Numbered(groups, groups)
    rank = {name: number for number, name in enumerate(narrow.names)}
    if any(list(group) != sorted(group, key=rank.__getitem__) for group in groups):
        raise WidenError(
            f"{state.name}: names its parameters in an order of their own, which says nothing of those that are new; save the "
            f"state of an optimizer that has each group in the order of {narrow.kind}'s parameters"
        )
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    placed: list[list[str]] = [[] for _ in groups]
    alone = [name for name in wide.names if name not in sources]
    if alone:
        raise WidenError(
            f"{state.name}: names its parameters, and no old one tells the group of {_listed(alone)}; save it without names "
            "(an optimizer made of model.parameters()), or leave --optimizer out"
        )
    for name in wide.names:
        if sources[name] in group_of:
            placed[group_of[sources[name]]].append(name)
    return Numbered(groups, tuple(map(tuple, placed)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{printable(name)}'" for name in names[:SHOWN]) + (" ..." if names[SHOWN:] else "")


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
