"""Which GPUs a study was measured on, in words; and that its trials ran on different ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from runner.insight.ranking import Ranking
from runner.measure.idle import IdleGpu
from runner.trial import TrialResult

BYTES_PER_GIB = 1 << 30
SHORT_UUID = len("GPU-01234567")


def short_names(gpus: Sequence[IdleGpu]) -> str:
    """`GPU-01234567`, `GPU-01234567 and 7 others`."""
    first, others = gpus[0].uuid[:SHORT_UUID], len(gpus) - 1
    return f"{first} and {others} other{'s' * (others > 1)}" if others else first


def models_words(gpus: Sequence[IdleGpu]) -> str:
    """`NVIDIA H200`; each model once."""
    return ", ".join(dict.fromkeys(gpu.name for gpu in gpus))


def kinds_words(gpus: Sequence[IdleGpu]) -> str:
    """`NVIDIA H200 (140 GiB)`; each model once, with its memory where that is told."""
    return ", ".join(dict.fromkeys(_kind(gpu) for gpu in gpus))


def limits_words(before: Sequence[IdleGpu], now: Sequence[IdleGpu]) -> str:
    """`; power limit 700 W before, 500 W now`; empty where it is the same or not told."""
    then, here = _limits(before), _limits(now)
    if not then or not here or then == here:
        return ""
    return f"; power limit {_watts(then)} before, {_watts(here)} now"


def moved_words(ranking: Ranking, idle: Sequence[IdleGpu]) -> Iterator[str]:
    """That ranked trials were measured on GPUs of different readings, and which; else nothing.

    GPUs that were read together are one machine's, and a launch may take any of them. A trial that
    used some of a later reading counts there: one of its cards was replaced.
    """
    reading = {gpu.uuid: gpu.reading for gpu in idle}
    trials: dict[int, set[int]] = {}
    used: set[str] = set()
    for result in (m for setting in ranking.measured for m in setting.measurements):
        own = _gpus_of(result) & reading.keys()
        if own:
            used |= own
            trials.setdefault(max(reading[uuid] for uuid in own), set()).add(result.number)
    if len(trials) < 2:  # noqa: PLR2004
        return
    shown = [
        f"{_numbers(numbers)} on {short_names(_of(idle, each, used))}"
        for each, numbers in sorted(trials.items())
    ]
    yield (
        f"Measured on different GPUs ({models_words([gpu for gpu in idle if gpu.uuid in used])}): "
        f"{'; '.join(shown)}. Cards of one model differ by a few percent: closer values are told "
        "apart only where both were measured on the same ones."
    )


def _gpus_of(result: TrialResult) -> set[str]:
    return {gpu.gpu_uuid for rung in result.rungs for gpu in rung.gpus}


def _of(idle: Sequence[IdleGpu], reading: int, used: set[str]) -> list[IdleGpu]:
    return [gpu for gpu in idle if gpu.reading == reading and gpu.uuid in used]


def _numbers(numbers: Iterable[int]) -> str:
    """`#0-#3, #5, #6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = (
        [f"#{run[0]}-#{run[-1]}"] if len(run) > 2 else [f"#{number}" for number in run]  # noqa: PLR2004
        for run in runs
    )
    return ", ".join(words for run in shown for words in run)


def _kind(gpu: IdleGpu) -> str:
    memory = gpu.memory_bytes
    return gpu.name if memory is None else f"{gpu.name} ({memory / BYTES_PER_GIB:.0f} GiB)"


def _limits(gpus: Sequence[IdleGpu]) -> list[float]:
    return sorted({gpu.power_limit_w for gpu in gpus if gpu.power_limit_w is not None})


def _watts(limits: Sequence[float]) -> str:
    return " or ".join(f"{limit:.0f} W" for limit in limits)
