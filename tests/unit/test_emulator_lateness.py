"""When the emulated server says that it is late, and that it is no longer."""

from __future__ import annotations

from runner.engines.emulator.lateness import AGAIN_WALL_S, Lateness
from runner.engines.sglang.logs import Verdict, explain_death, shows_death

SCALE = 10.0
ROUND_S = 1.0  # 100 ms of the wall
CAUGHT_UP = "The emulation has caught up with its schedule."


class Watch:
    """Notes a delay every emulated half second."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now_s = 1000.0
        self.lateness = Lateness(SCALE, self.lines.append)
        self.lateness.rest(self.now_s)

    def note(self, late_s: float, times: int = 1) -> list[str]:
        """The lines that these notes made."""
        before = len(self.lines)
        for _ in range(times):
            self.now_s += 0.5
            self.lateness.note(late_s, ROUND_S, self.now_s)
        return self.lines[before:]


def test_one_long_delay_is_told_at_once_with_how_long_it_was() -> None:
    (line,) = Watch().note(0.6)
    assert "behind its schedule by 60.0 ms of real time, 60% of a token's time" in line
    assert "(60% on average)" in line


def test_a_short_delay_or_one_that_is_a_small_share_is_not_told() -> None:
    watch = Watch()
    assert watch.note(0.2, 100) == []  # 20 ms of the wall, a fifth of a token's time


def test_small_delays_are_told_when_they_are_the_rule() -> None:
    lines: list[str] = []
    lateness = Lateness(SCALE, lines.append)
    for number in range(200):
        lateness.note(0.05, 0.1, 1000.0 + 0.1 * number)  # 5 ms of the wall, half a token's time
    assert len(lines) == 1


def test_the_end_of_a_delay_is_told_once() -> None:
    watch = Watch()
    assert len(watch.note(0.6)) == 1
    assert watch.note(0.0, 100) == [CAUGHT_UP]


def test_a_server_without_work_has_caught_up() -> None:
    watch = Watch()
    watch.note(0.6)
    watch.lateness.rest(watch.now_s)
    assert watch.lines[1:] == [CAUGHT_UP]
    watch.lateness.rest(watch.now_s)
    assert len(watch.lines) == 2


def test_a_server_that_stays_behind_says_so_every_ten_seconds_of_the_wall() -> None:
    watch = Watch()
    assert len(watch.note(0.6, 599)) == 3  # half an hour's sixth: 30 s of the wall


def test_delays_that_come_and_go_do_not_fill_the_log() -> None:
    watch = Watch()
    for _ in range(60):
        watch.note(0.6)
        watch.note(0.0, 50)
    wall_s = (watch.now_s - 1000.0) / SCALE
    assert len(watch.lines) <= 2 * (wall_s / AGAIN_WALL_S + 1)


def test_the_lines_do_not_look_like_a_death() -> None:
    watch = Watch()
    watch.note(0.6)
    watch.note(0.0, 100)
    text = "\n".join(f"[2026-01-01 00:00:00] {line}" for line in watch.lines)
    assert not any(shows_death(line) for line in text.splitlines())
    death = explain_death(text, exit_code=-9)
    assert death.verdict is Verdict.FAILED
    assert "names no reason" in death.message
