"""What a command checks before it begins anything."""

from __future__ import annotations

from typing import Any

import pytest

from runner.commands import check_engine
from runner.errors import ConfigError
from tests.studies import CPU, study


def with_engine(**changes: object) -> dict[str, Any]:
    return {**CPU, "engine": {**CPU["engine"], **changes}}


def test_faults_that_can_be_understood_are_fine() -> None:
    document = with_engine(args={"fault": "die-at-start@rate=0.2; chunks:1,3"})
    check_engine(study(document), is_local=True)
    searched = {"fault": {"choices": ["none", "heat:1,0.5"]}}
    check_engine(study(CPU, parameters=searched, baselines=[]), is_local=True)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": with_engine(args={"fault": "bogus"})["engine"]}, "engine.args.fault: unknown"),
        ({"parameters": {"fault": {"choices": ["none", "heat"]}}}, "parameters.fault: heat takes"),
        ({"baselines": [{"name": "b", "fault": "chunks"}]}, "baseline b: fault: chunks takes"),
        (
            {
                "engine": with_engine(kind="simulated", time_scale=1, args={"fault": "none"})[
                    "engine"
                ]
            },
            "only emulated servers break on purpose, and engine.kind is simulated",
        ),
    ],
)
def test_a_wrong_fault_is_found_before_anything_is_begun(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(study(CPU, **sections), is_local=True)
