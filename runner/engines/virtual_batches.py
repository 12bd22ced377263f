"""What a simulated server tells of its decode passes: a line and its counters, every so often."""

from __future__ import annotations

from runner.pipeline import BatchReport
from runner.trial import BatchSample


class VirtualBatches:
    """Watches the micro-batches of one scheduler; every `interval`-th decode pass is a sample."""

    def __init__(self, replica: int, dp_rank: int, interval: int, token_capacity: int) -> None:
        self.samples: list[BatchSample] = []
        self._replica = replica
        self._dp_rank = dp_rank
        self._interval = max(1, interval)
        self._capacity = token_capacity
        self._passes = 0
        self._graph_passes = 0
        self._retracted = 0

    def note(self, batches: tuple[BatchReport, ...], retractions: int) -> None:
        """Take in what one step of the pipeline brought; `retractions` are all so far."""
        for batch in batches:
            if retractions > self._retracted:
                lost = retractions - self._retracted
                self.samples.append(
                    BatchSample(batch.time_s, self._replica, self._dp_rank, retracted=lost)
                )
                self._retracted = retractions
            if not batch.is_prefill:
                self._decode(batch)

    def _decode(self, batch: BatchReport) -> None:
        self._passes += 1
        self._graph_passes += batch.cuda_graph
        if self._passes % self._interval:
            return
        sample = BatchSample(
            time_s=batch.time_s,
            replica=self._replica,
            dp_rank=self._dp_rank,
            running=batch.running,
            waiting=batch.queue,
            in_graph=batch.cuda_graph,
            kv_usage=batch.tokens_used / self._capacity if self._capacity else None,
            graph_passes=self._graph_passes,
            eager_passes=self._passes - self._graph_passes,
        )
        self.samples.append(sample)
