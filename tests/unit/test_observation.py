"""What servers are told so that they can be watched."""

import pytest

from runner.engines.observation import decode_log_interval, observation_args
from runner.trial import Params


@pytest.mark.parametrize(
    ("args", "interval"),
    [
        ({}, 17),
        ({"pp_size": 8}, 17),
        ({"pp_size": 8, "pp_async_batch_depth": 8}, 17),
        ({"pp_size": 8, "pp_async_batch_depth": 9}, 19),
        ({"pp_size": 16, "pp_async_batch_depth": 8}, 29),
        ({"pp_size": 2, "decode_log_interval": 40}, 40),
    ],
)
def test_the_interval_is_a_prime_above_the_number_of_slots(args: Params, interval: int) -> None:
    assert decode_log_interval(args) == interval


def test_what_the_study_says_itself_is_not_said_again() -> None:
    assert observation_args({}) == {
        "enable_metrics": True,
        "decode_log_interval": 17,
        "gc_warning_threshold_secs": 0.05,
    }
    own = {"enable_metrics": False, "decode_log_interval": 1, "gc_warning_threshold_secs": 1.0}
    assert observation_args(own) == {}
