"""Scales are exact numbers with a readable face; equations between them never lie about who contradicts whom."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widen_cli.scales import ONE, ContradictionError, Equations, Scale

HALF = Fraction(1, 2)
POWERS = st.dictionaries(st.sampled_from([2, 3, 5, 7]), st.fractions(-3, 3, max_denominator=4).filter(bool), max_size=3)


def scale_of(powers: dict[int, Fraction]) -> Scale:
    scale = ONE
    for prime, power in powers.items():
        scale = scale * Scale.of(prime) ** power
    return scale


SCALES = POWERS.map(scale_of)


def decimal(scale: Scale) -> Decimal:
    """The number to 50 digits, by another road than the code's."""
    with localcontext() as context:
        context.prec = 50
        product = Decimal(1)
        for prime, power in scale.powers:
            product *= (Decimal(prime).ln() * power.numerator / power.denominator).exp()
        return product


@settings(deadline=None)
@given(SCALES, SCALES, SCALES)
def test_scales_are_a_group(a: Scale, b: Scale, c: Scale) -> None:
    assert (a * b) * c == a * (b * c)
    assert a * b == b * a
    assert (a * b) / b == a
    assert (a / a).is_one
    assert a**0 == ONE
    assert (a**HALF) ** 2 == a


def test_a_root_times_itself_is_exact() -> None:
    root = Scale.of(2) ** -HALF
    assert root * root == Scale.of(HALF)
    assert Scale.of(12) ** HALF == Scale.of(2) * Scale.of(3) ** HALF


@settings(deadline=None)
@given(st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000))
def test_a_fraction_is_itself(number: Fraction) -> None:
    scale = Scale.of(number)
    assert scale.fraction == number
    assert float(scale) == float(number)
    assert scale.is_one == (number == 1)
    bits = number.numerator if number > 1 else number.denominator
    assert scale.is_power_of_two == ((number.numerator == 1 or number.denominator == 1) and bits & (bits - 1) == 0)


@settings(deadline=None)
@given(SCALES)
def test_float_is_the_number_to_the_last_places(scale: Scale) -> None:
    exact, found = decimal(scale), Decimal(float(scale))
    square = all(power.denominator in (1, 2, 4) for _, power in scale.powers)
    assert abs(found - exact) <= (1 if square else 8) * Decimal(math.ulp(float(scale)))


def test_square_roots_are_correctly_rounded() -> None:
    for number in range(2, 60):
        assert float(Scale.of(number) ** HALF) == math.sqrt(number)
    assert float(Scale.of(2) ** -HALF) == math.sqrt(0.5)


@settings(deadline=None)
@given(SCALES)
def test_a_scale_with_a_root_is_no_fraction(scale: Scale) -> None:
    rooted = any(power.denominator > 1 for _, power in scale.powers)
    assert (scale.fraction is None) == rooted
    assert not (rooted and scale.is_power_of_two)


@pytest.mark.parametrize("number", [0, -1, Fraction(-1, 2)])
def test_scales_are_positive(number: int | Fraction) -> None:
    with pytest.raises(ValueError, match="a scale is positive"):
        Scale.of(number)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (ONE, "1"),
        (Scale.of(2), "2"),
        (Scale.of(Fraction(3, 2)), "3/2"),
        (Scale.of(Fraction(1, 12)), "1/12"),
        (Scale.of(2) ** HALF, "sqrt(2)"),
        (Scale.of(2) ** -HALF, "1/sqrt(2)"),
        (Scale.of(2) ** Fraction(3, 2), "2 sqrt(2)"),
        (Scale.of(2) ** Fraction(-3, 2), "1/(2 sqrt(2))"),
        (Scale.of(6) ** HALF, "sqrt(6)"),
        (Scale.of(Fraction(2, 3)) ** HALF, "sqrt(2)/sqrt(3)"),
        (Scale.of(Fraction(4, 3)) ** HALF, "2/sqrt(3)"),
        (Scale.of(3) * Scale.of(2) ** -HALF, "3/sqrt(2)"),
        (Scale.of(2) ** Fraction(1, 4), "2^(1/4)"),
        (Scale.of(2) ** Fraction(-3, 4), "2^(-3/4)"),
        (Scale.of(2) ** Fraction(-1, 4) * Scale.of(3), "2^(-1/4) 3"),
        (Scale.of(2) ** Fraction(-1, 4) * Scale.of(3) ** -HALF, "2^(-1/4) 3^(-1/2)"),
    ],
)
def test_printed_as_a_person_writes_it(scale: Scale, text: str) -> None:
    assert str(scale) == text


@settings(deadline=None)
@given(SCALES)
def test_the_printed_scale_is_the_number(scale: Scale) -> None:
    python = str(scale).replace("^", "**").replace("sqrt", "math.sqrt").replace(") ", ")*").replace(" ", "*")
    assert eval(python) == pytest.approx(float(scale), rel=1e-14)


def test_equations_determine_and_leave_free() -> None:
    equations = Equations()
    equations.require({"query": 1, "key": 1}, Scale.of(2) ** -HALF, "scores")
    assert equations.value("query") is None
    equations.require({"query": 1, "key": -1}, ONE, "shared")
    assert equations.value("query") == equations.value("key") == Scale.of(2) ** Fraction(-1, 4)
    assert equations.value("stream") is None
    assert equations.prefer("stream", Scale.of(3), "wish")
    assert not equations.prefer("query", ONE, "too late")
    assert equations.value("stream") == Scale.of(3)


def test_powers_of_spaces_are_roots_of_scales() -> None:
    equations = Equations()
    equations.require({"a": 2, "b": -1}, ONE, "b is the square of a")
    equations.require({"b": 1}, Scale.of(2), "b doubles")
    assert equations.value("a") == Scale.of(2) ** HALF


def test_a_contradiction_names_who_takes_part_in_the_order_given() -> None:
    equations = Equations()
    equations.require({"other": 1}, Scale.of(5), "unrelated")
    equations.require({"a": 1, "b": -1}, ONE, "a is b")
    equations.require({"c": 1, "d": -1}, ONE, "c is d")
    equations.require({"b": 1, "c": -1}, ONE, "b is c")
    equations.require({"d": 1}, ONE, "d is 1")
    with pytest.raises(ContradictionError) as caught:
        equations.require({"a": 1}, Scale.of(2), "a is 2")
    assert caught.value.equations == ["a is b", "c is d", "b is c", "d is 1", "a is 2"]


def test_a_contradiction_leaves_out_a_longer_way_round() -> None:
    equations = Equations()
    equations.require({"a": 1}, ONE, "a is 1")
    equations.require({"a": 1, "b": -1}, ONE, "a is b")
    equations.require({"b": 1, "c": -1}, ONE, "b is c")
    with pytest.raises(ContradictionError) as caught:
        equations.require({"a": 1}, Scale.of(2), "a is 2")
    assert caught.value.equations == ["a is 1", "a is 2"]


def test_an_equation_without_spaces_is_true_or_not() -> None:
    equations = Equations()
    equations.require({}, ONE, "nothing")
    with pytest.raises(ContradictionError) as caught:
        equations.require({"a": 0}, Scale.of(2), "two is one")
    assert caught.value.equations == ["two is one"]


SPACES = ("a", "b", "c", "d")
ROWS = st.lists(
    st.dictionaries(st.sampled_from(SPACES), st.integers(-3, 3).filter(bool), min_size=1, max_size=3), max_size=8
)


def _right(row: dict[str, int], truth: dict[str, Scale]) -> Scale:
    right = ONE
    for space, coefficient in row.items():
        right = right * truth[space] ** coefficient
    return right


@settings(deadline=None)
@given(rows=ROWS, truth=st.fixed_dictionaries(dict.fromkeys(SPACES, SCALES)))
def test_equations_that_a_solution_satisfies_never_contradict(
    rows: list[dict[str, int]], truth: dict[str, Scale]
) -> None:
    equations = Equations()
    for row in rows:
        equations.require(row, _right(row, truth), "true")
    for space in SPACES:
        assert equations.value(space) in (None, truth[space])
    for space in SPACES:
        free = equations.value(space) is None
        assert equations.prefer(space, truth[space], "wish") is free
        assert equations.value(space) == truth[space]


@settings(deadline=None)
@given(rows=ROWS, lie=st.integers(0, 7), truth=st.fixed_dictionaries(dict.fromkeys(SPACES, SCALES)))
def test_the_equations_named_contradict_each_other_by_themselves(
    rows: list[dict[str, int]], lie: int, truth: dict[str, Scale]
) -> None:
    given_rows = [
        (row, _right(row, truth) * (Scale.of(11) if number == lie else ONE)) for number, row in enumerate(rows)
    ]
    named = contradiction(given_rows)
    if named:
        assert lie in named, "without the lie there is nothing wrong"
        assert contradiction([given_rows[number] for number in named]), "these alone do not contradict"


def contradiction(rows: list[tuple[dict[str, int], Scale]]) -> list[int]:
    """The numbers of the equations that contradict each other, none if all go together."""
    equations = Equations()
    try:
        for number, (row, right) in enumerate(rows):
            equations.require(row, right, str(number))
    except ContradictionError as error:
        return [int(text) for text in error.equations]
    return []
