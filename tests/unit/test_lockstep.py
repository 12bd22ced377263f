"""Equal replies fall into step when the HTTP process of a server stops, as on a real H200.

There, with 128 streams, prefill batches held 1 to 2.5 requests before the first stop of a load and
up to 32 (8192 tokens) after it, and the first token took 0.3 to 0.4 s instead of 0.03 s. Its log
has prefills and decodes of the scheduler during the stops.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from runner.config import parse_study
from runner.engines.simulated import SimulatedServers
from runner.launch import plan_launch
from runner.machine.profile import FOLDER, load_profile, profile_text
from runner.pipeline import Pipeline, Profile, ServerShape, Step
from runner.plans import rung_plans
from runner.trial import LaunchSpec, LoadRun, RequestStatus

SAME_BATCH_S = 0.003
SILENCE_S = 0.3


class WatchedPipeline(Pipeline):
    """Keeps when its tokens were made."""

    made_s: list[float]

    def step(self) -> Step:
        step = super().step()
        self.made_s.extend(token.time_s for token in step.tokens)
        return step


def run(
    profile: str, output_tokens: object, made_s: list[float] | None = None, most_s: float = 14
) -> LoadRun:
    """A load of 128 streams; `made_s` gets when the scheduler made each token."""

    def make(profile: Profile, shape: ServerShape, seed: int, start_s: float) -> Pipeline:
        pipeline = WatchedPipeline(profile, shape, seed, start_s)
        pipeline.made_s = [] if made_s is None else made_s
        return pipeline

    settings = parse_study(
        {
            "name": "lockstep",
            "engine": {"kind": "simulated", "profile": profile},
            "hardware": {"gpus": 1},
            "parameters": {"attention_backend": {"choices": ["triton"]}},
            "workload": {
                "prompt_tokens": 256,
                "output_tokens": output_tokens,
                "concurrency": [128],
            },
            "measure": {"min_window_s": most_s - 2, "max_window_s": most_s},
        }
    )
    plan = plan_launch(settings, {"attention_backend": "triton"})
    servers = SimulatedServers(settings, LaunchSpec(0, plan.key, plan.server_args, 1, 1), make)
    return servers.run_load(rung_plans(settings, 0)[0])


def largest_batch(load: LoadRun) -> int:
    """The most first tokens at a time."""
    first_s = sorted(record.token_s[0] for record in load.records if record.token_s)
    sizes, size = [1], 1
    for one_s, next_s in pairwise(first_s):
        size = size + 1 if next_s - one_s < SAME_BATCH_S else 1
        sizes.append(size)
    return max(sizes)


def silences(load: LoadRun) -> list[tuple[float, float, int]]:
    """When clients heard nothing: from, until, and how many tokens they had by then."""
    times_s = sorted(time_s for record in load.records for time_s in record.token_s)
    pairs = enumerate(pairwise(times_s), start=1)
    return [(one_s, next_s, n) for n, (one_s, next_s) in pairs if next_s - one_s > SILENCE_S]


def ttft_s(load: LoadRun) -> float:
    """Mean time to the first token in the window."""
    return fmean(
        record.token_s[0] - record.send_s
        for record in load.records
        if record.status is RequestStatus.OK and record.send_s >= load.window_start_s
    )


@pytest.fixture(scope="module")
def stopping() -> LoadRun:
    return run("h200-llama-3.1-8b", 128)


def test_a_stop_makes_large_batches_that_stay(stopping: LoadRun) -> None:
    assert largest_batch(stopping) >= 32
    assert 0.1 < ttft_s(stopping) < 0.5


def test_tokens_of_the_step_in_which_a_stop_begins_wait_too(stopping: LoadRun) -> None:
    """The stop begins at one token of a step: those before it are out, the others wait for it."""
    replies = [record.token_s for record in stopping.records if record.token_s]
    begun_s = {token_s[0] for token_s in replies}
    decodes_s = [last_s for last_s, _, _ in silences(stopping) if last_s not in begun_s]
    assert decodes_s
    for last_s in decodes_s:
        running = sum(token_s[0] < last_s < token_s[-1] for token_s in replies)
        assert 0 < sum(last_s in token_s for token_s in replies) < running


def test_stops_come_each_so_many_tokens_and_the_scheduler_goes_on() -> None:
    profile, made_s = "h200-llama-3.1-8b", list[float]()
    stops = silences(run(profile, {"uniform": [64, 192]}, made_s, most_s=30))
    assert len(stops) >= 3
    counts = [count for _, _, count in stops]
    every = load_profile(profile).host.pause_tokens
    assert [after - before for before, after in pairwise(counts)] == [every] * (len(stops) - 1)
    for from_s, until_s, _ in stops:
        assert sum(from_s < time_s < until_s for time_s in made_s) > 1000


def test_without_stops_requests_stay_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("profile") / "calm.yaml"
    profile = load_profile("h200-llama-3.1-8b")
    calm = replace(profile, host=replace(profile.host, pause_s=0.0))
    path.write_text(profile_text(calm))
    load = run(str(path), 128)
    assert largest_batch(load) <= 16
    assert ttft_s(load) < 0.06


def test_uneven_replies_part_again(stopping: LoadRun) -> None:
    assert ttft_s(run("h200-llama-3.1-8b", {"uniform": [64, 192]})) < ttft_s(stopping) / 2


def test_the_simulation_with_stops_is_the_same_each_time(stopping: LoadRun) -> None:
    again = run("h200-llama-3.1-8b", 128)
    assert [record.token_s for record in again.records] == [
        record.token_s for record in stopping.records
    ]


def test_profiles_without_a_measured_stop_have_none() -> None:
    for path in FOLDER.glob("*.yaml"):
        is_measured = path.stem.startswith("h200-")
        assert (load_profile(path.stem).host.pause_s > 0.0) is is_measured
