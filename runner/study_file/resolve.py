"""From the study file's shape to the settings: defaults filled in, sections checked together."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from runner.machine.profile import profile_names
from runner.settings import (
    LATENCIES,
    METRIC_DIRECTIONS,
    METRIC_NAMES,
    STATISTICS,
    Direction,
    EngineSettings,
    HardwareSettings,
    MeasureSettings,
    Objective,
    SearchSettings,
    SloLimit,
    StudySettings,
    Workload,
)
from runner.study_file import server_args
from runner.study_file.lengths import resolve_search, resolve_workload
from runner.study_file.mistake import Mistakes, show, unknown
from runner.study_file.model import EngineSection, ObjectiveSection, StudyDocument, WorkloadSection
from runner.study_file.parameters import SpaceReader, name_mistake
from runner.trial import Arrivals, EngineKind, Lengths, LoadProtocol, Params

NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,99}")
LADDER = (1, 8, 16, 32, 48, 64)


def resolve(document: StudyDocument, mistakes: Mistakes, folder: Path | None) -> StudySettings:
    """The settings; they can be used only if no mistake was noted.

    `folder` is the study file's: files it names are looked up there.
    """
    engine = _engine(document.engine, mistakes, folder)
    hardware = HardwareSettings(**document.hardware.model_dump())
    constants = {"gpus": hardware.gpus, "nodes": hardware.nodes, **engine.args}
    reader = SpaceReader(constants, engine.args, mistakes)
    parameters = reader.parameters(document.parameters)
    constraints = (
        reader.expression(text, f"constraints.{position}", document.parameters)
        for position, text in enumerate(document.constraints)
    )
    work = document.workload
    laws = resolve_workload(work, folder, mistakes)
    workload = _workload(work, laws, mistakes)
    search = document.search
    search_law = resolve_search(search.output_tokens, work, laws, folder, mistakes)
    slo = _slo(document.slo, mistakes)
    return StudySettings(
        name=_name(document.name, mistakes),
        engine=engine,
        hardware=hardware,
        parameters=parameters,
        constraints=tuple(each for each in constraints if each is not None),
        baselines=reader.baselines(document.baselines, parameters),
        workload=workload,
        objectives=_objectives(document.objectives, workload, slo, mistakes),
        slo=slo,
        search=SearchSettings(**{**search.model_dump(), "output_tokens": search_law}),
        measure=_measure(document, mistakes),
        storage=_url(document.storage, "storage", mistakes),
        tracking_uri=_url(document.tracking.uri, "tracking.uri", mistakes),
    )


def _name(name: str, mistakes: Mistakes) -> str:
    if not NAME.fullmatch(name) or ".." in name:
        mistakes.add(
            "name",
            f"found {show(name)}, expected 1 to 100 of a-z, 0-9, '.', '_' and '-', "
            "not starting with '.' and without '..' (it names a folder)",
        )
    return name


def _engine(section: EngineSection, mistakes: Mistakes, folder: Path | None) -> EngineSettings:
    kind = EngineKind(section.kind)
    if kind is EngineKind.SGLANG and section.model is None:
        mistakes.add("engine.model", "missing; engine sglang needs the model's path or name")
    if kind is not EngineKind.SGLANG and section.profile is None:
        names = ", ".join(profile_names())
        text = (
            f"missing; engine {kind} needs a hardware profile: {names}, or a path to a .yaml file"
        )
        mistakes.add("engine.profile", text)
    profile = _home(section.profile)
    if profile is not None and profile.endswith(".yaml") and folder is not None:
        profile = str((folder / profile).absolute())
    return EngineSettings(
        kind=kind,
        profile=profile,
        time_scale=section.time_scale if kind is EngineKind.EMULATED else 1.0,
        model=_home(section.model),
        python=_home(section.python),
        args=_args(section.args, mistakes),
        env=dict(section.env),
    )


def _home(path: str | None) -> str | None:
    """A path that begins with `~` from the user's home folder, as a shell would have it."""
    return None if path is None else os.path.expanduser(path)  # noqa: PTH111 - never raises


def _args(args: Params, mistakes: Mistakes) -> Params:
    for name, value in args.items():
        place = f"engine.args.{name}"
        allowed = server_args.value_mistake(name, value)
        if wrong := name_mistake(name):
            mistakes.add(place, wrong)
        elif allowed:
            mistakes.add(place, f"found {show(value)}, expected {allowed}")
    return {name: server_args.settle(name, value) for name, value in args.items()}


def _workload(
    section: WorkloadSection, laws: tuple[Lengths, Lengths], mistakes: Mistakes
) -> Workload:
    protocol = LoadProtocol(section.protocol)
    is_open = protocol is LoadProtocol.OPEN_LOOP
    if is_open and section.rate is None:
        mistakes.add("workload.rate", "missing; open_loop needs requests per second, e.g. [1, 2]")
    if is_open and section.concurrency is not None:
        text = "not used by open_loop, whose ladder is workload.rate; set it to null"
        mistakes.add("workload.concurrency", text)
    if not is_open and section.rate is not None:
        text = f"not used by {protocol}, whose ladder is workload.concurrency; set it to null"
        mistakes.add("workload.rate", text)
    if not is_open and section.arrivals is not None:
        text = f"not used by {protocol}; only open_loop has arrivals; set it to null"
        mistakes.add("workload.arrivals", text)
    concurrency = tuple(section.concurrency or LADDER) if not is_open else ()
    rate = tuple(section.rate or ()) if is_open else ()
    _no_twins("workload.concurrency", concurrency, concurrency, mistakes)
    # A rung is known by a whole number, in file names too.
    _no_twins("workload.rate", [max(1, round(each)) for each in rate], rate, mistakes)
    return Workload(
        protocol=protocol,
        prompt_tokens=laws[0],
        output_tokens=laws[1],
        concurrency=concurrency,
        rate=rate,
        shared_prefix=section.shared_prefix,
        arrivals=Arrivals(section.arrivals or Arrivals.POISSON),
    )


def _no_twins(
    place: str, keys: Sequence[Hashable], values: Sequence[object], mistakes: Mistakes
) -> None:
    first: dict[Hashable, object] = {}
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        if key in first:
            same = (
                "twice" if first[key] == value else f"and {show(first[key])}, the same rung {key}"
            )
            mistakes.add(f"{place}.{position}", f"found {show(value)} {same}; keep one")
        first.setdefault(key, value)


def _objectives(
    sections: Sequence[ObjectiveSection] | None,
    workload: Workload,
    slo: Sequence[SloLimit],
    mistakes: Mistakes,
) -> tuple[Objective, ...]:
    highest = max(workload.ladder, default=1)
    if sections is None:
        return (Objective("output_throughput", highest, Direction.MAXIMIZE),)
    found: list[Objective] = []
    for position, section in enumerate(sections):
        place = f"objectives.{position}"
        if wrong := _metric_mistake(section.metric, has_slo=bool(slo)):
            mistakes.add(f"{place}.metric", wrong)
            continue
        natural = METRIC_DIRECTIONS[section.metric]
        objective = Objective(
            metric=section.metric,
            concurrency=_rung(section, workload, place, mistakes) or highest,
            direction=Direction(section.direction) if section.direction else natural,
        )
        if any(
            (other.metric, other.concurrency) == (objective.metric, objective.concurrency)
            for other in found
        ):
            mistakes.add(place, f"{section.metric} at the same rung twice; keep one")
        found.append(objective)
    return tuple(found)


def _metric_mistake(metric: str, *, has_slo: bool) -> str | None:
    if metric in LATENCIES:
        forms = ", ".join(f"{metric}.{part}" for part in STATISTICS)
        return f"{metric} needs a statistic: {forms}"
    if metric not in METRIC_DIRECTIONS:
        return unknown("metric", metric, METRIC_NAMES)
    if metric == "goodput" and not has_slo:
        return "goodput counts requests that keep the limits of slo; give slo, {ttft_s: {p99: 2.0}}"
    return None


def _rung(
    section: ObjectiveSection, workload: Workload, place: str, mistakes: Mistakes
) -> float | None:
    """The rung an objective names: of `rate` for open_loop, else of `concurrency`."""
    is_open = workload.protocol is LoadProtocol.OPEN_LOOP
    key, wanted = ("rate", section.rate) if is_open else ("concurrency", section.concurrency)
    other, unused = ("concurrency", section.concurrency) if is_open else ("rate", section.rate)
    if unused is not None:
        mistakes.add(f"{place}.{other}", f"not used by {workload.protocol}; write {key}")
    if wanted is None or wanted in workload.ladder:
        return wanted
    rungs = ", ".join(f"{each:g}" for each in workload.ladder)
    mistakes.add(
        f"{place}.{key}", f"found {show(wanted)}, expected a rung of workload.{key}: {rungs}"
    )
    return None


def _slo(limits: Mapping[str, Mapping[str, float]], mistakes: Mistakes) -> tuple[SloLimit, ...]:
    for metric, parts in limits.items():
        if metric not in LATENCIES:
            mistakes.add(f"slo.{metric}", unknown("latency", metric, LATENCIES))
            continue
        for part in parts:
            if part not in STATISTICS:
                mistakes.add(f"slo.{metric}.{part}", unknown("statistic", part, STATISTICS))
    return tuple(
        SloLimit(metric, part, limits[metric][part])
        for metric in LATENCIES
        for part in STATISTICS
        if part in limits.get(metric, {})
    )


def _measure(document: StudyDocument, mistakes: Mistakes) -> MeasureSettings:
    measure = MeasureSettings(**document.measure.model_dump())
    if measure.min_window_s > measure.max_window_s:
        mistakes.add(
            "measure.min_window_s",
            f"found {measure.min_window_s:g}, expected at most measure.max_window_s, "
            f"{measure.max_window_s:g}",
        )
    return measure


def _url(url: str | None, place: str, mistakes: Mistakes) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        mistakes.add(place, f"found {show(url)}, expected a URL")
        return url
    if parts.password is not None:
        # Not repeated in the message: it would end up in logs.
        mistakes.add(place, "found a password in the URL; give it in the environment instead")
    elif place == "storage" and "://" not in url:
        mistakes.add(place, f"found {show(url)}, expected an Optuna URL such as sqlite:///study.db")
    return url
