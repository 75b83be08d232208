"""The formulas: what may be said, what each form is worth, and how unknown values take part."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widen_cli.formulas import FormulaSyntaxError, UnknownValueError, evaluate, holds, parse_formula

VALUES = {"hidden": 36, "heads": 3, "tied": True, "act": "relu", "n_inner": None, "text_config.size": 7}


def lookup(name: str) -> Any:
    if name not in VALUES:
        raise UnknownValueError(name)
    return VALUES[name]


def value(text: str | int | bool) -> Any:
    return evaluate(parse_formula(text), lookup)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hidden", 36),
        ("hidden / heads", 12),
        ("4 * hidden", 144),
        ("hidden // 5", 7),
        ("hidden % heads", 0),
        ("hidden - heads + 1", 34),
        ("-heads", -3),
        ("2 ** heads", 8),
        ("text_config.size", 7),
        ("hidden % heads == 0", True),
        ("hidden != 36", False),
        ("1 < heads <= 3", True),
        ("1 < heads < 3", False),
        ("heads > 3 or heads >= 3", True),
        ("act == 'relu'", True),
        ("act in ['relu', 'gelu']", True),
        ("act not in ('silu', 'gelu')", True),
        ("n_inner is None", True),
        ("n_inner is not None", False),
        ("4 * hidden if n_inner is None else n_inner", 144),
        ("not tied", False),
        ("tied and act == 'relu'", True),
        (12, 12),
        (True, True),
    ],
)
def test_values(text: str | int, expected: Any) -> None:
    assert value(text) == expected


@settings(deadline=None)
@given(a=st.integers(-50, 50), b=st.integers(-50, 50))
def test_division_is_exact_or_refused(a: int, b: int) -> None:
    divide = parse_formula("a / b")
    numbers = {"a": a, "b": b}
    if b and Fraction(a, b).denominator == 1:
        assert evaluate(divide, numbers.__getitem__) == Fraction(a, b)
    else:
        with pytest.raises(ValueError, match=rf"^a / b = {a} / {b} is no whole number$"):
            evaluate(divide, numbers.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tied or nowhere", True),
        ("nowhere or tied", True),
        ("not tied and nowhere", False),
        ("nowhere and not tied", False),
    ],
)
def test_a_known_value_outvotes_an_unknown_one(text: str, expected: bool) -> None:
    assert value(text) is expected


@pytest.mark.parametrize("text", ["nowhere", "nowhere and tied", "not tied or nowhere", "nowhere == 1", "a.b"])
def test_an_unknown_value_that_matters_is_named(text: str) -> None:
    with pytest.raises(UnknownValueError) as caught:
        value(text)
    assert caught.value.name == ("a.b" if text == "a.b" else "nowhere")


@pytest.mark.parametrize("unknown", [True, False])
def test_condition_with_unknown_values_takes_the_answer_given(unknown: bool) -> None:
    assert holds(parse_formula("nowhere"), lookup, unknown, has=lambda name: False) is unknown
    assert holds(parse_formula("tied"), lookup, unknown, has=lambda name: False) is True
    assert holds(parse_formula("n_inner"), lookup, unknown, has=lambda name: False) is False


def test_has_asks_for_all_the_tensors_named() -> None:
    stored = {"a.weight", "b.weight"}

    def both(text: str) -> bool:
        return holds(parse_formula(text), lookup, False, has=stored.__contains__)

    assert both('has("a.weight")')
    assert both('has("a.weight", "b.weight")')
    assert not both('has("a.weight", "c.weight")')
    assert both('not has("c.weight")')


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["LlamaForCausalLM"], True),
        (["LlamaForCausalLM", "LlamaModel"], True),
        (["LlamaModel", "LlamaForCausalLM"], False),
        ("LlamaForCausalLM", True),
        (["GPT2DoubleHeadsModel"], True),
        (["llamaforcausallm"], False),
    ],
)
def test_is_class_judges_the_first_class_by_pattern(architectures: Any, expected: bool) -> None:
    formula = parse_formula('is_class("*ForCausalLM", "*DoubleHeadsModel")')
    assert evaluate(formula, {"architectures": architectures}.__getitem__) is expected


@pytest.mark.parametrize("architectures", [None, [], [3]])
def test_is_class_without_a_class_is_unknown(architectures: Any) -> None:
    with pytest.raises(UnknownValueError, match="architectures"):
        evaluate(parse_formula('is_class("*Model")'), {"architectures": architectures}.__getitem__)


def test_names_come_with_column_and_whether_they_are_called() -> None:
    names = parse_formula("act(gate.x) * up / sqrt(hidden)").names()
    assert sorted(names, key=lambda found: found[1]) == [
        ("act", 0, True),
        ("gate.x", 4, False),
        ("up", 14, False),
        ("sqrt", 19, True),
        ("hidden", 24, False),
    ]


def test_columns_count_letters_and_not_bytes() -> None:
    text = "has('é') and hiden"
    columns = {name: column for name, column, _ in parse_formula(text).names()}
    assert columns["hiden"] == text.index("hiden")


def test_equal_texts_are_equal_formulas() -> None:
    one, other = parse_formula("4 * hidden"), parse_formula("4 * hidden")
    assert one == other
    assert len({one, other, parse_formula("hidden * 4")}) == 2


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 0, "cannot read the formula ''"),
        ("hidden heads", 7, "cannot read the formula 'hidden heads'"),
        ("hidden = 3", 7, "cannot read the formula 'hidden = 3'"),
        ("(hidden", 0, "cannot read the formula '(hidden'"),
        ("hidden $ 2", 7, "cannot read the formula 'hidden $ 2'"),
        ("2 * lambda: 1", 4, None),
        ("hidden[0]", 0, "'hidden[0]' has no meaning in a formula"),
        ("1 + hidden[0]", 4, "'hidden[0]' has no meaning in a formula"),
        ("1 + {2}", 4, "'{2}' has no meaning in a formula"),
        ("1 + [x for x in y]", 4, "'[x for x in y]' has no meaning in a formula"),
        ("~hidden", 0, "'~hidden' has no meaning in a formula"),
        ("a << b", 0, "'a << b' has no meaning in a formula"),
        ("2 * f(x=1)", 4, "a call is a name and plain arguments, not 'f(x=1)'"),
        ("f(*x)", 2, "'*x' has no meaning in a formula"),
        ("f(1)(2)", 0, "a call is a name and plain arguments, not 'f(1)(2)'"),
        ("2 * f(1).x", 4, "'f(1)' is no name"),
        ("f'{x}'", 0, None),
    ],
)
def test_faults_stand_where_they_are(text: str, column: int, message: str | None) -> None:
    with pytest.raises(FormulaSyntaxError) as caught:
        parse_formula(text)
    assert caught.value.column == column
    assert message is None or caught.value.message == message


@pytest.mark.parametrize("text", ["1j", "...", "b'x'"])
def test_only_numbers_and_texts_are_constants(text: str) -> None:
    with pytest.raises(FormulaSyntaxError):
        parse_formula(text)


@pytest.mark.parametrize("text", ["(" * 5000 + "1" + ")" * 5000, "-" * 100_000 + "1", "a" + ".b" * 100_000])
def test_endless_nesting_is_a_fault_and_no_crash(text: str) -> None:
    with pytest.raises(FormulaSyntaxError):
        parse_formula(text)


@settings(deadline=None)
@given(st.text(alphabet="ab1 ()[]{}.,+-*/%=<>'\"!:@\\\x00é\n#", max_size=16))
def test_any_text_is_a_formula_or_a_fault_inside_it(text: str) -> None:
    fault = fault_of(text)
    assert fault is None or 0 <= fault.column <= len(text)


def fault_of(text: str) -> FormulaSyntaxError | None:
    try:
        parse_formula(text)
    except FormulaSyntaxError as error:
        return error
    return None
