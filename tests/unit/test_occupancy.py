"""Which slots hold how many requests."""

from __future__ import annotations

import pytest

from runner.machine.occupancy import greedy, occupancy


def test_the_first_visit_finds_one_request_and_the_next_fill_up_to_the_cap() -> None:
    assert greedy(8, 64, 64, 32) == [1, 31, 0, 0, 0, 0, 0, 0]
    assert greedy(8, 8, 8, 32) == [1, 8, 8, 8, 7, 0, 0, 0]


def test_what_does_not_fit_in_one_sweep_goes_back_to_the_first_slot() -> None:
    assert greedy(4, 2, 2, 8) == [2, 2, 2, 2]


def test_a_visit_admits_what_the_chunk_budget_allows() -> None:
    assert greedy(4, 64, 3, 10) == [1, 3, 3, 3]


def test_equal_lengths_keep_the_slots_of_the_burst() -> None:
    assert occupancy(16, 4, 4, 32, 0.0) == (1, 4, 4, 4, 4, 4, 4, 4, 3)


def test_uneven_lengths_spread_over_more_slots_and_lose_nobody() -> None:
    spread = occupancy(8, 64, 64, 32, 0.5)
    assert len(spread) > len(occupancy(8, 64, 64, 32, 0.0))
    assert sum(spread) == pytest.approx(32, abs=0.2)


def test_the_cap_holds_after_spreading_too() -> None:
    spread = occupancy(16, 4, 4, 32, 0.5)
    assert max(spread) <= 4
    assert sum(spread) == pytest.approx(32, abs=0.2)
