"""The shape language of the maps: how a stored tensor's dimensions are made of spaces.

    vocab <- final                     torch Linear, stored [out, in]
    vocab -> hidden                    Embedding and Conv1D, stored [in, out]
    -> hidden                          bias or gain, stored [out]
    heads buckets                      carried along: repeated where an axis grows, never scaled
    (heads query) <- normed            a dimension that is a row-major product
    normed -> (heads query | heads key | heads value)        parts laid one after the other
    (heads (query | key | value)) <- normed                  the same, per head
    experts: intermediate <- normed    a leading stored axis
    hidden <- channels 3 3             several dimensions on one side (convolutions)

After einops (https://einops.rocks): names and parentheses mean what they mean there, the arrow points from input to output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>[0-9]{1,9}(?![0-9]))|(?P<mark><-|->|[()|:]))")


class ShapeSyntaxError(Exception):
    """A shape text that cannot be read; `column` counts from 0 within the text."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


@dataclass(frozen=True)
class Name:
    """An axis or space, or a structural number (then `text` is its digits)."""

    text: str
    column: int


@dataclass(frozen=True)
class Product:
    """Row-major product of the items."""

    items: tuple[Term, ...]


@dataclass(frozen=True)
class Parts:
    """Parts laid one after the other."""

    parts: tuple[Term, ...]


Term = Name | Product | Parts


@dataclass(frozen=True)
class Dimension:
    """One stored dimension and its role: `out` writes spaces, `in` reads them, `carried` does neither."""

    term: Term
    role: str


@dataclass(frozen=True)
class Shape:
    """A parsed shape: the text and its stored dimensions in order."""

    text: str
    dimensions: tuple[Dimension, ...]

    def names(self) -> Iterator[tuple[Name, str]]:
        """Every name in the shape with the role of the dimension it stands in."""
        for dimension in self.dimensions:
            for name in _names(dimension.term):
                yield name, dimension.role


def _names(term: Term) -> Iterator[Name]:
    if isinstance(term, Name):
        yield term
    else:
        for inner in term.items if isinstance(term, Product) else term.parts:
            yield from _names(inner)


@dataclass(frozen=True)
class _Token:
    text: str
    column: int
    kind: str


def _tokens(text: str) -> list[_Token]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            start = position + len(text[position:]) - len(text[position:].lstrip())
            raise ShapeSyntaxError(f"unexpected character {text[start]!r} in shape '{text}'", start)
        kind = str(match.lastgroup)
        tokens.append(_Token(match.group(kind), match.start(kind), kind))
        position = match.end()
    return tokens


NESTING_LIMIT = 32


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.position = 0
        self.depth = 0

    def peek(self) -> str:
        return self.tokens[self.position].text if self.position < len(self.tokens) else ""

    def take(self) -> _Token:
        self.position += 1
        return self.tokens[self.position - 1]

    def fail(self, message: str) -> ShapeSyntaxError:
        at_end = self.position >= len(self.tokens)
        column = len(self.text) if at_end else self.tokens[self.position].column
        return ShapeSyntaxError(f"{message} in shape '{self.text}'", column)

    def term(self) -> Term:
        if self.peek() == "(":
            if self.depth == NESTING_LIMIT:
                raise self.fail(f"more than {NESTING_LIMIT} nested parentheses")
            self.depth += 1
            self.take()
            parts = [self.product()]
            while self.peek() == "|":
                self.take()
                parts.append(self.product())
            if self.peek() != ")":
                raise self.fail("expected ')'" if not self.peek() else f"expected ')' before '{self.peek()}'")
            self.take()
            self.depth -= 1
            return parts[0] if len(parts) == 1 else Parts(tuple(parts))
        if self.position < len(self.tokens) and self.tokens[self.position].kind in ("name", "number"):
            token = self.take()
            return Name(token.text, token.column)
        raise self.fail(
            f"expected an axis, a space or '(' before '{self.peek()}'"
            if self.peek()
            else "expected an axis, a space or '('"
        )

    def product(self) -> Term:
        items = [self.term()]
        while self.peek() not in ("", ")", "|", "->", "<-", ":"):
            items.append(self.term())
        return items[0] if len(items) == 1 else Product(tuple(items))

    def terms(self) -> list[Term]:
        terms = []
        while self.peek() not in ("", "->", "<-", ":"):
            terms.append(self.term())
        return terms


def parse_shape(text: str) -> Shape:
    """The shape that `text` describes. Raises ShapeSyntaxError with the column of the fault."""
    reader = _Reader(text)
    left = reader.terms()
    carried: list[Term] = []
    if reader.peek() == ":":
        reader.take()
        carried, left = left, reader.terms()
        if not carried:
            raise ShapeSyntaxError(f"nothing before ':' in shape '{text}'", 0)
    arrow = reader.peek()
    if arrow not in ("", "->", "<-"):
        raise reader.fail(f"unexpected '{arrow}'")
    right: list[Term] = []
    if arrow:
        reader.take()
        right = reader.terms()
        if reader.peek():
            raise reader.fail(f"unexpected '{reader.peek()}'")
        if not right or (arrow == "<-" and not left):
            raise reader.fail(f"nothing {'after' if not right else 'before'} '{arrow}'")
    roles = {"": ("carried", ""), "->": ("in", "out"), "<-": ("out", "in")}[arrow]
    sides = [(carried, "carried"), (left, roles[0]), (right, roles[1])]
    dimensions = tuple(Dimension(term, role) for terms, role in sides for term in terms)
    if not dimensions:
        raise ShapeSyntaxError("empty shape", 0)
    return Shape(text, dimensions)
