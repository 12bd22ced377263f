"""Every study file that is shipped loads, on every engine, and has something to search."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config import dump, load_study, parse_study
from runner.launch import plan_launch
from runner.machine.profile import profile_names
from runner.space import enumerate_space, satisfies
from runner.trial import EngineKind

FOLDER = Path(__file__).parent.parent / "search_spaces"
FILES = sorted(FOLDER.glob("*.yaml"))
KIMI = FOLDER / "kimi-k2.6-8x-rtx-pro-6000.yaml"


def test_the_shipped_files() -> None:
    assert [path.name for path in FILES] == ["demo.yaml", KIMI.name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", list(EngineKind))
def test_one_option_is_enough_for_any_engine(path: Path, kind: EngineKind) -> None:
    settings = load_study(path, [f"engine.kind={kind}"])
    assert settings.engine.kind is kind
    assert settings.engine.profile in profile_names()
    assert settings.engine.model
    assert parse_study(dump(settings)) == settings


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_setting_has_a_launch(path: Path) -> None:
    settings = load_study(path)
    points = enumerate_space(settings, limit=50_000)
    assert points
    assert all(plan_launch(settings, params).replicas == 1 for params in points[::50])
    for baseline in settings.baselines:
        assert satisfies(settings, baseline.params)
        assert plan_launch(settings, baseline.params).gpus_per_replica == 8


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_opens_with_what_was_left_out(path: Path) -> None:
    head = path.read_text().split("name:")[0]
    assert head.startswith("#")
    assert "left out" in head.lower()


def test_the_demo_is_that_of_the_contract() -> None:
    settings = load_study(FOLDER / "demo.yaml")
    assert settings.name == "demo"
    assert (settings.engine.kind, settings.engine.time_scale) == (EngineKind.EMULATED, 20.0)
    assert settings.workload.concurrency == (1, 8, 32)
    assert (settings.search.trials, settings.search.seed) == (20, 0)
    assert [baseline.name for baseline in settings.baselines] == ["pp8-auto", "tp8"]
    # pp 1 has 2 graphs * 2 backends; pp 2, 4 and 8 have 9 depths and 64 caps on top.
    assert len(enumerate_space(settings, limit=10_000) or ()) == 4 * (1 + 3 * 9 * 64)


def test_the_reference_deployment() -> None:
    settings = load_study(KIMI)
    assert settings.name == "kimi-k2.6"
    assert settings.engine.kind is EngineKind.SGLANG
    assert settings.workload.concurrency == (1, 8, 16, 32, 48, 64)
    assert settings.objectives[0].concurrency == 64
    assert [each.name for each in settings.baselines] == ["tp8", "pp8-auto", "pp8-d8-auto"]
    points = enumerate_space(settings, limit=50_000) or []
    assert {(p["tp_size"], p.get("ep_size")) for p in points} == {
        (1, None),
        *((2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8)),
    }
