from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import ConfigError
from runner.expression import Expression
from runner.trial import ParamValue


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pp_size > 1", True),
        ("tp_size * pp_size == 8", True),
        ("tp_size == 1 or tp_size == pp_size", False),
        ("not cuda_graph", False),
        ("cuda_graph", True),
        ("1 < tp_size <= 2", True),
        ("backend in ['triton', 'flashinfer']", True),
        ("backend not in ('triton', 'fa3')", False),
        ("max(tp_size, pp_size) == 4 and abs(-1) == 1 and min(1, 2) == 1", True),
        ("(pp_size if cuda_graph else tp_size) == 4", True),
        ("pp_size % tp_size == 0 and pp_size // 3 == 1 and pp_size / 8 == 0.5", True),
        ("  tp_size - pp_size == -2  ", True),
    ],
)
def test_the_grammar_of_study_files(text: str, expected: bool) -> None:
    values: dict[str, ParamValue] = {
        "tp_size": 2,
        "pp_size": 4,
        "cuda_graph": True,
        "backend": "triton",
    }
    assert Expression.parse(text).holds(values) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pp_size >",
        "pp_size = 1",
        "pp_size > 1; tp_size",
        "import os",
        "a\nb",
        "x\0y",
        "(" * 250,
        "a > 1 and " * 40 + "a > 1",
        "a" * 301,
    ],
)
def test_what_is_no_expression_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(ConfigError):
        Expression.parse(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("__import__('os').system('true')", "__import__"),
        ("tp_size.real > 1", "tp_size.real"),
        ("open('x') == 1", "open('x')"),
        ("max(a, key=b) > 1", "max(a, key=b)"),
        ("[x for x in (1, 2)] == [1]", "for x in"),
        ("(lambda: 1) == 1", "lambda"),
        ("a ** 9 > 1", "Pow"),
        ("a << 9 > 1", "LShift"),
        ("a is b", "Is"),
        ("a == None", "None"),
        ("a[0] > 1", "a[0]"),
        ("f'{a}' == 'x'", "f'{a}'"),
        ("{1: 2} == a", "{1: 2}"),
    ],
)
def test_what_is_beyond_the_grammar_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Expression.parse(text)
    assert named in str(caught.value)
    assert "allowed are names, numbers" in str(caught.value)


def test_names_leave_out_functions_and_what_is_bound() -> None:
    expression = Expression.parse("max(tp_size, pp_size) <= gpus and min == 1")
    assert expression.names == {"tp_size", "pp_size", "gpus", "min"}
    bound = expression.bind({"gpus": 8, "nodes": 1})
    assert bound.names == {"tp_size", "pp_size", "min"}
    assert bound.bound == (("gpus", 8),)


def test_a_bound_name_has_its_value_until_another_is_given() -> None:
    expression = Expression.parse("tp_size > 1").bind({"tp_size": 8})
    assert expression.holds({}) is True
    assert expression.holds({"tp_size": 1}) is False


def test_an_absent_name_decides_nothing_unless_the_answer_is_clear_before() -> None:
    assert Expression.parse("depth > 2").decide({}) is None
    assert Expression.parse("pp_size > 1 and depth > 2").decide({"pp_size": 1}) is False
    assert Expression.parse("pp_size > 1 and depth > 2").decide({"pp_size": 8}) is None
    assert Expression.parse("pp_size == 1 or depth > 2").decide({"pp_size": 1}) is True


def test_holds_says_which_name_has_no_value() -> None:
    with pytest.raises(ConfigError, match=r"'depth' has no value; known: gpus, pp_size"):
        Expression.parse("depth > gpus").bind({"gpus": 8}).holds({"pp_size": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp_size", "gives 8, not true or false"),
        ("pp_size * 2", "gives 16, not true or false"),
        ("8 / depth > 1", "cannot be evaluated for depth=0: division by zero"),
        ("pp_size > 'x'", "cannot be evaluated for pp_size=8"),
    ],
)
def test_an_answer_that_is_no_truth_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Expression.parse(text).decide({"pp_size": 8, "depth": 0})
    assert message in str(caught.value)


def test_an_expression_crosses_processes() -> None:
    expression = Expression.parse("pp_size > 1").bind({"pp_size": 2})
    assert pickle.loads(pickle.dumps(expression)) == expression


@given(st.text(max_size=40))
def test_any_text_is_an_expression_or_a_config_error(text: str) -> None:
    try:
        expression = Expression.parse(text)
    except ConfigError:
        return
    try:
        assert expression.decide(dict.fromkeys(expression.names, 1)) in (True, False)
    except ConfigError:
        return


@given(st.integers(1, 64), st.integers(1, 64))
def test_comparisons_are_those_of_python(tp_size: int, pp_size: int) -> None:
    values: dict[str, ParamValue] = {"tp_size": tp_size, "pp_size": pp_size}
    assert Expression.parse("tp_size * pp_size == 64").holds(values) is (tp_size * pp_size == 64)
    assert Expression.parse("tp_size < pp_size - 3").holds(values) is (tp_size < pp_size - 3)
