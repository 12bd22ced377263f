"""The GPUs of a session: each read once while it is idle, and told when the study moved to them.

A study goes on wherever its home is, maybe on another machine, or after a card was replaced. Cards
of one model differ by a few percent, which is told; another model makes other numbers, and is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.cluster.executor import Executor
from runner.errors import ConfigError
from runner.insight.gpu_words import kinds_words, limits_words, models_words, short_names
from runner.insight.live import Note, View
from runner.measure.idle import IdleGpu
from runner.record.store import StudyStore
from runner.settings import StudySettings

MEMORY_SLACK = 1.05  # drivers and ECC change what one model offers, by less than this


def know_gpus(
    executor: Executor, settings: StudySettings, store: StudyStore, view: View
) -> tuple[IdleGpu, ...]:
    """The session's GPUs; those that were never read are read and kept with the study's others.

    Raises ConfigError when the study ran on another model, ClusterLost if one cannot be read.
    """
    before = store.read_idle() or ()
    gpus = executor.gpus()
    known = {gpu.uuid for gpu in before}
    unread = tuple(gpu for gpu in gpus if gpu.uuid not in known)
    read = executor.idle_gpus(unread) if unread else ()
    own, used = frozenset(gpu.uuid for gpu in gpus), measured_on(store)
    idle = with_read(before, read, needed=own | used)
    here = tuple(gpu for gpu in idle if gpu.uuid in own)
    if store.has_measured():
        tell_unknown(used - {gpu.uuid for gpu in idle}, view)
        tell_move(settings, read_with(idle, used) or before, here, view)
    if idle != before:
        store.write_idle(idle)
    return here


def measured_on(store: StudyStore) -> frozenset[str]:
    """The UUIDs of all GPUs that a rung of the study was measured on."""
    rungs = (rung for result in store.results() for rung in result.rungs)
    ended = {gpu.gpu_uuid for rung in rungs for gpu in rung.gpus}
    begun = (store.power_samples(number) for number in store.progress().running)
    return frozenset(ended | {sample.gpu_uuid for samples in begun for sample in samples})


def with_read(
    before: Sequence[IdleGpu], read: Sequence[IdleGpu], needed: frozenset[str]
) -> tuple[IdleGpu, ...]:
    """What is known of GPUs after some were read.

    Of those before, only the `needed` are kept, with all that were read with one of them.
    """
    reading = max((gpu.reading for gpu in before), default=-1) + 1
    kept = read_with(before, needed)
    return kept + tuple(replace(gpu, reading=reading) for gpu in read)


def read_with(idle: Sequence[IdleGpu], uuids: frozenset[str]) -> tuple[IdleGpu, ...]:
    """These GPUs, and those that were read together with one of them: the same machine's.

    A launch that is smaller than the machine may take any of them.
    """
    readings = {gpu.reading for gpu in idle if gpu.uuid in uuids}
    return tuple(gpu for gpu in idle if gpu.reading in readings)


def tell_move(
    settings: StudySettings, earlier: Sequence[IdleGpu], here: Sequence[IdleGpu], view: View
) -> None:
    """Say that a study which ran on `earlier` goes on `here`, if it must use others there.

    A cluster may have more here than the study wants. Raises ConfigError when it must use others
    of another model.
    """
    wanted = min(settings.hardware.gpus, len(here))
    strangers = [gpu for gpu in here if gpu.uuid not in {each.uuid for each in earlier}]
    if not earlier or len(here) - len(strangers) >= wanted:
        return
    if sum(is_like(gpu, earlier) for gpu in here) < wanted:
        raise ConfigError(
            f"study {settings.name} ran on {kinds_words(earlier)} ({short_names(earlier)}), "
            f"here it would run on {kinds_words(here)} ({short_names(here)}): numbers of different "
            "GPUs cannot be compared. Continue it on GPUs of that model, or start a study under "
            "another name here; what it measured is kept"
        )
    again = "so let the finalists' re-measurement decide"
    if not settings.measure.finalists:
        again = "and with measure.finalists: 0 no setting is measured again to tell"
    view.handle(
        Note(
            f"this study continues on GPUs that none of its trials ran on: {short_names(strangers)}"
            f" ({models_words(strangers)}); before: {short_names(earlier)}"
            f"{limits_words(earlier, strangers)}. Values of different cards of one model differ by "
            f"a few percent, {again}"
        )
    )


def tell_unknown(uuids: frozenset[str], view: View) -> None:
    """Say that trials ran on GPUs whose reading is lost, so that nobody can compare the models."""
    if uuids:
        others = f" and {len(uuids) - 1} more" if len(uuids) > 1 else ""
        view.handle(
            Note(
                f"warning: trials of this study ran on {min(uuids)}{others}, which "
                "machine/idle.json does not know: make sure that the GPUs here are of that model"
            )
        )


def is_like(gpu: IdleGpu, others: Sequence[IdleGpu]) -> bool:
    """Whether it is the same model as one of the others, with as much memory where that is told."""
    return any(gpu.name == other.name and _has_as_much(gpu, other) for other in others)


def _has_as_much(one: IdleGpu, other: IdleGpu) -> bool:
    if one.memory_bytes is None or other.memory_bytes is None:
        return True
    low, high = sorted((one.memory_bytes, other.memory_bytes))
    return high <= MEMORY_SLACK * low
