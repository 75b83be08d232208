"""The size of every axis, from the config where it says so and from the stored shapes where it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from widen_cli.config import ModelConfig
from widen_cli.errors import Faults, brief, did_you_mean, printable
from widen_cli.formulas import Formula, UnknownValueError, evaluate
from widen_cli.map_rules import ArchitectureMap, Axis
from widen_cli.plan.lookup import config_lookup
from widen_cli.plan.match import Match, Matched
from widen_cli.plan.meanings import meaning
from widen_cli.shapes import Name, Product, Term

SIZE_LIMIT = 1 << 63  # no array is longer
SLIP = 0.85  # a letter or two; hidden_act is no slip of hidden_size


class Sizes:
    """Axis sizes by name. `known` lacks an axis that neither config nor tensors tell.

    `layered` holds the sizes of axes that differ from layer to layer, 0 where a layer has none of the kind; in `known`
    stands the largest.
    """

    def __init__(self, architecture: ArchitectureMap, config: ModelConfig) -> None:
        self.architecture = architecture
        self.config = config
        self.known: dict[str, int] = {}
        self.told_by: dict[str, str] = {}
        self.layered: dict[str, tuple[int, ...]] = {}
        self._of_layers: dict[tuple[int, ...], Sizes] = {}

    def at(self, layer: int | None) -> Sizes:
        """The sizes in one layer: these, where no axis differs between layers, or beyond those the lists speak of."""
        if layer is None or not self.layered or any(layer >= len(sizes) for sizes in self.layered.values()):
            return self
        own = {name: sizes[layer] for name, sizes in self.layered.items()}
        found = self._of_layers.get(tuple(own.values()))
        if found is None:
            found = self._of_layers[tuple(own.values())] = Sizes(self.architecture, self.config)
            computed = {name for name, axis in self.architecture.axes.items() if axis.computed}
            found.known = {name: size for name, size in self.known.items() if name not in computed} | own
            found.told_by = self.told_by
            _from_formulas(found)
        return found

    def first(self) -> Sizes:
        """The sizes in the first layer, as far as they are known yet."""
        found = Sizes(self.architecture, self.config)
        found.known = self.known | {name: sizes[0] for name, sizes in self.layered.items()}
        return found

    def grown(self, ratios: Mapping[str, Fraction]) -> Sizes:
        """The sizes with some of them larger; those that no key holds follow."""
        found = Sizes(self.architecture, self.config)
        one = Fraction(1)
        found.known = {
            name: int(size * ratios.get(name, one))
            for name, size in self.known.items()
            if not self.architecture.axes[name].computed
        }
        found.layered = {
            name: tuple(int(size * ratios.get(name, one)) for size in sizes) for name, sizes in self.layered.items()
        }
        found.told_by = self.told_by
        _from_formulas(found)
        return found

    def layers(self) -> list[Sizes]:
        """The sizes of all layers, each kind of layer once."""
        count = min((len(sizes) for sizes in self.layered.values()), default=0)
        return list({id(sizes): sizes for sizes in map(self.at, range(count))}.values()) or [self]

    def axis_of(self, name: str) -> Axis | None:
        """The axis that a name in a shape lies on; None for a structural number."""
        return self.architecture.axis_of(name)

    def size(self, name: str) -> int | None:
        """The size that a name in a shape stands for, None where it is not known."""
        if name.isdigit():
            return int(name)
        axis = self.axis_of(name)
        return self.known.get(axis.name) if axis else None

    def total(self, term: Term) -> int | None:
        """How many positions a term covers, None where that is not known."""
        total = self._total(term)
        return self._of_any_parts(term) if total is None and not isinstance(term, Name) else total

    def _of_any_parts(self, term: Term) -> int | None:
        """What parts of unknown sizes cover together, where it does not depend on them: a head of which any part is rotated."""
        for name in self.architecture.axes.keys() - self.known.keys():
            totals = {self._with(name, size)._total(term) for size in (2, 4)}
            if len(totals) == 1 and None not in totals:
                return totals.pop()
        return None

    def _with(self, axis: str, size: int) -> Sizes:
        trial = Sizes(self.architecture, self.config)
        trial.known = {**self.known, axis: size}
        _from_formulas(trial)
        return trial

    def _total(self, term: Term) -> int | None:
        if isinstance(term, Name):
            return self.size(term.text)
        inner = [self._total(item) for item in (term.items if isinstance(term, Product) else term.parts)]
        if any(size is None for size in inner):
            return None
        sizes = [size for size in inner if size is not None]
        if not isinstance(term, Product):
            return sum(sizes)
        product = 1
        for size in sizes:
            product *= size
        return product

    def evaluate(self, formula: Formula) -> Any:
        """A formula over axes and config keys. Raises UnknownValueError or ValueError."""
        return evaluate(formula, self.named)

    def named(self, name: str) -> Any:
        """The size of an axis, or a config value. Raises UnknownValueError for what nothing tells."""
        if name not in self.architecture.axes:
            return config_lookup(self.architecture, self.config)(name)
        if name not in self.known:
            raise UnknownValueError(name)
        return self.known[name]


def config_key(axis: Axis, config: ModelConfig) -> str | None:
    """The key of the config that holds the axis's size, or None."""
    return next((key for key in axis.keys if config.get(key, None) is not None), None)


def told_by_no_tensor(sizes: Sizes, unknown: Mapping[str, str]) -> str:
    """What to say of axes whose sizes nothing tells; `unknown` names for each a tensor that holds a product with it."""
    axes = sizes.architecture.axes
    keys = list(dict.fromkeys(key for name in axes if name in unknown for key in _telling(sizes, name)))
    more = f"; where that is not enough, {' and '.join(keys[1:])} too" if keys[1:] else ""
    return (
        f"the tensors alone do not tell {', '.join(unknown)} "
        f"('{printable(next(iter(unknown.values())))}' holds only a product with it); "
        f"give --config, or --set {keys[0] if keys else 'the missing size'}=N{more}"
    )


def _telling(sizes: Sizes, name: str) -> list[str]:
    """The config keys that tell an unknown axis: its own, or for one that is computed those of what it comes from."""
    if name in sizes.known:
        return []
    axis = sizes.architecture.axes.get(name)
    if axis is None or not axis.computed or axis.size is None:
        return [name] if axis is None else list(axis.keys[:1])
    roots = [key for word in axis.size.words for key in _telling(sizes, word)]
    return roots if name != sizes.architecture.growth.head_dim else []


def resolve_sizes(architecture: ArchitectureMap, config: ModelConfig, match: Match, faults: Faults) -> Sizes:
    """The sizes of all axes that can be known, with a fault for each contradiction between config and tensors."""
    sizes = Sizes(architecture, config)
    _from_config(sizes, faults)
    _from_shapes(sizes, match.matched)
    for name, size in sizes.known.items():
        if size < 0:
            faults.add(
                f"{printable(config.name)}: {name} would be {size} ({sizes.told_by[name]}); no part is smaller than 0"
            )
    _check_shapes(sizes, match.matched, faults)
    return sizes


def _from_config(sizes: Sizes, faults: Faults) -> None:
    # What means a size is often a multiple of another one.
    for axis in sorted(sizes.architecture.axes.values(), key=lambda axis: axis.means is not None):
        key = config_key(axis, sizes.config)
        if key is None:
            _check_slip(axis.keys, f"holds {axis.name}", axis.otherwise is not None, sizes, faults)
            continue
        _check_others(axis, key, sizes.config, faults)
        value = sizes.config.get(key)
        by_layer = sizes.config.per_layer or sizes.architecture.layered is not None
        if axis.means is not None:
            value = _meant(sizes, axis, key, value, faults)
            if value is None:
                continue
        if by_layer and isinstance(value, list):
            value = _of_layers(sizes, axis.name, key, value, faults)
            if value is None:
                continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < SIZE_LIMIT:
            faults.add(
                f"{printable(sizes.config.name)}: {key} is {brief(value)}, where a whole number from 1 up is needed"
            )
            continue
        sizes.known[axis.name] = value
        sizes.told_by[axis.name] = key
    for pattern, keys in sizes.architecture.repeats.items():
        _check_slip(keys, f"counts {pattern}", True, sizes, faults)
    if sizes.config.present:
        _from_formulas(sizes, faults)


def _meant(sizes: Sizes, axis: Axis, key: str, value: Any, faults: Faults) -> Any:
    """The size, or list of them, that a config value means; 0 for a null in a list. None with a fault where it means none."""
    assert axis.means is not None
    values = value if isinstance(value, list) else [value]
    try:
        meant = [0 if one is None else meaning(axis.means, sizes)(one) for one in values]
    except UnknownValueError as error:
        faults.add(
            f"{printable(sizes.config.name)}: {key} means a size together with '{printable(error.name)}', which nothing tells"
        )
        return None
    except ValueError as error:
        faults.add(f"{printable(sizes.config.name)}: {key} is {brief(value)}, which means no size: {error}")
        return None
    return meant if isinstance(value, list) else meant[0]


def _check_others(axis: Axis, key: str, config: ModelConfig, faults: Faults) -> None:
    """Keys of one axis that disagree: which of them its library goes by differs, so the wide model might be another one's.

    What a key of a size that never grows says is checked against the shapes alone.
    """
    value = config.get(key)
    for other in () if axis.fixed or axis.first else axis.keys:
        said = config.get(other)
        if said is not None and said != value:
            faults.add(
                f"{printable(config.name)}: {key} is {brief(value)} and {other} is {brief(said)}, which both hold "
                f"'{axis.name}'; the model's library reads one of them: let both say what it is"
            )


def _of_layers(sizes: Sizes, axis: str, key: str, values: list[Any], faults: Faults) -> int | None:
    """Notes what a list says of each layer; the largest of its numbers, None where they are none."""
    (repeated, *_) = sizes.architecture.repeats.values()
    layers = sizes.config.get(repeated[0])
    if not values or any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
        faults.add(f"{printable(sizes.config.name)}: {key} is a list of something else than whole numbers from 0 up")
        return None
    if isinstance(layers, int) and len(values) != layers:
        faults.add(f"{printable(sizes.config.name)}: {key} has {len(values)} values for {layers} layers")
        return None
    if len(set(values)) > 1:
        sizes.layered[axis] = tuple(values)
    return int(max(values))


def _check_slip(keys: tuple[str, ...], what: str, spared: bool, sizes: Sizes, faults: Faults) -> None:
    """Absent keys that the config all has under very similar names are slips, in the map or in the config.

    `spared`: models may lack the key, so that a name of more or fewer words is that of something else.
    """
    config, architecture = sizes.config, sizes.architecture
    if not config.present or not keys or any(key in config for key in keys):
        return
    others = {key for other in architecture.axes.values() for key in other.keys}
    others |= {key for counted in architecture.repeats.values() for key in counted}
    others |= {*architecture.defaults, *(place for places in architecture.places.values() for place in places)}
    written = {name for name in _names(config) if name not in others}
    near = {
        key: did_you_mean(key, (name for name in written if not spared or _words(name) == _words(key)), SLIP)
        for key in keys
    }
    if all(near.values()):
        faults.add(f"{printable(config.name)}: there is no '{keys[0]}', which the map says {what}{near[keys[0]]}")


def _names(config: ModelConfig) -> Iterator[str]:
    """The keys of a config, those in a section with its name in front."""
    for key, value in config.values.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in value)
            yield from value if key == config.inside else ()


def _words(key: str) -> int:
    return key.count("_") + key.count(".")


def _from_formulas(sizes: Sizes, faults: Faults | None = None) -> bool:
    """Fills sizes that formulas give, and those that are made of these; True where one was added."""
    added = False
    for axis in sizes.architecture.axes.values():
        formula = axis.size or (axis.otherwise if sizes.config.present else None)
        if axis.name in sizes.known or formula is None:
            continue
        # What stands in for an absent key is made of the first layer's sizes, as in llama.cpp.
        told = sizes if axis.size else sizes.first()
        try:
            sizes.known[axis.name] = int(told.evaluate(formula))
        except UnknownValueError:
            continue
        except ValueError as error:
            if faults is not None:
                faults.add(f"{printable(sizes.config.name)}: {axis.name}: {error}")
            continue
        sizes.told_by[axis.name] = formula.text
        added = True
    if added:
        _from_formulas(sizes)
    return added


def _from_shapes(sizes: Sizes, matched: Iterable[Matched]) -> None:
    """Solves dimensions in which one axis alone is unknown, until nothing more is found."""
    dimensions = {
        (dimension.term, size, item.tensor.name)
        for item in matched
        if len(item.tensor.shape) == len(item.rule.shape.dimensions)
        for dimension, size in zip(item.rule.shape.dimensions, item.tensor.shape, strict=True)
    }
    unsolved = sorted(dimensions, key=lambda entry: entry[2])
    while True:
        unsolved = [entry for entry in unsolved if not _solved(sizes, *entry)]
        if not _from_formulas(sizes) and not any(_solved(sizes, *entry) for entry in unsolved):
            return


def _solved(sizes: Sizes, term: Term, size: int, tensor: str) -> bool:
    unknown = {axis.name for axis in _axes(sizes, term) if axis.name not in sizes.known and not _any_size(axis)}
    if len(unknown) != 1:
        return False
    (name,) = unknown
    trial = Sizes(sizes.architecture, sizes.config)
    totals = []
    for value in (0, 1):
        trial.known = {**sizes.known, name: value}
        totals.append(trial.total(term))
    if totals[0] is None or totals[1] is None or totals[1] <= totals[0]:
        return False
    value, rest = divmod(size - totals[0], totals[1] - totals[0])
    if rest or value < 1:
        return False
    sizes.known[name] = value
    sizes.told_by[name] = f"the shape of {tensor}"
    return True


def _any_size(axis: Axis) -> bool:
    """True for an axis such as the labels of a head: fixed, held by no key, of another size in each tensor."""
    return axis.fixed and not axis.keys and axis.size is None


def _axes(sizes: Sizes, term: Term) -> list[Axis]:
    if isinstance(term, Name):
        axis = sizes.axis_of(term.text)
        return [axis] if axis else []
    return [axis for item in (term.items if isinstance(term, Product) else term.parts) for axis in _axes(sizes, item)]


def _check_shapes(sizes: Sizes, matched: Iterable[Matched], faults: Faults) -> None:
    by_axis: dict[tuple[str, int], list[str]] = defaultdict(list)
    effects: list[str] = []
    for item in matched:
        tensor, dimensions = item.tensor, item.rule.shape.dimensions
        if len(tensor.shape) != len(dimensions):
            faults.add(
                f"tensor '{printable(tensor.name)}' has shape {list(tensor.shape)}, but the map says {len(dimensions)} "
                f"dimension(s): {item.rule.shape.text}"
            )
            continue
        own = sizes.at(item.layer(sizes.architecture))
        for dimension, size in zip(dimensions, tensor.shape, strict=True):
            expected = own.total(dimension.term)
            if expected is None or expected == size:
                continue
            axes = _axes(sizes, dimension.term)
            if isinstance(dimension.term, Name) and axes and axes[0].name not in sizes.layered:
                by_axis[(axes[0].name, size)].append(tensor.name)
            else:
                effects.append(_disagreement(own, item, expected, size))
    for (name, size), names in by_axis.items():
        also = f" and {len(names) - 1} more" if len(names) > 1 else ""
        faults.add(
            f"{sizes.told_by.get(name, name)} says {name} = {sizes.known[name]}, but tensor '{printable(names[0])}'{also} "
            f"has {size}; the config belongs to another model, or the file is damaged"
        )
    for text in effects:
        faults.add(text)


def _disagreement(sizes: Sizes, item: Matched, expected: int, size: int) -> str:
    axes = {axis.name for dimension in item.rule.shape.dimensions for axis in _axes(sizes, dimension.term)}
    told = ", ".join(f"{name} {sizes.known[name]}" for name in sorted(axes) if name in sizes.known)
    gathered = "; a size of 0 looks like a ZeRO-3 checkpoint that was saved ungathered" if size == 0 else ""
    return (
        f"tensor '{printable(item.tensor.name)}' has shape {list(item.tensor.shape)}, but {item.rule.shape.text} "
        f"needs {expected} where it has {size} ({told}){gathered}"
    )
