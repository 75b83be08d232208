"""Which rule of a map each stored tensor follows, and which tensors are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from widen_cli.config import ModelConfig
from widen_cli.dtypes import DType
from widen_cli.errors import Faults, WidenError, did_you_mean, printable
from widen_cli.formulas import Formula, Lookup, UnknownValueError, holds
from widen_cli.map_file import Place
from widen_cli.map_rules import BLOCKS, LAST, SCALES, ArchitectureMap, TensorRule, Tie, last_of, name_pattern
from widen_cli.plan.lookup import config_lookup
from widen_cli.plan.packed import NUMBERS, PackedWeight, packed_weight
from widen_cli.shapes import parse_shape

MISSING_SHOWN = 8
WITH_BASE = "merge it into its base first, or give its base with --base"
LORA = f"a LoRA adapter and no model; {WITH_BASE}"
GRID = "_scale_inv"  # the name of a block-scaled FP8 weight's scales, behind its own
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


class StoredHeader(Protocol):
    """What the planner knows of a stored tensor: its header entry, never its bytes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Matched:
    """A stored tensor, the rule it follows, and where in its name which axes are counted (start and stop of the number)."""

    tensor: StoredHeader
    rule: TensorRule
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def layer(self, architecture: ArchitectureMap) -> int | None:
        """The number of the layer it stands in, None for a tensor outside of the layers."""
        for pattern in architecture.repeats:
            if self.rule.pattern.replace(f".{LAST}.", ".*.").startswith(pattern + "."):
                path, _, word = pattern.removesuffix("*").rpartition(".")
                number = self.tensor.name.split(".")[path.count(".") + 1 if path else 0].removeprefix(word)
                return int(number) if _NUMBER.fullmatch(number) else None
        return None


@dataclass
class Match:
    """The outcome for one checkpoint.

    `carried` are copied unchanged (integers, scalars and empty tensors that no rule names),
    `dropped` left out, `strangers` are weights that no rule names; `grids` are the scales of block-scaled FP8 weights, by
    the weight's name, and those of weights in MXFP4 blocks; `torn` says of such weights, by their own names, what is wrong
    with their two tensors. `kept` counts those of the matched that the map only carries. `root` stands in front of every
    name, as where the model is a part of another; `last` says how a layer that a map calls the last one is named.
    """

    matched: list[Matched] = field(default_factory=list)
    carried: list[StoredHeader] = field(default_factory=list)
    dropped: list[StoredHeader] = field(default_factory=list)
    strangers: list[StoredHeader] = field(default_factory=list)
    grids: dict[str, StoredHeader] = field(default_factory=dict)
    torn: dict[str, str] = field(default_factory=dict)
    spelling: tuple[tuple[str, str], ...] = ()
    synonyms: dict[str, str] = field(default_factory=dict)
    ties: tuple[Tie, ...] = ()
    root: str = ""
    last: dict[str, str] = field(default_factory=dict)
    kept: int = 0

    def written(self, pattern: str) -> str:
        """A map's name pattern as this checkpoint spells it."""
        for called, name in self.last.items():
            if pattern.startswith(called):
                pattern = name + pattern[len(called) :]
        for prefix, other in self.spelling:
            if pattern.startswith(prefix):
                return self.root + other + pattern[len(prefix) :]
        return self.root + pattern

    def by_name(self, name: str) -> Matched | None:
        """The tensor that the map calls `name`, if it is stored."""
        written = self.written(name)
        return next((found for found in self.matched if found.tensor.name == written), None)


def match_tensors(
    architecture: ArchitectureMap, tensors: Sequence[StoredHeader], config: ModelConfig, root: str = ""
) -> Match:
    """Matches by the spelling of the prefixes under which the most tensors find a rule, one prefix after the other."""
    best = _matched_under(architecture, tensors, config, (), root)
    for prefix, others in architecture.prefixes.items():
        candidates = [
            _matched_under(architecture, tensors, config, (*best.spelling, (prefix, other)), root) for other in others
        ]
        best = max([best, *candidates], key=lambda match: len(match.matched) - match.kept)
    return best


@dataclass(frozen=True)
class Conditions:
    """Decides the conditions of a map's rules: config values, and which tensors the checkpoint stores."""

    lookup: Lookup
    names: frozenset[str]
    match: Match
    config: str

    def hold(self, formula: Formula | None, unknown: bool) -> bool:
        """Whether a condition holds, an absent one does; `unknown` is the answer where a config value is not known."""
        try:
            return formula is None or holds(
                formula, self.lookup, unknown, lambda name: self.match.written(name) in self.names
            )
        except ValueError as error:
            raise WidenError(f"{printable(self.config)}: its values do not fit what the map asks: {error}") from None


def _conditions(
    architecture: ArchitectureMap,
    tensors: Iterable[StoredHeader],
    config: ModelConfig,
    match: Match,
    known: Mapping[str, int] = MappingProxyType({}),
) -> Conditions:
    names = frozenset(_canonical(tensor.name, architecture.synonyms) for tensor in tensors)
    return Conditions(config_lookup(architecture, config, known), names, match, config.name)


def _matched_under(
    architecture: ArchitectureMap,
    tensors: Sequence[StoredHeader],
    config: ModelConfig,
    spelling: tuple[tuple[str, str], ...],
    root: str,
) -> Match:
    match = Match(spelling=spelling, synonyms=architecture.synonyms, root=root)
    match.last = _last_layers(architecture, tensors, config, match)
    conditions = _conditions(architecture, tensors, config, match)
    rules = [
        (name_pattern(match.written(rule.pattern)), rule)
        for rule in architecture.tensors
        if conditions.hold(rule.condition, unknown=False)
    ]
    fp8 = {tensor.name for tensor in tensors if tensor.dtype.name.startswith("F8_") and len(tensor.shape) == 2}
    drops = [name_pattern(match.written(pattern)) for pattern in architecture.drop]
    packed = [
        (name_pattern(match.written(pattern)), rule.when_packed)
        for rule in architecture.tensors
        for pattern in rule.packed_patterns
        if conditions.hold(rule.condition, unknown=False)
    ]
    by_name = {tensor.name: tensor for tensor in tensors} if packed else {}
    for tensor in tensors:
        name = _canonical(tensor.name, architecture.synonyms)
        if any(drop.fullmatch(name) for drop in drops):
            match.dropped.append(tensor)
        elif found := next(((rule, hit) for pattern, rule in rules if (hit := pattern.fullmatch(name))), None):
            match.matched.append(_matched(tensor, *found))
        elif half := next(((rule, hit) for pattern, rule in packed if rule and (hit := pattern.fullmatch(name))), None):
            _match_packed(match, tensor, by_name, *half)
        elif name.endswith(GRID) and name.removesuffix(GRID) in fp8:
            match.grids[name.removesuffix(GRID)] = tensor
        elif not _means_nothing(tensor) and (
            place := next((at for begin, at in architecture.carried if name.startswith(root + begin)), None)
        ):
            match.matched.append(Matched(tensor, _kept(tensor, place)))
            match.kept += 1
        elif _means_nothing(tensor) and not any(mark in name for mark in _KNOWN_KINDS):
            match.carried.append(tensor)
        else:
            match.strangers.append(tensor)
    # Where nothing says whether a head is tied, one that is stored is not, and one that is missing may be:
    # taking it as tied costs a bare model nothing but another factor on its last norm.
    match.ties = tuple(
        tie
        for tie in architecture.tied
        if conditions.hold(tie.when, unknown=match.written(tie.tensor) not in conditions.names)
    )
    return match


def _match_packed(
    match: Match, tensor: StoredHeader, stored: Mapping[str, StoredHeader], rule: TensorRule, hit: re.Match[str]
) -> None:
    """Matches one of the two tensors of a weight in blocks: the first stands for both."""
    called = tensor.name.removesuffix(BLOCKS).removesuffix(SCALES)
    weight = packed_weight(called, stored)
    if isinstance(weight, str):
        match.torn[called] = weight
    elif tensor.name == weight.name:
        match.matched.append(_matched(weight, rule, hit))
        match.grids[weight.name] = stored[weight.scales.name]


def _last_layers(
    architecture: ArchitectureMap, tensors: Iterable[StoredHeader], config: ModelConfig, match: Match
) -> dict[str, str]:
    """The names of the last layers, by the map's patterns for them."""
    called = [pattern for pattern in architecture.repeats if architecture.has_last(pattern)]
    if not called:
        return {}
    counts = _counts(architecture, match, config_lookup(architecture, config), [tensor.name for tensor in tensors])
    return {last_of(pattern): last_of(pattern, str(counts[pattern] - 1)) for pattern in called}


def _means_nothing(tensor: StoredHeader) -> bool:
    """Whether a tensor that no rule names can be no weight: integers, scalars and empty ones are carried along."""
    return tensor.dtype.kind == "integer" or not tensor.shape or 0 in tensor.shape


def _kept(tensor: StoredHeader, place: Place) -> TensorRule:
    """The rule of a tensor that stays as it is: all its sizes are numbers."""
    shape = parse_shape(" ".join(map(str, tensor.shape)))
    return TensorRule(tensor.name, shape, None, None, None, 0, "any", place)


def applying_rule(architecture: ArchitectureMap, match: Match, config: ModelConfig, pattern: str) -> TensorRule:
    """The rule of a name pattern that counts here: the one that its stored tensor follows, else the first whose `if` holds."""
    found = match.by_name(pattern)
    if found is not None:
        return found.rule
    conditions = _conditions(architecture, (item.tensor for item in match.matched), config, match)
    rules = [rule for rule in architecture.tensors if rule.pattern == pattern]
    return next((rule for rule in rules if conditions.hold(rule.condition, unknown=False)), rules[0])


def _matched(tensor: StoredHeader, rule: TensorRule, hit: re.Match[str]) -> Matched:
    return Matched(tensor, rule, {axis: hit.span(axis) for axis in hit.re.groupindex})


def _canonical(name: str, synonyms: dict[str, str]) -> str:
    for other, word in synonyms.items():
        if name == other or name.endswith("." + other):
            return name[: len(name) - len(other)] + word
    return name


def missing_tensors(
    architecture: ArchitectureMap,
    match: Match,
    config: ModelConfig,
    known: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """The names of tensors that the map asks for and the checkpoint lacks; `known` are sizes that the shapes tell.

    How many layers there are says the config, or without one the highest number found.
    """
    conditions = _conditions(architecture, (item.tensor for item in match.matched), config, match, known)
    tied = {tie.tensor for tie in match.ties}
    found = {item.rule.pattern for item in match.matched}
    counts, heads = _counts(architecture, match, conditions.lookup), _numbered(match)
    stored = {_canonical(_called(item.tensor), match.synonyms) for item in match.matched} | match.torn.keys()
    missing: list[str] = []
    for rule in architecture.tensors:
        if rule.need == "any" or not conditions.hold(rule.condition, unknown=False):
            continue
        needed = rule.need == "each" and rule.pattern not in tied and conditions.hold(rule.when, unknown=False)
        if needed or rule.pattern in found:
            missing += [name for name in _expected(rule, match, counts, heads) if name not in stored]
    return missing


def _called(tensor: StoredHeader) -> str:
    """A tensor's name, or that of the weight that is stored in it and another."""
    return tensor.called if isinstance(tensor, PackedWeight) else tensor.name


def _numbered(match: Match) -> dict[str, int]:
    """How many heads are numbered in names, by the highest number stored."""
    highest: dict[str, int] = {}
    for item in match.matched:
        for axis, (start, stop) in item.numbers.items():
            highest[axis] = max(highest.get(axis, 0), int(item.tensor.name[start:stop]) + 1)
    return highest


def _counts(
    architecture: ArchitectureMap, match: Match, lookup: Lookup, names: Iterable[str] | None = None
) -> dict[str, int]:
    """How many there are of each repeated pattern: by the config, else by the highest number among `names`, those matched."""
    counts: dict[str, int] = {}
    for pattern, keys in architecture.repeats.items():
        try:
            counts[pattern] = int(_first_known(keys, lookup))
        except (UnknownValueError, TypeError, ValueError, OverflowError):
            head = re.compile(name_pattern(match.written(pattern)).pattern + r"(\.|$)")
            stored = names if names is not None else [item.tensor.name for item in match.matched]
            last = [hit.groups()[-2] for name in stored if (hit := head.match(name))]
            counts[pattern] = max((int(number) for number in last if _NUMBER.fullmatch(number)), default=-1) + 1
    return counts


def layer_counts(architecture: ArchitectureMap, match: Match, config: ModelConfig) -> dict[str, int]:
    """How many layers, or experts, there are of each repeated pattern."""
    return _counts(architecture, match, config_lookup(architecture, config))


def _first_known(keys: Sequence[str], lookup: Lookup) -> Any:
    for key in keys[:-1]:
        with suppress(UnknownValueError):
            return lookup(key)
    return lookup(keys[-1])


def _expected(rule: TensorRule, match: Match, counts: dict[str, int], heads: dict[str, int]) -> list[str]:
    """The names that a rule asks for; none where it cannot be known how many there should be."""
    expected = [match.written(rule.pattern)]
    for wildcard in re.finditer(r"\*|\{(\w+)\}", rule.pattern):
        number = heads.get(wildcard[1]) if wildcard[1] else counts.get(rule.pattern[: wildcard.end()])
        if number is None:
            return []
        # A config may promise any number of layers; the first few that are missing tell enough.
        shown = range(min(number, len(match.matched) + MISSING_SHOWN))
        expected = [name.replace(wildcard[0], str(n), 1) for name in expected for n in shown]
    return expected


def surplus_layers(architecture: ArchitectureMap, match: Match, config: ModelConfig) -> list[str]:
    """The stored layers (or experts) that are not among those the config counts, by their names up to the number."""
    surplus: dict[str, None] = {}
    for pattern, number in _counts(architecture, match, config_lookup(architecture, config)).items():
        head = re.compile(name_pattern(match.written(pattern)).pattern + r"(?=\.|$)")
        for item in match.matched:
            hit = head.match(item.tensor.name)
            if hit and not (_NUMBER.fullmatch(hit.groups()[-1]) and int(hit.groups()[-1]) < number):
                surplus[hit[0]] = None
    return list(surplus)


def report_strangers(faults: Faults, file: str, architecture: ArchitectureMap, match: Match, limit: int = 8) -> None:
    """Adds a fault for each weight that no rule names, telling what is known of its kind."""
    names = [tensor.name for tensor in match.strangers]
    total = len(names) + len(match.matched)
    if len(names) > limit and len(names) > total // 2:
        faults.add(
            f"{file}: {len(names)} of {total} tensors are none that map '{architecture.architecture}' knows, "
            f"'{printable(names[0])}' for one; the config or the map is that of another family"
        )
        return
    known = [match.written(rule.pattern) for rule in architecture.tensors]
    for tensor in match.strangers[:limit]:
        hint = next((text for mark, text in _KNOWN_KINDS.items() if mark in tensor.name), None)
        nearest = did_you_mean(re.sub(r"\.\d+\.", ".*.", tensor.name), known)
        advice = hint or (
            f"map '{architecture.architecture}' does not know this weight{nearest}, and copying it unwidened would break the model; "
            "add it to a map of your own (--map), or leave it out of the checkpoint"
        )
        faults.add(f"{file}: unknown tensor '{printable(tensor.name)}' {list(tensor.shape)}: {advice}")
    if len(names) > limit:
        faults.add(f"{file}: ... and {len(names) - limit} more unknown tensors")


_KNOWN_KINDS = {
    "weight_scale_inv": "block-scaled FP8, a weight that means nothing without its scale; dequantise the model first",
    "lora_A": LORA,
    "lora_B": LORA,
    ".qweight": "packed GPTQ or AWQ weights, which must not be repeated; use the unquantised model",
    "_proj_blocks": f"MXFP4 weights, of which this map does not say how they lie; {NUMBERS}",
    "_proj_scales": f"scales of MXFP4 weights, of which this map does not say how they lie; {NUMBERS}",
    ".absmax": "bitsandbytes 4-bit weights; use the unquantised model",
    ".quant_state": "bitsandbytes 4-bit weights; use the unquantised model",
    "query_key_value": (
        "fused q, k and v, whose row order cannot be seen from the shape; it must come from a map (--map) "
        "that says (heads (q | k | v)) or (heads q | heads k | heads v)"
    ),
}


def common_prefix(architecture: ArchitectureMap, tensors: Sequence[StoredHeader]) -> str | None:
    """A foreign prefix (such as `_orig_mod.` or `module.`) after which the names would match, or None."""
    patterns = [
        name_pattern(pattern) for rule in architecture.tensors for pattern in (rule.pattern, *rule.packed_patterns)
    ]
    first = next((tensor.name for tensor in tensors), "")
    for end in [place + 1 for place, letter in enumerate(first) if letter == "."]:
        prefix = first[:end]
        if all(tensor.name.startswith(prefix) for tensor in tensors) and all(
            any(pattern.fullmatch(tensor.name[end:]) for pattern in patterns) for tensor in tensors
        ):
            return prefix
    return None
