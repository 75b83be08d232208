"""What changes in the config: sizes, epsilons and the element type, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from widen_cli.config import ModelConfig, is_number
from widen_cli.dtypes import CONFIG_NAMES, DType
from widen_cli.errors import Faults, WidenError, brief, printable
from widen_cli.formulas import UnknownValueError
from widen_cli.map_rules import Axis
from widen_cli.plan.factors import Factor
from widen_cli.plan.meanings import meaning, telling
from widen_cli.plan.result import EXACT, ROUNDS, ConfigChange
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.spaces import SpaceScales


def wide_sizes(
    sizes: Sizes, factors: Mapping[str, Factor], layered: Mapping[str, Sequence[Factor]] | None = None
) -> Sizes:
    """The sizes of the wide model; `layered` are the factors in every layer of axes that grow by ranges of layers."""
    wide = Sizes(sizes.architecture, sizes.config)
    wide.known = {name: int(size * factors[name]) for name, size in sizes.known.items()}
    wide.layered = {name: tuple(int(size * factors[name]) for size in all_) for name, all_ in sizes.layered.items()}
    for name, each in (layered or {}).items():
        old = sizes.layered.get(name) or [sizes.known[name]] * len(each)
        wide.layered[name] = tuple(int(size * factor) for size, factor in zip(old, each, strict=True))
        wide.known[name] = max(wide.layered[name])
    return wide


class ConfigChanges:
    """Works out the changes from the old sizes, the factors of the axes and the solved scales."""

    def __init__(
        self,
        old: Sizes,
        factors: Mapping[str, Factor],
        spaces: SpaceScales,
        config: ModelConfig,
        dtype: DType | None,
        layered: Mapping[str, Sequence[Factor]] | None = None,
    ) -> None:
        self.old = old
        self.factors = factors
        self.spaces = spaces
        self.config = config
        self.dtype = dtype
        self.layered = layered or {}

    def all(self, scales: dict[str, Any]) -> list[ConfigChange]:
        """Every change. Raises WidenError for an epsilon that is no number."""
        return self.sizes() + self.epsilons(scales) + self.multipliers(scales) + self.dtypes()

    def sizes(self) -> list[ConfigChange]:
        """The changes of sizes. Raises WidenError where no value means a new size."""
        changes: list[ConfigChange] = []
        wide = wide_sizes(self.old, self.factors, self.layered)
        with Faults() as faults:
            for name, axis in self.old.architecture.axes.items():
                grows = self.factors[name] != 1 or name in self.layered
                held = [key for key in axis.keys if self.config.get(key) is not None]
                if not axis.keys or name not in self.old.known or not (self.config.present or grows):
                    continue
                if axis.means is not None:
                    changes += [change for key in held if (change := told(axis, key, self.old, wide, faults))]
                    continue
                changes += [self.held(axis, key, wide) for key in held if grows]
                new = wide.known[name]
                unsaid = axis.keys[0] not in held if axis.first and name in self.layered else not held
                if unsaid and name in self.layered:
                    changes.append(ConfigChange(axis.keys[0], None, list(wide.layered[name]), EXACT))
                elif unsaid and (grows or axis.otherwise) and not self.follows(axis.otherwise, wide, new):
                    changes.append(ConfigChange(axis.keys[0], None, new, EXACT))
        return changes

    def held(self, axis: Axis, key: str, wide: Sizes) -> ConfigChange:
        """The change of a key that holds a size, or a list of one for each layer."""
        old = self.config.get(key)
        # Of several keys the model reads the first; what the others say is a size of its own.
        main = not axis.first or key == axis.keys[0]
        if axis.name in self.layered and main:
            return ConfigChange(key, old, list(wide.layered[axis.name]), EXACT)
        factor = self.factors[axis.name]
        if isinstance(old, list):
            return ConfigChange(key, old, [int(size * factor) for size in old], EXACT)
        return ConfigChange(key, old, wide.known[axis.name] if main else int(old * factor), EXACT)

    def follows(self, formula: Any, wide: Sizes, new: int) -> bool:
        """Whether an absent key still means the right size in the wide model."""
        try:
            return formula is not None and bool(wide.first().evaluate(formula) == new)
        except (UnknownValueError, ValueError):
            return False

    def epsilons(self, scales: dict[str, Any]) -> list[ConfigChange]:
        changes = []
        for key, scale in self.spaces.epsilon_scales(scales).items():
            if scale.is_one:
                continue
            exactness = EXACT if scale.is_power_of_two else ROUNDS
            if not self.config.present:
                changes.append(ConfigChange(key, None, f"{scale} of what it was", exactness))
                continue
            old = self.config.get(key, self.old.architecture.defaults.get(key))
            if not is_number(old):
                raise WidenError(
                    f"{printable(self.config.name)}: {key} is {brief(old)}, where a number is needed; "
                    f"its norms' epsilon has to be scaled by {scale}"
                )
            new = float(old) * float(scale)
            changes.append(ConfigChange(key, self.config.get(key), new, exactness))
        return changes

    def multipliers(self, scales: dict[str, Any]) -> list[ConfigChange]:
        """The run-time multipliers that take a factor, such as that of an attention whose heads grow."""
        changes = []
        for key in sorted(self.spaces.multipliers):
            if (scale := scales.get(key)) is None or scale.is_one:
                continue
            old = self.config.get(key)
            if not is_number(old):
                raise WidenError(f"{printable(self.config.name)}: {key} is {brief(old)}, where a number is needed")
            new = old * scale.fraction if isinstance(old, int) and scale.fraction else float(old) * float(scale)
            whole = isinstance(old, int) and new == int(new)
            exactness = EXACT if scale.is_power_of_two else ROUNDS
            changes.append(ConfigChange(key, old, int(new) if whole else float(new), exactness))
        return changes

    def dtypes(self) -> list[ConfigChange]:
        if self.dtype is None:
            return []
        name = CONFIG_NAMES[self.dtype.name]
        return [
            ConfigChange(key, self.config.get(key), name, EXACT)
            for key in ("dtype", "torch_dtype")
            if key in self.config and self.config.get(key) != name
        ]


def told(axis: Axis, key: str, old: Sizes, wide: Sizes, faults: Faults) -> ConfigChange | None:
    """The change of a key whose values mean sizes, layer by layer where they differ; None where it stays as it is.

    Notes a fault for each size of which no value tells.
    """
    assert axis.means is not None
    value = old.config.get(key)
    layers = wide.layered.get(axis.name)
    values = value if isinstance(value, list) else [value] * (len(layers) if layers else 1)
    words = [name for name in (axis.name, *axis.means.words) if name in old.known]
    new = []
    for layer, one in enumerate(values):
        here, there = old.at(layer), wide.at(layer)
        size = there.known[axis.name]
        ratios = {name: Fraction(there.known[name], here.known[name]) for name in words if here.known[name]}
        found = one if not size else telling(meaning(axis.means, there), size, one, ratios)
        if found is None and one is not None:
            where = f" of layer {layer}" if len(values) > 1 else ""
            faults.add(
                f"{printable(old.config.name)}: {axis.name}{where} would be {size}, and no value of {key} means that "
                f"({axis.means.text}); choose another size with --grow"
            )
        new.append(found)
    changed = new if isinstance(value, list) or layers else new[0]
    return None if changed == value else ConfigChange(key, value, changed, EXACT)
