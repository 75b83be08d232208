"""A whole map for a model that is near to none: patterns, axes, a shape for every tensor, and marks on all that is guessed.

The guesses are those of a person who sees names and sizes but not the code. So every kind of guess is a line of `todo`, and
the map widens nothing before the user has taken each of them out.
"""

from __future__ import annotations

from collections.abc import Sequence

from widen_cli.config import ModelConfig
from widen_cli.drafts.axes import Axes
from widen_cli.drafts.document import Document, Entry, comment, flow_list, scalar, shape_value
from widen_cli.drafts.patterns import Pattern, patterns
from widen_cli.drafts.shapes import ShapeGuesses
from widen_cli.plan.match import StoredHeader

CODE = "open the model's code beside it"
ORDER = ("vocab", "positions", "token_types", "experts", "hidden", "intermediate", "heads", "kv_heads", "head_dim")


def whole_draft(tensors: Sequence[StoredHeader], config: ModelConfig, kind: str | None, gguf: bool) -> Document:
    """The drafted map of a model that calls itself `kind`, all of it marked as guessed."""
    weights = [
        tensor for tensor in tensors if tensor.shape and 0 not in tensor.shape and tensor.dtype.kind != "integer"
    ]
    found, counts = patterns(weights)
    axes = Axes(config, found, gguf)
    guesses = ShapeGuesses(found, axes, gguf)
    document = Document()
    document.plain["architecture"] = Entry(scalar(kind or "mine"))
    if kind is not None:
        document.plain["match"] = Entry(f"{{{'gguf' if gguf else 'model_type'}: {flow_list([kind])}}}")
    for pattern in found:
        _tensor(document, pattern, guesses)
    _repeats(document, counts, axes)
    _config(document, axes, guesses)
    _spaces(document, axes, guesses)
    _tie(document, axes, guesses, bare=_is_bare(config))
    _axes(document, axes, guesses)
    _decisions(document, guesses)
    return document


def _tensor(document: Document, pattern: Pattern, guesses: ShapeGuesses) -> None:
    shape, note = guesses.shapes[pattern.name]
    name = pattern.name + ("" if pattern.everywhere else "??")
    stored = f"{list(pattern.shape)}{'' if pattern.even else ' and others'}"
    before = ("one of these, as the code says, in place of the next line's:", *guesses.choices(pattern))
    note = f"{stored}{'; TODO ' + note if note else ''}"
    document.put("tensors", name, shape_value(shape), note, before if len(before) > 1 else ())


def _repeats(document: Document, counts: dict[str, int], axes: Axes) -> None:
    for prefix, count in counts.items():
        key = axes.layers_key(count)
        if key is not None and prefix.count("*") == 1:
            document.put("repeats", prefix, scalar(key), f"{count}")


def _config(document: Document, axes: Axes, guesses: ShapeGuesses) -> None:
    """The keys that formulas rely on, each with the value it has here as the one that its absence means."""
    if guesses.epsilon_key is not None:
        document.put(
            "config", guesses.epsilon_key, repr(axes.values[guesses.epsilon_key]), "what the key's absence means"
        )
    if guesses.activation_key is not None:
        document.put("config", guesses.activation_key, scalar(str(axes.values[guesses.activation_key])))
    if (tie := axes.tie()) is not None:
        document.put("config", tie[0], "true" if tie[1] else "false")


def _axes(document: Document, axes: Axes, guesses: ShapeGuesses) -> None:
    used = guesses.used_axes()
    for axis in sorted(axes.sizes, key=lambda axis: ORDER.index(axis) if axis in ORDER else len(ORDER)):
        if axis in used or axis in ("vocab", "hidden", "heads"):
            note = f"{axes.sizes[axis]}" + (f", TODO {axes.guessed[axis]}" if axis in axes.guessed else "")
            value = axes.declared(axis)
            if axis in guesses.unpacked_later() and axis in axes.keys:
                value = f"{{key: {scalar(axes.keys[axis])}, fixed: true}}"
                note += "; TODO take `fixed` out when the packing is written below"
            document.put("axes", axis, value, note)
    if "head_dim" in used and "head_dim" not in axes.sizes:
        document.put("axes", "head_dim", guesses.head_dim(), f"{guesses.head_size}")
    for axis, size in guesses.fixed.items():
        document.put("axes", axis, "{fixed: true}", f"{size}; never grows as it stands")
    width = ["hidden"] + ["intermediate"] * ("intermediate" in used and "key:" in axes.declared("intermediate"))
    heads: list[str] = [axis for axis in ("heads", "kv_heads") if axis in document.sections["axes"]]
    parts = [f"width: {flow_list(width)}"] + ([f"heads: {flow_list(heads)}"] if heads else [])
    parts += ["head_dim: head_dim"] if heads and "head_dim" in document.sections["axes"] else []
    document.plain["growth"] = Entry(f"{{{', '.join(parts)}}}")
    requires = ["hidden % heads == 0"] if guesses.tied_heads and "heads" in heads else []
    requires += ["heads % kv_heads == 0"] if len(heads) == 2 else []
    if requires:
        document.plain["requires"] = Entry(f"[{', '.join(requires)}]")


def _spaces(document: Document, axes: Axes, guesses: ShapeGuesses) -> None:
    used = guesses.used_spaces()
    epsilon = guesses.epsilon_key or "1e-5"
    note = "" if guesses.epsilon_key else "TODO no config key holds an epsilon; a number here keeps hidden's scale at 1"
    if guesses.post_norm:
        document.put(
            "spaces", "hidden", f"norm(hidden, {epsilon})", note or "TODO every sum of the stream passes a norm"
        )
    for space in ("normed", "final"):
        if space in used:
            document.put("spaces", space, f"norm(hidden, {epsilon})", note)
    if "query" in used or guesses.packed:
        _attention_spaces(document, guesses, epsilon)
    used |= {"gate", "up", "product"} if guesses.doubled else set()
    for space in ("gate", "up", "inner"):
        if space in used:
            document.put("spaces", space, "intermediate")
    function = guesses.activation_key or ("silu" if "gate" in used else "gelu")
    if "product" in used:
        document.put(
            "spaces", "product", f"{function}(gate) * up", "TODO the function, and which of the two goes into it"
        )
    if "acted" in used:
        document.put(
            "spaces",
            "acted",
            f"{function}(inner)",
            "TODO the function: one that docs/maps.md does not list is written gelu",
        )


def _attention_spaces(document: Document, guesses: ShapeGuesses, epsilon: str) -> None:
    for space in ("query", "key"):
        if space in guesses.head_norms:
            document.put("spaces", f"{space}_raw", "head_dim")
            document.put("spaces", space, f"norm({space}_raw, {epsilon})")
        else:
            document.put("spaces", space, "head_dim")
    document.put("spaces", "value", "head_dim")
    document.put(
        "spaces",
        "scores",
        "softmax(rope(query) @ rope(key) / sqrt(head_dim))",
        "TODO without rotary positions: query @ key; ALiBi: + alibi(heads)",
    )


def _is_bare(config: ModelConfig) -> bool:
    """Whether the model's class has no head, as its name says."""
    classes = config.get("architectures")
    return isinstance(classes, list) and bool(classes) and str(classes[0]).endswith("Model")


def _tie(document: Document, axes: Axes, guesses: ShapeGuesses, bare: bool) -> None:
    tie, table = axes.tie(), guesses.embedding
    if table is None or (bare and guesses.head is None):
        return
    if guesses.head is None:
        stands = "TODO not stored; stands for a head tied to the embedding"
        document.put("tensors", "lm_head.weight??", f"vocab <- {guesses.last}", stands)
        document.plain["tied"] = Entry(f"[{{tensor: lm_head.weight, to: {scalar(table)}}}]")
        document.decide(
            f"no head is stored, so it is taken as tied to '{comment(table)}'; where the model makes no logits, take `tied` "
            "and lm_head.weight out"
        )
    elif tie is not None:
        document.plain["tied"] = Entry(f"[{{tensor: {scalar(guesses.head)}, to: {scalar(table)}, when: {tie[0]}}}]")
    else:
        document.decide(
            f"'{comment(guesses.head)}' is taken as a head of its own; if the code ties it to '{comment(table)}', say so under `tied`"
        )


def _decisions(document: Document, guesses: ShapeGuesses) -> None:
    """What names and shapes cannot tell, one line for each kind of guess."""
    document.decide(f"every arrow: what each tensor reads and writes was guessed from names and sizes; {CODE}")
    document.decide(
        "norms: before or behind the block, with this epsilon, gains used as w (as 1 + w: {shape: ..., offset: 1})"
    )
    document.decide(
        "whether the code multiplies by something that depends on the width, as embeddings by sqrt(hidden): `times`"
    )
    if guesses.packed:
        shown = ", ".join(comment(name) for name in guesses.packed)
        document.decide(
            f"packed: the shape of {shown} does not tell the order of its parts; put one of the lines above it in its place "
            "(the same behind the arrow of its bias), (heads value) in the output projection, and take `fixed` off the heads"
        )
    if guesses.doubled:
        shown = ", ".join(comment(name) for name in guesses.doubled)
        document.decide(
            f"gate and up in one tensor: {shown} has a shape for two parts; say their order as the lines above it do"
        )
    if not guesses.packed and guesses.used_spaces() & {"query"}:
        document.decide("attention: rows of q, k and v go head by head; positions as `scores` says")
    if guesses.used_spaces() & {"acted", "product"}:
        document.decide("feed-forward: the function under `spaces`, and what it is applied to")
    if guesses.fixed:
        document.decide(
            f"sizes that never grow as they stand ({', '.join(guesses.fixed)}): right only where what is computed between "
            "them does not depend on the width"
        )
