"""Numbers and values in words for people."""

from __future__ import annotations

from collections.abc import Sequence

from runner.settings import Objective


def format_number(value: float | None) -> str:
    """At least three significant digits, no exponent; a dash for what is unavailable."""
    if not value:
        return "-" if value is None else "0"
    for limit, digits in ((100.0, 0), (10.0, 1), (1.0, 2)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.3f}"


def format_value(value: float, objective: Objective) -> str:
    """A value of the objective with its unit and rung."""
    match objective.metric:
        case "output_throughput":
            text = f"{format_number(value)} tokens/s"
        case "tokens_per_joule":
            text = f"{format_number(value)} tokens/J"
        case metric:
            text = f"{metric} {format_number(value)}"
    return f"{text} at C={objective.concurrency:g}"


def not_modelled_words(names: Sequence[str]) -> str:
    """What the numbers leave out."""
    return f"Not modelled, so without effect on these numbers: {', '.join(names)}."
