"""A shape in the map language for every pattern: which axes its sizes are, and whether it reads or writes the stream."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from widen_cli.drafts.axes import Axes
from widen_cli.drafts.patterns import Pattern
from widen_cli.drafts.words import EMBEDDING, GATE, HEAD, POSITION, SCALE, attention_part, is_norm, words

_NORM_OR_BIAS = (
    "a norm's gain? Then `-> normed` here, `normed: norm(hidden, ...)` under spaces, and `<- normed` where it is read; a bias "
    "stays; what multiplies channels is `hidden` without an arrow"
)

Guess = tuple[str, str]  # the shape, and what is doubtful about it


class ShapeGuesses:
    """Guesses for all patterns of a model; `shapes` holds for each the shape and a note on what is doubtful.

    `fixed` are axes made for sizes that no key and no role explains, `packed` the tensors that hold q, k and v in an order
    that no shape tells, `doubled` those of gate and up; `normed` are the spaces that a norm writes, `head_norms` which of
    query and key pass a norm of their own.
    """

    def __init__(self, patterns: Sequence[Pattern], axes: Axes, gguf: bool) -> None:
        self.patterns = patterns
        self.axes = axes
        self.sizes = axes.sizes
        self.hidden = axes.sizes.get("hidden", 0)
        self.inner = axes.sizes.get("intermediate", 0)
        self.fixed: dict[str, int] = {}
        self.packed: list[str] = []
        self.doubled: list[str] = []
        self.normed: set[str] = set()
        self.head_norms: set[str] = set()
        self.embedding: str | None = None
        self.head: str | None = None
        self.shapes: dict[str, Guess] = {}
        epsilon = axes.epsilon()
        self.epsilon_key = epsilon[0] if epsilon else None
        self.activation_key = axes.activation()
        self.reversed = not gguf and self.stored_reversed()
        self.head_size = self.find_head_size()
        self.post_norm = self.find_post_norm()
        self.gated = self.find_gated()
        for pattern in sorted(patterns, key=lambda pattern: len(pattern.shape) < 2):
            self.shapes[pattern.name] = self.shape(pattern)

    # What the model as a whole shows

    def stored_reversed(self) -> bool:
        """Whether matrices are stored [in, out], as their biases tell."""
        sizes = {pattern.name: pattern.shape for pattern in self.patterns}
        votes = 0
        for name, shape in sizes.items():
            bias = sizes.get(f"{name.rpartition('.')[0]}.bias")
            if bias and len(shape) == 2 and shape[0] != shape[1] and bias[0] in shape:
                votes += 1 if bias[0] == shape[1] else -1
        return votes > 0

    def find_head_size(self) -> int:
        """The size of a head: by its key, or by the rows of a query."""
        heads = self.sizes.get("heads", 0)
        if "head_dim" in self.sizes or not heads:
            return self.sizes.get("head_dim", 0)
        for pattern in self.patterns:
            if pattern.layered and len(pattern.shape) == 2 and attention_part(pattern) == "query":
                rows = self.sides(pattern)[0]
                return rows // heads if rows % heads == 0 else 0
        return self.hidden // heads if self.hidden % heads == 0 else 0

    def find_post_norm(self) -> bool:
        """Whether norms stand behind the blocks: where layers have them and no last one follows."""
        norms = [pattern for pattern in self.patterns if is_norm(pattern) and pattern.shape == (self.hidden,)]
        inside = [pattern for pattern in norms if pattern.layered]
        return bool(inside) and not any(not pattern.layered and not self.of_embedding(pattern) for pattern in norms)

    def find_gated(self) -> dict[str, str]:
        """Of feed-forward modules that stand in pairs, which is the gate and which goes up; `inner` for single ones."""
        siblings: dict[str, list[Pattern]] = defaultdict(list)
        for pattern in self.patterns:
            if pattern.layered and len(pattern.shape) >= 2 and self.feeds(pattern):
                siblings[pattern.module.rpartition(".")[0]].append(pattern)
        found: dict[str, str] = {}
        for group in siblings.values():
            if len(group) == 2:
                first, second = group
                swapped = set(words(second.module.rpartition(".")[2])) & GATE
                gate, up = (second, first) if swapped else (first, second)
                found |= {gate.module: "gate", up.module: "up"}
            else:
                found |= {pattern.module: "inner" for pattern in group}
        return found

    def feeds(self, pattern: Pattern) -> bool:
        """Whether a matrix goes from the stream's width to the feed-forward's."""
        part = attention_part(pattern)
        return self.sides(pattern) == (self.inner, self.hidden) and part in (None, "attended")

    @property
    def tied_heads(self) -> bool:
        """Whether hidden = heads * head_dim without a key for the latter, so that they grow together."""
        return "head_dim" not in self.axes.keys and self.head_size * self.sizes.get("heads", 0) == self.hidden

    def head_dim(self) -> str:
        """The head's size as an axis, in YAML."""
        return "{size: hidden / heads}" if self.tied_heads else f"{{size: {self.head_size}}}"

    def of_embedding(self, pattern: Pattern) -> bool:
        return bool(set(words(pattern.name)) & EMBEDDING)

    # One tensor

    def sides(self, pattern: Pattern) -> tuple[int, int]:
        """How many positions a matrix writes and reads; of experts in one tensor, each one's."""
        *_, first, second = pattern.shape
        return (second, first) if self.reversed else (first, second)

    def shape(self, pattern: Pattern) -> Guess:
        if len(pattern.shape) == 1:
            return self.vector(pattern)
        if len(pattern.shape) == 2:
            return self.matrix(pattern) if pattern.layered else self.outer_matrix(pattern)
        if (
            len(pattern.shape) == 3
            and pattern.layered
            and {self.hidden} & set(pattern.shape[1:])
            and min(pattern.shape) > 1
        ):
            inner, note = self.matrix(pattern)
            return f"{self.size(pattern, pattern.shape[0], ('experts',))}: {inner}", note or "experts in one tensor"
        first, second, *kernel = [self.size(pattern, size, ("hidden",)) for size in pattern.shape]
        numbers = " ".join(str(size) for size in pattern.shape[2:])
        if pattern.shape[1] == 1:
            return f"{first} 1 {numbers}", "a kernel for each channel, carried along"
        return f"{first} <- {second} {numbers}", f"a kernel over {len(kernel)} dimension(s)"

    def matrix(self, pattern: Pattern) -> Guess:
        """A matrix in a layer: into the feed-forward, out of it, a part of attention, or what its sizes alone say."""
        out, read = self.sides(pattern)
        part = attention_part(pattern)
        if pattern.module in self.gated:
            return self.arrow(self.gated[pattern.module], self.reads), ""
        if self.inner and (out, read) == (self.hidden, self.inner) and (part != "attended" or not self.is_rows(read)):
            return self.down(pattern, read)
        if part is not None and (out if part == "attended" else read) == self.hidden:
            return self.attention(pattern, part, out, read)
        if read == self.hidden:
            self.doubled += [pattern.name] if self.is_double(pattern) else []
            return self.arrow(self.size(pattern, out, ("experts",)), self.reads), "what it writes"
        if out == self.hidden:
            return self.arrow("hidden", self.size(pattern, read)), "what it reads"
        return self.arrow(self.size(pattern, out), self.size(pattern, read)), "both sides"

    def is_rows(self, size: int) -> bool:
        """Whether a size is that of all heads together."""
        return size == self.sizes.get("heads", 0) * self.head_size

    def is_double(self, pattern: Pattern) -> bool:
        """Whether a matrix has the rows of gate and up together."""
        matrix = self.inner and len(pattern.shape) == 2 and attention_part(pattern) != "packed"
        return bool(matrix) and self.sides(pattern) == (2 * self.inner, self.hidden)

    def down(self, pattern: Pattern, read: int) -> Guess:
        """The way out of the feed-forward: it reads what the function makes."""
        found = set(self.gated.values())
        if found:
            return self.arrow("hidden", "product" if "gate" in found else "acted"), ""
        if not any(one.layered and self.is_double(one) for one in self.patterns):
            return self.arrow("hidden", self.size(pattern, read)), "what it reads"
        return self.arrow("hidden", self.made("joined", read)), "`product`, when the packing of gate and up is written"

    def unpacked_later(self) -> set[str]:
        """The axes that cannot grow before the packing of a tensor is known."""
        return ({"heads", "kv_heads"} if self.packed else set()) | ({"intermediate"} if self.doubled else set())

    def choices(self, pattern: Pattern) -> list[str]:
        """The shapes that a packed matrix may have; none for any other."""
        if pattern.name in self.doubled:
            return [self.arrow(text, self.reads) for text in ("(gate | up)", "(up | gate)")]
        if not self.head_size or len(pattern.shape) != 2 or attention_part(pattern) != "packed":
            return []
        heads, kv_heads = self.sizes.get("heads", 0), self.sizes.get("kv_heads", 0)
        parts = self.sides(pattern)[0] / self.head_size
        if parts == 3 * heads:
            texts = ["(heads query | heads key | heads value)", "(heads (query | key | value))"]
        elif kv_heads and parts == heads + 2 * kv_heads:
            texts = ["(heads query | kv_heads key | kv_heads value)", "(kv_heads (group query | key | value))"]
        else:
            texts = ["(kv_heads key | kv_heads value)", "(kv_heads (key | value))"] if parts == 2 * kv_heads else []
        return [self.arrow(text, self.reads) for text in texts]

    def attention(self, pattern: Pattern, part: str, out: int, read: int) -> Guess:
        heads = self.sizes.get("heads", 0)
        rows = heads * self.head_size
        if part == "packed":
            known = self.choices(pattern)
            self.packed += [pattern.name] if known else []
            return self.arrow(self.size(pattern, out), self.reads), "packed" if known else "what it writes"
        if part == "attended":
            if rows and read == rows and not self.any_packed():
                return self.arrow("hidden", "(heads value)"), ""
            return self.arrow("hidden", self.made("attended", read)), "what it reads: (heads value)?"
        raw = f"{part}_raw" if self.passes_norm(part) else part
        for axis in ("heads", "kv_heads") if part == "query" else ("kv_heads", "heads"):
            if self.head_size and out == self.sizes.get(axis, 0) * self.head_size and not self.any_packed():
                return self.arrow(f"({axis} {raw})", self.reads), ""
        return self.arrow(self.size(pattern, out), self.reads), "what it writes"

    def any_packed(self) -> bool:
        return any(attention_part(pattern) == "packed" and len(pattern.shape) == 2 for pattern in self.patterns)

    def passes_norm(self, part: str) -> bool:
        """Whether query or key pass a norm over the head; notes it."""
        found = any(
            is_norm(pattern) and pattern.shape == (self.head_size,) and attention_part(pattern) == part
            for pattern in self.patterns
        )
        self.head_norms |= {part} if found else set()
        return found

    def outer_matrix(self, pattern: Pattern) -> Guess:
        """A matrix outside of the layers: embeddings, a head, or what its sizes alone say."""
        named, vocab = set(words(pattern.name)), self.sizes.get("vocab", 0)
        if sorted(pattern.shape) == sorted((vocab, self.hidden)):
            tables = [one for one in self.patterns if not one.layered and one.shape == (vocab, self.hidden)]
            likely = next(
                (one for one in tables if self.of_embedding(one) and not set(words(one.name)) & {"un", "unembed"}), None
            )
            if pattern == (likely or (tables[0] if tables else None)):
                self.embedding = pattern.name
                return "vocab -> hidden", ""
            self.head = self.head or pattern.name
            return (
                f"vocab <- {self.last}" if pattern.shape[0] == vocab else f"{self.last} -> vocab"
            ), "" if named & HEAD else "a head?"
        if pattern.shape[1] == self.hidden and named & (EMBEDDING | POSITION):
            axes = ("positions",) if named & POSITION else ("token_types", "positions")
            return f"{self.size(pattern, pattern.shape[0], axes)} -> hidden", ""
        out, read = self.sides(pattern)
        if read == self.hidden:
            return self.arrow(self.size(pattern, out, ("hidden",)), self.last), "what it reads and writes"
        reads = self.size(pattern, read, ("vocab",))
        return self.arrow(self.size(pattern, out, ("hidden", "vocab")), reads), "what it reads and writes"

    def vector(self, pattern: Pattern) -> Guess:
        (size,) = pattern.shape
        weight = self.shapes.get(f"{pattern.module}.weight")
        if is_norm(pattern):
            return self.norm(pattern, size)
        if weight is not None and re.search(r"<-|->", weight[0]):
            packed = f"{pattern.module}.weight" in (*self.packed, *self.doubled)
            return f"-> {self.written(weight[0])}", "packed, as its weight" if packed else ""
        if size == self.hidden and set(words(pattern.name)) & SCALE:
            return "hidden", "multiplies each channel, carried along"
        if size == self.hidden:
            return "-> hidden", _NORM_OR_BIAS
        return self.size(pattern, size, ("heads",)), "carried along"

    def norm(self, pattern: Pattern, size: int) -> Guess:
        part = attention_part(pattern)
        if size == self.hidden and self.post_norm:
            return "-> hidden", ""
        if size == self.hidden and (pattern.layered or not self.of_embedding(pattern)):
            space = "normed" if pattern.layered else "final"
            self.normed.add(space)
            return f"-> {space}", ""
        if size == self.hidden:
            return "-> hidden", "a norm behind the embedding: then also `hidden: norm(hidden, ...)` under spaces"
        if size == self.head_size and part in self.head_norms:
            return f"-> {part}", ""
        return f"-> {self.size(pattern, size)}", "a norm of its own: give what it writes a space with a norm"

    def written(self, shape: str) -> str:
        """The side of a matrix's shape that it writes."""
        left, arrow, right = re.split(r"\s*(<-|->)\s*", shape.partition(": ")[2] or shape, maxsplit=1)
        return left if arrow == "<-" else right

    def arrow(self, out: str, read: str) -> str:
        return f"{read} -> {out}" if self.reversed else f"{out} <- {read}"

    @property
    def reads(self) -> str:
        """What a layer's matrices read: the output of a norm, where there are norms in front."""
        inside = any(is_norm(one) and one.layered and one.shape == (self.hidden,) for one in self.patterns)
        return "normed" if inside and not self.post_norm else "hidden"

    @property
    def last(self) -> str:
        """What a head reads: the output of the last norm, where there is one."""
        outside = any(is_norm(one) and not one.layered and not self.of_embedding(one) for one in self.patterns)
        return "final" if outside and not self.post_norm else "hidden"

    def size(self, pattern: Pattern, size: int, likely: Sequence[str] = ()) -> str:
        """The axis of a size: one of the likely ones if it has that size, else one that never grows."""
        for axis in likely:
            if self.sizes.get(axis) == size:
                return axis
        return str(size) if size == 1 else self.made(f"size_{size}", size)

    def made(self, name: str, size: int) -> str:
        """An axis of its own for a size that nothing explains."""
        self.fixed[name] = size
        return name

    # What came of it

    def used_words(self) -> set[str]:
        return {word for shape, _ in self.shapes.values() for word in re.findall(r"[A-Za-z_]\w*", shape)}

    def used_spaces(self) -> set[str]:
        return self.used_words() - self.sizes.keys()

    def used_axes(self) -> set[str]:
        used = self.used_words()
        used |= {"intermediate"} if used & {"gate", "up", "inner"} or self.doubled else set()
        return used | ({"head_dim", "heads"} if used & {"query", "query_raw", "key", "value"} or self.packed else set())
