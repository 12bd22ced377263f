"""What a report says, before it is laid out: rows of numbers and the verdict in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.insight.confirmation import confirmation_words, lengths_title
from runner.insight.gpu_words import moved_words
from runner.insight.power_words import power_words
from runner.insight.ranking import Ranking, Setting, rank
from runner.insight.server_words import server_words
from runner.insight.start_words import start_words
from runner.insight.words import format_number, format_value
from runner.label import setting_label
from runner.launch import plan_launch
from runner.lengths import law_words
from runner.measure.idle import IdleGpu
from runner.measure.resolved import difference_words
from runner.settings import Objective, StudySettings
from runner.trial import EngineKind, Outcome, RungResult, TrialLengths, TrialResult

COUNT_WORDS = {1: "once", 2: "twice"}
COUNTED = (Outcome.COMPLETE, Outcome.PRUNED)
ROW_METRICS = ("output_throughput", "power_w", "tokens_per_joule", "ttft_s.p99", "tpot_s.p99")
MOST_RIVALS = 12
UNLIKE = 1.3  # measurements of one setting further apart than this were not of the same machine
REASON_LIMIT = 300


@dataclass(frozen=True, slots=True)
class Row:
    """One measured setting; latency, power and efficiency are those of the objective's rung.

    `mark` is "best", "~" (cannot be told from the best), "slo" (misses a limit), "= #7"
    (shows the measurement of #7: its servers resolve to the same) or "".
    `attainment` is the share of requests that met every limit, with its 95 % interval.
    """

    number: int
    label: str
    baseline: str | None
    mark: str
    throughput: tuple[float | None, ...]
    power: tuple[float | None, ...]
    power_w: float | None
    tokens_per_joule: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    objective: float
    measurements: int
    attainment: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One trial without a value, and why."""

    number: int
    label: str
    baseline: str | None
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole report. `ladder` are the concurrencies of Row.throughput and Row.power, ascending.

    Where finalists were measured at the user's own lengths, `rows` are these, and `searched_rows`
    all settings by the lengths of the search; the titles say so, else both are empty. `power` are
    sentences on what the GPUs draw, idle and at the best setting, and may draw.
    """

    name: str
    counts: str
    conditions: str
    ladder: tuple[int, ...]
    objective: Objective
    rows: tuple[Row, ...]
    unfinished: tuple[Unfinished, ...]
    verdict: tuple[str, ...]
    power: tuple[str, ...] = ()
    rows_title: str = ""
    searched_rows: tuple[Row, ...] = ()
    searched_title: str = ""

    @property
    def has_limits(self) -> bool:
        """Whether rows say how many requests met the limits."""
        return any(row.attainment is not None for row in (*self.rows, *self.searched_rows))

    @property
    def is_objective_shown(self) -> bool:
        """Whether a row has the objective among its other numbers."""
        return self.objective.metric in ROW_METRICS


def summarize(
    results: Sequence[TrialResult], settings: StudySettings, idle: Sequence[IdleGpu] = ()
) -> Summary:
    """Everything a report shows of a study so far."""
    ranking = rank(results, settings)
    searched = () if ranking.searched is None else ranking.searched.settings
    ladder = tuple(sorted({rung.concurrency for result in results for rung in result.rungs}))
    return Summary(
        name=settings.name,
        counts=count_words(results, settings),
        conditions=_conditions(settings),
        ladder=ladder,
        objective=settings.objectives[0],
        rows=tuple(_row(setting, ranking, ladder) for setting in ranking.settings),
        unfinished=tuple(_unfinished(results)),
        verdict=(*_verdict(ranking, results, settings), *moved_words(ranking, idle)),
        power=tuple(power_words(ranking, results, idle)),
        rows_title=lengths_title(ranking.lengths, settings),
        searched_rows=tuple(_row(each, ranking.searched or ranking, ladder) for each in searched),
        searched_title=lengths_title(TrialLengths.SEARCH, settings) if searched else "",
    )


def counted(results: Iterable[TrialResult]) -> int:
    """How many trials count towards search.trials: complete or pruned, re-measurements not."""
    return sum(result.outcome in COUNTED and result.repeat_of is None for result in results)


def trials_wanted(settings: StudySettings, done: int) -> int:
    """How many trials are to count; a study may be told to want fewer than it has."""
    return max(settings.search.trials, done)


def count_words(results: Sequence[TrialResult], settings: StudySettings) -> str:
    """For example `20 of 20 trials: 17 complete, 3 pruned; 4 re-measurements, 1 infeasible`."""
    counts = Counter(result.outcome for result in results if result.repeat_of is None)
    repeats = sum(result.repeat_of is not None for result in results)
    parts = [f"{counts[o]} {o}" for o in COUNTED if counts[o]]
    rest = [_plural(repeats, "re-measurement")] if repeats else []
    rest += [f"{counts[o]} {o}" for o in Outcome if counts[o] and o not in COUNTED]
    done = counted(results)
    text = f"{done} of {trials_wanted(settings, done)} trials"
    text += f": {', '.join(parts)}" if parts else ""
    return text + (f"; {', '.join(rest)}" if rest else "")


def measured_words(setting: Setting) -> str:
    """`measured twice`."""
    count = len(setting.measurements)
    return f"measured {COUNT_WORDS.get(count, f'{count} times')}"


def short_reason(result: TrialResult) -> str:
    """Why a trial has no value, in one line that fits a table."""
    reason = " ".join((result.reason or "").split())
    return reason if len(reason) <= REASON_LIMIT else reason[: REASON_LIMIT - 3] + "..."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _conditions(settings: StudySettings) -> str:
    """What the numbers hold for; a model's numbers are called that."""
    engine, workload = settings.engine, settings.workload
    if engine.kind is EngineKind.SGLANG:
        servers = f"SGLang, {engine.model}"
    else:
        servers = f"{engine.kind} {engine.profile}: a model's numbers"
    prompt, output = law_words(workload.prompt_tokens), law_words(workload.output_tokens)
    search = settings.search.output_tokens
    shorter = "" if search is None else f" (the search: {law_words(search)})"
    return f"{servers}; {workload.protocol}, {prompt} in, {output} out{shorter}"


def _row(setting: Setting, ranking: Ranking, ladder: Sequence[int]) -> Row:
    objective = ranking.objectives[0]
    rungs = setting.rungs_at(objective.concurrency)
    return Row(
        number=setting.number,
        label=setting_label(setting.params),
        baseline=setting.name,
        mark=_mark(setting, ranking),
        throughput=tuple(_mean(r.output_throughput for r in setting.rungs_at(c)) for c in ladder),
        power=tuple(_mean(r.power_w for r in setting.rungs_at(c)) for c in ladder),
        power_w=_mean(rung.power_w for rung in rungs),
        tokens_per_joule=_mean(rung.tokens_per_joule for rung in rungs),
        ttft_p99_s=_mean(_p99s(rungs, "ttft_s")),
        tpot_p99_s=_mean(_p99s(rungs, "tpot_s")),
        objective=setting.values[0],
        measurements=len(setting.measurements),
        attainment=_attainment(rungs),
    )


def _attainment(rungs: Sequence[RungResult]) -> tuple[float, float, float] | None:
    """The share of requests that met every limit and its bounds, each the mean over rungs."""
    share = _mean(rung.slo_attainment for rung in rungs)
    low = _mean(rung.slo_attainment_low for rung in rungs)
    high = _mean(rung.slo_attainment_high for rung in rungs)
    return None if share is None or low is None or high is None else (share, low, high)


def _mark(setting: Setting, ranking: Ranking) -> str:
    if setting is ranking.best:
        return "best"
    if setting.shares is not None:
        return f"= #{setting.shares}"
    if setting.violation > 0.0:
        return "slo"
    return "~" if setting in ranking.contenders else ""


def _p99s(rungs: Sequence[RungResult], metric: str) -> Iterable[float]:
    distributions = (rung.ttft_s if metric == "ttft_s" else rung.tpot_s for rung in rungs)
    return (distribution.p99 for distribution in distributions if distribution is not None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _unfinished(results: Sequence[TrialResult]) -> Iterable[Unfinished]:
    again = {r.retry_of: r.number for r in results if r.retry_of is not None}
    for result in sorted(results, key=lambda result: result.number):
        if result.outcome is Outcome.COMPLETE:
            continue
        reason = _pruned_reason(result) or short_reason(result)
        if result.number in again:
            reason += f" (measured again as #{again[result.number]})"
        label = setting_label(result.params)
        yield Unfinished(result.number, label, result.name, result.outcome, reason.strip())


def _pruned_reason(result: TrialResult) -> str:
    """How far a pruned trial came; the whole reason is in its result."""
    if result.outcome is not Outcome.PRUNED or not result.rungs:
        return ""
    last = max(result.rungs, key=lambda rung: rung.position)
    throughput = format_number(last.output_throughput)
    if last.cut_below is not None:
        return f"cut short at C={last.concurrency}: hopelessly behind with {throughput} tokens/s"
    return f"clearly behind after C={last.concurrency}: {throughput} tokens/s"


def _verdict(
    ranking: Ranking, results: Sequence[TrialResult], settings: StudySettings
) -> Iterable[str]:
    best, objective = ranking.best, ranking.objectives[0]
    if best is None:
        yield "No setting was measured to its end, so there is no best one."
        return
    title = f"Best: #{best.number} {setting_label(best.params)}"
    title += f" (baseline {best.name})" if best.name else ""
    replicas = plan_launch(settings, best.params).replicas
    title += f", {replicas} servers side by side" if replicas > 1 else ""
    value, sure = format_value(best.values[0], objective), _interval_words(ranking, best)
    yield f"{title}: {value}{sure or f', {measured_words(best)}'}."
    if sure and settings.engine.kind is not EngineKind.SIMULATED:
        yield from _command_words(best)
    if words := confirmation_words(ranking, settings):
        yield words
    if best.violation > 0.0:
        where = " of them" if ranking.searched else ""
        yield f"No setting{where} keeps every latency limit; this one misses them least."
    for baseline in ranking.baselines:
        if baseline is not best:
            yield _comparison(ranking, best, baseline)
    measured = {baseline.name for baseline in ranking.baselines}
    for name in dict.fromkeys(r.name for r in results if r.name and r.name not in measured):
        yield f"Baseline {name} has no value to compare with; see its reason above."
    yield from _claims_words(ranking)
    yield _noise_words(ranking, settings.measure.precision)
    yield from _unlike_words(ranking)
    yield from _unconfirmed_words(ranking, results)
    yield from start_words(ranking, settings)
    yield from _notes(ranking, results)
    yield from server_words(ranking)


def _command_words(best: Setting) -> Iterable[str]:
    """Where to read how the servers of the best setting were started: with exactly its flags."""
    launches = [m.launch for m in best.counted if m.launch is not None]
    if launches:
        yield f"Its command line: launches/{launches[-1]:04d}/launch.json in the study's folder."


def _interval_words(ranking: Ranking, best: Setting) -> str:
    """` (95 %: +- 9, from 3 restarts)`: how sure the value is; empty where nothing is claimed."""
    width = ranking.halfwidth(best)
    if width is None:
        return ""
    rungs = best.rungs_at(ranking.objectives[0].concurrency)
    restarts = sum(restart.counts for rung in rungs for restart in rung.restarts)
    return f" (95 %: +- {format_number(width)}, from {_plural(restarts, 'restart')} of its load)"


def _claims_words(ranking: Ranking) -> Iterable[str]:
    """How sure the values of the settings are that were measured again."""
    shown = [
        f"#{setting.number} {format_number(setting.values[0])} +- {format_number(width)}"
        for setting in ranking.measured
        if (width := ranking.halfwidth(setting)) is not None
    ]
    if len(shown) > 1:
        where = f"C={ranking.objectives[0].concurrency:g}"
        yield f"Measured from restarts (tokens/s at {where}, 95 %): {', '.join(shown)}."


def _unlike_words(ranking: Ranking) -> Iterable[str]:
    """For settings whose measurements are so far apart that the machine cannot have been the same.

    Only those of one kind are compared: what claims a precision, or else all.
    """
    for setting in ranking.measured:
        values = [measurement.values[0] for measurement in setting.counted]
        low, high = min(values), max(values)
        if len(values) > 1 and high > UNLIKE * low:
            shown = ", then ".join(format_number(value) for value in values)
            yield (
                f"#{setting.number} gave {shown} when it was measured again: settings alone do not "
                "explain this. See what else uses this machine, then measure again."
            )


def _unconfirmed_words(ranking: Ranking, results: Sequence[TrialResult]) -> Iterable[str]:
    """For settings that the search saw ahead of the best, and that could not be measured again."""
    best = ranking.best
    if best is None or ranking.halfwidth(best) is None:
        return
    for setting in ranking.measured:
        if (ranking.advantage(over=best, of=setting) or 0.0) <= 1.0:
            continue
        numbers = {measurement.number for measurement in setting.measurements}
        again = [result for result in results if result.repeat_of in numbers]
        if again and not any(result.outcome is Outcome.COMPLETE for result in again):
            value = format_value(setting.values[0], ranking.objectives[0])
            yield (
                f"#{setting.number} had {value} in the search and is not confirmed: measured "
                f"again it was {again[-1].outcome} (#{again[-1].number}). Before you choose, put "
                "right what its reason says and measure it again."
            )


def _notes(ranking: Ranking, results: Sequence[TrialResult]) -> Iterable[str]:
    """What rungs say that does not make them invalid, and what runs differently; each once."""
    found: dict[str, list[int]] = {}
    for setting in ranking.measured:
        for measurement in setting.measurements:
            for note in dict.fromkeys(n for rung in measurement.rungs for n in rung.notes):
                found.setdefault(note, []).append(measurement.number)
    for result in results:
        for words in difference_words(result.differences):
            found.setdefault(words, []).append(result.number)
    for note, numbers in found.items():
        shown = ", ".join(f"#{number}" for number in sorted(numbers)[:MOST_RIVALS])
        more = f" and {len(numbers) - MOST_RIVALS} more" if len(numbers) > MOST_RIVALS else ""
        yield f"Note: {note} ({shown}{more})."


def _comparison(ranking: Ranking, best: Setting, baseline: Setting) -> str:
    ratio = ranking.advantage(over=baseline, of=best)
    times = "not comparable with" if ratio is None else f"{ratio:.2f} times"
    value = format_value(baseline.values[0], ranking.objectives[0])
    doubt = ", within the noise" if ranking.is_noise(best, baseline) else ""
    limits = ", misses a latency limit" if baseline.violation > 0.0 else ""
    return (
        f"  {times} baseline {baseline.name} (#{baseline.number}: {value}, "
        f"{measured_words(baseline)}{limits}){doubt}."
    )


def _noise_source(ranking: Ranking, *, is_floor: bool) -> str:
    """What the noise comes from; `is_floor`: it is the precision that the study wants."""
    repeats = sum(len(setting.measurements) - 1 for setting in ranking.measured)
    is_claimed = any(ranking.halfwidth(setting) is not None for setting in ranking.measured)
    if repeats:
        again = _plural(repeats, "re-measurement")
        less = f"measure.precision; {again} differ{'s' if repeats == 1 else ''} by less"
        return less if is_floor else f"from {again}"
    if is_claimed:
        less = "measure.precision; re-measurements claim less"
        return less if is_floor else "the median of what re-measurements claim"
    return "measure.precision; nothing was measured twice"


def _noise_words(ranking: Ranking, precision: float) -> str:
    noise = "above 100 %" if ranking.noise > 1.0 else f"{100.0 * ranking.noise:.1f} %"
    source = _noise_source(ranking, is_floor=ranking.noise <= precision)
    words = f"Noise of one measurement: {noise} ({source})."
    rivals = [f"#{setting.number}" for setting in ranking.contenders if setting is not ranking.best]
    names = ", ".join(rivals[:MOST_RIVALS]) or "none"
    names += f" and {len(rivals) - MOST_RIVALS} more" if len(rivals) > MOST_RIVALS else ""
    if len(ranking.objectives) > 1:
        return f"{words} Not beaten in every objective either: {names}."
    return f"{words} Not to be told from the best: {names}."
