"""`runner load`: the load generator alone, on any running server. No study, no launch."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from runner.clock import Clock
from runner.errors import ConfigError, Interrupted, LoadFailed
from runner.insight.load_result import LoadResult, judge_load, load_document
from runner.insight.load_view import LoadView, print_load
from runner.load.api import Api
from runner.load.client import Address, Target
from runner.load.generator import LoadGenerator, LoadProgress
from runner.load.inquiry import REFUSED, ServerFacts, ask_server, check_reachable, refusal_advice
from runner.load.vocabulary import vocabulary_size
from runner.measure.metrics import LATENCIES, STATISTICS
from runner.settings import SloLimit
from runner.study_file.mistake import unknown
from runner.trial import Arrivals, Lengths, LoadPlan, LoadProtocol, LoadRun, LoadStart

STREAMS = 8
REQUESTS_PER_STREAM = 10
OPEN_LOOP_S = 60.0
FEWEST_REQUESTS = 50
MOST = 10**9
MOST_TOKENS = 2_000_000
SEEDS = 10**6
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_MISSED, EXIT_INTERRUPTED = 1, 130
RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What the user asked for; `warmup` None: no requests before those that count."""

    target: Target
    plan: LoadPlan
    warmup: LoadPlan | None
    slo: tuple[SloLimit, ...]


def load(args: argparse.Namespace) -> int:
    """Load the server, print what was seen; returns the exit code."""
    order = read_order(args)
    server = ask_server(order.target)
    model = order.target.model or server.model or "default"
    vocabulary = vocabulary_size(str(server.facts.get("model_path", "")))
    order = replace(order, target=replace(order.target, model=model, vocabulary=vocabulary))
    drive = Drive()
    with drive.interruptible():
        run = drive.warm_up_and_load(order)
    result = judge_load(run, order.plan, order.slo)
    if args.json:
        print(json.dumps(load_document(result, order.target, server.facts)))
    else:
        print_load(result, order.target, server_words(order.target, server), sys.stdout)
    sys.stdout.flush()
    if drive.is_interrupted:
        raise Interrupted(
            f"interrupted after {result.ended} of {order.plan.requests} requests; "
            "what was measured until then is shown"
        )
    check_survived(result, order.target)
    return EXIT_MISSED if result.is_slo_missed else 0


class Drive:
    """The warm-up and the load, which Ctrl-C ends early."""

    def __init__(self) -> None:
        self.is_interrupted = False
        self._generator = LoadGenerator(Clock())

    def warm_up_and_load(self, order: LoadOrder) -> LoadRun:
        """Raises LoadFailed when the server is of no use, Interrupted when nothing was seen."""
        if order.warmup is not None:
            warmed = self._run(order.warmup, order.target, "warming up")
            if warmed.cut_short and not self.is_interrupted:
                raise LoadFailed(f"in the warm-up, {with_advice(warmed.cut_short, order.target)}")
        if self.is_interrupted:
            raise Interrupted("interrupted in the warm-up; nothing was measured")
        return self._run(order.plan, order.target, "load")

    def _run(self, plan: LoadPlan, target: Target, what: str) -> LoadRun:
        with closing(LoadView(sys.stderr, plan, what)) as view:

            def on_progress(progress: LoadProgress) -> None:
                view(progress)
                if self.is_interrupted:  # the signal came before there was anything to cancel
                    self._generator.cancel()

            try:
                return self._generator.run(plan, [target], on_progress=on_progress)
            except LoadFailed as error:
                if self.is_interrupted:
                    raise Interrupted("interrupted; nothing was measured") from error
                raise LoadFailed(with_advice(str(error), target)) from error

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C (or SIGTERM) once ends the load and shows what was measured; twice ends all."""

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.is_interrupted = True
            # The lock of the generator may be held by the very code that was interrupted.
            threading.Thread(target=self._generator.cancel, daemon=True).start()

        before = {each: signal.signal(each, on_signal) for each in STOP_SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def check_survived(result: LoadResult, target: Target) -> None:
    """Raise LoadFailed when the load ended early, or its server is gone."""
    if result.load.cut_short:
        why = with_advice(result.load.cut_short, target)
        raise LoadFailed(f"the load ended early: {why}")
    if result.totals.result.errors:
        check_reachable(target)


def with_advice(failure: str, target: Target) -> str:
    """A failure in the server's words, with what to do about it where that is known."""
    found = re.search(r"HTTP (\d+)", failure)
    status = int(found[1]) if found else 0
    if status in REFUSED:
        return refusal_advice(target, status)
    if status == 404:  # noqa: PLR2004 - not found
        path = Address.of(target.url).prefix + target.api.path
        others = " or ".join(f"--api {api.value}" for api in Api if api is not target.api)
        return (
            f"{failure}\nThe server has no {path}, or no model {target.model!r}: try {others}, "
            "correct the path in the URL, or name the model with --model"
        )
    return failure


def server_words(target: Target, server: ServerFacts) -> str:
    """For example `model Kimi-K2.6, version 0.5.20`."""
    words = f"model {target.model}"
    version = server.facts.get("version")
    return f"{words}, version {version}" if version else words


# From words to numbers.


def read_order(args: argparse.Namespace) -> LoadOrder:
    """The options of the command line; raises ConfigError."""
    Address.of(args.url)
    target = Target(0, args.url, Api(args.api), args.model or "", read_key(args.api_key_env))
    if args.arrivals is not None and args.rate is None:
        raise ConfigError("--arrivals says how the requests of --rate arrive; give --rate too")
    if args.burst and args.requests is None:
        raise ConfigError("--burst sends all requests at once; say how many: --requests N")
    protocol, streams = LoadProtocol.CLOSED_LOOP, args.concurrency or STREAMS
    requests, rate = args.requests or REQUESTS_PER_STREAM * streams, None
    if args.rate is not None:
        rate = read_number("--rate", args.rate, "a number of requests per second above 0", 0.0)
        protocol, streams = LoadProtocol.OPEN_LOOP, max(1, round(rate))
        requests = args.requests or max(FEWEST_REQUESTS, round(OPEN_LOOP_S * rate))
    elif args.burst:
        protocol, streams = LoadProtocol.BURST, requests
    plan = LoadPlan(
        phase="load",
        protocol=protocol,
        concurrency=streams,
        prompt_tokens=read_lengths("--input-tokens", args.input_tokens, "prompt_tokens"),
        output_tokens=read_lengths("--output-tokens", args.output_tokens, "output_tokens"),
        seed=secrets.randbelow(SEEDS) if args.seed is None else args.seed,
        rate=rate,
        shared_prefix=read_share(args.shared_prefix),
        start=LoadStart.TOGETHER,
        requests=requests,
        silence_s=read_number("--timeout", args.timeout, "a number of seconds above 0", 0.0),
        arrivals=Arrivals(args.arrivals or Arrivals.POISSON),
    )
    slo = tuple(dict.fromkeys(read_limit(text) for text in args.slo))
    return LoadOrder(target, plan, warmup_plan(plan, args.warmup), slo)


def warmup_plan(plan: LoadPlan, count: int | None) -> LoadPlan | None:
    """Requests of its own prompts, a closed loop of as many streams as the load has."""
    if count is not None and count < 0:
        raise ConfigError(f"--warmup {count}: expected a number of requests, 0 for none")
    if count is None:
        is_closed = plan.protocol is LoadProtocol.CLOSED_LOOP
        count = plan.concurrency if is_closed else min(STREAMS, plan.requests or STREAMS)
    if count == 0:
        return None
    return replace(
        plan,
        phase="warmup",
        protocol=LoadProtocol.CLOSED_LOOP,
        concurrency=min(count, plan.concurrency),
        rate=None,
        requests=count,
    )


def read_key(name: str | None) -> str | None:
    """The key in an environment variable."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"--api-key-env {name}: this environment variable is not set; put the key in it "
            "(here goes its name, not the key)"
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"--api-key-env {name}: its value is no key; it may not have spaces")
    return key


def read_limit(text: str) -> SloLimit:
    """`ttft_s.p99=2.0`."""
    name, equals, value = text.partition("=")
    metric, dot, statistic = name.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"--slo {text}: expected METRIC=SECONDS, for example ttft_s.p99=2.0")
    if metric not in LATENCIES:
        raise ConfigError(f"--slo {text}: {unknown('latency', metric, LATENCIES)}")
    if statistic not in STATISTICS:
        raise ConfigError(f"--slo {text}: {unknown('statistic', statistic, STATISTICS)}")
    return SloLimit(metric, statistic, read_number(f"--slo {name}", value, "seconds above 0", 0.0))


def read_share(text: str) -> float:
    """A share from 0 to 1."""
    share = read_number("--shared-prefix", text, "a share from 0 to 1, for example 0.5", -1.0)
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"--shared-prefix {text}: expected a share from 0 to 1, for example 0.5")
    return share


def read_number(option: str, text: str, expected: str, above: float) -> float:
    """A finite number above a limit."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not above < number <= MOST:
        raise ConfigError(f"{option} {text}: expected {expected}")
    return number


def read_lengths(option: str, text: str, key: str) -> Lengths:
    """`128`, `64-192`, or a JSON lines file whose lines are token counts or have them at `key`."""
    if found := RANGE.fullmatch(text):
        low = int(found[1])
        high = int(found[2] or low)
        if not 1 <= low <= high <= MOST_TOKENS:
            raise ConfigError(
                f"{option} {text}: expected 1 to {MOST_TOKENS:,} tokens, and LOW at most HIGH"
            )
        return Lengths.fixed(low) if low == high else Lengths("uniform", low, high)
    if not re.search(r"[a-zA-Z]", text):
        raise ConfigError(
            f"{option} {text}: expected a number of tokens above 0, LOW-HIGH, or a JSON lines file"
        )
    from runner.study_file.lengths import read_lengths as read_file

    try:
        return Lengths("recorded", values=read_file(Path(text), key))
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
