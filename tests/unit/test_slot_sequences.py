"""The slot rules against what a real pipeline logged, batch by batch.

The log says what each result was, not when requests came nor which empty slot took them. So the
replay lets requests come exactly when an admission of the log needs them, and where several visits
could be that admission it tries each: a load that the rules cannot have made is found to have no
way through.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.machine.batch import Batch, PipelineRequest
from runner.machine.scheduler import Limits, Scheduler

DATA = Path(__file__).parent.parent / "data" / "h200-pp-slots.json"
PP_SIZE, PROMPT_TOKENS, OUTPUT_TOKENS, CHUNK_TOKENS, ROWS = 2, 256, 128, 8192, 128
KV_TOKENS = 1_904_421
MOST_WRONG_TURNS = 30_000


class Line(NamedTuple):
    """A batch of `size` requests; of a prefill also how many ran in its slot."""

    is_prefill: bool
    size: int
    running: int


@dataclass(frozen=True)
class Load:
    """One load and what was logged of it."""

    protocol: str
    depth: int
    cap: int
    requests: int
    lines: tuple[Line, ...]

    @property
    def name(self) -> str:
        return f"{self.protocol} of {self.requests}, depth {self.depth}, cap {self.cap}"


def read_line(word: str) -> Line:
    size, _, running = word[1:].partition("/")
    return Line(word[0] == "P", int(size), int(running or size))


def read_loads() -> tuple[Load, ...]:
    return tuple(
        Load(
            each["protocol"],
            each["depth"],
            each["cap"],
            each["requests"],
            tuple(map(read_line, each["log"].split())),
        )
        for each in json.loads(DATA.read_text(encoding="utf-8"))["loads"]
    )


LOADS = read_loads()
SHALLOW_LOOPS = tuple(each for each in LOADS if each.protocol == "closed_loop" and each.depth < 2)
FULL_BURSTS = tuple(
    each
    for each in LOADS
    if each.protocol == "burst" and any(line.size == each.cap for line in each.lines)
)


@dataclass
class Replay:
    """The scheduler on its way through a log."""

    scheduler: Scheduler
    flying: deque[Batch | None] = field(default_factory=deque)
    visits: int = 0
    matched: int = 0
    admitted: int = 0
    requests: int = 0
    idle: int = 0
    is_refused: bool = False


def replay(load: Load, slots: int, cap: int, *, counts_ended: bool) -> int:
    """How many lines of the log the rules can explain."""
    limits = Limits(slots, ROWS, CHUNK_TOKENS, KV_TOKENS, counts_ended)
    prefills = [line for line in load.lines if line.is_prefill]
    state, ways, most, wrong = Replay(Scheduler(limits, cap)), [], 0, 0
    while state.matched < len(load.lines):
        most = max(most, state.matched)
        other = may_admit(state, prefills, cap)
        if other is not None:
            ways.append(other)
        wanted = prefills[state.admitted].size if other is not None else 0
        if not visit(state, load.lines, wanted):
            wrong += 1
            if not ways or wrong > MOST_WRONG_TURNS:
                return most
            state = ways.pop()
    return state.matched


def may_admit(state: Replay, prefills: list[Line], cap: int) -> Replay | None:
    """The way on in which this visit admits nothing, where it may admit; None: it may not."""
    is_refused, state.is_refused = state.is_refused, False
    if is_refused or state.admitted >= len(prefills):
        return None
    slot = state.scheduler.slots[state.visits % len(state.scheduler.slots)]
    line = prefills[state.admitted]
    most = min(cap - line.running, CHUNK_TOKENS // PROMPT_TOKENS)
    if slot.counted != line.running or line.size > most:
        return None
    other = copy.deepcopy(state)
    other.is_refused = True
    return other


def visit(state: Replay, lines: tuple[Line, ...], wanted: int) -> bool:
    """One iteration, in which `wanted` requests are there; False: the log says otherwise."""
    scheduler = state.scheduler
    slots = scheduler.slots
    for _ in range(wanted):
        request = PipelineRequest(str(state.requests), PROMPT_TOKENS, OUTPUT_TOKENS)
        scheduler.submit(request)
        state.requests += 1
    batch = scheduler.visit(slots[state.visits % len(slots)])
    state.visits += 1
    state.admitted += wanted > 0
    if (batch.new_seqs if batch is not None and batch.is_prefill else 0) != wanted:
        return False
    state.flying.append(batch)
    state.idle += 1
    done = state.flying.popleft() if len(state.flying) == len(slots) else None
    if done is None:
        return state.idle <= 2 * len(slots) + 1
    state.idle = 0
    size = done.new_seqs if done.is_prefill else len(done.works)
    found = Line(done.is_prefill, size, done.running if done.is_prefill else size)
    scheduler.finish(done, 0.0, [])
    state.matched += 1
    return found == lines[state.matched - 1]


@pytest.mark.parametrize(("counts_ended", "sizes"), [(False, [1, 2]), (True, [1, 0, 2])])
def test_a_full_slot_replaces_an_ended_request_a_round_late(
    counts_ended: bool,
    sizes: list[int],
) -> None:
    """Cap 2: one short request beside a long one, and a third that waits."""
    scheduler = Scheduler(Limits(1, ROWS, CHUNK_TOKENS, KV_TOKENS, counts_ended), cap=2)
    (slot,) = scheduler.slots
    for name, tokens in (("long", 9), ("short", 2), ("third", 9)):
        scheduler.submit(PipelineRequest(name, PROMPT_TOKENS, tokens))
    prefill = scheduler.visit(slot)
    assert prefill is not None
    assert prefill.new_seqs == 2
    scheduler.finish(prefill, 0.0, [])
    decode = scheduler.visit(slot)
    assert decode is not None
    scheduler.finish(decode, 0.0, [])  # the short one has its second token
    admitted = []
    for _ in sizes[:-1]:
        batch = scheduler.visit(slot)
        assert batch is not None
        admitted.append(batch.new_seqs if batch.is_prefill else 0)
        scheduler.finish(batch, 0.0, [])
    assert admitted == ([1] if not counts_ended else [0, 1])


def test_an_idle_server_has_forgotten_who_ended() -> None:
    scheduler = Scheduler(Limits(1, ROWS, CHUNK_TOKENS, KV_TOKENS, counts_ended=True), cap=1)
    (slot,) = scheduler.slots
    for name in ("one", "next"):
        scheduler.submit(PipelineRequest(name, PROMPT_TOKENS, 1))
        batch = scheduler.visit(slot)
        assert batch is not None
        assert batch.is_prefill
        scheduler.finish(batch, 0.0, [])
    assert scheduler.is_empty


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_the_rules_make_what_a_real_pipeline_logged(load: Load) -> None:
    found = replay(load, PP_SIZE + load.depth, load.cap, counts_ended=True)
    assert found == len(load.lines)


@pytest.mark.parametrize("load", SHALLOW_LOOPS, ids=lambda load: load.name)
def test_before_0_5_23_an_ended_request_counts_until_the_next_decode(load: Load) -> None:
    assert replay(load, PP_SIZE + load.depth, load.cap, counts_ended=False) < len(load.lines)


@pytest.mark.parametrize("load", SHALLOW_LOOPS, ids=lambda load: load.name)
def test_with_a_slot_less_they_do_not(load: Load) -> None:
    assert replay(load, PP_SIZE + load.depth - 1, load.cap, counts_ended=True) < len(load.lines)


@pytest.mark.parametrize("load", FULL_BURSTS, ids=lambda load: load.name)
def test_with_a_lower_cap_they_do_not(load: Load) -> None:
    assert replay(load, PP_SIZE + load.depth, load.cap - 1, counts_ended=True) < len(load.lines)
