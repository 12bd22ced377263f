"""What a prediction says, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from runner.trial import LoadProtocol


class Basis(StrEnum):
    """Where a number comes from."""

    SIMULATION = "simulation"
    CLOSED_FORM = "closed form"


@dataclass(frozen=True, slots=True)
class RungPrediction:
    """One rung of one setting. Definitions of the metrics: measure/metrics.py.

    `level` is the concurrency, or the rate (requests/s) of an open loop. `output_throughput`,
    `power_w` (all GPUs of the launch) are those of the whole launch; `busy_stages` and `slots`
    (stages that work and slots that hold a request, averaged over time) are those of one of its
    servers. `ttft_s` and `tpot_s` are means over requests. From a simulation, each is the median
    over seeds, and `p10` and `p90` are percentiles of output_throughput over the seeds; None
    where there was one seed or all agree. `together` is the output_throughput where all streams
    begin at once instead of one after another; None where replies differ in length and forget it,
    or it was not asked. `objectives` are the values of the study's objectives
    that are measured at this rung, by their place, as far as they have one.
    """

    level: float
    output_throughput: float
    ttft_s: float
    tpot_s: float
    busy_stages: float
    slots: float
    power_w: float
    basis: Basis
    p10: float | None = None
    p90: float | None = None
    together: float | None = None
    objectives: tuple[tuple[int, float], ...] = ()
    misses_slo: bool = False

    @property
    def spread(self) -> float:
        """From p10 to p90 in units of the median; 0 where seeds agree."""
        if self.p10 is None or self.p90 is None or not self.output_throughput:
            return 0.0
        return (self.p90 - self.p10) / self.output_throughput


@dataclass(frozen=True, slots=True)
class Prediction:
    """A setting under the study's workload: its rungs in the order of the ladder, or a refusal.

    `output_tokens` is the mean of the study's law of output lengths; `is_cut_off`: some rung was
    not simulated until its first requests ended, which would have taken too long. `not_modelled`:
    parameters of the setting that have no effect here, though they may have one on a server.
    """

    protocol: LoadProtocol
    output_tokens: float
    basis: Basis
    rungs: tuple[RungPrediction, ...]
    refused: str | None = None
    seeds: int = 1
    is_cut_off: bool = False
    not_modelled: tuple[str, ...] = ()


def prediction_document(prediction: Prediction) -> dict[str, object]:
    """The JSON answer of `runner predict`."""
    document: dict[str, object] = {
        "protocol": str(prediction.protocol),
        "output_tokens": plain(prediction.output_tokens),
        "rungs": [rung_document(rung) for rung in prediction.rungs],
    }
    if prediction.refused is not None:
        document["refused"] = prediction.refused
    if prediction.is_cut_off:
        document["is_cut_off"] = True
    if prediction.not_modelled:
        document["not_modelled"] = list(prediction.not_modelled)
    return document


def rung_document(rung: RungPrediction) -> dict[str, float]:
    """One rung in JSON: plain numbers; the percentiles only where seeds differ."""
    document = {
        "concurrency": plain(rung.level),
        "output_throughput": rung.output_throughput,
        "ttft_s": rung.ttft_s,
        "tpot_s": rung.tpot_s,
        "busy_stages": rung.busy_stages,
        "slots": rung.slots,
        "power_w": rung.power_w,
    }
    if rung.p10 is not None and rung.p90 is not None:
        document["output_throughput_p10"] = rung.p10
        document["output_throughput_p90"] = rung.p90
    if rung.together is not None:
        document["output_throughput_together"] = rung.together
    return document


def plain(value: float) -> float:
    """A whole number without its point."""
    return int(value) if float(value).is_integer() else value
