"""What the scheduler deals with: requests, the batches of them, and the slots they run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from runner.machine.graphs import Launching

MOST_RESERVED_TOKENS = 4096  # of one request's output still to come: SGLang's CLIP_MAX_NEW_TOKENS


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """One request: it produces exactly `output_tokens` tokens."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


# Named tuples, not dataclasses: one is made per token, and they are three times as fast to make.
class Token(NamedTuple):
    """The n-th output token of a request (`completion_tokens` = n) leaves the server."""

    request_id: str
    time_s: float
    completion_tokens: int
    is_last: bool


class BatchReport(NamedTuple):
    """What rank 0 logs when it processes the result of one micro-batch."""

    time_s: float
    slot: int
    is_prefill: bool
    new_seqs: int
    new_tokens: int
    running: int
    queue: int
    cuda_graph: bool
    tokens_used: int
    cached_tokens: int = 0  # of the prompts this prefill began
    pending_tokens: int = 0  # of prompts left to prefill when it was put together


class Work:
    """A request inside the server.

    `context`: its prefilled tokens in the KV cache; `recomputed` of them are output tokens that
    were prefilled again after a retraction.
    """

    __slots__ = (
        "context",
        "done",
        "is_aborted",
        "prompt_tokens",
        "recomputed",
        "request_id",
        "to_prefill",
        "wanted",
    )

    def __init__(self, request: PipelineRequest) -> None:
        self.request_id = request.request_id
        self.wanted = max(request.output_tokens, 1)
        self.done = self.recomputed = 0
        cached = min(request.cached_tokens, request.prompt_tokens - 1)
        self.context = max(cached, 0)
        self.prompt_tokens = max(request.prompt_tokens, 1)
        self.to_prefill = max(request.prompt_tokens - self.context, 1)
        self.is_aborted = False

    @property
    def held(self) -> int:
        """Its tokens in the KV cache."""
        return self.context + self.done - self.recomputed

    @property
    def to_come(self) -> int:
        """The output tokens that admission keeps room for."""
        return min(self.wanted - self.done, MOST_RESERVED_TOKENS)

    def retract(self) -> None:
        """Lose the KV cache: prompt and output so far are prefilled again."""
        self.context = 0
        self.recomputed = self.done
        self.to_prefill = self.prompt_tokens + self.done


class Batch:
    """A micro-batch on its way through the stages.

    `works` are the requests that get a token from it; `end_s` is set by the event loop.
    """

    __slots__ = (
        "cached_tokens",
        "end_s",
        "gpu_s",
        "is_prefill",
        "kv_tokens",
        "launch_s",
        "launching",
        "lead",
        "new_seqs",
        "noise",
        "pending_tokens",
        "result_s",
        "running",
        "slot",
        "slow",
        "tokens",
        "watts",
        "works",
    )

    def __init__(self, slot: Slot, works: list[Work], *, is_prefill: bool) -> None:
        self.slot = slot
        self.works = works
        self.is_prefill = is_prefill
        self.tokens = self.new_seqs = len(works)
        self.running = slot.counted
        self.kv_tokens = slot.context
        self.launching = Launching.EAGER
        self.gpu_s: tuple[float, ...] = ()
        self.launch_s: tuple[float, ...] = ()
        self.watts = self.slow = self.result_s = self.end_s = self.lead = 0.0
        self.noise = self.cached_tokens = self.pending_tokens = 0


class Slot:
    """One micro-batch slot. `context` is the KV tokens of its running requests.

    `ended` requests count as running still.
    """

    __slots__ = ("context", "ended", "index", "is_closed", "running")

    def __init__(self, index: int) -> None:
        self.index = index
        self.running: list[Work] = []
        self.context = self.ended = 0
        self.is_closed = False

    @property
    def counted(self) -> int:
        """How many requests count against the cap."""
        return len(self.running) + self.ended
