"""Laws of token counts: their mean, the same law at another mean, and their words. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

NARROW = 0.1


@dataclass(frozen=True, slots=True)
class Lengths:
    """A law of token counts: `kind` is fixed, uniform, normal or recorded.

    fixed: a; uniform: integers a..b inclusive; normal: mean a, standard deviation b, at least 1;
    recorded: drawn from `values`. Two `paired` laws of one plan are the columns of one record: a
    request takes both counts from the same row.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0
    values: tuple[int, ...] = ()
    paired: bool = False

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """Every request has `tokens` tokens."""
        return cls("fixed", tokens)


def written_mean(lengths: Lengths) -> float:
    """The mean of a law as it is written; that of a wide normal one is a little more when drawn."""
    match lengths.kind:
        case "uniform":
            return (lengths.a + lengths.b) / 2
        case "recorded":
            return sum(lengths.values) / max(len(lengths.values), 1)
        case _:
            return lengths.a


def is_narrow(lengths: Lengths) -> bool:
    """Whether requests of this law take so much alike that those begun together end together.

    By the deviation over the mean: up to 0.1. Uniform a..b has (b - a) / (3 ** 0.5 * (a + b)).
    """
    match lengths.kind:
        case "uniform":
            spread = (lengths.b - lengths.a) / (3**0.5 * (lengths.a + lengths.b))
        case "normal":
            spread = lengths.b / lengths.a
        case "recorded":
            values = lengths.values
            spread = statistics.pstdev(values) / statistics.fmean(values) if values else 0.0
        case _:
            spread = 0.0
    return spread <= NARROW


def longest(lengths: Lengths) -> float:
    """The highest count of a law; of a normal one that which hardly any request exceeds."""
    match lengths.kind:
        case "uniform":
            return lengths.b
        case "normal":
            return lengths.a + 4 * lengths.b
        case "recorded":
            return max(lengths.values, default=0)
        case _:
            return lengths.a


def scaled(lengths: Lengths, mean: float) -> Lengths:
    """The law with another mean and the same shape: every count times one factor, at least 1."""
    factor = mean / written_mean(lengths)
    match lengths.kind:
        case "normal":
            return replace(lengths, a=lengths.a * factor, b=lengths.b * factor)
        case "recorded":
            return replace(lengths, values=tuple(_times(value, factor) for value in lengths.values))
        case "uniform":
            return replace(lengths, a=_times(lengths.a, factor), b=_times(lengths.b, factor))
        case _:
            return replace(lengths, a=_times(lengths.a, factor))


def law_words(lengths: Lengths) -> str:
    """For example `1,300 - 3,000 tokens`; a range means that all counts are equally likely."""
    match lengths.kind:
        case "fixed":
            return "1 token" if lengths.a == 1 else f"{_number(lengths.a)} tokens"
        case "uniform":
            return f"{_number(lengths.a)} - {_number(lengths.b)} tokens"
        case "normal":
            return f"{_number(lengths.a)} tokens normal, deviation {_number(lengths.b)}"
        case _:
            pairs = " in pairs" if lengths.paired else ""
            mean = _number(written_mean(lengths))
            return f"{mean} tokens on average, {_number(len(lengths.values))} recorded{pairs}"


def _times(tokens: float, factor: float) -> int:
    return max(round(tokens * factor), 1)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == round(value) else f"{value:.4g}"  # noqa: PLR2004
