"""Which settings of a space are looked at: all of them, or a seeded sample of a large space."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from runner.launch import spec_hash
from runner.settings import Choices, FloatRange, IntRange, Parameter, StudySettings
from runner.space import enumerate_space, is_active, satisfies
from runner.trial import Params, ParamValue

MOST_EXAMINED = 20_000
SAMPLED = 2_000
TRIES = 40  # draws for each setting that is wanted


@dataclass(frozen=True, slots=True)
class Examined:
    """The settings looked at. `total` is the size of the space, None when it was not counted."""

    settings: tuple[Params, ...]
    total: int | None

    @property
    def is_sampled(self) -> bool:
        """Whether these are a sample only."""
        return self.total is None


def examine(settings: StudySettings) -> Examined:
    """Every setting, or a sample when there are too many or a parameter is continuous."""
    found = enumerate_space(settings, MOST_EXAMINED)
    if found is not None:
        return Examined(tuple(found), len(found))
    draws = random.Random(settings.search.seed)
    kept: dict[str, Params] = {}
    for _ in range(TRIES * SAMPLED):
        params = _draw(settings, draws)
        if satisfies(settings, params):
            kept.setdefault(spec_hash(params), params)
        if len(kept) == SAMPLED:
            break
    return Examined(tuple(kept.values()), None)


def _draw(settings: StudySettings, draws: random.Random) -> Params:
    params: dict[str, ParamValue] = {}
    for parameter in settings.parameters:
        if is_active(parameter, params):
            params[parameter.name] = _value(parameter, draws)
    return params


def _value(parameter: Parameter, draws: random.Random) -> ParamValue:
    match parameter:
        case Choices(values=values):
            return draws.choice(values)
        case IntRange(low=low, high=high, log=True):
            drawn = math.exp(draws.uniform(math.log(max(low, 1)), math.log(high + 1)))
            return min(max(int(drawn), low), high)
        case IntRange(low=low, high=high, step=step):
            return draws.randrange(low, high + 1, step)
        case FloatRange(low=low, high=high, log=True):
            return math.exp(draws.uniform(math.log(low), math.log(high)))
        case FloatRange(low=low, high=high):
            return draws.uniform(low, high)
