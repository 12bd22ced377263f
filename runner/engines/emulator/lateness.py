"""Whether the emulation keeps up with its own schedule, and what the log says when it does not.

The schedule is the pipeline model's. An emulation that has too little processor time, or too high
a time scale, reads requests and delivers tokens late: then what is measured is this machine, not
the emulated one.
"""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.25  # of the time between two tokens of a request; later than that on average is behind
REVIEW_WALL_S = 1.0
QUIET_WALL_S = 10.0  # between two lines that say the same
NEWS = 2.0  # by which factor the lateness must change to be told earlier


class Lateness:
    """Watches delays, all in seconds of the clock; `scale` of them are one second of the wall."""

    def __init__(self, scale: float, write: Callable[[str], object]) -> None:
        self._scale = scale
        self._write = write
        self._is_behind = False
        self._told_s = 0.0
        self._told_share = 0.0
        self._review_s: float | None = None
        self._count = 0
        self._sum_s = 0.0

    def note(self, late_s: float, round_s: float, now_s: float) -> None:
        """Something was done `late_s` after its time; a token takes `round_s` at present.

        Nothing is judged while `round_s` is 0: not known yet.
        """
        if round_s <= 0:
            return
        if self._review_s is None:
            self._review_s = now_s
        self._count += 1
        self._sum_s += late_s
        if now_s - self._review_s >= REVIEW_WALL_S * self._scale:
            self._review(self._sum_s / self._count, round_s, now_s)
            self._review_s, self._count, self._sum_s = now_s, 0, 0.0

    def _review(self, mean_s: float, round_s: float, now_s: float) -> None:
        share = mean_s / round_s
        was_behind, self._is_behind = self._is_behind, share > SHARE
        is_other = not self._told_share / NEWS <= share <= self._told_share * NEWS
        is_old = now_s - self._told_s >= QUIET_WALL_S * self._scale
        if self._is_behind and (not was_behind or is_other or is_old):
            self._told_s, self._told_share = now_s, share
            self._write(
                f"The emulation is behind its schedule by {mean_s / self._scale * 1000:.1f} ms of "
                f"real time on average, {share:.0%} of a token's time; a smaller "
                "--time-scale gives it more time."
            )
        elif was_behind and not self._is_behind:
            self._write("The emulation has caught up with its schedule.")
