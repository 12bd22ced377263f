"""What a server says of its decode passes: lines of its log, and counters in its /metrics.

Every rank of a pipeline says the same, so stage 0 alone is heard, and of its tensor-parallel ranks
the lowest that speaks for a data-parallel rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:.,]+(?P<rank>(?: [A-Z_]+\d+)*)\] (?P<text>.+)")
_RANK = re.compile(r"([A-Z_]+)(\d+)")
_PASSES = re.compile(r"^sglang[:_]cuda_graph_passes(?:_total)?\{(?P<labels>.*)\} (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RETRACTED = re.compile(r"\bRetract requests\..*?#retracted_reqs: (\d+)")
_PAUSE = re.compile(r"^LONG GARBAGE COLLECTION DETECTED \|.*?\bDuration: (\d+(?:\.\d+)?)s\b")
_LATE = re.compile(r"^The emulation is behind its schedule by .*, (\d+)% of a token's time")
_IN_TIME = "The emulation has caught up"
_DECODE = "Decode batch"
_MARKS = (_DECODE, "Retract requests", "LONG GARBAGE", "The emulation ")
_EAGER_MODES = ("none", "eager")


@dataclass(frozen=True, slots=True)
class Rank:
    """Who wrote a line or owns a counter, of stage 0; a dimension that is not named is 0."""

    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class DecodeWords:
    """A decode line: one micro-batch. None: the line does not say."""

    running: int
    waiting: int | None
    in_graph: bool | None
    kv_usage: float | None


@dataclass(frozen=True, slots=True)
class RetractWords:
    """So many requests lost their place: the KV cache is full."""

    retracted: int


@dataclass(frozen=True, slots=True)
class PauseWords:
    """The server's HTTP process stopped for so long, to collect its garbage."""

    paused_s: float


@dataclass(frozen=True, slots=True)
class LateWords:
    """How late an emulated server gives its tokens on average, in shares of a token's time.

    0: in time again.
    """

    late_share: float


Words: TypeAlias = DecodeWords | RetractWords | PauseWords | LateWords


class Leaders:
    """Which rank speaks for each data-parallel rank, learned from who speaks at all."""

    def __init__(self) -> None:
        self._tp_of: dict[int, int] = {}

    def is_leader(self, rank: Rank) -> bool:
        """Whether this rank is the first of its scheduler as far as is known."""
        first = min(rank.tp, self._tp_of.get(rank.dp, rank.tp))
        self._tp_of[rank.dp] = first
        return rank.tp == first


def read_line(line: str) -> tuple[Rank, Words] | None:
    """Who says what in a line of stage 0; None for a line that is about something else."""
    if not any(mark in line for mark in _MARKS):
        return None
    found = _LINE.match(line)
    if found is None:
        return None
    named = {name: int(number) for name, number in _RANK.findall(found["rank"])}
    if named.get("PP", 0) != 0:
        return None
    words = _words(found["text"])
    return None if words is None else (Rank(named.get("DP", 0), named.get("TP", 0)), words)


def read_passes(text: str) -> dict[int, tuple[int, int]]:
    """Decode passes (in a graph, outside) of each data-parallel rank; empty: not counted here.

    The modes are `decode_cuda_graph` and `decode_none`; other names for graphs are graphs too.
    """
    counted: dict[Rank, tuple[int, int]] = {}
    for line in text.splitlines():
        found = _PASSES.match(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found["labels"]))
        if labels.get("pp_rank", "0") != "0":
            continue
        rank = Rank(*(_whole(labels.get(name)) or 0 for name in ("dp_rank", "tp_rank")))
        graph, eager = counted.get(rank, (0, 0))
        mode, passes = labels.get("mode", ""), _passes(found["value"])
        if mode.startswith("decode"):
            is_eager = mode.endswith(_EAGER_MODES)
            graph, eager = (graph, eager + passes) if is_eager else (graph + passes, eager)
        counted[rank] = graph, eager
    last_first = sorted(counted, key=lambda rank: rank.tp, reverse=True)
    return {rank.dp: counted[rank] for rank in last_first}


def _words(text: str) -> Words | None:
    if text.startswith(_DECODE):
        return _decode_words(text)
    if text.startswith(_IN_TIME):
        return LateWords(0.0)
    if (late := _LATE.match(text)) is not None:
        return LateWords(int(late[1]) / 100)
    if (pause := _PAUSE.match(text)) is not None:
        return PauseWords(float(pause[1]))
    return _retract_words(text)


def _decode_words(text: str) -> DecodeWords | None:
    parts = (part.partition(": ") for part in text.split(", "))
    pairs = {key: value for key, _, value in parts}
    running = _whole(pairs.get("#running-req"))
    if running is None:
        return None
    graphs = (value for key, value in pairs.items() if key.endswith(" graph"))
    usages = (value for key, value in pairs.items() if key.endswith("token usage"))
    return DecodeWords(
        running=running,
        waiting=_whole(pairs.get("#queue-req")),
        in_graph={"True": True, "False": False}.get(next(graphs, "")),
        kv_usage=max(map(float, filter(_is_share, usages)), default=None),
    )


def _retract_words(text: str) -> RetractWords | None:
    found = _RETRACTED.search(text)
    return RetractWords(int(found[1])) if found else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _is_share(text: str) -> bool:
    return re.fullmatch(r"\d+(?:\.\d+)?", text) is not None


def _passes(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError):  # NaN and infinity are words of the format
        return 0
