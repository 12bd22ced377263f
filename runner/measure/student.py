"""Student's t: how far the mean of few values may be off, in units of their standard error."""

from __future__ import annotations

# 97.5 %, for 1 to 10 degrees of freedom.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL = 1.96
TAIL = 2.6  # t is about NORMAL + TAIL / freedom beyond the table, within 0.5 %


def student_t(freedom: int) -> float:
    """The 97.5 % quantile for `freedom` >= 1 degrees of freedom."""
    if freedom <= len(QUANTILES):
        return QUANTILES[freedom - 1]
    return NORMAL + TAIL / freedom
