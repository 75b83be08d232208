"""The tensors of a mixture of experts, made of a dense model's: copies or slices of its feed-forward weights, and routers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from widen_cli.dtypes import STORED, DType
from widen_cli.errors import Faults, WidenError, printable
from widen_cli.map_rules import ArchitectureMap, TensorRule, Upcycle, name_pattern
from widen_cli.plan.match import Match, Matched
from widen_cli.rebuild.wish import Wish
from widen_cli.safetensors_file import StoredTensor
from widen_cli.scales import Scale
from widen_cli.shapes import Name
from widen_cli.sources import Source
from widen_cli.views import Drawing, DrawnSource, FilledSource, Shared, ViewSource, Window


@dataclass(frozen=True)
class Experts:
    """The new model's tensors in the order of the dense one's bytes, and the factors on those that hold a slice."""

    tensors: tuple[StoredTensor, ...]
    times: dict[str, Scale]


@dataclass(frozen=True)
class _Layer:
    """A layer's names: the parts that its number stands for, and one of its dense weights, [inner, hidden] as its rule says."""

    numbers: tuple[str, ...]
    weight: StoredTensor


class ExpertTensors:
    """Makes the tensors; `deviation` is that of what is drawn, `routers` the type they are stored in, None for the weights' own."""

    def __init__(
        self,
        source: ArchitectureMap,
        target: ArchitectureMap,
        rules: Upcycle,
        match: Match,
        asked: Wish,
        deviation: float,
        routers: DType | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.rules = rules
        self.match = match
        self.asked = asked
        self.deviation = deviation
        self.routers = routers
        self.times: dict[str, Scale] = {}
        self.faults = Faults()

    def of(self, tensors: tuple[StoredTensor, ...], file: str) -> Experts:
        """The new tensors. Raises WidenError for dense ones that have no place, or that cannot be cut."""
        dense = {item.tensor.name: item for item in self.match.matched}
        made: list[StoredTensor] = []
        routed: set[tuple[str, ...]] = set()
        found = False
        with self.faults:
            for tensor in tensors:
                item = dense.get(tensor.name)
                if item is None or item.rule.pattern not in self.rules.weights:
                    if item is not None and not self.has_place(item):
                        self.faults.add(
                            f"{file}: tensor '{printable(tensor.name)}' has no place in '{self.target.architecture}'"
                        )
                    made.append(tensor)
                    continue
                found = True
                layer = _Layer(self.numbers(item), tensor)
                if layer.numbers not in routed:
                    routed.add(layer.numbers)
                    made += self.routers_of(layer, item)
                made += self.experts_of(layer, item, file)
            if not found:
                raise WidenError(f"{file}: has no dense feed-forward layers to make experts of")
        return Experts(tuple(made), self.times)

    def has_place(self, item: Matched) -> bool:
        pattern = item.rule.pattern
        return pattern not in self.rules.without and any(rule.pattern == pattern for rule in self.target.tensors)

    def numbers(self, item: Matched) -> tuple[str, ...]:
        hit = name_pattern(self.match.written(item.rule.pattern)).fullmatch(item.tensor.name)
        if hit is None:
            raise WidenError(f"tensor '{printable(item.tensor.name)}' is not named as its map does; rename it")
        return hit.groups()

    def named(self, pattern: str, numbers: tuple[str, ...]) -> str:
        """A name of the new model: a map's pattern as this checkpoint spells it, with its numbers."""
        parts = iter(numbers)
        return re.sub(r"\*", lambda _: next(parts), self.match.written(pattern))

    def cut_axis(self, item: Matched) -> tuple[int, bool]:
        """The stored dimension that is shared out between slices, and whether the weight reads it."""
        for number, dimension in enumerate(item.rule.shape.dimensions):
            if isinstance(dimension.term, Name):
                axis = self.source.axis_of(dimension.term.text)
                if axis is not None and axis.name == self.rules.axis:
                    return number, dimension.role == "in"
        raise WidenError(
            f"{self.rules.place}: '{item.rule.pattern}' of map '{self.source.architecture}' does not lie on "
            f"'{self.rules.axis}', so it cannot be shared out"
        )

    def experts_of(self, layer: _Layer, item: Matched, file: str) -> Iterator[StoredTensor]:
        """One dense weight's tensors: an expert each or all in one, and the shared expert's."""
        tensor, pattern = layer.weight, item.rule.pattern
        axis, reads = self.cut_axis(item)
        slices = self._windows(tensor, axis, file)
        if slices is None:
            return
        shape = tuple(size // self.asked.slices if n == axis else size for n, size in enumerate(tensor.shape))
        new, shared = self.rules.weights[pattern], self.rules.shared.get(pattern)
        stacked = new.count("*") == pattern.count("*")
        count = self.asked.experts
        uses = Shared(tensor, (1 if stacked else count) + (shared is not None and not reads))
        chosen = [slices[number % self.asked.slices] for number in range(count)]
        if stacked:
            yield self._view(self.named(new, layer.numbers), (count, *shape), uses, chosen)
        for number, window in enumerate(chosen if not stacked else ()):
            name = self.named(new, (*layer.numbers, str(number)))
            yield self._view(name, shape, uses, [window])
        if reads and self.asked.slices > 1:
            names = (
                [self.named(new, layer.numbers)]
                if stacked
                else [self.named(new, (*layer.numbers, str(number))) for number in range(count)]
            )
            self.times |= dict.fromkeys(names, Scale.of(self.asked.slices))
        if shared is not None:
            yield self._shared(self.named(shared, layer.numbers), uses, reads)

    def _shared(self, name: str, uses: Shared, reads: bool) -> StoredTensor:
        """A weight of the shared expert, which reads as the dense layer does and writes nothing."""
        tensor = uses.tensor
        if reads:
            return replace(tensor, name=name, offset=0, source=FilledSource(name, tensor.nbytes))
        return self._view(name, tensor.shape, uses, [Window(0, tensor.nbytes, tensor.nbytes, 1)])

    def _view(self, name: str, shape: tuple[int, ...], uses: Shared, windows: list[Window]) -> StoredTensor:
        nbytes = sum(window.nbytes for window in windows)
        tensor = uses.tensor
        plain = len(windows) == 1 and windows[0].count == 1 and not tensor.source.sequential
        source: Source = tensor.source if plain else ViewSource(uses, windows)
        return StoredTensor(name, tensor.dtype, shape, tensor.offset + windows[0].start if plain else 0, nbytes, source)

    def _windows(self, tensor: StoredTensor, axis: int, file: str) -> list[Window] | None:
        """Where the bytes of each slice stand; None, and a fault, where they cannot be cut apart."""
        slices = self.asked.slices
        if slices == 1:
            return [Window(0, tensor.nbytes, tensor.nbytes, 1)]
        size, row = tensor.shape[axis], tensor.dtype.nbytes(tensor.shape[1:])
        if axis == 0 and size % slices == 0:
            whole = tensor.nbytes // slices
            return [Window(number * whole, whole, whole, 1) for number in range(slices)]
        if size % slices or (size // slices) % tensor.dtype.block:
            blocks = f" in blocks of {tensor.dtype.block}" if tensor.dtype.block > 1 else ""
            self.faults.add(
                f"--slices {slices}: does not divide {size} of '{printable(tensor.name)}'{blocks}; give another number"
            )
            return None
        piece = row // slices
        return [Window(number * piece, piece, row, tensor.shape[0]) for number in range(slices)]

    def routers_of(self, layer: _Layer, item: Matched) -> Iterator[StoredTensor]:
        """A layer's routers and gates."""
        axis, _ = self.cut_axis(item)
        hidden = layer.weight.shape[1 - axis]
        for pattern in (*self.rules.routers, *self.rules.gates):
            name = self.named(pattern, layer.numbers)
            rule = next(rule for rule in self.target.tensors if rule.pattern == pattern)
            zero = self.asked.router == "zero" and pattern in self.rules.routers
            yield self._router(name, rule, layer.weight.dtype, hidden, zero)

    def _router(self, name: str, rule: TensorRule, weights: DType, hidden: int, zero: bool) -> StoredTensor:
        dtype = self.routers or (weights if weights.kind == "float" and weights.bits >= 16 else STORED["F32"])
        rows = [self._rows(dimension.term) for dimension in rule.shape.dimensions[:-1]]
        shape = (*rows, hidden)
        nbytes = dtype.nbytes(shape)
        # The slices of a copy share a row, so that they are chosen together.
        times = self.asked.slices if rows == [self.asked.experts] else 1
        drawing = Drawing(self.asked.seed, (rows[0] if rows else 1) // times, hidden, times, self.deviation)
        source: Source = FilledSource(name, nbytes) if zero else DrawnSource(name, drawing, dtype)
        return StoredTensor(name, dtype, shape, 0, nbytes, source)

    def _rows(self, term: object) -> int:
        """How many rows of its own a router has: one for each expert, or the number that its map says."""
        assert isinstance(term, Name)
        return int(term.text) if term.text.isdigit() else self.asked.experts
