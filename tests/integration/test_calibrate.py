"""`runner calibrate` on a study of a machine that is not as its profile says."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.calibration import model
from runner.calibration.calibrate import Calibration, FittedParameter, calibrate
from runner.calibration.files import CalibrationFiles
from runner.calibration.points import Quantity, StudyRecord, evidence_of
from runner.calibration.verdict import Verdict
from runner.cli import main
from runner.config import dump, parse_study
from runner.errors import ConfigError
from runner.insight.calibration_view import print_calibration
from runner.machine.profile import load_profile
from runner.record.store import StudyStore
from runner.trial import Lengths, TrialResult
from tests.calibrating import (
    DOCUMENT,
    SETTINGS,
    START,
    TRUTH,
    measured_trial,
    simulated_rungs,
    slower,
    small_study,
    write_profile,
)
from tests.driving import Home

KNOWN = ("gpu.bandwidth_bytes_per_s", "host.eager_layer_s", "gpu.memory_bound_w")


def number(profile: Any, name: str) -> float:  # noqa: ANN401 - any profile
    section, field = name.split(".")
    value: float = getattr(getattr(profile, section), field)
    return value


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """In this process one seed is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "SEEDS", 1)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A study that was tuned on the true machine."""
    folder = tmp_path_factory.mktemp("home")
    engine = {**DOCUMENT["engine"], "profile": str(write_profile(folder))}
    home = Home(folder, {**DOCUMENT, "engine": engine})
    done = home.tune("--executor", "inline")
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture(scope="module")
def answer(measured: Home, quick: None) -> dict[str, Any]:  # noqa: ARG001 - sets seeds
    out = measured.folder / "mine.yaml"
    words = ["calibrate", "one-gpu", "--home", str(measured.folder), "--profile", START.name]
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        assert main([*words, "--out", str(out), "--json"]) == 0
    assert stream.getvalue().count("\n") == 1, "one document"
    found: dict[str, Any] = json.loads(stream.getvalue())
    return found


def test_the_true_machine_is_found(answer: dict[str, Any]) -> None:
    profile = load_profile(answer["profile_path"])
    for name in KNOWN:
        assert number(profile, name) == pytest.approx(number(TRUTH, name), rel=0.05), name
    verdicts = {each["name"]: each["verdict"] for each in answer["parameters"]}
    assert {verdicts[name] for name in KNOWN} == {"identified"}


def test_errors_shrink_to_the_noise_also_for_settings_left_out(answer: dict[str, Any]) -> None:
    errors = {each["quantity"]: each for each in answer["errors"]}
    assert set(errors) == {str(quantity) for quantity in Quantity}
    for quantity in ("output_throughput", "tpot_s", "power_w"):
        assert errors[quantity]["before"] > 0.07
        assert errors[quantity]["after"] < 0.04
        assert errors[quantity]["left_out"] < 0.06
    assert answer["settings"] == answer["folds"] >= 6


def test_what_one_gpu_cannot_tell_is_said_and_unchanged(answer: dict[str, Any]) -> None:
    profile = load_profile(answer["profile_path"])
    found = {each["name"]: each for each in answer["parameters"]}
    for name, words in (
        ("link.ring_step_s", "no tensor parallelism was measured"),
        ("link.hop_s", "no pipeline (pp_size > 1) was measured"),
        ("gpu.communication_w", "no server of several GPUs was measured"),
    ):
        assert found[name]["verdict"] == "not identified"
        assert found[name]["reason"] == words
        assert number(profile, name) == number(START, name)
    for each in answer["parameters"]:
        if each["verdict"] == "not identified":
            assert each["value"] == each["start"]
    assert profile.model == START.model


def test_the_files_are_whole(measured: Home, answer: dict[str, Any]) -> None:
    folder = measured.study_folder / "calibration"
    assert sorted(path.name for path in folder.iterdir()) == ["profile.yaml", "residuals.json"]
    points = json.loads((folder / "residuals.json").read_text(encoding="utf-8"))["points"]
    assert points == answer["residuals"]
    assert len(points) == answer["points"]
    first = {"study", "trial", "setting", "lengths", "concurrency", "quantity"}
    assert set(points[0]) == first | {"measured", "before", "after", "left_out"}
    profile = load_profile(str(folder / "profile.yaml"))
    assert load_profile(answer["profile_path"]) == profile
    assert answer["profile_path"] == str(measured.folder / "mine.yaml")
    assert profile.name == f"{START.name}-calibrated"
    assert "calibrated from one-gpu" in profile.fit
    assert "link.ring_step_s" in profile.fit


def test_predict_uses_the_profile(
    measured: Home, answer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    point = next(
        each
        for each in answer["residuals"]
        if (each["quantity"], each["concurrency"]) == ("output_throughput", 32)
        and "eager" in each["setting"].split()
    )
    setting = measured.results()[point["trial"]]["params"]
    params = ",".join(f"{name}={str(value).lower()}" for name, value in setting.items())
    study = str(measured.study_file)

    def predicted(profile: str) -> float:
        words = ["predict", study, "--params", params, "--seeds", "1", "--json"]
        assert main([*words, "--set", f"engine.profile={profile}"]) == 0
        rungs = json.loads(capsys.readouterr().out)["rungs"]
        return next(float(r["output_throughput"]) for r in rungs if r["concurrency"] == 32)

    assert predicted(answer["profile_path"]) == pytest.approx(point["measured"], rel=0.06)
    assert predicted(START.name) > 1.2 * point["measured"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no-such",), "no study no-such"),
        (("one-gpu", "--profile", "no-such"), "there is no hardware profile 'no-such'"),
        (("one-gpu", "--profile", "/no/such.yaml"), "/no/such.yaml: cannot be read"),
        (("one-gpu", "--out", "profile.json"), "a profile's file ends in .yaml"),
        (("one-gpu", "--out", "/no/such/p.yaml"), "expected a file in a folder that exists"),
    ],
)
def test_wrong_input_is_one_message(
    measured: Home, words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *words, "--home", str(measured.folder)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1


def test_a_driver_that_runs_is_left_its_cpu(
    measured: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("enough")

    urgency: list[int] = []
    monkeypatch.setattr("os.nice", urgency.append)
    monkeypatch.setattr("runner.calibration.calibrate.calibrate", refuse)
    words = ["calibrate", "one-gpu", "--home", str(measured.folder)]
    assert main(words) == 2
    assert urgency == []
    with StudyStore(measured.folder, "one-gpu").lock():
        assert main(words) == 2
    assert urgency == [19]
    assert "study one-gpu is running: calibrating with" in capsys.readouterr().err


def test_a_study_without_measurements_or_profile_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = {**DOCUMENT, "engine": {"kind": "sglang", "model": "/no/such"}}
    for name, document in (("empty", DOCUMENT), ("bare", bare)):
        StudyStore(tmp_path, name).create(dump(parse_study({**document, "name": name})), {})
    assert main(["calibrate", "empty", "--home", str(tmp_path)]) == 2
    assert "study empty has no measured rung to calibrate from" in capsys.readouterr().err
    assert main(["calibrate", "bare", "--home", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "study bare names no hardware profile to start from" in told
    assert "--profile" in told


def test_studies_of_different_things_are_not_calibrated_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = DOCUMENT["engine"]
    others: dict[str, dict[str, object]] = {
        "one": {},
        "profile": {"engine": {**engine, "profile": "rtx-pro-6000-x8-kimi-k2.6"}},
        "kind": {"engine": {**engine, "kind": "emulated"}},
        "real": {"engine": {**engine, "kind": "sglang", "model": "/m"}},
        "guess": {
            "engine": {
                **engine,
                "kind": "sglang",
                "model": "/m",
                "profile": "rtx-pro-6000-x8-kimi-k2.6",
            }
        },
    }
    for name, other in others.items():
        document = {**DOCUMENT, **other, "name": name}
        StudyStore(tmp_path, name).create(dump(parse_study(document)), {})
    for words, message in (
        (["one", "one"], "study one is named twice"),
        (["one", "profile"], f"engine.profile of one is {START.name}, that of profile rtx-"),
        (["real", "guess"], "name different hardware profiles: real "),
        (["one", ""], "'' cannot be the name of a study"),
        (["one", "kind"], "engine.kind of one is simulated, that of kind emulated"),
    ):
        assert main(["calibrate", *words, "--home", str(tmp_path)]) == 2
        told = capsys.readouterr()
        assert message in told.err
        assert told.err.count("\n") == 1


def test_a_study_of_other_gpus_or_of_nothing_is_left_out(
    measured: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(measured.folder, home)
    for name in ("elsewhere", "empty"):
        folder = home / "studies" / name
        shutil.copytree(home / "studies" / "one-gpu", folder)
        document = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        document["settings"]["name"] = name
        (folder / "study.json").write_text(json.dumps(document), encoding="utf-8")
    shutil.rmtree(home / "studies" / "empty" / "trials")
    (idle,) = (home / "studies" / "elsewhere").rglob("idle.json")
    idle.write_text(idle.read_text(encoding="utf-8").replace("H200", "A100"), encoding="utf-8")
    assert main(["calibrate", "one-gpu", "elsewhere", "--home", str(home)]) == 2
    told = capsys.readouterr().err
    assert "one-gpu was measured on NVIDIA H200, elsewhere was measured on NVIDIA A100" in told
    assert main(["calibrate", "empty", "one-gpu", "--home", str(home)]) == 2
    told = capsys.readouterr().err
    assert "study empty has no measured rung to calibrate from" in told
    assert told.rstrip().endswith("or leave it out")


def test_two_studies_are_fitted_in_one(
    measured: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same trials twice: the same errors, from twice the points."""
    home = tmp_path / "home"
    shutil.copytree(measured.folder, home)
    shutil.copytree(home / "studies" / "one-gpu", home / "studies" / "again")
    file = home / "studies" / "again" / "study.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["settings"]["name"] = "again"
    file.write_text(json.dumps(document), encoding="utf-8")
    answers = []
    for names in (["one-gpu"], ["one-gpu", "again"]):
        assert main(["calibrate", *names, "--home", str(home), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    alone, both = answers
    assert both["studies"] == ["one-gpu", "again"]
    assert both["points"] == 2 * alone["points"]
    assert both["settings"] == alone["settings"]
    assert both["errors"][0]["before"] == pytest.approx(alone["errors"][0]["before"], abs=1e-9)
    assert both["errors"][0]["after"] == pytest.approx(alone["errors"][0]["after"], abs=0.01)
    assert {each["study"] for each in both["residuals"]} == {"one-gpu", "again"}
    assert main(["calibrate", "again", "one-gpu", "--home", str(home)]) == 0
    shown = capsys.readouterr().out
    assert "again, one-gpu: " in shown
    assert str(home / "studies" / "again" / "calibration" / "profile.yaml") in shown


def calibrated(trials: Sequence[TrialResult]) -> Calibration:
    return calibrate(START, evidence_of(START, StudyRecord(small_study(), tuple(trials))))


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialResult, ...]:
    """One trial for each setting, simulated on the true machine."""
    path = write_profile(tmp_path_factory.mktemp("truth"))
    return tuple(
        measured_trial(place, params, rungs=simulated_rungs(params, path))
        for place, params in enumerate(SETTINGS)
    )


@pytest.fixture(scope="module")
def clean(trials: tuple[TrialResult, ...]) -> Calibration:
    return calibrated(trials)


def test_a_fit_that_explains_nothing_or_spoils_something_says_so(
    clean: Calibration, tmp_path: Path
) -> None:
    bad = tuple(replace(each, before=0.1, after=0.3, left_out=0.9) for each in clean.errors)
    stream = io.StringIO()
    print_calibration(replace(clean, errors=bad), CalibrationFiles(tmp_path), stream)
    told = " ".join(stream.getvalue().split())
    assert "throughput is 90% off after the fit. Do not use this profile" in told
    assert "Further off than before, for the sake of the others: throughput, TTFT (mean)" in told
    assert "throughput is 90.0% off for settings it has not seen, 10.0% before." in told
    assert "can well be off" not in told
    assert "use it" not in told


def test_a_number_that_cannot_be_is_told(clean: Calibration, tmp_path: Path) -> None:
    """Bandwidth may be off by 15 %; twice as much would be beyond physics."""
    bent = tuple(
        replace(each, value=2.0 * each.parameter.start)
        if each.parameter.name == "gpu.bandwidth_bytes_per_s"
        else each
        for each in clean.parameters
    )
    stream = io.StringIO()
    print_calibration(replace(clean, parameters=bent), CalibrationFiles(tmp_path), stream)
    told = " ".join(stream.getvalue().split())
    assert "gpu.bandwidth_bytes_per_s is 2 times what it was, more than it can well be off" in told


def test_replies_of_like_length_are_told(clean: Calibration, tmp_path: Path) -> None:
    def told_of(law: Lengths) -> str:
        (study,) = clean.evidence.studies
        work = replace(study.workload, output_tokens=law)
        evidence = replace(clean.evidence, studies=(replace(study, workload=work),))
        stream = io.StringIO()
        print_calibration(replace(clean, evidence=evidence), CalibrationFiles(tmp_path), stream)
        return " ".join(stream.getvalue().split())

    assert "Replies of one-gpu are of like length" in told_of(Lengths.fixed(32))
    assert "are of like length" not in told_of(Lengths("uniform", 16, 48))


def test_effects_that_the_profile_says_are_not_there_are_named(
    clean: Calibration, tmp_path: Path
) -> None:
    host = replace(clean.start.host, collective_s=0.0, exchange_s=0.0)
    stream = io.StringIO()
    without = replace(clean, start=replace(clean.start, host=host))
    print_calibration(without, CalibrationFiles(tmp_path), stream)
    told = " ".join(stream.getvalue().split())
    assert "the effect is not there: " in told
    assert "host.exchange_s, host.collective_s" in told
    assert "use it runner plan" in told


def test_a_person_reads_what_was_found(clean: Calibration, tmp_path: Path) -> None:
    stream = io.StringIO()
    print_calibration(clean, CalibrationFiles(tmp_path), stream)
    told = stream.getvalue()
    for words in (
        "mean error",
        "left out",
        "Not identified, kept as before (no tensor parallelism",
        "The worst points",
        f"runner plan STUDY.yaml --set engine.profile={tmp_path / 'profile.yaml'}",
    ):
        assert words in told, words
    assert max(map(len, told.partition("\nprofile ")[0].splitlines())) <= 100


def test_a_drifted_point_does_not_move_the_fit(
    trials: tuple[TrialResult, ...], clean: Calibration
) -> None:
    high, low = trials[1].rungs
    drifted = replace(trials[1], rungs=(slower(high, 1.6), low))
    found = calibrated([drifted if trial.number == 1 else trial for trial in trials])
    for name in KNOWN:
        true, steady = number(TRUTH, name), number(clean.profile, name)
        assert number(clean.profile, name) == pytest.approx(true, rel=0.06), name
        assert number(found.profile, name) == pytest.approx(steady, rel=0.08), name


def test_left_out_errors_do_not_know_the_setting(
    trials: tuple[TrialResult, ...], clean: Calibration, tmp_path: Path
) -> None:
    """flashinfer without graphs is odd in a way that its own factor can explain."""
    flashinfer = replace(TRUTH.backends["flashinfer"], eager_factor=1.4)
    odd = replace(TRUTH, name="odd", backends={**TRUTH.backends, "flashinfer": flashinfer})
    place = SETTINGS.index({"attention_backend": "flashinfer", "cuda_graph": False})
    rungs = simulated_rungs(SETTINGS[place], write_profile(tmp_path, odd))
    found = calibrated([replace(t, rungs=rungs) if t.number == place else t for t in trials])
    for calibration, is_odd in ((clean, False), (found, True)):
        for each in calibration.points:
            if each.point.trial == place and each.point.quantity is Quantity.THROUGHPUT:
                assert each.left_out is not None
                assert each.after == pytest.approx(each.point.measured, rel=0.05)
                assert (each.left_out > 1.25 * each.point.measured) == is_odd
                assert (each.left_out < 1.05 * each.point.measured) != is_odd


def test_with_few_settings_none_is_left_out(trials: tuple[TrialResult, ...]) -> None:
    both = calibrated(trials[:2])
    assert both.folds == 0
    assert {each.left_out for each in both.points} == {None}
    assert {each.left_out for each in both.errors} == {None}
    assert parameter(both, "host.eager_layer_s").verdict is Verdict.IDENTIFIED
    graphs = parameter(calibrated(trials[:1]), "host.eager_layer_s")
    assert graphs.verdict is Verdict.NOT_IDENTIFIED
    assert graphs.reason == "no setting without CUDA graphs was measured"
    assert graphs.value == graphs.parameter.start


def parameter(calibration: Calibration, name: str) -> FittedParameter:
    (found,) = (each for each in calibration.parameters if each.parameter.name == name)
    return found
