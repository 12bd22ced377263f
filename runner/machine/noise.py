"""Noise on stage times, seeded."""

from __future__ import annotations

import random

from runner.machine.hardware import Noise

NOISE_DRAWS = 512
NOISE_STRIDE = 37  # ranks of one launch draw their noise apart
LOWEST_NOISE = 0.5


def noise_factors(noise: Noise, seed: int) -> tuple[float, ...]:
    """Factors on stage times: one run's common factor times a draw for each launch."""
    draws = random.Random(seed)
    run = 1.0 + draws.gauss(0.0, noise.run)
    return tuple(
        max(run * (1.0 + draws.gauss(0.0, noise.stage)), LOWEST_NOISE) for _ in range(NOISE_DRAWS)
    )
