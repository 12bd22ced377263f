"""When the emulated server says that it is late, and that it is no longer."""

from __future__ import annotations

from runner.engines.emulator.lateness import QUIET_WALL_S, Lateness
from runner.engines.sglang.logs import Verdict, explain_death, shows_death

SCALE = 10.0
ROUND_S = 1.0  # 100 ms of the wall
BEHIND = (
    "The emulation is behind its schedule by 60.0 ms of real time on average, 60% of a token's "
    "time; a smaller --time-scale gives it more time."
)
CAUGHT_UP = "The emulation has caught up with its schedule."


class Watch:
    """Notes a delay every emulated half second."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now_s = 1000.0
        self.lateness = Lateness(SCALE, self.lines.append)
        self.lateness.note(0.0, ROUND_S, self.now_s)

    def note(self, late_s: float, wall_s: float = 1.0) -> list[str]:
        """The lines that so much time of such delays made."""
        before = len(self.lines)
        for _ in range(round(wall_s * SCALE / 0.5)):
            self.now_s += 0.5
            self.lateness.note(late_s, ROUND_S, self.now_s)
        return self.lines[before:]


def test_delays_that_are_the_rule_are_told_with_how_long_they_are() -> None:
    watch = Watch()
    watch.note(0.0)
    assert watch.note(0.6) == [BEHIND]


def test_delays_that_are_a_small_share_are_not_told() -> None:
    assert Watch().note(0.2, 20.0) == []  # 20 ms of the wall, a fifth of a token's time


def test_one_delay_is_not_the_rule() -> None:
    watch = Watch()
    watch.lateness.note(4.0, ROUND_S, watch.now_s)
    assert watch.note(0.0, 5.0) == []


def test_nothing_is_told_before_the_time_of_a_token_is_known() -> None:
    lines: list[str] = []
    lateness = Lateness(SCALE, lines.append)
    for number in range(100):
        lateness.note(5.0, 0.0, 1000.0 + number)
    assert lines == []


def test_the_end_of_a_delay_is_told_once() -> None:
    watch = Watch()
    watch.note(0.6, 2.0)
    assert watch.note(0.0, 5.0) == [CAUGHT_UP]


def test_a_server_that_stays_behind_says_so_now_and_then() -> None:
    watch = Watch()
    watch.note(0.0)
    lines = watch.note(0.6, 3 * QUIET_WALL_S)
    assert lines == 3 * [BEHIND]


def test_a_delay_that_gets_much_shorter_or_longer_is_told_at_once() -> None:
    """Else a later rung is blamed for what an earlier one met."""
    watch = Watch()
    watch.note(2.4)
    (shorter,) = watch.note(0.6, 2.0)
    assert shorter == BEHIND
    assert watch.note(0.4, 2.0) == []
    (longer,) = watch.note(2.0, 2.0)
    assert "200% of a token's time" in longer


def test_the_lines_do_not_look_like_a_death() -> None:
    watch = Watch()
    watch.note(0.6, 2.0)
    watch.note(0.0, 2.0)
    text = "\n".join(f"[2026-01-01 00:00:00] {line}" for line in watch.lines)
    assert not any(shows_death(line) for line in text.splitlines())
    death = explain_death(text, exit_code=-9)
    assert death.verdict is Verdict.FAILED
    assert "names no reason" in death.message
