"""The shape language: what each form means, where each fault stands, and that no text breaks the reader."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widen_cli.shapes import Dimension, Name, Parts, Product, Shape, ShapeSyntaxError, Term, parse_shape


def text_of(term: Term) -> str:
    """A term as the language writes it."""
    if isinstance(term, Name):
        return term.text
    if isinstance(term, Product):
        return f"({' '.join(text_of(item) for item in term.items)})"
    return f"({' | '.join(_bare(part) for part in term.parts)})"


def _bare(term: Term) -> str:
    return " ".join(text_of(item) for item in term.items) if isinstance(term, Product) else text_of(term)


def read(text: str) -> list[tuple[str, str]]:
    """Every stored dimension of a shape as (term, role)."""
    return [(text_of(dimension.term), dimension.role) for dimension in parse_shape(text).dimensions]


@pytest.mark.parametrize(
    ("text", "dimensions"),
    [
        ("vocab <- final", [("vocab", "out"), ("final", "in")]),
        ("vocab -> hidden", [("vocab", "in"), ("hidden", "out")]),
        ("-> hidden", [("hidden", "out")]),
        ("heads", [("heads", "carried")]),
        ("heads buckets", [("heads", "carried"), ("buckets", "carried")]),
        ("(heads query) <- normed", [("(heads query)", "out"), ("normed", "in")]),
        ("hidden <- channels 3 3", [("hidden", "out"), ("channels", "in"), ("3", "in"), ("3", "in")]),
        ("experts: inner <- normed", [("experts", "carried"), ("inner", "out"), ("normed", "in")]),
        ("experts: -> inner", [("experts", "carried"), ("inner", "out")]),
        ("experts 2: a b", [("experts", "carried"), ("2", "carried"), ("a", "carried"), ("b", "carried")]),
        ("(gate | up) <- normed", [("(gate | up)", "out"), ("normed", "in")]),
        ("x -> (h q | h k | h v)", [("x", "in"), ("(h q | h k | h v)", "out")]),
        ("(h (q | k | v)) <- x", [("(h (q | k | v))", "out"), ("x", "in")]),
        ("(kv ((g q) | k | v)) <- x", [("(kv (g q | k | v))", "out"), ("x", "in")]),
        ("a<-b", [("a", "out"), ("b", "in")]),
        ("  a\t->\n b ", [("a", "in"), ("b", "out")]),
    ],
)
def test_forms(text: str, dimensions: list[tuple[str, str]]) -> None:
    assert read(text) == dimensions


def test_packed_forms_are_different_trees() -> None:
    blocks, per_head = parse_shape("-> (h q | h k)"), parse_shape("-> (h (q | k))")
    assert blocks.dimensions[0].term == Parts(
        (
            Product((Name("h", 4), Name("q", 6))),
            Product((Name("h", 10), Name("k", 12))),
        )
    )
    assert per_head.dimensions[0].term == Product((Name("h", 4), Parts((Name("q", 7), Name("k", 11)))))


def test_parentheses_around_one_name_mean_nothing() -> None:
    assert parse_shape("-> ((hidden))").dimensions == (Dimension(Name("hidden", 5), "out"),)


def test_names_come_with_role_and_column() -> None:
    shape = parse_shape("experts: (a | 2 b) <- c")
    assert [(name.text, name.column, role) for name, role in shape.names()] == [
        ("experts", 0, "carried"),
        ("a", 10, "out"),
        ("2", 14, "out"),
        ("b", 16, "out"),
        ("c", 22, "in"),
    ]


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 0, "empty shape"),
        ("   ", 0, "empty shape"),
        ("->", 2, "nothing after '->' in shape '->'"),
        ("a ->", 4, "nothing after '->' in shape 'a ->'"),
        ("a <-", 4, "nothing after '<-' in shape 'a <-'"),
        ("<- a", 4, "nothing before '<-' in shape '<- a'"),
        ("a <- b <- c", 7, "unexpected '<-' in shape 'a <- b <- c'"),
        ("a -> b: c", 6, "unexpected ':' in shape 'a -> b: c'"),
        ("a: b: c", 4, "unexpected ':' in shape 'a: b: c'"),
        (": a", 0, "nothing before ':' in shape ': a'"),
        ("(a b", 4, "expected ')' in shape '(a b'"),
        ("(a -> b)", 3, "expected ')' before '->' in shape '(a -> b)'"),
        ("()", 1, "expected an axis, a space or '(' before ')' in shape '()'"),
        ("(", 1, "expected an axis, a space or '(' in shape '('"),
        ("(a |) <- b", 4, "expected an axis, a space or '(' before ')' in shape '(a |) <- b'"),
        ("(a | | b)", 5, "expected an axis, a space or '(' before '|' in shape '(a | | b)'"),
        ("a | b", 2, "expected an axis, a space or '(' before '|' in shape 'a | b'"),
        ("a ) b", 2, "expected an axis, a space or '(' before ')' in shape 'a ) b'"),
        ("a, b", 1, "unexpected character ',' in shape 'a, b'"),
        ("a <- $b", 5, "unexpected character '$' in shape 'a <- $b'"),
        ("a - > b", 2, "unexpected character '-' in shape 'a - > b'"),
        ("a <-\n é", 6, "unexpected character 'é' in shape 'a <-\n é'"),
    ],
)
def test_faults_stand_where_they_are(text: str, column: int, message: str) -> None:
    with pytest.raises(ShapeSyntaxError) as caught:
        parse_shape(text)
    assert (caught.value.message, caught.value.column) == (message, column)


NAMES = st.one_of(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True),
    st.integers(0, 99).map(str),
).map(lambda text: Name(text, -1))


def _deeper(terms: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    inner = st.lists(terms, min_size=2, max_size=3).map(tuple)
    return inner.map(Product) | inner.map(Parts)


TERMS = st.recursive(NAMES, _deeper, max_leaves=8)


def _uncolumned(term: Term) -> Term:
    """The term with every column -1, and products inside products kept as written."""
    if isinstance(term, Name):
        return Name(term.text, -1)
    if isinstance(term, Product):
        return Product(tuple(_uncolumned(item) for item in term.items))
    return Parts(tuple(_uncolumned(part) for part in term.parts))


@settings(deadline=None)
@given(
    carried=st.lists(TERMS, max_size=2),
    left=st.lists(TERMS, min_size=1, max_size=2),
    right=st.lists(TERMS, min_size=1, max_size=2),
    arrow=st.sampled_from(["->", "<-"]),
)
def test_whatever_is_written_is_read_back(carried: list[Term], left: list[Term], right: list[Term], arrow: str) -> None:
    sides = [" ".join(map(text_of, side)) for side in (carried, left, right)]
    shape = parse_shape(f"{sides[0]}: {sides[1]} {arrow} {sides[2]}" if carried else f"{sides[1]} {arrow} {sides[2]}")
    roles = ("in", "out") if arrow == "->" else ("out", "in")
    expected = [(term, "carried") for term in carried]
    expected += [(term, roles[0]) for term in left] + [(term, roles[1]) for term in right]
    assert [(_uncolumned(dimension.term), dimension.role) for dimension in shape.dimensions] == expected


@settings(deadline=None)
@given(st.text(alphabet="ab1 _()|:<->é\n\t", max_size=20))
def test_any_text_is_a_shape_or_a_fault_inside_it(text: str) -> None:
    found = shape_or_fault(text)
    if isinstance(found, ShapeSyntaxError):
        assert 0 <= found.column <= len(text)
    else:
        assert all(text[name.column :].startswith(name.text) for name, _ in found.names())


def shape_or_fault(text: str) -> Shape | ShapeSyntaxError:
    try:
        return parse_shape(text)
    except ShapeSyntaxError as error:
        return error


def test_endless_nesting_is_a_fault_and_no_crash() -> None:
    with pytest.raises(ShapeSyntaxError):
        parse_shape("(" * 5000 + "a" + ")" * 5000)
