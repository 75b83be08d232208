"""Layers and experts that a model was given before it was widened: left out again, or folded as the copies that they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from widen_cli.collapse.fold import Fold
from widen_cli.dimensions import Copies, times
from widen_cli.errors import WidenError, printable
from widen_cli.map_rules import ArchitectureMap, Upcycle, name_pattern
from widen_cli.options import Options
from widen_cli.plan.match import Match, match_tensors
from widen_cli.plan.narrowing import Header, Narrow
from widen_cli.plan.result import TensorPlan
from widen_cli.records import Built, Stack
from widen_cli.safetensors_file import StoredTensor
from widen_cli.scales import Scale
from widen_cli.shapes import Name

Folds = dict[str, Fold]


def refuse_lost(file: str, options: Options, built: Built | None) -> None:
    """Raises WidenError where layers or experts were made and nothing records of what, or where layers were left out."""
    made = [f"--depth {printable(text)}" for text in options.depth]
    made += [f"--experts {options.experts}"] if options.experts is not None else []
    if made and built is None:
        raise WidenError(
            f"{printable(file)}: was made with {' '.join(made)}, and only its record tells what was made of what; give --record with "
            "the model as it was written then"
        )
    for stack in built.stacks.values() if built else ():
        kept = {layer for layer in stack.layers if layer >= 0}
        if lost := [str(layer) for layer in range(stack.count) if layer not in kept]:
            raise WidenError(
                f"{printable(file)}: was made with {' '.join(made)}, which left out layers {', '.join(lost)} of "
                f"{printable(stack.written)}: nothing brings these back; go on with the model that it was made of"
            )


# Layers.


def without_new_layers(folds: Mapping[str, Fold], stacks: Mapping[str, Stack]) -> Folds:
    """The folds under the old layers' names: a layer that stands several times is the mean of all, one that passes the stream
    on is left out, and what it has that was to write nothing is told beside what it was made of."""
    for stack in stacks.values():
        folds = _restacked(folds, stack)
    return dict(folds)


def _restacked(folds: Mapping[str, Fold], stack: Stack) -> Folds:
    numbered = re.compile(name_pattern(stack.written).pattern + r"(?=\.|$)")
    silent = [name_pattern(text) for text in stack.silent]
    fixed, found = {*stack.fixed}, Folds()
    beside: dict[str, list[StoredTensor]] = {}
    for name, fold in folds.items():
        hit = numbered.match(name) if name not in fixed else None
        start, stop = hit.span(hit.re.groups) if hit else (0, 0)
        if not name[start:stop].isdigit():
            found[name] = fold
            continue
        number = int(name[start:stop])
        behind = number - len(stack.layers) + stack.count
        source = stack.layers[number] if number < len(stack.layers) else behind
        old = f"{name[:start]}{source if source >= 0 else ~source}{name[stop:]}"
        if source >= 0:
            found[old] = _together(found[old], fold) if old in found else fold
        elif any(each.fullmatch(name) for each in silent):
            beside.setdefault(old, []).extend(fold.wide)
    for old, tensors in beside.items():
        found[old] = replace(found[old], silent=(*found[old].silent, *tensors))
    return found


def _together(one: Fold, other: Fold) -> Fold:
    """One tensor folded from the copies of both."""
    return replace(
        one,
        wide=(*one.wide, *other.wide),
        plans=(*_plans(one), *_plans(other)),
        more=tuple(_together(*pair) for pair in zip(one.more, other.more, strict=True)),
        silent=(*one.silent, *other.silent),
    )


def _plans(fold: Fold) -> tuple[TensorPlan, ...]:
    return tuple(fold.made_by(copy) for copy in range(len(fold.wide)))


# Experts.


@dataclass(frozen=True)
class Upcycling:
    """How a dense model of the map `source` became experts of the map `target`, so many of them, each one of `slices` of a copy."""

    source: ArchitectureMap
    target: ArchitectureMap
    experts: int
    slices: int

    @property
    def rules(self) -> Upcycle:
        assert self.target.upcycle is not None
        return self.target.upcycle

    def cut(self, pattern: str) -> tuple[int, bool]:
        """Which dimension of a dense weight is shared out between slices, and whether the weight reads it."""
        rule = next(rule for rule in self.source.tensors if rule.pattern == pattern)
        for number, dimension in enumerate(rule.shape.dimensions):
            axis = self.source.axis_of(dimension.term.text) if isinstance(dimension.term, Name) else None
            if axis is not None and axis.name == self.rules.axis:
                return number, dimension.role == "in"
        raise WidenError(f"{self.rules.place}: '{pattern}' does not lie on '{self.rules.axis}'")

    def times(self, tensors: Sequence[StoredTensor], match: Match) -> dict[str, Scale]:
        """The factors of their own that weights of slices were given, by the names that they have in `tensors`."""
        if self.slices == 1:
            return {}
        patterns = [
            name_pattern(match.written(new)) for pattern, new in self.rules.weights.items() if self.cut(pattern)[1]
        ]
        names = [tensor.name for tensor in tensors if any(each.fullmatch(tensor.name) for each in patterns)]
        return dict.fromkeys(names, Scale.of(self.slices))

    def dense(self, folds: Mapping[str, Fold], narrow: Narrow, root: str) -> Folds:
        """The folds of the dense model; routers and shared experts are left out."""
        match = match_tensors(self.target, narrow.headers, narrow.told, root)
        experts = {
            pattern: (name_pattern(match.written(new)), new.count("*") == pattern.count("*"))
            for pattern, new in self.rules.weights.items()
        }
        others = [*self.rules.routers, *self.rules.gates, *self.rules.shared.values()]
        gone = [name_pattern(match.written(pattern)) for pattern in others]
        found: dict[str, Fold | list[Fold]] = {}
        for name, fold in folds.items():
            hits = ((pattern, each.fullmatch(name), stacked) for pattern, (each, stacked) in experts.items())
            pattern, hit, stacked = next((hit for hit in hits if hit[1]), ("", None, False))
            if hit is not None and stacked:
                found[_named(match, pattern, hit.groups())] = self.stacked(fold, *self.cut(pattern)[:1])
            elif hit is not None:
                copies = found.setdefault(_named(match, pattern, hit.groups()[:-1]), [])
                assert isinstance(copies, list)
                copies.append(fold)
            elif not any(each.fullmatch(name) for each in gone):
                found[name] = fold
        dense = {
            name: fold if isinstance(fold, Fold) else self.numbered(fold, self.axis_of(match, name))
            for name, fold in found.items()
        }
        return self.with_shared(dense, folds, match)

    def axis_of(self, match: Match, name: str) -> int:
        """Which dimension of a dense weight is shared out, by its name."""
        pattern = next(each for each in self.rules.weights if name_pattern(match.written(each)).fullmatch(name))
        return self.cut(pattern)[0]

    def numbered(self, experts: Sequence[Fold], axis: int) -> Fold:
        """One dense weight of experts with names of their own, which stand in the order of their numbers."""
        slices = []
        for number in range(self.slices):
            first, *others = (experts[at] for at in range(number, len(experts), self.slices))
            for other in others:
                first = _together(first, other)
            slices.append(first)
        first, *more = slices
        first = replace(first, of_experts=True)
        if not more:
            return first
        return replace(first, more=tuple(more), beside=axis > 0, whole=_whole(first.shape, axis, self.slices))

    def stacked(self, fold: Fold, axis: int) -> Fold:
        """One dense weight of experts that are one tensor."""
        plan = fold.plan
        assert plan.growth is not None
        first, *others = plan.growth
        assert isinstance(first, Copies)
        copies = Copies(1, self.experts // self.slices, inner=Copies(self.slices))
        others[0] = times(others[0], first.scale)
        shape = (self.slices, *plan.source.shape[1:])
        header = Header(plan.source.name, plan.source.dtype, shape)
        return replace(
            fold,
            plan=replace(plan, source=header, growth=(copies, *others)),
            plans=(plan,),
            stacked=True,
            beside=axis > 0 and self.slices > 1,
            of_experts=True,
            whole=_whole(shape[1:], axis, self.slices),
        )

    def with_shared(self, dense: Folds, folds: Mapping[str, Fold], match: Match) -> Folds:
        """The dense folds with the shared expert's weights that write nothing."""
        for pattern, new in self.rules.shared.items():
            each = name_pattern(match.written(new))
            for name, fold in folds.items() if self.cut(pattern)[1] else ():
                if hit := each.fullmatch(name):
                    old = _named(match, pattern, hit.groups())
                    dense[old] = replace(dense[old], silent=(*dense[old].silent, *fold.wide))
        return dense


def _whole(shape: tuple[int, ...], axis: int, slices: int) -> tuple[int, ...]:
    return tuple(size * slices if number == axis else size for number, size in enumerate(shape))


def _named(match: Match, pattern: str, numbers: Sequence[str]) -> str:
    """A map's pattern as this checkpoint spells it, with its numbers."""
    parts: Iterator[str] = iter(numbers)
    return re.sub(r"\*", lambda _: next(parts), match.written(pattern))
