"""On a cluster, the node where the servers will run is asked which flags they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import ConfigError
from runner.settings import EngineSettings
from runner.trial import EngineKind
from tests.fake_python import FakePython
from tests.server_flags import help_text, real_environment
from tests.studies import CPU, study


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_with_gpus_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from runner.cluster.ray_executor import connect, environment_of_cluster

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python, empty = FakePython(tmp_path / "env"), FakePython(tmp_path / "empty")
    python.install("0.5.16", help_text(real_environment("0.5.16")))
    empty.install(None)
    connect(study(CPU), None)
    try:
        found = environment_of_cluster(engine(python))
        with pytest.raises(ConfigError, match="has no SGLang"):
            environment_of_cluster(engine(empty))
    finally:
        ray.shutdown()
    assert found == real_environment("0.5.16")
    assert python.asked() == ["version", "help"]


def engine(python: FakePython) -> EngineSettings:
    return EngineSettings(EngineKind.SGLANG, None, 1.0, "/models/m", python.path, {}, {})
