"""Laws of token counts, and which one the search measures with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config import complete, diff, dump, parse_study
from runner.errors import ConfigError
from runner.lengths import is_narrow, law_words, scaled, written_mean
from runner.settings import StudySettings
from runner.trial import Arrivals, Lengths
from tests.study_samples import DOCUMENT, refused

LONG: dict[str, Any] = {"uniform": [1300, 3000]}


@pytest.mark.parametrize(
    ("law", "short", "words"),
    [
        (Lengths.fixed(512), Lengths.fixed(256), "512 tokens"),
        (Lengths("uniform", 1300, 3000), Lengths("uniform", 155, 357), "1,300 - 3,000 tokens"),
        (
            Lengths("normal", 512, 100),
            Lengths("normal", 256, 50),
            "512 tokens normal, deviation 100",
        ),
        (
            Lengths("recorded", values=(1, 1023), paired=True),
            Lengths("recorded", values=(1, 512), paired=True),
            "512 tokens on average, 2 recorded in pairs",
        ),
    ],
)
def test_a_scaled_law_keeps_its_shape(law: Lengths, short: Lengths, words: str) -> None:
    assert scaled(law, 256) == short
    assert law_words(law) == words


def test_one_token_is_no_plural_and_odd_means_are_short() -> None:
    assert law_words(Lengths.fixed(1)) == "1 token"
    assert law_words(Lengths("recorded", values=(1, 1, 2))) == "1.333 tokens on average, 3 recorded"


@given(st.lists(st.integers(1, 9999), min_size=1), st.floats(1, 9999))
def test_scaled_lengths_are_tokens(values: list[int], mean: float) -> None:
    law = scaled(Lengths("recorded", values=tuple(values)), mean)
    assert min(law.values) >= 1
    assert written_mean(law) == pytest.approx(mean, abs=1)


def of(workload: object = LONG, **more: object) -> StudySettings:
    """A study with these output tokens; `search` is its search.output_tokens."""
    search = {"output_tokens": more.pop("search", None)}
    lengths = {"output_tokens": workload, "concurrency": [1, 8]}
    return parse_study({**DOCUMENT, "workload": {**lengths, **more}, "search": search})


def test_long_replies_are_searched_with_shorter_ones() -> None:
    assert of().search.output_tokens == Lengths("uniform", 155, 357)
    assert of(search="auto").search.output_tokens == Lengths("uniform", 155, 357)
    assert of(257).search.output_tokens == Lengths.fixed(256)
    assert of(LONG, protocol="burst").search.output_tokens == Lengths("uniform", 155, 357)


@pytest.mark.parametrize("law", [256, {"uniform": [1, 511]}, {"normal": [256, 500]}])
def test_short_replies_stay_as_they_are(law: object) -> None:
    assert of(law).search.output_tokens is None


def test_an_open_loop_keeps_its_lengths_unless_it_is_told_others() -> None:
    ladder = {"protocol": "open_loop", "rate": [1, 2], "concurrency": None}
    assert of(**ladder).search.output_tokens is None
    assert of(search=100, **ladder).search.output_tokens == Lengths.fixed(100)


def test_the_lengths_of_the_search_can_be_given() -> None:
    assert of(search=64).search.output_tokens == Lengths.fixed(64)
    assert of(128, search={"normal": [64, 8]}).search.output_tokens == Lengths("normal", 64, 8)
    assert of(search=LONG).search.output_tokens is None, "the same law is no other law"


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ("soon", "found the text 'soon', expected auto, a whole number of tokens above 0, {uni"),
        ("0", "found 0, expected auto, a whole number"),
        ("{uniform: [9, 1]}", "search.output_tokens.uniform: found [9, 1], expected [low, high]"),
        ("{file: none.jsonl}", "search.output_tokens.file: none.jsonl does not exist"),
        ("{recorded: [1], paired: true}", "pairs of recorded lengths need `paired: true` in work"),
    ],
)
def test_lengths_of_the_search_that_are_none(law: str, message: str) -> None:
    assert refused(f"search.output_tokens={law}").startswith(message)


@pytest.mark.parametrize("search", [None, 64, LONG])
def test_both_laws_are_written_down_and_read_back(search: object) -> None:
    settings = of(search=search)
    stored = json.loads(json.dumps(dump(settings)))
    assert parse_study(stored) == settings


def test_another_law_of_the_search_is_another_study() -> None:
    assert diff(dump(of(search=64)), dump(of(search=65))) == ["search.output_tokens: 64 -> 65"]


def test_studies_of_earlier_versions_measured_all_with_the_lengths_of_the_workload() -> None:
    stored = dump(of())
    assert isinstance(stored["search"], dict)
    del stored["search"]["output_tokens"]
    assert parse_study(complete(stored)).search.output_tokens is None
    assert complete({"name": "damaged"}) == {"name": "damaged"}


def test_arrivals_are_of_open_loops_alone() -> None:
    ladder: dict[str, object] = {"protocol": "open_loop", "rate": [1, 2], "concurrency": None}
    assert of(**ladder).workload.arrivals is Arrivals.POISSON
    even = of(arrivals="constant", **ladder)
    assert even.workload.arrivals is Arrivals.CONSTANT
    assert parse_study(dump(even)) == even
    with pytest.raises(ConfigError, match=r"workload\.arrivals: not used by closed_loop; only"):
        of(arrivals="constant")
    stored = dump(of(**ladder))
    assert isinstance(stored["workload"], dict)
    del stored["workload"]["arrivals"]
    assert diff(complete(stored), dump(of(**ladder))) == []


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (Lengths.fixed(128), True),
        (Lengths("uniform", 128, 128), True),
        (Lengths("uniform", 112, 144), True),
        (Lengths("uniform", 96, 160), False),
        (Lengths("normal", 128, 6), True),
        (Lengths("normal", 128, 40), False),
        (Lengths("recorded", values=(128, 128, 130)), True),
        (Lengths("recorded", values=(20, 128, 400)), False),
    ],
)
def test_laws_whose_replies_end_together(law: Lengths, expected: bool) -> None:
    assert is_narrow(law) is expected
