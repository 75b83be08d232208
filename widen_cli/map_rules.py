"""What a checked map holds: axes, spaces, the rules of tensors, and what ties them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from widen_cli.formulas import Formula
from widen_cli.map_file import Place
from widen_cli.shapes import Shape

OF_LAYERS = "hidden_states"  # what transformers calls what each layer gives
BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of a weight that is stored in blocks, as gpt-oss's are


@dataclass(frozen=True)
class Axis:
    """A size that may grow: the config keys that may hold it, or the formula that gives it.

    `padded`: new positions are no copies but rows that nothing is looked up in, as of a vocabulary.
    `first`: the model reads the first of the keys that is there, whatever the others say. `grouped`: where this holds the
    model takes neighbours along the axis together, so that copies have to stand side by side. `means`: the size that a
    value of the keys tells, where it is no size itself; the formula calls it `value`. `whole`: why only whole factors are exact.
    """

    name: str
    keys: tuple[str, ...]
    size: Formula | None
    otherwise: Formula | None
    fixed: bool
    padded: bool = False
    first: bool = False
    grouped: Formula | None = None
    means: Formula | None = None
    whole: str = ""

    @property
    def computed(self) -> bool:
        """True for a size that no key holds, so that it follows other sizes."""
        return not self.keys and self.size is not None


@dataclass(frozen=True)
class Space:
    """Activations that share one scale: the axis they lie on, or the formula they come out of."""

    name: str
    axis: str | None
    formula: Formula | None
    place: Place


@dataclass(frozen=True)
class TensorRule:
    """How the tensors of one name pattern are stored.

    `need` is `each` (a tensor for every layer), `all-or-none` (name?) or `any` (name??). `packed` is the shape where the
    weight is stored as blocks and scales, in two tensors.
    """

    pattern: str
    shape: Shape
    condition: Formula | None
    when: Formula | None
    times: Formula | None
    offset: int
    need: str
    place: Place
    packed: Shape | None = None

    @cached_property
    def when_packed(self) -> TensorRule | None:
        """The rule that counts for the weight where it is stored in blocks; None where the map says nothing of such."""
        return None if self.packed is None else replace(self, shape=self.packed, packed=None)

    @property
    def packed_patterns(self) -> tuple[str, ...]:
        """The name patterns of the two tensors that hold the weight where it is stored in blocks."""
        return () if self.packed is None else (self.pattern + BLOCKS, self.pattern + SCALES)


@dataclass(frozen=True)
class Tie:
    """`tensor` is the same weight as `to` where `when` holds."""

    tensor: str
    to: str
    when: Formula


@dataclass(frozen=True)
class Growth:
    """Which axes make the model wider, and the two ways its attention can follow; axes in `with_head_dim` grow as it does."""

    width: tuple[str, ...]
    heads: tuple[str, ...]
    head_dim: str | None
    with_head_dim: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rope:
    """What a larger head size under rotary positions needs.

    `keys` hold the bases of the angles, `lists` one number for each pair that divides its frequency, as `tensor` does;
    `sections` are the objects of the config that take such lists where it has none, in the order in which the model looks;
    `methods` are the ways to grow that keep the function, each with the condition under which it does; `reasons` say under
    which condition none of them does, and why. `shares` are config lists of how many pairs turn by each kind of position,
    with which of the numbers (`first`, `last`) new pairs are counted to where the old ones stay in front.
    """

    keys: tuple[str, ...]
    lists: tuple[str, ...]
    tensor: str | None
    sections: tuple[str, ...]
    methods: dict[str, Formula]
    reasons: tuple[tuple[Formula, str], ...]
    shares: dict[str, str]


@dataclass(frozen=True)
class Schedule:
    """A rule by which a layer's number says of what kind it is.

    `stack` is the pattern of the only layers it speaks of; `key` is the config key whose list takes the rule's place, with
    `values` for where `kind` holds and where not; `weights`: the kinds have different tensors.
    """

    kind: Formula
    key: str | None
    values: tuple[Any, ...]
    weights: bool
    why: str | None
    stack: str | None


@dataclass(frozen=True)
class DepthReason:
    """Why layers of a stack, or of all where it names none, cannot be what --depth makes of them, where a condition holds."""

    condition: Formula
    why: str
    stack: str | None


@dataclass(frozen=True)
class Depth:
    """What --depth needs to know of a family.

    `behind` is the config key that says how many of the layers that are counted stand behind the last one, where they stay.
    `zero` are the weights that make nothing in a layer which passes the stream on, where shapes do not tell. `per_layer` are
    config keys with a value for each layer, `numbers` those that list layers by number, `runs` those of `[kinds, times]`,
    `roots` those that the model divides by the root of the number of layers. `reasons` say under which condition no layer
    passes the stream on, `fixed` under which layers cannot be numbered anew.
    """

    behind: str | None = None
    zero: tuple[str, ...] = ()
    per_layer: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    reasons: tuple[DepthReason, ...] = ()
    fixed: tuple[DepthReason, ...] = ()


@dataclass(frozen=True)
class Upcycle:
    """How dense models become mixtures of experts of this map's kind.

    `sources` are the dense families, each with what their configs mean that leave a key out; `axis` is the dense axis of
    which an expert has all or a slice. `sizes` says of config keys that they hold `experts`, `top_k`, `slice` or `whole`,
    `config` which values the others have; `classes` are model classes, by patterns of the dense ones. `weights` are the
    experts' tensors by the dense ones they are copies of, `shared` those of the shared expert; `routers` and `gates` are
    made, the latter never of zeros. `without` are dense tensors that experts have no place for, `needs` tensors that the
    model must have, `refuses` what of a dense config cannot be said; `normalised`: the chosen experts' weights sum to 1.
    """

    sources: dict[str, dict[str, Any]]
    axis: str
    sizes: dict[str, str]
    config: dict[str, Any]
    classes: dict[str, str]
    weights: dict[str, str]
    shared: dict[str, str]
    routers: tuple[str, ...]
    gates: tuple[str, ...]
    without: tuple[str, ...]
    needs: tuple[str, ...]
    refuses: tuple[tuple[Formula, str], ...]
    normalised: bool
    place: Place

    def key_of(self, what: str) -> str:
        """The config key of a size, such as `experts`."""
        return next(key for key, held in self.sizes.items() if held == what)


@dataclass(frozen=True)
class WholeLayers:
    """In which layers an axis grows by whole factors alone: those of whose own config values `condition` holds; and why."""

    condition: Formula
    why: str


@dataclass(frozen=True)
class Layered:
    """Axes whose sizes may differ from layer to layer, and the families that become this one where they are to; `whole` says of
    an axis where it takes no fractions."""

    axes: tuple[str, ...]
    sources: tuple[str, ...]
    whole: dict[str, WholeLayers]


@dataclass(frozen=True)
class Module:
    """What a checkpoint calls a module that has another name in memory; `part`: it is that part of a packed weight's output."""

    name: str
    part: int | None = None


@dataclass(frozen=True)
class ArchitectureMap:
    """A checked map. Shapes and formulas are parsed, every name in them is known.

    `by_names`: of families whose tensors have the same names, the one that a model without a config is taken for.
    `section` is where in the config the part stands that the map speaks of, such as `text_config`; `carried` are beginnings
    of names whose tensors stay as they are, with their places in the map.
    `output` names the space of a bare model's hidden states, or several of which the first counts that the model has,
    `outputs` those of what else it puts out, by transformers' names, and of what each layer gives (`OF_LAYERS`).
    `untie` are the config keys that an untied model says false to.
    `places` are other places where a config key's value may stand, which the model looks at first.
    `multipliers` are config keys that the model multiplies by, `scalars` tensors of one number by which it multiplies what
    a weight makes, by the weight's name.
    `modules` are names of modules in memory, as adapters have them, where the checkpoint's are others.
    `norms` says by an axis, or by "" for all others, which norm runs over it.
    `sidecars` are the axes of widths that files beside the model state, by file and key, `numbered` the stack and the axis of
    heads that are named there by their numbers.
    `todo` is what is not decided yet, with its places: such a map widens nothing.
    `merged` is the document itself, with what it extends.
    """

    architecture: str
    file: str
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    by_names: bool
    prefixes: dict[str, tuple[str, ...]]
    synonyms: dict[str, str]
    repeats: dict[str, tuple[str, ...]]
    defaults: dict[str, Any]
    axes: dict[str, Axis]
    growth: Growth
    requires: tuple[Formula, ...]
    supports: tuple[Formula, ...]
    spaces: dict[str, Space]
    tensors: tuple[TensorRule, ...]
    tied: tuple[Tie, ...]
    untie: tuple[str, ...]
    drop: tuple[str, ...]
    output: tuple[str, ...]
    sidecars: dict[str, dict[str, str]]
    numbered: dict[str, dict[str, tuple[str, str]]]
    section: str = ""
    carried: tuple[tuple[str, Place], ...] = ()
    outputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rope: Rope | None = None
    depth: Depth = field(default_factory=Depth)
    upcycle: Upcycle | None = None
    layered: Layered | None = None
    multipliers: tuple[str, ...] = ()
    scalars: dict[str, str] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    todo: tuple[tuple[str, Place], ...] = ()
    merged: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layered_axes(self) -> tuple[str, ...]:
        """The axes whose sizes may differ from layer to layer."""
        return self.layered.axes if self.layered else ()

    @property
    def layered_from(self) -> tuple[str, ...]:
        """The families that become this one where layers are to differ."""
        return self.layered.sources if self.layered else ()

    def has_last(self, repeated: str) -> bool:
        """Whether a rule names the last of repeated layers, `layers.-1.` of `layers.*`."""
        return any(rule.pattern.startswith(last_of(repeated)) for rule in self.tensors)

    def axis_of(self, name: str) -> Axis | None:
        """The axis that a space (or an axis of that name) lies on, found through the formulas it comes out of."""
        seen: set[str] = set()
        while name not in self.axes:
            space = self.spaces.get(name)
            if space is None or name in seen:
                return None
            seen.add(name)
            if space.axis is not None:
                name = space.axis
            elif space.formula is not None:
                words = (word for word in space.formula.words if word != name)
                name = next((word for word in words if word in self.spaces or word in self.axes), "")
        return self.axes[name]


def says_tied(tied: Iterable[Tie]) -> Iterator[str]:
    """The keys by which transformers ties weights, where the ties of a map go by them."""
    for tie in tied:
        yield from (word for word in tie.when.words if word.rpartition(".")[2] == "tie_word_embeddings")


LAST = "-1"  # in the place of a layer's number, the last of them


def last_of(repeated: str, number: str = LAST) -> str:
    """How names of the last layer begin, of a repeated pattern such as `layers.*`."""
    return f"{repeated.removesuffix('*')}{number}."


@lru_cache(maxsize=4096)
def name_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a name pattern.

    `*` is one part between dots, or in a part with a word, as in `layer_*`, its number; `{axis}` is a number in the name.
    """
    parts = re.split(r"(\*|\{\w+\})", pattern)
    expression, seen = "", set()
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        alone = before[-1:] in ("", ".") and after[:1] in ("", ".")
        # An axis counted twice is a fault that the map's check reports; the pattern must not fail before it.
        expression += re.escape(part) if part in seen and part.startswith("{") else _part_expression(part, alone)
        seen.add(part)
    return re.compile(expression)


def _part_expression(part: str, alone: bool) -> str:
    if part == "*":
        return r"([^.]+)" if alone else r"([0-9]+)"
    return rf"(?P<{part[1:-1]}>[0-9]+)" if part.startswith("{") else re.escape(part)
