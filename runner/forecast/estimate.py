"""A setting by the closed form: what the study's ladder would give, without simulating it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from runner.forecast.lengths import LengthFacts, expected_longest, length_facts
from runner.forecast.prediction import Basis, Prediction, RungPrediction
from runner.forecast.setting import PlannedSetting, plan_setting, study_profile
from runner.machine.hardware import Profile
from runner.machine.shape import Refusal, ServerShape
from runner.machine.steady import SteadyLoad, SteadyModel, SteadyState
from runner.measure.attainment import excess_s
from runner.settings import StudySettings
from runner.trial import LoadProtocol, Params

# Streams that begin one after another end one by one, as if replies were at least so uneven,
# relative standard deviation: found against simulations of loops with equal and uneven replies.
LEAST_CV = 2 / math.sqrt(12)


def estimate(settings: StudySettings, params: Params) -> Prediction:
    """One setting by the closed form; raises ConfigError without a profile."""
    estimator = Estimator(settings, study_profile(settings))
    planned = plan_setting(settings, estimator.profile, params)
    if isinstance(planned, Refusal):
        return estimator.refused(planned.text)
    return estimator.predict(planned)


class Estimator:
    """The closed form for many settings of one study; remembers servers that share a shape."""

    def __init__(self, settings: StudySettings, profile: Profile) -> None:
        self.profile = profile
        self._settings = settings
        self._output = length_facts(settings.workload.output_tokens)
        self._prompt = length_facts(settings.workload.prompt_tokens)
        self._models: dict[ServerShape, SteadyModel] = {}

    @property
    def output(self) -> LengthFacts:
        """The output lengths of the workload."""
        return self._output

    def refused(self, reason: str) -> Prediction:
        """The prediction of a setting that cannot start."""
        work = self._settings.workload
        return Prediction(work.protocol, self._output.mean, Basis.CLOSED_FORM, (), reason)

    def predict(self, planned: PlannedSetting) -> Prediction:
        """Every rung of the ladder."""
        work = self._settings.workload
        rungs = tuple(self.rung(planned, level) for level in work.ladder)
        return Prediction(work.protocol, self._output.mean, Basis.CLOSED_FORM, rungs)

    def rung(self, planned: PlannedSetting, level: float) -> RungPrediction:
        """One rung: the load is dealt to the launch's servers round-robin."""
        engines = planned.engines
        shares = self._shares(planned, level)
        states = [(count, self.state(planned, share)) for count, share in shares]
        idle = engines - sum(count for count, _ in shares)
        idle_w = idle * planned.shape.gpus * self.profile.gpu.server_idle_w
        rung = RungPrediction(
            level=level,
            output_throughput=sum(n * state.output_throughput for n, state in states),
            ttft_s=_mean_by_output(states, [state.ttft_s for _, state in states]),
            tpot_s=_mean_by_output(states, [state.tpot_s for _, state in states]),
            busy_stages=sum(n * state.busy_stages for n, state in states) / engines,
            slots=sum(n * state.slots for n, state in states) / engines,
            power_w=sum(n * state.power_w for n, state in states) + idle_w,
            basis=Basis.CLOSED_FORM,
        )
        return replace(rung, objectives=self._objectives(rung), misses_slo=self._misses(rung))

    def state(self, planned: PlannedSetting, load: SteadyLoad) -> SteadyState:
        """One server of the setting under one load."""
        shape = replace(planned.shape, pp_max_micro_batch_size=None)
        model = self._models.get(shape)
        if model is None:
            model = self._models[shape] = SteadyModel(self.profile, shape)
        return model.state(planned.cap, load)

    def load(self, concurrency: int, rate: float | None) -> SteadyLoad:
        """The study's load on one server.

        The closed form holds equal requests to be together for ever. Those of a closed loop are
        not: its streams begin one after another (load/ramp.py).
        """
        work, cv = self._settings.workload, self._output.cv
        if work.protocol is LoadProtocol.CLOSED_LOOP and concurrency > 1:
            cv = max(cv, LEAST_CV)
        return SteadyLoad(
            protocol=work.protocol,
            concurrency=concurrency,
            prompt_tokens=self._prompt.mean,
            output_tokens=self._output.mean,
            output_cv=cv,
            longest_output_tokens=expected_longest(work.output_tokens, concurrency),
            rate=rate,
        )

    def _shares(self, planned: PlannedSetting, level: float) -> list[tuple[int, SteadyLoad]]:
        """How many servers get which load; those that get none are left out."""
        engines = planned.engines
        if self._settings.workload.protocol is LoadProtocol.OPEN_LOOP:
            return [(engines, self.load(1, level / engines))]
        each, more = divmod(math.floor(level), engines)
        shares = [(more, each + 1), (engines - more, each)]
        return [(count, self.load(share, None)) for count, share in shares if count and share]

    def _objectives(self, rung: RungPrediction) -> tuple[tuple[int, float], ...]:
        return tuple(
            (place, self._metric(rung, objective.metric))
            for place, objective in enumerate(self._settings.objectives)
            if objective.concurrency == rung.level
        )

    def _metric(self, rung: RungPrediction, metric: str) -> float:
        """A metric of the study; latencies have one value, whatever the percentile."""
        output = max(self._output.mean, 1.0)
        requests = rung.output_throughput / output
        known = {
            "output_throughput": rung.output_throughput,
            "total_throughput": requests * (output + self._prompt.mean),
            "request_throughput": requests,
            "goodput": 0.0 if self._misses(rung) else requests,
            "tokens_per_joule": rung.output_throughput / rung.power_w,
            "joules_per_request": rung.power_w / requests,
            "power_w": rung.power_w,
            "energy_j": rung.power_w * self._settings.measure.min_window_s,
            "achieved_concurrency": requests * self._latency(rung, "e2e_s"),
        }
        name = metric.partition(".")[0]
        return known[name] if name in known else self._latency(rung, name)

    def _latency(self, rung: RungPrediction, name: str) -> float:
        match name:
            case "ttft_s":
                return rung.ttft_s
            case "e2e_s":
                return rung.ttft_s + (self._output.mean - 1) * rung.tpot_s
            case _:
                return rung.tpot_s

    def _misses(self, rung: RungPrediction) -> bool:
        """Whether a mean is above a limit, as every percentile then is that matters."""
        return any(
            excess_s(self._latency(rung, limit.metric), limit.limit_s) > 0
            for limit in self._settings.slo
        )


def _mean_by_output(states: Sequence[tuple[int, SteadyState]], values: Sequence[float]) -> float:
    """The mean over requests: servers count by their throughput."""
    weights = [count * state.output_throughput for count, state in states]
    total = math.fsum(weights)
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
