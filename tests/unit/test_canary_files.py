"""The canary's files: references by numerics, adopted once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runner.canary import PROMPTS, CanaryRecord, GreedyOutput
from runner.errors import StudyError
from runner.record.canary_files import CanaryFiles
from runner.trial import Params

OUTPUT = GreedyOutput((5, 6), (2.5, None))
N = len(PROMPTS)


def record(trial: int, numerics: Params, **changes: str) -> CanaryRecord:
    other = GreedyOutput((trial,), (0.0,))
    whole = CanaryRecord(trial, trial, numerics, ((OUTPUT, *(other,) * (N - 1)), (other,) * N))
    return replace(whole, **changes)  # type: ignore[arg-type]


def adopt(files: CanaryFiles, folder: Path, new: CanaryRecord) -> None:
    trial = folder / str(new.trial)
    trial.mkdir()
    files.write(trial, new)
    files.adopt(trial)


def test_the_first_of_each_numerics_stays(tmp_path: Path) -> None:
    files = CanaryFiles(tmp_path)
    assert files.reference({}) is None
    adopt(files, tmp_path, record(3, {}))
    adopt(files, tmp_path, record(4, {}))
    adopt(files, tmp_path, record(5, {"dtype": "float16"}))
    again = CanaryFiles(tmp_path)
    plain, half = again.reference({}), again.reference({"dtype": "float16"})
    assert plain is not None
    assert half is not None
    assert (plain.trial, half.trial) == (3, 5)
    assert plain.outputs == (OUTPUT, *(GreedyOutput((3,), (0.0,)),) * (N - 1))
    assert again.reference({"dtype": "bfloat16"}) is None


def test_a_trial_without_outputs_is_no_reference(tmp_path: Path) -> None:
    files = CanaryFiles(tmp_path)
    files.adopt(tmp_path / "trial")
    assert list(tmp_path.iterdir()) == []


def test_outputs_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    files = CanaryFiles(tmp_path)
    adopt(files, tmp_path, record(1, {}, prompts="old"))
    assert files.reference({}) is None


def test_files_that_lack_outputs_are_damaged(tmp_path: Path) -> None:
    files = CanaryFiles(tmp_path)
    adopt(files, tmp_path, record(1, {}))
    path = tmp_path / "canary.json"
    document = json.loads(path.read_text())
    document["references"][0]["outputs"].pop()
    path.write_text(json.dumps(document))
    with pytest.raises(StudyError, match=r"outputs are missing.* Delete it: it is made again"):
        files.reference({})
    path.unlink()
    broken = json.loads((tmp_path / "1" / "canary.json").read_text()) | {"outputs": []}
    (tmp_path / "1" / "canary.json").write_text(json.dumps(broken))
    with pytest.raises(StudyError, match=r"1/canary.json is damaged \(outputs are missing"):
        files.adopt(tmp_path / "1")


def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "canary.json").write_text('{"references": [{}]}')
    with pytest.raises(StudyError, match=r"canary.json is damaged .* Delete it"):
        CanaryFiles(tmp_path).reference({})
