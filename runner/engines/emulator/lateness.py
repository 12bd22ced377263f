"""Whether the emulation keeps up with its own schedule, and what the log says when it does not.

The schedule is the pipeline model's. An emulation that has too little processor time, or too high
a time scale, delivers tokens late: then what is measured is this machine, not the emulated one.
"""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.25  # of the time between two tokens of a request; later than that is behind
HICCUP_WALL_S = 0.010  # one delay of this size is told at once, smaller ones if they are the rule
REVIEW_WALL_S = 1.0
QUIET_WALL_S = 10.0  # between two lines of one delay
AGAIN_WALL_S = 2.0  # until the next delay is told


class Lateness:
    """Watches delays, all in seconds of the clock; `scale` of them are one second of the wall."""

    def __init__(self, scale: float, write: Callable[[str], object]) -> None:
        self._scale = scale
        self._write = write
        self._is_told = False
        self._told_s = -QUIET_WALL_S * scale
        self._review_s = 0.0
        self._steps = 0
        self._sum_s = 0.0
        self._worst_s = 0.0

    def note(self, late_s: float, round_s: float, now_s: float) -> None:
        """Something was done `late_s` after its time; a token takes `round_s` at present.

        Nothing is judged while `round_s` is 0: not known yet.
        """
        if round_s <= 0:
            return
        self._steps += 1
        self._sum_s += late_s
        if late_s > self._worst_s:
            self._worst_s = late_s
            if late_s > HICCUP_WALL_S * self._scale and late_s > SHARE * round_s:
                self._fall_behind(late_s, round_s, now_s)
        if now_s - self._review_s >= REVIEW_WALL_S * self._scale:
            self._review(round_s, now_s)

    def rest(self, now_s: float) -> None:
        """Nothing is left to do, so nothing is late."""
        self._catch_up()
        self._begin_review(now_s)

    def _review(self, round_s: float, now_s: float) -> None:
        mean_s, worst_s = self._sum_s / self._steps, self._worst_s
        if mean_s > SHARE * round_s:
            self._fall_behind(worst_s, round_s, now_s)
        elif worst_s <= HICCUP_WALL_S * self._scale or worst_s <= SHARE * round_s:
            self._catch_up()
        self._begin_review(now_s)

    def _begin_review(self, now_s: float) -> None:
        self._review_s = now_s
        self._steps = 0
        self._sum_s = self._worst_s = 0.0

    def _fall_behind(self, late_s: float, round_s: float, now_s: float) -> None:
        quiet_s = (QUIET_WALL_S if self._is_told else AGAIN_WALL_S) * self._scale
        if now_s - self._told_s < quiet_s:
            return
        self._told_s, self._is_told = now_s, True
        mean_s = self._sum_s / self._steps
        self._write(
            f"The emulation is behind its schedule by {late_s / self._scale * 1000:.1f} ms of real "
            f"time, {late_s / round_s:.0%} of a token's time ({mean_s / round_s:.0%} on average); "
            "a smaller --time-scale gives it more time."
        )

    def _catch_up(self) -> None:
        if self._is_told:
            self._is_told = False
            self._write("The emulation has caught up with its schedule.")
