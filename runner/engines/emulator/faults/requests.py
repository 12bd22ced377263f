"""What the faults of a server do to its requests, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runner.engines.emulator.answers import Answer
from runner.engines.emulator.faults.active import ActiveFaults
from runner.engines.emulator.faults.chunks import ChunkedSink
from runner.engines.emulator.faults.counts import MiscountedAnswer
from runner.engines.emulator.faults.draw import draw
from runner.engines.emulator.faults.garbled import GarbledAnswer
from runner.engines.emulator.faults.ghosts import Ghosts
from runner.engines.emulator.faults.kind import FaultKind
from runner.engines.emulator.faults.silence import BudgetedSink, TokenBudget
from runner.engines.emulator.faults.stream_errors import FailingSink
from runner.engines.emulator.reply import Reply
from runner.engines.emulator.serving import Demand, TokenSink


class RequestFaults:
    """Between the server and its requests; without faults everything passes as it is.

    `on_stop` is called when the server is to send nothing any more.
    """

    def __init__(self, faults: ActiveFaults, on_stop: Callable[[], None]) -> None:
        self._faults = faults
        self._on_stop = on_stop
        self._streams = 0
        self.ghosts = Ghosts(faults.get(FaultKind.GHOST_REQUESTS))
        stop = faults.get(FaultKind.STOP_SENDING)
        self._budget: TokenBudget | None = None
        self._stop_after: int | None = None
        if stop is not None and stop.argument.text == "tokens":
            self._budget = TokenBudget(int(stop.number), on_stop)
        elif stop is not None:
            self._stop_after = int(stop.number)

    def cached_tokens(self, cached: int, prompt_tokens: int) -> int:
        """How many of a prompt's tokens the cache is said to hold."""
        return prompt_tokens - 1 if FaultKind.CACHED_PROMPTS in self._faults else cached

    def demand(self, demand: Demand) -> Demand:
        """What is really produced."""
        missing = self._missing(demand)
        return replace(demand, output_tokens=demand.output_tokens - missing)

    def answer(self, answer: Answer, demand: Demand) -> Answer:
        """How the request is answered."""
        if FaultKind.GARBLED_OUTPUT in self._faults:
            chance = draw(self._faults.seed, FaultKind.GARBLED_OUTPUT)
            answer = GarbledAnswer(answer, int(chance * self.demand(demand).output_tokens))
        wrong = self._faults.get(FaultKind.WRONG_COUNTS)
        extra = self._missing(demand)
        if wrong is not None and demand.output_tokens > 1:
            extra += int(wrong.number)  # or no server's first sign of life would be believed
        return MiscountedAnswer(answer, extra) if extra else answer

    def sink(self, reply: Reply) -> TokenSink:
        """Where the request's tokens go."""
        sink: TokenSink = reply
        errors = self._faults.get(FaultKind.STREAM_ERRORS)
        if errors is not None and reply.is_stream:
            self._streams += 1
            chance = draw(self._faults.seed, FaultKind.STREAM_ERRORS, self._streams)
            sink = FailingSink(reply) if chance < errors.number else sink
        chunks = self._faults.get(FaultKind.CHUNKS)
        if chunks is not None:
            sink = ChunkedSink(sink, tuple(int(size) for size in chunks.argument.numbers))
        return sink if self._budget is None else BudgetedSink(sink, self._budget)

    def on_answered(self, answered: int) -> None:
        """The server has answered so many requests."""
        if answered == self._stop_after:
            self._on_stop()

    def _missing(self, demand: Demand) -> int:
        short = self._faults.get(FaultKind.SHORT_OUTPUT)
        return 0 if short is None else min(int(short.number), demand.output_tokens - 1)
