"""The shipped mechanism: SGLang's slot rules with the stage times of the profile, run as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.engines.virtual_load import SEND_GAP_S
from runner.machine.hardware import Profile
from runner.machine.profile import load_profile
from tests.bench.rivals.fit import Values
from tests.bench.rivals.measured import Run
from tests.bursts import Burst, run_burst, run_closed_loop

NAME = "rtx-pro-6000-x8-kimi-k2.6"


class SlotRule:
    """Runs the real pipeline model in virtual time; fits run `scale` times shorter requests."""

    name = "slot rule"
    about = (
        "admission is greedy per slot; a batch reads the experts it hits, and its kernels pad "
        "small batches to whole tiles"
    )

    def __init__(self, scale: float = 20.0) -> None:
        self.scale = scale
        self.profile = load_profile(NAME)
        self._quiet = replace(self.profile, noise=replace(self.profile.noise, stage=0.0, run=0.0))
        self.start: Values = {
            "kernels.layer_s": self.profile.kernels.layer_s,
            "kernels.batch_s": self.profile.kernels.batch_s,
            "model.routing_overlap": self.profile.model.routing_overlap,
            "link.ring_step_s": self.profile.link.ring_step_s,
            "host.eager_layer_s": self.profile.host.eager_layer_s,
        }

    def throughputs(self, values: Values, runs: Sequence[Run]) -> list[float]:
        profile = _with(self._quiet, values)
        return [_throughput(profile, run) for run in runs]

    def burst(self, run: Run, seed: int) -> Burst:
        """A burst on the profile as it is shipped, with its noise."""
        gap_s = SEND_GAP_S if run.gap_s is None else run.gap_s
        return run_burst(self.profile, run.shape, run.lengths, seed=seed, gap_s=gap_s)


def _throughput(profile: Profile, run: Run) -> float:
    if run.is_closed_loop:
        return run_closed_loop(profile, run.shape, run.lengths)
    gap_s = SEND_GAP_S if run.gap_s is None else run.gap_s
    return run_burst(profile, run.shape, run.lengths, gap_s=gap_s).tokens_per_s


def _with(profile: Profile, values: Values) -> Profile:
    """A profile with some of its numbers changed, named `section.field`."""
    for name, value in values.items():
        section, field = name.split(".")
        changed = replace(getattr(profile, section), **{field: value})
        profile = replace(profile, **{section: changed})
    return profile
