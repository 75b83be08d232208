"""A map that extends the closest one, with overrides for what does not fit, and marks on what is guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher

from widen_cli.config import ModelConfig
from widen_cli.drafts.axes import FUNCTIONS
from widen_cli.drafts.document import Document, Entry, comment, flow_list, quoted, scalar, shape_value
from widen_cli.formulas import Formula
from widen_cli.map_rules import ArchitectureMap, Axis, TensorRule
from widen_cli.maps import catalog_map
from widen_cli.nearest import Fit, axis_keys, flat_values, is_size, layer_pattern
from widen_cli.plan.match import StoredHeader
from widen_cli.plan.sizes import config_key

# Keys that speak of what a repeat does not leave alone: not linear, or dependent on the width or the heads.
TELLING = re.compile(r"clip|alibi|sinusoid|mup|embed\w*_scale|scale_emb|normali[sz]e_emb|embed\w*_norm|qk_(layer)?norm")


def close_draft(fit: Fit, config: ModelConfig, kind: str | None) -> Document:
    """The drafted map of a model that calls itself `kind`; without marks where the closest map fits and is named by it."""
    gguf = fit.name.endswith(".gguf")
    document = Document()
    document.plain["extends"] = Entry(scalar(fit.name))
    document.plain["architecture"] = Entry(scalar(kind or f"my-{fit.name.removesuffix('.gguf')}"))
    if kind is not None:
        document.plain["match"] = Entry(f"{{{'gguf' if gguf else 'model_type'}: {flow_list([kind])}}}")
    _Overrides(fit, config, document).all(gguf)
    if not fit.named:
        others = f", and as well {', '.join(fit.equals)}" if fit.equals else ""
        document.decide(
            f"nothing but names and shapes says that this model computes what '{fit.name}' does (they fit it{others}): compare the "
            f"model's code with `widen-ckpt maps {fit.name}`, its norms, activation, positions and multipliers"
        )
    return document


class _Overrides:
    """Puts into a document what of the closest map is otherwise in this model."""

    def __init__(self, fit: Fit, config: ModelConfig, document: Document) -> None:
        self.fit = fit
        self.config = config
        self.document = document
        self.parent = catalog_map(fit.name)
        self.values = flat_values(config)

    def all(self, gguf: bool) -> None:
        self.axes(gguf)
        self.repeats()
        self.config_keys()
        self.telling_keys()
        self.renamed()
        self.missing()
        self.misfits()
        self.strangers()

    def axes(self, gguf: bool) -> None:
        """Axes that other keys hold: those of other maps are taken, those found by their name or value are guesses."""
        for name, key in self.fit.keys.items():
            known = key in axis_keys(gguf).get(name, {})
            self.document.put(
                "axes",
                name,
                _axis(self.parent.axes[name], key),
                f"{self.values.get(key)}" + ("" if known else "; TODO"),
            )
            if not known:
                self.document.decide(f"axes: that '{comment(key)}' holds {name} was guessed from its name or value")
        for name, axis in self.fit.architecture.axes.items():
            if (
                axis.keys
                and axis.otherwise is None
                and not axis.fixed
                and config_key(axis, self.config) is None
                and self.config.present
            ):
                self.document.decide(
                    f"axes: no config key for {name} ('{axis.keys[0]}' in '{self.fit.name}') was found"
                )

    def repeats(self) -> None:
        """Counts of layers that other keys hold, by the number of layers stored."""
        for pattern, keys in self.parent.repeats.items():
            if any(key in self.config for key in keys) or not self.config.present:
                continue
            written = self.fit.match.written(pattern).count(".")
            numbers = {
                item.tensor.name.split(".")[written]
                for item in self.fit.match.matched
                if item.rule.pattern.startswith(pattern)
            }
            found = [
                key for key, value in self.values.items() if is_size(value) and value == len(numbers) and "layer" in key
            ]
            if found:
                self.document.put("repeats", pattern, scalar(found[0]), f"{len(numbers)}")

    def config_keys(self) -> None:
        """Keys that the map's formulas rely on and the config lacks: another one of their kind, or a decision."""
        if not self.config.present:
            return
        known = {*self.parent.defaults, *(key for axis in self.parent.axes.values() for key in axis.keys)}
        others = {key: value for key, value in self.values.items() if key not in known and _name(key)}
        for key, use in _relied_on(self.parent, self.fit).items():
            if key in self.config:
                continue
            likely = [other for other, value in others.items() if _of_kind(use, other, value)]
            if likely:
                best = max(likely, key=lambda other: SequenceMatcher(None, key, other).ratio())
                self.exchange(key, best)
                others.pop(best)
            elif not self.fit.name.endswith(".gguf") or use == "epsilon":
                default = self.parent.defaults[key]
                self.document.decide(
                    f"config: there is no '{key}', which '{self.fit.name}' takes as {default!r} where it is absent; "
                    f"if this model means something else, say so in a section `config` ({key}: ...)"
                )

    def exchange(self, key: str, other: str) -> None:
        """Writes formulas that speak of one config key with another."""
        value = self.values[other]
        self.document.put(
            "config", other, scalar(value) if isinstance(value, str) else repr(value), f"{key} in {self.fit.name}"
        )
        word = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w.])")
        for name, space in self.parent.spaces.items():
            if space.formula is not None and word.search(space.formula.text):
                entry = self.document.sections.get("spaces", {}).get(name)
                text = entry.value if entry else space.formula.text
                self.document.put("spaces", name, word.sub(other, text))

    def telling_keys(self) -> None:
        known = {*self.parent.defaults, *(key for axis in self.parent.axes.values() for key in axis.keys)}
        for key, value in self.values.items():
            if key not in known and value not in (None, False, 0) and TELLING.search(key):
                self.document.decide(
                    f"config: '{comment(key)}' is {comment(repr(value))}, and '{self.fit.name}' does not know it: what does the code do?"
                )

    def renamed(self) -> None:
        for rule, pattern in self.fit.renamed:
            self.remove(rule)
            name = self.canonical(pattern)
            rules = [one for one in self.parent.tensors if one.pattern == rule.pattern]
            self.document.put("tensors", name, _rules_text(rules), f"TODO {rule.pattern} by another name?")
            self.document.decide(
                f"tensors: '{comment(name)}' was taken for '{rule.pattern}', by its place and its shape"
            )

    def missing(self) -> None:
        paired = {rule.pattern for rule, _ in self.fit.renamed}
        stored = {item.rule.pattern for item in self.fit.match.matched}
        for rule in self.fit.missing:
            if rule.pattern in paired:
                continue
            if rule.pattern in stored:
                self.optional(rule, "TODO not in every layer")
                self.document.decide(f"tensors: '{rule.pattern}' is stored in some layers only; is the file whole?")
                continue
            # A linear map or a norm without its bias is one whose bias is zero; any other absence changes the block.
            bias = rule.pattern.endswith(".bias")
            self.remove(rule, f"{'' if bias else 'TODO '}no such tensor here")
            if not bias:
                self.document.decide(
                    f"tensors: '{rule.pattern}' is missing; does this model do without it, and what takes its part?"
                )

    def misfits(self) -> None:
        seen: set[str] = set()
        for item in self.fit.misfits:
            pattern = item.rule.pattern
            if pattern in seen:
                continue
            seen.add(pattern)
            text = self.proposal(item.tensor)
            suffix = {"all-or-none": "?", "any": "??"}.get(item.rule.need, "")
            self.document.put(
                "tensors",
                pattern + suffix,
                shape_value(text),
                f"TODO {list(item.tensor.shape)}, not {item.rule.shape.text}",
            )
            self.document.decide(
                f"tensors: '{pattern}' is {list(item.tensor.shape)}, which is not {item.rule.shape.text} with the config's sizes"
            )

    def strangers(self) -> None:
        taken = {pattern for _, pattern in self.fit.renamed}
        for pattern, tensor in self.fit.strangers().items():
            if pattern in taken:
                continue
            name = self.canonical(pattern)
            text = self.proposal(tensor)
            self.document.put(
                "tensors", f"{name}??", shape_value(text), f"TODO {list(tensor.shape)}, unknown to {self.fit.name}"
            )
            self.document.decide(
                f"tensors: '{comment(name)}' {list(tensor.shape)} is new; '{text}' is a guess by its size: what does it read and write, "
                "and does it stand in front of something that other lines speak of?"
            )

    def remove(self, rule: TensorRule, note: str = "") -> None:
        """Takes a tensor out of the map, or where other parts of the map name it, makes it one that may be absent."""
        if rule.pattern in _named_elsewhere(self.parent):
            self.optional(rule, note)
        else:
            self.document.put("tensors", _key(rule), "null", note)

    def optional(self, rule: TensorRule, note: str) -> None:
        rules = [one for one in self.parent.tensors if one.pattern == rule.pattern]
        if rule.need == "any":
            return
        self.document.put("tensors", _key(rule), "null")
        self.document.put("tensors", f"{rule.pattern}??", _rules_text(rules), note)

    def canonical(self, written: str) -> str:
        """A stored name as the map spells it, whose prefixes may be written otherwise."""
        for prefix, other in self.fit.match.spelling:
            name = prefix + written.removeprefix(other)
            if written.startswith(other) and self.fit.match.written(name) == written:
                return name
        return written

    def proposal(self, tensor: StoredHeader) -> str:
        """A shape by size alone: what writes hidden or reads it, sizes that no axis has as numbers."""
        sizes = self.fit.sizes
        width = self.parent.growth.width[0]
        normed = next((name for name in ("normed", width) if name in self.parent.spaces or name == width), width)
        terms = [self.term(size) for size in tensor.shape]
        if len(terms) == 1:
            module = layer_pattern(tensor.name).rpartition(".")[0]
            weight = next(
                (item for item in self.fit.match.matched if layer_pattern(item.tensor.name) == f"{module}.weight"), None
            )
            if weight is not None and (written := _written(weight.rule)):
                return f"-> {written}"
            return f"-> {normed if tensor.shape[0] == sizes.known.get(width) else terms[0]}"
        if len(terms) == 2:
            read = normed if terms[1] == width else terms[1]
            return f"{terms[0]} <- {read}"
        return " ".join(terms)

    def term(self, size: int) -> str:
        """The axis, or the product of heads, of a size; the number where there is none."""
        known = self.fit.sizes.known
        likely = [*self.parent.growth.width, *self.parent.axes]
        for name in likely:
            if known.get(name) == size and size > 1 and not self.fit.architecture.axes[name].fixed:
                return name
        head = self.parent.growth.head_dim
        for heads in self.parent.growth.heads if head else ():
            if head and known.get(heads, 0) * known.get(head, 0) == size:
                return f"({heads} {head})"
        return str(size)


def _axis(axis: Axis, key: str) -> str:
    parts = [f"key: {scalar(key)}"]
    parts += [f"else: {_formula(axis.otherwise)}"] if axis.otherwise is not None else []
    return f"{{{', '.join([*parts, 'fixed: true'] if axis.fixed else parts)}}}"


def _formula(formula: Formula) -> str:
    """A formula inside a flow mapping."""
    return formula.text if re.fullmatch(r"[\w][\w .+*/()=<>-]*", formula.text) else quoted(formula.text)


def _key(rule: TensorRule) -> str:
    """The rule's name as it stands in its map."""
    return rule.pattern + {"all-or-none": "?", "any": "??"}.get(rule.need, "")


def _rules_text(rules: Sequence[TensorRule]) -> str:
    """The rules of a tensor in YAML, on one line."""
    texts = [_rule_text(rule) for rule in rules]
    return texts[0] if len(texts) == 1 else f"[{', '.join(text if text[0] == '{' else quoted(text) for text in texts)}]"


def _rule_text(rule: TensorRule) -> str:
    conditions = (("if", rule.condition), ("when", rule.when), ("times", rule.times))
    parts = [f"{word}: {_formula(formula)}" for word, formula in conditions if formula is not None]
    parts += [f"offset: {rule.offset}"] if rule.offset else []
    parts += [f"packed: {quoted(rule.packed.text)}"] if rule.packed else []
    if not parts:
        return shape_value(rule.shape.text)
    return f"{{shape: {quoted(rule.shape.text) if ': ' in rule.shape.text else rule.shape.text}, {', '.join(parts)}}}"


def _written(rule: TensorRule) -> str | None:
    """The side that a matrix's rule writes, as text."""
    left, arrow, right = (
        re.split(r"\s*(<-|->)\s*", rule.shape.text, maxsplit=1) if re.search("<-|->", rule.shape.text) else ("", "", "")
    )
    return {"<-": left.rpartition(": ")[2], "->": right}.get(arrow) or None


def _named_elsewhere(architecture: ArchitectureMap) -> set[str]:
    """The tensors that ties, conditions and other sections name."""
    named = {name for tie in architecture.tied for name in (tie.tensor, tie.to)}
    named |= {name for pair in architecture.scalars.items() for name in pair}
    named |= {architecture.rope.tensor} if architecture.rope and architecture.rope.tensor else set()
    formulas = [formula for rule in architecture.tensors for formula in (rule.condition, rule.when) if formula]
    formulas += [tie.when for tie in architecture.tied]
    return named | {name for formula in formulas for name in re.findall(r"""has\(["']([^"']+)["']\)""", formula.text)}


def _relied_on(architecture: ArchitectureMap, fit: Fit) -> dict[str, str]:
    """The config keys that formulas speak of, and what for: an epsilon, a function or a condition."""
    found: dict[str, str] = {}
    for space in architecture.spaces.values():
        for name, _, called in space.formula.names() if space.formula else ():
            if name in architecture.defaults:
                norm = space.formula is not None and space.formula.text.startswith("norm(")
                found[name] = "function" if called else "epsilon" if norm else "condition"
    for formula in _conditions(architecture, fit):
        for name, _, _ in formula.names():
            if name in architecture.defaults:
                found.setdefault(name, "condition")
    return found


def _conditions(architecture: ArchitectureMap, fit: Fit) -> Iterator[Formula]:
    """The conditions that decide more than whether a tensor is stored: of rules that may apply, and of ties."""
    stored = {item.rule.pattern for item in fit.match.matched}
    yield from (rule.condition for rule in architecture.tensors if rule.condition and rule.pattern in stored)
    yield from (tie.when for tie in architecture.tied if tie.to in stored)


def _of_kind(use: str, key: str, value: object) -> bool:
    """Whether a config value may be what a formula wants."""
    if use == "epsilon":
        return "eps" in key and isinstance(value, float)
    return use == "function" and isinstance(value, str) and value in FUNCTIONS


def _name(key: str) -> bool:
    parts: Iterable[str] = key.split(".")
    return all(part.isidentifier() for part in parts)
