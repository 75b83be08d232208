"""The map that a model of an unknown kind comes closest to, by tensor names and shapes: what fits, and what does not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache

from widen_cli.config import ModelConfig
from widen_cli.errors import Faults, WidenError, first_of, printable
from widen_cli.map_file import known_path, map_names, read_map_data
from widen_cli.map_rules import ArchitectureMap, Axis, TensorRule, name_pattern
from widen_cli.maps import catalog_map
from widen_cli.plan.match import Match, Matched, StoredHeader, match_tensors, missing_tensors
from widen_cli.plan.sizes import Sizes, config_key, resolve_sizes

SHOWN = 4
NAMED = 0.6  # a map of the model's own name is taken even if another fits a little better
# What a key is likely to hold whose name no map has, by words in it; the first that fits counts.
LIKELY = {
    "vocab": r"vocab",
    "kv_heads": r"kv.*head|head.*kv|(key|value).*heads",
    "head_dim": r"head_(dim|size|width)|(dim|size)_(per_)?head|^d_head",
    "heads": r"heads?$",
    "experts": r"experts$",
    "intermediate": r"ffn|feed_?forward|mlp_(dim|size|width|hidden)|inner|intermediate|d_ff",
    "token_types": r"types?_vocab|segments",
    "positions": r"position|ctx|context|seq_len|max_len|block_size",
    "hidden": r"hidden|width|d_model|model_(dim|size)|n_?emb|embed(ding)?(s|_(dim|size|length))?$|^dim$|channels$",
}
NOT_SIZES = re.compile(r"layers?$|window|dropout|_id$|token")
Renamed = tuple[TensorRule, str]


@dataclass(frozen=True)
class Fit:
    """How far a model follows a map.

    `keys` are config keys that hold an axis (or count layers) under another name than the map's. `misfits` have a rule by
    name and another shape; `renamed` pairs a missing tensor's rule with the pattern of a stored one of its shape and place.
    `named`: the config calls the model by the map's name. `unheld` counts axes, such as experts, of which the config says
    nothing. `equals` are other maps that fit as well.
    """

    name: str
    architecture: ArchitectureMap
    match: Match
    sizes: Sizes
    keys: dict[str, str]
    misfits: tuple[Matched, ...]
    missing: tuple[TensorRule, ...]
    renamed: tuple[Renamed, ...]
    named: bool
    known_keys: int
    unheld: int
    equals: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        return len(self.match.matched) + len(self.match.strangers)

    @property
    def fitting(self) -> int:
        return len(self.match.matched) - len(self.misfits)

    @property
    def near(self) -> bool:
        """Whether most tensors fit by name and shape."""
        return 2 * self.fitting > self.total

    @property
    def complete(self) -> bool:
        return not (self.match.strangers or self.misfits or self.missing)

    def cost(self) -> float:
        """How many names do not fit, each counted once over all layers; one under another name counts half."""
        unfit = len(self.strangers()) + len({item.rule.pattern for item in self.misfits}) + len(self.missing)
        return unfit - 1.5 * len(self.renamed)

    def strangers(self) -> dict[str, StoredHeader]:
        """The stored tensors that no rule names, one of each pattern."""
        found: dict[str, StoredHeader] = {}
        for tensor in self.match.strangers:
            found.setdefault(layer_pattern(tensor.name), tensor)
        return found


def nearest(
    tensors: Sequence[StoredHeader], config: ModelConfig, called: Sequence[str], gguf: bool, among: Sequence[str] = ()
) -> Fit | None:
    """The map that fits best, or None where no map knows any of the tensors.

    `called` are the names that the model gives itself; of maps that fit alike, one of such a name is taken. `among` limits
    the choice.
    """
    names = list(among) or [name for name in map_names() if name.endswith(".gguf") == gguf]
    ends = name_ends(tensors)
    likely = [name for name in names if known_names(catalog_map(name), ends)]
    if not likely:
        best = max(names, key=lambda name: _known_ends(catalog_map(name), ends))
        likely = [best] if _known_ends(catalog_map(best), ends) else []
    # One tensor of each pattern tells maps apart; only the best is gone through with all layers and experts.
    sample = list({layer_pattern(tensor.name): tensor for tensor in reversed(tensors)}.values())[::-1]
    fits = [found for name in likely if (found := _fit(name, sample, config, called, sampled=True)) is not None]
    if not fits:
        return None
    best_fit = min(fits, key=_order)
    equals = [fit.name for fit in fits if fit.cost() == best_fit.cost() and fit.name != best_fit.name]
    whole = _fit(best_fit.name, tensors, config, called)
    return replace(whole, equals=tuple(equals)) if whole else None


def _order(fit: Fit) -> tuple[float, bool, int, int, bool, int, str]:
    """What fits best first; of equals the one of the model's name, then the one that others are made from."""
    by_names, extended = fit.architecture.by_names, _extended()[fit.name]
    cost = fit.cost() * (NAMED if fit.named else 1)
    return cost, not fit.named, fit.unheld, -fit.known_keys, not by_names, -extended, fit.name


@cache
def _extended() -> Counter[str]:
    """How many maps that come with the tool extend each of them."""
    parents = (read_map_data(known_path(name), name).value.get("extends") for name in map_names())
    return Counter(parent for parent in parents if isinstance(parent, str))


NameEnds = Counter[tuple[str, ...]]


def name_ends(tensors: Iterable[StoredHeader]) -> NameEnds:
    """How many tensors end in which two parts, counted once for all maps."""
    return Counter(_end(tensor.name) for tensor in tensors)


def known_names(architecture: ArchitectureMap, ends: NameEnds) -> bool:
    """Whether most tensors end in two parts that some rule ends in; matching all rules of all maps would take a second."""
    return 2 * _known_ends(architecture, ends) >= ends.total()


def _known_ends(architecture: ArchitectureMap, ends: NameEnds) -> int:
    known = {_end(pattern) for rule in architecture.tensors for pattern in (rule.pattern, *rule.packed_patterns)}
    known |= {_end(f"x.{other}") for other in architecture.synonyms}
    return sum(ends[end] for end in known)


def _end(name: str) -> tuple[str, ...]:
    """The last two parts of a name, numbers and axes that count heads as they are counted."""
    return tuple("*" if part.isdigit() or part.startswith("{") else part for part in name.split(".")[-2:])


def layer_pattern(name: str) -> str:
    """A name with its numbers as `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _fit(
    name: str, tensors: Sequence[StoredHeader], config: ModelConfig, called: Sequence[str], sampled: bool = False
) -> Fit | None:
    """How the model follows one map; None where none of its tensors do, or its config is not of the map's kind.

    Of a sample, a rule is missing where no tensor follows it, whatever the number of layers.
    """
    try:
        keys = _other_keys(catalog_map(name), config, name.endswith(".gguf"))
        architecture = with_keys(catalog_map(name), keys)
        match = match_tensors(architecture, tensors, config)
        sizes = resolve_sizes(architecture, config, match, Faults())
        missing = missing_tensors(architecture, match, config)
    except WidenError:
        return None
    if not match.matched:
        return None
    found = _by_value(architecture, sizes, config)
    rules = _missing_rules(architecture, match, missing)
    if sampled:
        stored = {item.rule.pattern for item in match.matched}
        rules = tuple(rule for rule in rules if rule.pattern not in stored)
    own = {*architecture.defaults, *(key for axis in architecture.axes.values() for key in axis.keys)}
    fit = Fit(
        name,
        with_keys(architecture, found),
        match,
        sizes,
        keys | found,
        tuple(item for item in match.matched if not _fits(item, sizes)),
        rules,
        (),
        bool(
            _words(called) & {_joined(kind) for kind in (*architecture.model_types, *architecture.gguf_architectures)}
        ),
        sum(key in config for key in own),
        sum(
            bool(axis.keys) and axis.otherwise is None and config_key(axis, config) is None
            for axis in architecture.axes.values()
            if not name.endswith(".gguf")  # whose maps say more than one kind's keys
        ),
    )
    return replace(fit, renamed=_renamed(fit))


def _missing_rules(architecture: ArchitectureMap, match: Match, missing: Sequence[str]) -> tuple[TensorRule, ...]:
    """The rules of missing tensors, those of which no layer has one first; one rule a pattern."""
    found = {
        rule.pattern: rule
        for rule in reversed(architecture.tensors)
        if any(name_pattern(match.written(rule.pattern)).fullmatch(name) for name in missing)
    }
    return tuple(found.values())


def _fits(item: Matched, sizes: Sizes) -> bool:
    dimensions, shape = item.rule.shape.dimensions, item.tensor.shape
    own = sizes.at(item.layer(sizes.architecture))
    return len(dimensions) == len(shape) and all(
        own.total(dimension.term) in (None, size) for dimension, size in zip(dimensions, shape, strict=True)
    )


def _renamed(fit: Fit) -> tuple[Renamed, ...]:
    """Pairs of a missing tensor and a stored stranger that stand in one place and have one shape, the most alike first."""
    candidates = []
    for rule in fit.missing:
        written = fit.match.written(rule.pattern)
        shape = tuple(fit.sizes.total(dimension.term) for dimension in rule.shape.dimensions)
        for pattern, tensor in fit.strangers().items():
            if tensor.shape == shape and _place(pattern) == _place(written):
                candidates.append((-SequenceMatcher(None, written, pattern).ratio(), rule.pattern, pattern, rule))
    pairs: list[Renamed] = []
    for _, _, pattern, rule in sorted(candidates, key=lambda candidate: candidate[:3]):
        if all(rule is not other and pattern != taken for other, taken in pairs):
            pairs.append((rule, pattern))
    return tuple(pairs)


def _place(pattern: str) -> tuple[str, str]:
    """The module that a tensor's module stands in, and the tensor's own last part."""
    *path, _, last = ["", *pattern.split(".")]
    return ".".join(path), last


def with_keys(architecture: ArchitectureMap, keys: dict[str, str]) -> ArchitectureMap:
    """The map with axes held by other config keys."""
    axes = {
        name: Axis(name, (keys[name],), None, axis.otherwise, axis.fixed) if name in keys else axis
        for name, axis in architecture.axes.items()
    }
    return replace(architecture, axes=axes)


@cache
def axis_keys(gguf: bool) -> dict[str, Counter[str]]:
    """Which config keys hold the axes of each name, over all maps that come with the tool, and in how many maps."""
    found: dict[str, Counter[str]] = {}
    for name in map_names():
        for axis in catalog_map(name).axes.values() if name.endswith(".gguf") == gguf else ():
            found.setdefault(axis.name, Counter()).update(axis.keys)
    return found


def _other_keys(architecture: ArchitectureMap, config: ModelConfig, gguf: bool) -> dict[str, str]:
    """For axes whose keys the config lacks, a key that holds such an axis in another map, or one of such a name."""
    taken = {key for axis in architecture.axes.values() for key in axis.keys}
    found: dict[str, str] = {}
    for axis in architecture.axes.values():
        others = axis_keys(gguf).get(axis.name, Counter()) if axis.keys and config_key(axis, config) is None else ()
        key = next((key for key in others if key not in taken and is_size(config.get(key))), None)
        if key is None and axis.keys and config_key(axis, config) is None:
            alike = (key for key, value in flat_values(config).items() if is_size(value) and key not in taken)
            key = next((key for key in alike if likely_axis(key) == axis.name), None)
        if key is not None:
            found[axis.name] = key
            taken.add(key)
    return found


def likely_axis(key: str) -> str | None:
    """The axis that a config key is likely to hold, by the words of its name; None where they say nothing of a size."""
    last = key.rpartition(".")[2]
    if NOT_SIZES.search(last):
        return None
    return next((axis for axis, words in LIKELY.items() if re.search(words, last)), None)


def _by_value(architecture: ArchitectureMap, sizes: Sizes, config: ModelConfig) -> dict[str, str]:
    """For axes that no key holds though the map asks for one: a key of that value, the most alike in name."""
    taken = {key for axis in architecture.axes.values() for key in axis.keys} | {*architecture.defaults}
    found: dict[str, str] = {}
    for axis in architecture.axes.values():
        size = sizes.known.get(axis.name)
        if not axis.keys or axis.otherwise is not None or size is None or config_key(axis, config) is not None:
            continue
        equal = [key for key, value in flat_values(config).items() if value == size and key not in taken]
        if equal:
            found[axis.name] = max(equal, key=lambda key: SequenceMatcher(None, key, axis.keys[0]).ratio())
            taken.add(found[axis.name])
    return found


def flat_values(config: ModelConfig) -> dict[str, object]:
    """The config's values by dotted key; those of nested sections too."""
    flat: dict[str, object] = {}
    waiting: list[tuple[str, object]] = [(str(key), value) for key, value in config.values.items()]
    while waiting:
        key, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{key}.{inner}", one) for inner, one in value.items()]
        else:
            flat[key] = value
    return flat


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _joined(kind: str) -> str:
    return re.sub(r"[^a-z0-9]", "", kind.lower())


def _words(called: Sequence[str]) -> set[str]:
    """The words of the names, and neighbouring words joined: `my_llama` says llama, `Qwen2MoeForCausalLM` qwen2moe."""
    found: set[str] = set()
    for name in called:
        stem = re.sub(r"(?:For[A-Z]\w*|LMHead\w*|Model|EncoderModel)$", "", name)
        words = [word.lower() for word in re.findall(r"[A-Z]*[a-z0-9]+|[A-Z]+", stem)]
        found |= {
            "".join(words[start:stop]) for start in range(len(words)) for stop in range(start + 1, len(words) + 1)
        }
    return found


def told(fit: Fit | None, given: str) -> list[str]:
    """The offer that goes with an unknown kind of model: the closest map, what does not fit, and the command for a draft."""
    draft = f"`widen-ckpt maps --draft {given} > mine.yaml` drafts a map"
    if fit is None or not fit.fitting:
        return [f"  no map knows its tensor names; {draft} to complete (docs/maps.md)"]
    if fit.complete:
        return [
            f"  the closest map is '{fit.name}', which all {fit.total} tensors fit by name and shape",
            f"  {draft} that extends it, for --map mine.yaml (docs/maps.md)",
        ]
    lines = [f"  the closest map is '{fit.name}': {fit.fitting} of {fit.total} tensors fit it by name and shape"]
    renamed = {pattern for _, pattern in fit.renamed}
    lines += _listed("not in it", [(name, t.shape) for name, t in fit.strangers().items() if name not in renamed])
    lines += _listed("of another shape", _misfit_patterns(fit))
    lines += _listed(
        "missing", [(fit.match.written(rule.pattern), None) for rule in fit.missing if rule not in _rules(fit)]
    )
    lines += _listed(
        "under another name", [(f"{fit.match.written(rule.pattern)} as {name}", None) for rule, name in fit.renamed]
    )
    return [*lines, f"  {draft} to complete, {'extending it' if fit.near else 'from names and shapes'} (docs/maps.md)"]


def _rules(fit: Fit) -> list[TensorRule]:
    return [rule for rule, _ in fit.renamed]


def _misfit_patterns(fit: Fit) -> list[tuple[str, tuple[int, ...] | None]]:
    found: dict[str, tuple[int, ...] | None] = {}
    for item in fit.misfits:
        found.setdefault(layer_pattern(item.tensor.name), item.tensor.shape)
    return list(found.items())


def _listed(what: str, entries: Sequence[tuple[str, tuple[int, ...] | None]]) -> list[str]:
    """One line for a kind of misfit, with the first few tensors."""
    if not entries:
        return []
    shown = [printable(name) + (f" {list(shape)}" if shape is not None else "") for name, shape in entries]
    return [f"  {what}: {first_of(shown, SHOWN)}"]
