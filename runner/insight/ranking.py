"""Which setting won, and what is only noise. Pure: words in, words out.

A setting is one point of the search space: a complete trial and its re-measurements (trials that
repeat it). Its value is the mean over those that claim a precision from restarts of their load
(measure/restarts.py), or over all when none does: a search trial that was chosen because it was
high is high partly by luck.

- Measurements with other lengths of replies are never compared or averaged. Where finalists were
  measured at the user's own lengths, these alone are ranked; the ranking by the lengths of the
  search goes with it (`searched`), with a noise of its own.
- Settings that keep every latency limit come before those that do not; among the latter, the
  smaller violation comes first.
- An unconfirmed setting never leads: once searched settings were re-measured, the leader is one
  that was measured as often as any of them. The highest of many single measurements is partly
  luck, and the finalists were re-measured to take that luck out.
- A trial that shares a measurement (its servers resolve to the same) is shown behind the setting
  that was measured and decides nothing: the same numbers twice confirm nothing.
- Noise is the relative 95 % half-width of one measurement that claims nothing: from the spread
  between measurements of the same setting where there are any (a single window cannot see it: the
  state of a pipeline can last longer than a window), else the median of what measurements claim,
  and never below the precision the study asks for.
- Two settings cannot be told apart when they differ by less than the root of the sum of squares of
  their half-widths: what their measurements claim, or else the noise. Contenders are the settings
  that cannot be told from the leader. With several objectives they are the settings that no other
  setting beats in every one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from runner.measure.student import student_t
from runner.plans import rung_label
from runner.settings import Direction, Objective, StudySettings
from runner.trial import Outcome, Params, RungResult, TrialLengths, TrialResult


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting with its complete measurements at one law of lengths.

    `result` is its first measurement of all, which gives it number and name.
    """

    measurements: tuple[TrialResult, ...]
    result: TrialResult

    @property
    def number(self) -> int:
        return self.result.number

    @property
    def name(self) -> str | None:
        """The baseline's name, None for a setting that was searched."""
        return self.result.name

    @property
    def shares(self) -> int | None:
        """The setting whose measurements it shows; None: it has its own."""
        return self.result.shares

    @property
    def params(self) -> Params:
        return self.result.params

    @property
    def counted(self) -> tuple[TrialResult, ...]:
        """The measurements that make the value: those that claim a precision, else all."""
        return tuple(m for m in self.measurements if _claims(m)) or self.measurements

    @property
    def values(self) -> tuple[float, ...]:
        """The mean of each objective over the measurements that count."""
        columns = zip(*(m.values for m in self.counted), strict=True)
        return tuple(_mean(column) for column in columns)

    @property
    def violation(self) -> float:
        """By how much the latency limits are missed; 0 when all are kept."""
        columns = zip(*(m.constraints for m in self.counted), strict=True)
        return sum(max(0.0, _mean(column)) for column in columns)

    def rungs_at(self, concurrency: float) -> tuple[RungResult, ...]:
        """What each measurement that counts saw at one concurrency, or rate."""
        label = rung_label(concurrency)
        rungs = (rung for m in self.counted for rung in m.rungs)
        return tuple(rung for rung in rungs if rung.concurrency == label)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The settings of a study, best first. `noise` is relative, of one measurement.

    All values are of trials with these `lengths`. `searched` is the ranking by the lengths of the
    search where this one is by the user's own, else None.
    """

    settings: tuple[Setting, ...]
    contenders: tuple[Setting, ...]
    noise: float
    objectives: tuple[Objective, ...]
    lengths: TrialLengths = TrialLengths.SEARCH
    searched: Ranking | None = None

    @property
    def best(self) -> Setting | None:
        """The leading contender."""
        return self.settings[0] if self.settings else None

    @property
    def measured(self) -> tuple[Setting, ...]:
        """The settings with measurements of their own."""
        return tuple(setting for setting in self.settings if setting.shares is None)

    @property
    def baselines(self) -> tuple[Setting, ...]:
        """The measured baselines, in the order they were measured."""
        named = (setting for setting in self.settings if setting.name is not None)
        return tuple(sorted(named, key=lambda setting: setting.number))

    def find(self, number: int) -> Setting | None:
        """The setting of this number, if it has a value here."""
        return next((setting for setting in self.settings if setting.number == number), None)

    def advantage(self, over: Setting, of: Setting) -> float | None:
        """How many times better `of` is than `over` in the first objective; > 1 is better."""
        better, worse = of.values[0], over.values[0]
        if self.objectives[0].direction is Direction.MINIMIZE:
            better, worse = worse, better
        return better / worse if worse else None

    def is_noise(self, one: Setting, other: Setting) -> bool:
        """Whether two settings cannot be told apart in the first objective."""
        return _is_noise(one, other, self.noise, self.objectives[0])

    def halfwidth(self, setting: Setting) -> float | None:
        """The 95 % half-width of a setting's value as its measurements claim it; None: they do not.

        It is of the first objective, when that is the output throughput.
        """
        return _claimed_halfwidth(setting, self.objectives[0])


def rank(results: Sequence[TrialResult], settings: StudySettings) -> Ranking:
    """Order the complete trials of a study; results may come in any order."""
    searched = _rank_at(results, settings, TrialLengths.SEARCH)
    confirmed = _rank_at(results, settings, TrialLengths.WORKLOAD)
    return replace(confirmed, searched=searched) if confirmed.settings else searched


def _rank_at(
    results: Sequence[TrialResult], settings: StudySettings, lengths: TrialLengths
) -> Ranking:
    groups = _group(results, lengths)
    noise = _noise(groups, settings)
    ordered = _order(groups, settings)
    contenders = _contenders(ordered, noise, settings)
    shown = tuple(_with_sharers(ordered, results))
    return Ranking(shown, tuple(contenders), noise, settings.objectives, lengths)


def _with_sharers(ordered: Sequence[Setting], results: Sequence[TrialResult]) -> Iterator[Setting]:
    """Each setting, followed by those that show its measurements."""
    for setting in ordered:
        yield setting
        for result in sorted(results, key=lambda result: result.number):
            if result.shares == setting.number:
                yield Setting(setting.measurements, result)


def origin(result: TrialResult) -> int:
    """The number of the setting a trial belongs to."""
    return result.number if result.repeat_of is None else result.repeat_of


def _group(results: Sequence[TrialResult], lengths: TrialLengths) -> list[Setting]:
    by_number = {result.number: result for result in results}
    measured: dict[int, list[TrialResult]] = {}
    for result in sorted(results, key=lambda result: (result.repeat_of is not None, result.number)):
        if result.lengths is not lengths or result.shares is not None:
            continue
        if result.outcome is Outcome.COMPLETE and result.values:
            measured.setdefault(origin(result), []).append(result)
    return [
        Setting(tuple(group), by_number.get(number, group[0])) for number, group in measured.items()
    ]


def _order(groups: Sequence[Setting], settings: StudySettings) -> list[Setting]:
    """Best first: limits kept, then the first objective; an unconfirmed setting never leads."""
    sign = -1.0 if settings.objectives[0].direction is Direction.MAXIMIZE else 1.0
    ordered = sorted(groups, key=lambda s: (s.violation, sign * s.values[0], s.number))
    pool = [s for s in ordered if s.violation == 0.0] or ordered
    needed = max((len(s.measurements) for s in pool if s.name is None), default=1)
    for leader in [s for s in pool if len(s.measurements) >= needed][:1]:
        ordered.remove(leader)
        ordered.insert(0, leader)
    return ordered


def _contenders(
    ordered: Sequence[Setting], noise: float, settings: StudySettings
) -> Sequence[Setting]:
    if not ordered:
        return []
    leader = ordered[0]
    rivals = [s for s in ordered if (s.violation > 0.0) == (leader.violation > 0.0)]
    if len(settings.objectives) > 1:
        return [s for s in rivals if not any(_dominates(r, s, settings) for r in rivals)]
    objective = settings.objectives[0]
    return [s for s in rivals if s is leader or _is_noise(s, leader, noise, objective)]


def _dominates(one: Setting, other: Setting, settings: StudySettings) -> bool:
    """Whether `one` is at least as good in every objective and better in some."""
    gains = [
        a - b if objective.direction is Direction.MAXIMIZE else b - a
        for objective, a, b in zip(settings.objectives, one.values, other.values, strict=True)
    ]
    return min(gains) >= 0.0 and max(gains) > 0.0


def _is_noise(one: Setting, other: Setting, noise: float, objective: Objective) -> bool:
    scale = max(abs(one.values[0]), abs(other.values[0]))
    widths = [
        noise * scale / math.sqrt(len(setting.counted)) if claimed is None else claimed
        for setting in (one, other)
        for claimed in (_claimed_halfwidth(setting, objective),)
    ]
    return abs(one.values[0] - other.values[0]) <= math.hypot(*widths)


def _claimed_halfwidth(setting: Setting, objective: Objective) -> float | None:
    """Of the mean over measurements: the root of the sum of squares, by their number."""
    if objective.metric != "output_throughput":
        return None
    rungs = setting.rungs_at(objective.concurrency)
    widths = [rung.output_throughput_halfwidth for rung in rungs]
    known = [width for width in widths if width is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(rungs) else None


def _claims(measurement: TrialResult) -> bool:
    return any(rung.output_throughput_halfwidth is not None for rung in measurement.rungs)


def _noise(groups: Sequence[Setting], settings: StudySettings) -> float:
    squares, freedom = 0.0, 0
    for setting in groups:
        mean = _mean([m.values[0] for m in setting.measurements])
        if len(setting.measurements) > 1 and mean:
            squares += sum((m.values[0] / mean - 1.0) ** 2 for m in setting.measurements)
            freedom += len(setting.measurements) - 1
    if freedom:
        return max(settings.measure.precision, student_t(freedom) * math.sqrt(squares / freedom))
    return max(settings.measure.precision, _reported_noise(groups, settings))


def _reported_noise(groups: Sequence[Setting], settings: StudySettings) -> float:
    """The median of the half-widths that are claimed at the first objective's rung."""
    rungs = [r for s in groups for r in s.rungs_at(settings.objectives[0].concurrency)]
    widths = sorted(
        rung.output_throughput_halfwidth / rung.output_throughput
        for rung in rungs
        if rung.output_throughput_halfwidth is not None and rung.output_throughput > 0.0
    )
    return widths[len(widths) // 2] if widths else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
