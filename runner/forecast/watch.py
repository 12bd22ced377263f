"""A pipeline that is watched while it runs: how many of its slots hold requests."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from runner.pipeline import Pipeline, Profile, ServerShape, Step, slots


class WatchedPipeline(Pipeline):
    """Counts occupied slots over time: those with a result in the last round of visits."""

    def __init__(self, profile: Profile, shape: ServerShape, seed: int, start_s: float) -> None:
        super().__init__(profile, shape, seed, start_s)
        self._visits: deque[bool] = deque([False] * slots(shape), slots(shape))
        self._occupied = 0
        self._times_s = [start_s]
        self._slot_s = [0.0]  # cumulative at each of these times

    def step(self) -> Step:
        """Run the iteration, and note what it was."""
        start_s = self.next_step_s()
        self._note(start_s, 0)  # it was idle up to here, or this is where the last step ended
        done = super().step()
        self._occupied += bool(done.batches) - self._visits[0]
        self._visits.append(bool(done.batches))
        self._note(self.next_step_s(), self._occupied)
        return done

    def occupied_slots(self, start_s: float, end_s: float) -> float:
        """The mean over a span of time."""
        if end_s <= start_s:
            return 0.0
        return (self._at(end_s) - self._at(start_s)) / (end_s - start_s)

    def _note(self, time_s: float | None, occupied: int) -> None:
        last_s = self._times_s[-1]
        if time_s is not None and time_s > last_s:
            self._times_s.append(time_s)
            self._slot_s.append(self._slot_s[-1] + occupied * (time_s - last_s))

    def _at(self, time_s: float) -> float:
        after = bisect_right(self._times_s, time_s)
        if after == len(self._times_s):
            return self._slot_s[-1]
        left_s, right_s = self._times_s[after - 1], self._times_s[after]
        share = (time_s - left_s) / (right_s - left_s)
        return self._slot_s[after - 1] + share * (self._slot_s[after] - self._slot_s[after - 1])
