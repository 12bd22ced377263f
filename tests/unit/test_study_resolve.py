from __future__ import annotations

import pytest

from runner.config import parse_study
from tests.study_samples import DOCUMENT, refused

NAME = (
    "expected 1 to 100 of a-z, 0-9, '.', '_' and '-', not starting with '.' and without '..' "
    "(it names a folder)"
)


@pytest.mark.parametrize(
    "name", ["a/b", "..", "a..b", ".a", "Demo", "a b", "a\\b", "ä", "a" * 101, "''", "'a\n'", "~x"]
)
def test_a_name_that_is_no_folder(name: str) -> None:
    assert refused(f"name={name}").endswith(NAME)


@pytest.mark.parametrize("name", ["kimi-k2.6", "a", "0", "a_b", "-a", "a" * 100])
def test_a_name_that_is(name: str) -> None:
    assert parse_study({**DOCUMENT, "name": name}).name == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["engine.profile="],
            "missing; engine emulated needs a hardware profile: cpu-blocking-pp2, h200",
        ),
        (
            ["engine.profile=", "engine.kind=simulated"],
            "--set engine.profile: missing; engine simulated needs a hardware profile",
        ),
        (
            ["engine.kind=sglang"],
            "engine.model: missing; engine sglang needs the model's path or name",
        ),
        (
            ["engine.args.trust_remote_cod=true"],
            "unknown server parameter 'trust_remote_cod'; did you mean 'trust_remote_code'?",
        ),
        (["engine.args.trust_remote_code=1"], "found 1, expected true or false"),
        (["engine.args.port=1"], "'port' is set by this program; leave it out"),
        (["engine.args.api_key=x"], "'api_key' is set by this program; leave it out"),
        (
            ["workload.protocol=open_loop", "workload.concurrency="],
            "workload.rate: missing; open_loop needs requests per second, e.g. [1, 2]",
        ),
        (
            ["workload.protocol=open_loop", "workload.rate=[1, 2]"],
            (
                "workload.concurrency: not used by open_loop, whose ladder is workload.rate; "
                "set it to null"
            ),
        ),
        (
            ["workload.rate=[1]"],
            "not used by closed_loop, whose ladder is workload.concurrency; set it to null",
        ),
        (["workload.concurrency=[8, 1, 8]"], "workload.concurrency.2: found 8 twice; keep one"),
        (
            ["workload={protocol: open_loop, rate: [0.5, 1, 4]}"],
            "workload.rate.1: found 1.0 and 0.5, the same rung 1; keep one",
        ),
        (
            ["objectives=[{metric: ttft_s}]"],
            (
                "objectives.0.metric: ttft_s needs a statistic: ttft_s.mean, ttft_s.p50, "
                "ttft_s.p90, ttft_s.p99"
            ),
        ),
        (
            ["objectives=[{metric: outptu_throughput}]"],
            (
                "objectives.0.metric: unknown metric 'outptu_throughput'; did you mean "
                "'output_throughput'? Valid: output_throughput, total_throughput, "
            ),
        ),
        (
            ["objectives=[{metric: goodput}]"],
            "objectives.0.metric: goodput counts requests that keep the limits of slo; give slo",
        ),
        (
            ["objectives=[{metric: power_w, concurrency: 9}]"],
            "objectives.0.concurrency: found 9, expected a rung of workload.concurrency: 1, 8, 32",
        ),
        (
            ["objectives=[{metric: power_w, rate: 8}]"],
            "objectives.0.rate: not used by closed_loop; write concurrency",
        ),
        (
            ["objectives=[{metric: power_w}, {metric: power_w, concurrency: 32}]"],
            "objectives.1: power_w at the same rung twice; keep one",
        ),
        (
            ["slo.ttft.p99=2"],
            (
                "slo.ttft: unknown latency 'ttft'; did you mean 'ttft_s'? "
                "Valid: ttft_s, tpot_s, itl_s, e2e_s"
            ),
        ),
        (
            ["slo.ttft_s.p98=2"],
            "unknown statistic 'p98'; did you mean 'p99'? Valid: mean, p50, p90, p99",
        ),
        (["measure.min_window_s=200"], "found 200, expected at most measure.max_window_s, 120"),
        (["storage=optuna.db"], "found the text 'optuna.db', expected an Optuna URL such as"),
        (["storage='http://[x'"], "found the text 'http://[x', expected a URL"),
    ],
)
def test_sections_that_contradict_each_other(options: list[str], message: str) -> None:
    assert refused(*options).startswith(message)


@pytest.mark.parametrize("field", ["storage", "tracking.uri"])
def test_a_password_is_refused_and_not_repeated(field: str) -> None:
    message = refused(f"{field}=postgresql://user:hunter2@host/db")
    assert message == "found a password in the URL; give it in the environment instead"


def test_a_storage_without_password_is_fine() -> None:
    settings = parse_study(DOCUMENT, ["storage=postgresql://user@host/db"])
    assert settings.storage == "postgresql://user@host/db"
