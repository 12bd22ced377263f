"""Running totals of a load, and when too many requests failed to go on."""

from __future__ import annotations

from dataclasses import dataclass

from runner.trial import LoadPlan

FEWEST_ENDED = 20
MAX_FAILED_SHARE = 0.1


@dataclass(slots=True)
class Totals:
    """What has come so far."""

    output_tokens: int = 0
    answered: int = 0  # requests whose first token has come
    sent: int = 0
    finished: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    first_error: str | None = None
    last_error: str | None = None

    def end(self, error: str | None) -> None:
        """A request has ended, with an error or without."""
        self.finished += 1
        if error is None:
            self.failed_in_a_row = 0
            return
        self.failed += 1
        self.failed_in_a_row += 1
        self.first_error = self.first_error or error
        self.last_error = error

    def failures(self) -> str | None:
        """How many failed, and the first cause; None: none has."""
        if not self.failed:
            return None
        return f"{self.failed} of {self.finished} requests failed; the first: {self.first_error}"

    def reason_to_give_up(self, plan: LoadPlan) -> str | None:
        """All of the first requests failed, or over 10 % of at least 20; None: go on.

        A failure comes sooner than a whole reply, so every stream has its say first. A counted
        load counts failures as part of its answer, and gives up when 20 in a row failed.
        """
        if self.failed == self.finished >= plan.concurrency:
            return self.failures()
        enough = max(FEWEST_ENDED, plan.concurrency)
        if plan.requests is None:
            is_too_many = self.finished >= enough and self.failed > MAX_FAILED_SHARE * self.finished
            return self.failures() if is_too_many else None
        if self.failed_in_a_row < enough:
            return None
        return f"the last {self.failed_in_a_row} requests failed; the last: {self.last_error}"
