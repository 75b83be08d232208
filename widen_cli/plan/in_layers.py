"""What grows in each layer: sizes, factors and the places of copies, which may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.errors import Faults
from widen_cli.formulas import Formula, UnknownValueError, evaluate
from widen_cli.map_rules import ArchitectureMap
from widen_cli.plan.factors import Factor, is_whole
from widen_cli.plan.filling import Filling
from widen_cli.plan.lookup import config_lookup
from widen_cli.plan.partial import Partials, partial_axes, shared_keys
from widen_cli.plan.sizes import Sizes


@dataclass(frozen=True)
class InLayer:
    """The old sizes, the factors of all axes, and what fills new positions: in layer `number` and those like it, or, where
    that is None, outside of all layers and wherever they do not differ."""

    sizes: Sizes
    factors: Mapping[str, Factor]
    filling: Filling
    number: int | None = None

    @property
    def at(self) -> str:
        """Which layer it is, as `--grow` takes it."""
        return "" if self.number is None else f"@{self.number}"


@dataclass(frozen=True)
class InLayers:
    """What grows, layer by layer; `layered` are the factors in every layer of axes that grow by ranges of layers.

    `filling` makes what fills the new positions of axes that grow by fractions, of which those `shared` do in all layers alike;
    of those `in_front` old positions come first.
    """

    sizes: Sizes
    factors: Mapping[str, Factor]
    layered: Mapping[str, Sequence[Factor]]
    in_front: frozenset[str]
    shared: Partials
    filling: Callable[[Partials], Filling]
    found: dict[tuple[Factor, ...], InLayer] = field(default_factory=dict, init=False)

    @cached_property
    def count(self) -> int:
        """How many layers there are of which some may differ."""
        return min((len(each) for each in (*self.layered.values(), *self.sizes.layered.values())), default=0)

    @cached_property
    def everywhere(self) -> InLayer:
        """What does not go by layers."""
        return InLayer(self.sizes, self.factors, self.filling(self.shared))

    def at(self, layer: int | None) -> InLayer:
        """What grows in a layer. Raises WidenError for a fraction of which no whole number comes there."""
        if layer is None or layer >= self.count:
            return self.everywhere
        sizes = self.sizes.at(layer)
        own = {axis: each[layer] for axis, each in self.layered.items()}
        key = (id(sizes), *own.values())
        if key not in self.found:
            factors = {**self.factors, **own}
            partials = partial_axes(sizes.architecture, sizes, factors, self.in_front, f"@{layer}")
            self.found[key] = InLayer(sizes, factors, self.filling(partials), layer)
        return self.found[key]

    def kinds(self) -> Iterator[InLayer]:
        """All of them, layers that are alike once. Raises WidenError with every layer in which it cannot be."""
        yield self.everywhere
        with Faults() as faults:
            for layer in range(self.count):
                with faults.collecting():
                    self.at(layer)
        yield from self.found.values()


def shared_partials(
    sizes: Sizes,
    factors: Mapping[str, Factor],
    layered: Mapping[str, Sequence[Factor]],
    in_front: frozenset[str] = frozenset(),
) -> Partials:
    """The axes that grow by one fraction in all layers, from one size."""
    own = {*layered, *sizes.layered}
    for heads, keys in shared_keys(sizes.architecture).items():
        own |= {heads, keys} if own & {heads, keys} else set()
    alike = {axis: 1 if axis in own else factor for axis, factor in factors.items()}
    return partial_axes(sizes.architecture, sizes, alike, in_front)


def grown_most(kinds: Sequence[InLayer]) -> dict[str, Factor]:
    """The largest factor of every axis; 1 for one that grows nowhere."""
    return {axis: max(kind.factors[axis] for kind in kinds) for axis in kinds[0].factors}


def unfit_layers(in_layers: InLayers, layers: int, config: ModelConfig) -> Iterator[str]:
    """What speaks against fractions in single layers, where a map says by the config in which of them."""
    architecture = in_layers.sizes.architecture
    for axis, reason in (architecture.layered.whole if architecture.layered else {}).items():
        unfit = [
            layer
            for layer in range(layers)
            if not is_whole(in_layers.at(layer).factors[axis]) and _holds(reason.condition, architecture, config, layer)
        ]
        if unfit:
            which = f"layer{'s' if unfit[1:] else ''} {', '.join(map(str, unfit))}"
            yield f"--grow {axis}={in_layers.at(unfit[0]).factors[axis]}: {which}: {reason.why}; give a whole factor there"


def _holds(condition: Formula, architecture: ArchitectureMap, config: ModelConfig, layer: int) -> bool:
    """Whether a condition holds in a layer, of whose own value a list speaks; what nothing tells may hold."""
    lookup = config_lookup(architecture, config)

    def own(name: str) -> Any:
        value = lookup(name)
        return value[layer] if isinstance(value, list) and layer < len(value) else value

    try:
        return bool(evaluate(condition, own))
    except (UnknownValueError, ValueError):
        return True
