"""What servers are told so that they can be watched; no part of a setting."""

from __future__ import annotations

from itertools import count

from runner.launch import as_int
from runner.trial import Params

LEAST_INTERVAL = 16
LEAST_PAUSE_S = 0.05  # a stop for garbage collection that is worth a line in the log


def observation_args(server_args: Params) -> Params:
    """Parameters that a server gets besides its own, as far as its own do not say them."""
    watching: Params = {
        "enable_metrics": True,
        "decode_log_interval": decode_log_interval(server_args),
        "gc_warning_threshold_secs": LEAST_PAUSE_S,
    }
    return {name: value for name, value in watching.items() if name not in server_args}


def decode_log_interval(server_args: Params) -> int:
    """How many decode passes of all slots together lie between two that are logged.

    The server's own, or the first prime above 16 and above the number of its slots: an interval
    that the busy slots divide shows the batch of one slot for ever.
    """
    if "decode_log_interval" in server_args:
        return as_int(server_args["decode_log_interval"])
    slots = as_int(server_args.get("pp_size", 1))
    slots += as_int(server_args.get("pp_async_batch_depth", 0))
    return next(n for n in count(max(LEAST_INTERVAL, slots) + 1) if _is_prime(n))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
