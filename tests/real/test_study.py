"""A whole study on real servers: refused flags, a driver killed in the middle, what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.engines.lease import Lease, read_leases
from runner.engines.processes import ProcessId, is_running
from tests.driving import Home, kill, wait_for
from tests.real.cpu_study import cpu_study, needs_sglang

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600), needs_sglang]

LIMIT_S = 3000.0
GONE_S = 30.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder: Path = tmp_path_factory.mktemp("study")
    return Home(folder, cpu_study(folder), LIMIT_S)


def leases(home: Home) -> tuple[Lease, ...]:
    return read_leases(home.study_folder / "leases").leases


def servers(home: Home) -> list[ProcessId]:
    """Every process of every server that has a lease."""
    return [stat.process for lease in leases(home) for stat in lease.group.members()]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("engine.args.max_runing_requests=16", "max_running_requests"),
        ("engine.args.pp_max_micro=4", "pp_max_micro_batch_size"),  # argparse would take it
        ("engine.args.attention_backend=flashinfr", "flashinfer"),
        ("parameters.sampling_bakend={choices: [pytorch]}", "sampling_backend"),
    ],
)
def test_a_flag_that_sglang_does_not_have_is_refused_before_any_launch(
    home: Home, option: str, words: str
) -> None:
    done = home.tune("--set", option)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(home.study_folder.glob("launches/*")) == []


def test_a_driver_killed_in_the_middle_takes_its_servers_along_and_continues(home: Home) -> None:
    driver = home.start()
    wait_for(lambda: half_measured(home) != [], "a trial with one of its rungs", 1800)
    (rung,) = half_measured(home)
    kept, running = rung.read_bytes(), servers(home)
    kill(driver)
    wait_for(lambda: not any(map(is_running, running)), "their end", GONE_S)

    done = home.tune()

    assert done.returncode == 0, done.stderr
    assert leases(home) == ()
    assert rung.read_bytes() == kept
    assert (rung.parent / "result.json").exists()
    results = home.results()
    assert [result["number"] for result in results] == list(range(len(results)))
    bad = [each for each in results if each["outcome"] not in {"complete", "pruned"}]
    assert all("not steady" in each["reason"] for each in bad)  # two cores have more to do
    searched = [result for result in results if result["repeat_of"] is None]
    assert sum(each["outcome"] in {"complete", "pruned"} for each in searched) == 5


def half_measured(home: Home) -> list[Path]:
    """The first rung of the trial that has no more than that yet."""
    return [
        path
        for path in home.study_folder.glob("trials/*/rung-0-*.parquet")
        if not (path.parent / "result.json").exists()
        and not list(path.parent.glob("rung-1-*.parquet"))
    ]


def test_the_servers_said_what_they_should_and_what_happened_in_them(home: Home) -> None:
    first, *others = [result["canary"] for result in complete(home)]
    assert first["state"] == "first"
    assert {each["state"] for each in others} == {"matched"}
    for result in complete(home):
        evidence = result["rungs"][0]["evidence"]
        assert evidence["graph_share"] == 0.0  # there are none on a CPU
        assert 1 <= evidence["batch_mean"] <= evidence["batch_max"] <= 8


def test_what_was_asked_ran(home: Home) -> None:
    for result in complete(home):
        for name, value in result["params"].items():
            assert result["resolved"][name] == value, result["number"]


def test_caps_are_changed_on_a_running_server(home: Home) -> None:
    cap4, cap2 = (result for result in complete(home) if result["name"] in {"cap4", "cap2"})
    caps = [result["resolved"]["pp_max_micro_batch_size"] for result in (cap4, cap2)]
    assert caps == [4, 2]
    assert cap4["launch"] == cap2["launch"]
    assert cap2["rungs"][0]["evidence"]["batch_max"] <= 2


def complete(home: Home) -> list[dict[str, Any]]:
    return [result for result in home.results() if result["outcome"] == "complete"]
