"""SGLang's scheduler under pipeline parallelism, without time: who runs in which slot.

Every rank runs the same scheduler on the same requests, so one copy stands for all of them. The
rules: admission is greedy per slot visit, up to the cap, the free request rows, the KV cache and
the chunk budget; a slot that was refused stays closed until it loses a request; prefill goes
first; requests never move between slots; one prompt at a time is prefilled in chunks, which go to
consecutive slots.

`counts_ended`: until its slot's next decode an ended request counts against the cap, so a full slot
replaces it a round late. So it is up to SGLang 0.5.20; 0.5.23 forgets it before it admits.

KV room: a request is admitted if its prompt and its output fit beside what is in use and what
the requests of the *same slot* will still need; other slots' needs are not looked at. So with
several slots more is admitted than fits in the end, and a slot that cannot grow retracts requests
(those with the fewest output tokens first): they go back to the queue and are prefilled again,
with what they had produced. As in SGLang 0.5.23 for requests of a fixed length; where that aborts
the last request of a slot, here it is retracted too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from runner.machine.batch import Batch, BatchReport, PipelineRequest, Slot, Token, Work
from runner.machine.graphs import Launching


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds admission."""

    slots: int
    max_running_requests: int
    chunk_tokens: int
    kv_tokens: int
    counts_ended: bool = False


class Scheduler:
    """The waiting queue, the slots, and the rows and KV tokens they share."""

    def __init__(self, limits: Limits, cap: int) -> None:
        self.cap = cap
        self.rows = 0
        self.kv_used = 0
        self.retractions = 0  # ever
        self.waiting: deque[Work] = deque()
        self.slots = [Slot(index) for index in range(limits.slots)]
        self._limits = limits
        self._kv_coming = 0  # tokens of batches on their way
        self._admitted: dict[str, Work] = {}
        self._chunked: Work | None = None
        self._aborted = 0  # of the admitted

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs, waits or is on its way."""
        return not self.rows and not self.waiting

    def submit(self, request: PipelineRequest) -> None:
        """Queue a request."""
        if self.is_empty:
            for slot in self.slots:  # an idle server visits them all the time
                slot.ended = 0
        self.waiting.append(Work(request))

    def abort(self, request_id: str) -> bool:
        """Take a request out: at once if it waits, else when its slot's next result is there."""
        for work in self.waiting:
            if work.request_id == request_id:
                self.waiting.remove(work)
                return True
        work_in = self._admitted.get(request_id)
        if work_in is None or work_in.is_aborted:
            return False
        work_in.is_aborted = True
        self._aborted += 1
        return True

    def abort_all(self) -> None:
        """Take every request out."""
        self.waiting.clear()
        for work in self._admitted.values():
            work.is_aborted = True
        self._aborted = len(self._admitted)

    def visit(self, slot: Slot) -> Batch | None:
        """The next batch of a slot: a prefill if anything may be admitted, else its decode."""
        if self._chunked is not None or (self.waiting and not slot.is_closed):
            batch = self._admit(slot)
            if batch is not None:
                return batch
        if slot.ended:
            slot.ended = 0
            slot.is_closed = False
        if not slot.running:
            return None
        if self._kv_free < len(slot.running) and self.rows > 1:
            self._retract(slot)
            if not slot.running:
                return None
        self._kv_coming += len(slot.running)
        return Batch(slot, slot.running, is_prefill=False)

    def finish(self, batch: Batch, time_s: float, tokens: list[Token]) -> BatchReport:
        """Process a batch's result at `time_s`: a token for each of its requests."""
        slot, works = batch.slot, batch.works
        self._kv_coming -= len(works)
        if self._aborted:
            works = self._without_aborted(slot, works)
        has_ended = False
        for work in works:
            work.done = done = work.done + 1
            is_last = done >= work.wanted
            tokens.append(Token(work.request_id, time_s, done, is_last))
            has_ended = has_ended or is_last
        count = len(works)
        self.kv_used += count
        if batch.is_prefill:
            slot.running += works
            slot.context += sum(work.held for work in works) - count
        slot.context += count
        if has_ended:
            self._release_ended(slot)
        return BatchReport(
            time_s=time_s,
            slot=slot.index,
            is_prefill=batch.is_prefill,
            new_seqs=batch.new_seqs if batch.is_prefill else 0,
            new_tokens=batch.tokens if batch.is_prefill else 0,
            running=batch.running,
            queue=len(self.waiting),
            cuda_graph=batch.launching is not Launching.EAGER,
            tokens_used=self.kv_used,
            cached_tokens=batch.cached_tokens,
            pending_tokens=batch.pending_tokens,
        )

    def _admit(self, slot: Slot) -> Batch | None:
        limits = self._limits
        allowed = min(self.cap - slot.counted, limits.max_running_requests - self.rows)
        admitted: list[Work] = []
        budget = limits.chunk_tokens
        chunked = self._drop_aborted_chunk()
        if chunked is not None:
            # The pending prompt goes on whether or not the slot is full, and counts as admitted.
            budget -= self._prefill(chunked, budget)
            admitted.append(chunked)
        elif slot.is_closed:
            return None
        is_refused = False
        promised = -1
        cached = 0
        while self.waiting and budget > 0 and not is_refused:
            work = self.waiting[0]
            if promised < 0 and len(admitted) < allowed:
                promised = sum(one.to_come for one in (*slot.running, *admitted))
            is_refused = len(admitted) >= allowed or not self._has_kv_room(work, promised)
            if not is_refused:
                self._take_row(self.waiting.popleft())
                admitted.append(work)
                cached += work.context
                budget -= self._prefill(work, budget)
                promised += work.to_come
        batch = self._prefill_batch(slot, admitted, limits.chunk_tokens - budget)
        if batch is not None:
            batch.cached_tokens = cached
            batch.pending_tokens = self._pending_tokens()
        # A slot without requests never closes: nothing would ever open it again.
        if is_refused and (slot.running or (batch is not None and batch.works)):
            slot.is_closed = True
        return batch

    def _prefill_batch(self, slot: Slot, admitted: list[Work], tokens: int) -> Batch | None:
        if not admitted:
            return None
        last = admitted[-1]
        self._chunked = last if last.to_prefill else None
        works = admitted[:-1] if last.to_prefill else admitted
        batch = Batch(slot, works, is_prefill=True)
        self._kv_coming += len(works)
        batch.new_seqs = len(admitted)
        batch.tokens = tokens
        batch.kv_tokens = sum(work.context for work in admitted)
        return batch

    def _pending_tokens(self) -> int:
        """Prompt tokens that wait, cached ones included, and what is left of the chunked prompt."""
        chunk = 0 if self._chunked is None else self._chunked.to_prefill
        return chunk + sum(work.context + work.to_prefill for work in self.waiting)

    def _take_row(self, work: Work) -> None:
        self.rows += 1
        self.kv_used += work.context
        self._admitted[work.request_id] = work

    def _prefill(self, work: Work, budget: int) -> int:
        """Prefill what the budget allows of a prompt; returns the tokens taken."""
        taken = min(work.to_prefill, budget)
        work.to_prefill -= taken
        self.kv_used += taken
        work.context += taken
        return taken

    @property
    def _kv_free(self) -> int:
        return self._limits.kv_tokens - self.kv_used - self._kv_coming

    def _has_kv_room(self, work: Work, promised: int) -> bool:
        """Whether a request fits beside what its slot's others will need; alone it always does."""
        needed = work.context + work.to_prefill + work.to_come
        return not self.rows or needed <= self._kv_free - promised

    def _retract(self, slot: Slot) -> None:
        """Send requests of a slot back to the queue until the others can grow by a token."""
        order = sorted(slot.running, key=lambda work: (-work.done, work.prompt_tokens))
        while order and self._kv_free < len(order) and self.rows > 1:
            work = order.pop()
            self._release(work)
            if work.is_aborted:
                self._aborted -= 1
                continue
            work.retract()
            self.waiting.append(work)
            self.retractions += 1
        self._keep(slot, order)

    def _drop_aborted_chunk(self) -> Work | None:
        chunked = self._chunked
        if chunked is not None and chunked.is_aborted:
            self._aborted -= 1
            self._release(chunked)
            self._chunked = chunked = None
        return chunked

    def _without_aborted(self, slot: Slot, works: list[Work]) -> list[Work]:
        alive = [work for work in works if not work.is_aborted]
        for work in works:
            if work.is_aborted:
                self._aborted -= 1
                self._release(work)
        if works is slot.running and len(alive) < len(works):
            self._keep(slot, alive)
            return slot.running
        return alive

    def _release_ended(self, slot: Slot) -> None:
        alive = []
        for work in slot.running:
            if work.done < work.wanted:
                alive.append(work)
            else:
                self._release(work)
        is_counted = self._limits.counts_ended
        if is_counted:
            slot.ended += len(slot.running) - len(alive)
        self._keep(slot, alive, is_closed=slot.is_closed and is_counted)

    def _keep(self, slot: Slot, alive: list[Work], *, is_closed: bool = False) -> None:
        slot.running = alive
        slot.context = sum(work.held for work in alive)
        slot.is_closed = is_closed

    def _release(self, work: Work) -> None:
        del self._admitted[work.request_id]
        self.rows -= 1
        self.kv_used -= work.held
