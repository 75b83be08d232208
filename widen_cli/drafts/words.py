"""What the words of a tensor's name tell of its part in a model. Guesses, every one of them: shapes and names are all there is."""

from __future__ import annotations

import re

from widen_cli.drafts.patterns import Pattern

QUERY = {"q", "wq", "query", "queries", "qproj"}
KEY = {"k", "wk", "key", "keys", "kproj"}
VALUE = {"v", "wv", "value", "values", "vproj"}
PACKED = {"qkv", "wqkv", "kqv", "kv", "wkv"}
OUT = {"o", "wo", "out", "output", "proj", "dense", "oproj", "projection"}
ATTENTION = {"attn", "attention", "att", "selfattn", "mix", "mixer", "mha", "sa"}
GATE = {"gate", "w1", "wg", "wi0", "gated"}
EMBEDDING = {
    "embed",
    "emb",
    "embd",
    "embeddings",
    "embedding",
    "embedder",
    "wte",
    "wpe",
    "tok",
    "token",
    "word",
    "vocab",
}
POSITION = {"pos", "position", "positions", "wpe", "positional"}
HEAD = {"head", "lm", "logits", "unembed", "output", "out", "decoder", "classifier"}
SCALE = {"gamma", "ls", "scale", "layerscale", "lambda"}


def words(name: str) -> list[str]:
    """The words of a name in small letters: `self_attn.qProj` is self, attn, q, proj."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*|\d+", name)]


def is_norm(pattern: Pattern) -> bool:
    """Whether a vector belongs to a norm, by its module's name."""
    *_, module = ("", *pattern.module.split("."))
    return any("norm" in word or re.fullmatch(r"ln\d*|rms\d*", word) for word in words(module))


def attention_part(pattern: Pattern) -> str | None:
    """`query`, `key`, `value`, `packed` or `attended` for a module of an attention; None for every other."""
    *path, leaf = pattern.module.split(".")
    own = set(words(leaf))
    parts = [part for part, known in (("query", QUERY), ("key", KEY), ("value", VALUE)) if own & known]
    if len(parts) > 1 or own & PACKED or (own >= {"c", "attn"}) or own >= {"in", "proj"}:
        return "packed"
    if parts:
        return parts[0]
    inside = {word for part in path for word in words(part)} | own
    return "attended" if own & OUT and inside & ATTENTION else None
