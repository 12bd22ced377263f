"""Which requests a phase of load sends: lengths and prompts, fixed by (seed, phase, index).

Everything is derived by hashing, so any process can produce the request of any index, and equal
seeds give equal loads on every machine and Python version. Prompts are token ids, of which the
leading `shared_prefix` share is the same for all phases of a seed. What a prefix cache can serve
beyond that share is bounded, whatever its page size:

- Within a phase the first own token of each of the first V prompts differs: nothing. V is 29,001,
  less for a model with fewer tokens.
- A phase walks through the V tokens from a place and by a step of its own. So a prompt shares its
  first own token with some of N cached prompts of other phases with a chance of about N / V, spread
  evenly, and more than this one token with a chance of about N / V^2: with 1,000 cached prompts
  3.4 % and 0.0001 %. In expectation less than N / V tokens a prompt are served, and hardly ever
  more than one (tests/unit/test_prompts.py).
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

from runner.errors import ConfigError
from runner.load.vocabulary import Vocabulary
from runner.trial import Arrivals, Lengths, LoadPlan

QUANTILES = 1000


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send. The first `shared_tokens` of its prompt are common to all requests.

    `due_s`: when an open loop is to send it.
    """

    request_id: str
    index: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    due_s: float | None = None


class RequestSource:
    """Deals the requests of one plan; shard i of n gets the indices i, i + n, i + 2n, ..."""

    def __init__(
        self,
        plan: LoadPlan,
        shard: int = 0,
        shards: int = 1,
        vocabulary: Vocabulary = Vocabulary(),  # noqa: B008 - frozen
    ) -> None:
        self._plan = plan
        self._vocabulary = vocabulary
        self._next_index = shard
        self._shards = shards
        self._phase_key = f"{plan.seed}/{plan.phase}"
        self._phase_id = hashlib.sha256(self._phase_key.encode()).hexdigest()[:12]
        self._first_id = int(self._phase_id, 16)
        draw = int.from_bytes(_bytes(f"{self._phase_key}/step", 8), "little")
        self._step = _coprime_step(draw, vocabulary.count)
        self._is_paired = plan.prompt_tokens.paired and plan.output_tokens.paired
        self._shared: list[int] = []

    def next(self) -> PlannedRequest:
        """The next request of this shard."""
        index = self._next_index
        self._next_index += self._shards
        return self.request(index)

    def request(self, index: int) -> PlannedRequest:
        """The request of an index, the same on every call."""
        draws = _bytes(f"{self._phase_key}/{index}/lengths", 16)
        prompt_tokens = draw(self._plan.prompt_tokens, _unit(draws[:8]))
        output_draw = draws[:8] if self._is_paired else draws[8:]
        # Two requests must differ somewhere, so a prompt is never wholly shared.
        shared_tokens = min(int(prompt_tokens * self._plan.shared_prefix), prompt_tokens - 1)
        return PlannedRequest(
            request_id=f"{self._phase_id}-{index:08d}",
            index=index,
            prompt_tokens=prompt_tokens,
            output_tokens=draw(self._plan.output_tokens, _unit(output_draw)),
            shared_tokens=shared_tokens,
        )

    def input_ids(self, request: PlannedRequest) -> list[int]:
        """The prompt of a request, as token ids."""
        own = request.prompt_tokens - request.shared_tokens
        place = (self._first_id + request.index * self._step) % self._vocabulary.count
        rest = self._token_ids(f"{self._phase_key}/{request.index}/prompt", own - 1)
        return [*self._shared_ids(request.shared_tokens), self._vocabulary.lowest + place, *rest]

    def arrival_gap(self, index: int) -> float:
        """The time between two arrivals of an open loop, in units of the mean gap."""
        if self._plan.arrivals is Arrivals.CONSTANT:
            return 1.0
        return -math.log1p(-_unit(_bytes(f"{self._phase_key}/{index}/arrival", 8)))

    def _shared_ids(self, count: int) -> list[int]:
        if count > len(self._shared):
            # A longer draw starts with the shorter one: the hash is a stream.
            self._shared = self._token_ids(f"{self._plan.seed}/shared", count)
        return self._shared[:count]

    def _token_ids(self, key: str, count: int) -> list[int]:
        if count <= 0:
            return []
        drawn = struct.unpack(f"<{count}I", _bytes(key, 4 * count))
        ids = self._vocabulary
        return [ids.lowest + value % ids.count for value in drawn]


def draw(lengths: Lengths, unit: float) -> int:
    """The token count at quantile `unit` (0 <= unit < 1) of a law; at least 1."""
    match lengths.kind:
        case "fixed":
            tokens = round(lengths.a)
        case "uniform":
            low, high = round(lengths.a), round(lengths.b)
            tokens = low + int(unit * (high - low + 1))
        case "normal":
            tokens = round(lengths.a)
            if lengths.b > 0:
                tokens = round(NormalDist(lengths.a, lengths.b).inv_cdf(max(unit, 1e-12)))
        case "recorded":
            if not lengths.values:
                raise ConfigError("recorded lengths are empty; give at least one token count")
            tokens = lengths.values[int(unit * len(lengths.values))]
        case kind:
            raise ConfigError(f"unknown law of lengths {kind!r}; known: {', '.join(LAWS)}")
    return max(tokens, 1)


@lru_cache(maxsize=64)
def mean_tokens(lengths: Lengths) -> float:
    """The mean token count of a law."""
    if lengths.kind == "recorded":
        return fmean(max(value, 1) for value in lengths.values)
    return fmean(draw(lengths, (place + 0.5) / QUANTILES) for place in range(QUANTILES))


LAWS = ("fixed", "uniform", "normal", "recorded")


def _coprime_step(seed: int, count: int) -> int:
    """A step that leads through all `count` ids before it meets the first one again."""
    if count == 1:
        return 1
    step = 1 + seed % (count - 1)
    while math.gcd(step, count) != 1:
        step = step % (count - 1) + 1
    return step


def _bytes(key: str, count: int) -> bytes:
    return hashlib.shake_128(key.encode()).digest(count)


def _unit(eight: bytes) -> float:
    """Eight bytes as a number in [0, 1)."""
    return (int.from_bytes(eight, "little") >> 11) / (1 << 53)
