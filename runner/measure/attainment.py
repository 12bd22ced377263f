"""How many requests met their limits, and whether a rung kept them: one rule for all who ask."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z_95 = 1.959964  # the 97.5 % point of the normal distribution


@dataclass(frozen=True, slots=True)
class Attainment:
    """A share of requests with its 95 % interval."""

    share: float
    low: float
    high: float


def share_with_bounds(good: int, ended: int) -> Attainment | None:
    """The share `good / ended` with Wilson's score interval; None when no request ended.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal
    of the American Statistical Association 22 (1927), 209-212: the shares p for which the observed
    one lies within z standard deviations sqrt(p (1 - p) / n) of p. Unlike the share plus or minus
    its deviation it is no point at 0 and 1, and it never leaves them.
    """
    if ended == 0:
        return None
    share, z2 = good / ended, Z_95 * Z_95
    middle = share + z2 / (2 * ended)
    reach = Z_95 * math.sqrt(share * (1 - share) / ended + z2 / (4 * ended * ended))
    scale = 1 + z2 / ended
    low, high = (middle - reach) / scale, (middle + reach) / scale
    # At the ends the formula is exactly the end; rounding must not pass it.
    return Attainment(share, 0.0 if good == 0 else low, 1.0 if good == ended else high)


def excess_s(value_s: float | None, limit_s: float) -> float:
    """By how much a latency exceeds its limit; <= 0: the limit is kept.

    A latency without a value counts as missed, by the limit itself: nobody has seen it kept.
    """
    return limit_s if value_s is None else value_s - limit_s
