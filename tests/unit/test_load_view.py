"""How far a load is, in words."""

from __future__ import annotations

from io import StringIO

from runner.insight.load_view import LoadView
from runner.load.generator import LoadProgress
from runner.trial import Lengths, LoadPlan, LoadProtocol

PLAN = LoadPlan(
    phase="load",
    protocol=LoadProtocol.CLOSED_LOOP,
    concurrency=4,
    prompt_tokens=Lengths.fixed(8),
    output_tokens=Lengths("uniform", 50, 150),
    seed=0,
    requests=40,
)


def test_elsewhere_than_in_a_terminal_a_line_comes_every_five_seconds() -> None:
    stream, now_s = StringIO(), 0.0
    view = LoadView(stream, PLAN, "load", lambda: now_s)
    for half_seconds in range(1, 25):
        now_s = half_seconds / 2
        tokens = half_seconds * 50
        view(LoadProgress(now_s, tokens, half_seconds // 2, 100.0, in_flight=4, failed=1))
    view.close()
    assert stream.getvalue().splitlines() == [
        "load: 5 of 40 requests, 4 in flight, 1 failed, 100 tokens/s, about 35 s left",
        "load: 10 of 40 requests, 4 in flight, 1 failed, 100 tokens/s, about 30 s left",
    ]


def test_nothing_is_said_of_the_time_left_before_anything_came() -> None:
    stream, now_s = StringIO(), 0.0
    view = LoadView(stream, PLAN, "warming up", lambda: now_s)
    now_s = 6.0
    view(LoadProgress(now_s, 0, 0, 0.0, in_flight=4))
    assert stream.getvalue() == "warming up: 0 of 40 requests, 4 in flight, 0 tokens/s\n"
