from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runner.insight.chart import Series, line_chart, y_ticks
from runner.insight.page import html_page
from tests.samples import make_result, make_settings

STUDY = make_settings()
RESULTS = [
    make_result(0, 200.0, name="pp8-auto"),
    make_result(1, 500.0),
    make_result(2, None),
    make_result(3, 499.0),
]


class Collector(HTMLParser):
    """Checks that tags nest, and keeps what refers to anything outside the page."""

    VOID = ("meta", "link", "br", "line", "polyline", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [pair for pair in attrs if pair[0] in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_needs_nothing_from_outside() -> None:
    page = html_page(RESULTS, STUDY)
    parser = Collector()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert parser.references == []
    assert not re.search(r"https?:|url\(|@import|<script", page)
    assert page.count("<svg") == 2
    assert "prefers-color-scheme: dark" in page


def test_page_escapes_what_servers_and_users_wrote() -> None:
    params = {"attention_backend": "<b>&"}
    results = [make_result(0, None, reason="<script>alert(1)</script>", params=params)]
    page = html_page([*results, make_result(1, 10.0, params=params)], STUDY)
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_page_of_an_empty_study_says_so() -> None:
    assert "No setting was measured to its end" in html_page([], STUDY)


@given(st.floats(0.0, 1e9))
def test_axis_begins_at_zero_and_covers_the_highest(highest: float) -> None:
    ticks = y_ticks(highest)
    assert ticks[0] == 0.0
    assert ticks[-1] >= highest * (1.0 - 1e-9)
    assert 2 <= len(ticks) <= 7


def test_labels_of_lines_that_end_together_do_not_cover_each_other() -> None:
    lines = [Series(((1.0, 5.0), (2.0, 10.0)), "t", "best", f"name{n}") for n in range(4)]
    chart = line_chart(lines, "concurrency", "tokens/s")
    heights = [float(y) for y in re.findall(r'class="label best" x="[\d.]+" y="([\d.]+)"', chart)]
    assert len(heights) == 4
    assert all(b - a >= 14.9 for a, b in pairwise(heights))


def test_a_chart_without_points_is_a_sentence() -> None:
    assert (
        line_chart([Series((), "t", "best")], "concurrency", "W") == '<p class="quiet">No data.</p>'
    )
