"""Expressions that choose runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.api.dashboard.run_filter import Values, parse_filter
from tinsmith.errors import RequestError

RUN: Values = {
    **{"lr": 3e-4, "loss": 1.5, "name": "Maths, 1st", "tag": ["old", "Sweep"], "ppo_kl:mean": 0.1, "odd name": 2.0},
    **{"created": "2026-11-02T10:00:00Z", "version": "v2", "and": 1.0},
}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "lr > 1e-4",
            "lr >= .0003",
            "lr<0.001 and loss<2",
            "lr = 3e-4",
            "lr == 0.0003",
            "lr != 1",
            "loss >= +1.5",
        ),
        *("loss < 1 or lr < 1", "loss < 1 or loss > 9 or loss = 1.5", "loss > 1 and (lr > 1 or lr < 1)", "not lr > 1"),
        *("not (lr > 1 or loss > 2)", "NOT missing", "lr", "(lr)", "lr and loss AND not missing", "missing != 3"),
        *('name ~ "MATHS, 1"', "name ~ '1st'", "name ~ maths", "name !~ code", 'name = "maths, 1st"', "lr ~ 0003"),
        *("tag = sweep", "tag = old and tag = Sweep", "tag ~ swe", "tag != new", "version = v2", "version > v1"),
        *("ppo_kl:mean < 1", "`odd name` = 2", "`and` = 1", "created > 2026-11-01", "created < '2026-12'"),
        *("loss < 1 or loss > 1 and lr < 1", "loss > 1 or missing > 1 and missing > 2"),
    ],
)
def test_an_expression_fits_the_run(text: str) -> None:
    assert parse_filter(text).fits(RUN)


@pytest.mark.parametrize(
    "text",
    [
        *("lr > 1", "lr < 1e-4", "loss != 1.5", "missing", "missing > 1", "missing = 1", "missing < 1", "not lr"),
        *("(loss < 1 or lr < 1) and missing", "name = maths", "name > 5", "tag = swee", "tag != old", "name !~ maths"),
        *("lr = text", "name ~ 'a.*b'"),
    ],
)
def test_an_expression_does_not_fit_the_run(text: str) -> None:
    assert not parse_filter(text).fits(RUN)


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("lr >", 5, "a number or text is expected after lr >, not the end"),
        ("lr > (", 6, "a number or text is expected after lr >, not '('"),
        ("lr > and loss", 6, "a number or text is expected after lr >, not 'and'"),
        ("lr 3", 4, "one of < <= > >= = != ~ !~ is expected after lr, not '3'"),
        ("3 < lr", 1, "the name of a value is expected, not '3'"),
        ("(lr > 1", 8, "the bracket opened at character 1 is not closed"),
        ("lr > 1)", 7, "')' follows a whole expression"),
        ("lr > 1 loss < 2", 8, "'loss' follows a whole expression; join with and, or"),
        ('name ~ "open', 8, "'\"' begins no name, number, operator or closed quotation"),
        ("lr > 1 and  $", 13, "'$' begins"),
        ("lr > 1 and", 11, "the name of a value is expected, not the end"),
        ("(" * 40 + "lr" + ")" * 40, 34, "nested more than 32 deep"),
        ("not " * 40 + "lr", 133, "nested more than 32 deep"),
    ],
)
def test_a_mistake_has_a_place(text: str, place: int, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_filter(text)
    assert f"at character {place}, " in str(caught.value) and reason in str(caught.value)


def test_the_names_of_an_expression_are_listed() -> None:
    assert parse_filter("lr > 1 and (not `b c` or lr = x)").names == {"lr", "b c"}


@given(st.text(alphabet="lr ()<>=!~\"'`and.o1e-$", max_size=60))
def test_any_text_is_an_expression_or_a_mistake_with_a_place(text: str) -> None:
    try:
        parse_filter(text).fits(RUN)
    except RequestError as error:
        assert "at character " in str(error)
