"""The search space: which parameters count in a setting, which settings are in it. Pure.

- A parameter is active where its condition is true. A condition that needs a parameter which is
  itself absent is not true.
- A constraint applies where it can be decided: one that needs an absent parameter is kept.
  (`cuda_graph_max_bs >= pp_max_micro_batch_size` says nothing about servers without a pipeline.)
- A server must fit on the GPUs of one node; a larger one is in no space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from runner.expression import Expression
from runner.launch import WORLD, world_size
from runner.settings import Choices, IntRange, Parameter, StudySettings
from runner.trial import Params, ParamValue

LEAST_STEPS = 20_000


def is_active(parameter: Parameter, params: Params) -> bool:
    """Whether a parameter counts, given the values of those before it."""
    return parameter.when is None or parameter.when.decide(params) is True


def canonical(settings: StudySettings, params: Params) -> Params:
    """The setting without inactive parameters, in the order of the study.

    Two settings are the same if their canonical forms are equal. Names that the study does not
    declare (a baseline may have some) stay.
    """
    declared = {parameter.name for parameter in settings.parameters}
    others = {name: value for name, value in params.items() if name not in declared}
    kept: dict[str, ParamValue] = {}
    for parameter in settings.parameters:
        if parameter.name in params and is_active(parameter, {**others, **kept}):
            kept[parameter.name] = params[parameter.name]
    return {**kept, **others}


def satisfies(settings: StudySettings, params: Params) -> bool:
    """Whether a setting keeps every constraint and its servers fit on the GPUs."""
    return fits(settings, params) and all(
        constraint.decide(params) is not False for constraint in settings.constraints
    )


def fits(settings: StudySettings, params: Params) -> bool:
    """Whether one server of a setting fits on the GPUs of one node."""
    return world_size({**settings.engine.args, **params}) <= settings.hardware.gpus


def enumerate_space(settings: StudySettings, limit: int) -> list[Params] | None:
    """Every setting of the space in canonical form.

    None when there are more than `limit`, when a parameter is continuous, or when finding them
    takes too long (constraints that leave few settings out of a very large product).
    """
    walk = Walk(settings, settings.parameters, settings.constraints, max(LEAST_STEPS, 20 * limit))
    found: list[Params] = []
    try:
        for params in walk.settings_from(0, {}):
            found.append(params)
            if len(found) > limit:
                return None
    except TooLargeError:
        return None
    return found


class TooLargeError(Exception):
    """The walk met a continuous parameter or ran out of steps."""


@dataclass(slots=True)
class Walk:
    """A depth-first walk over settings that leaves a branch at the first broken constraint."""

    study: StudySettings
    parameters: Sequence[Parameter]
    constraints: Sequence[Expression]
    steps_left: int
    _due: list[list[Expression]] = field(init=False)

    def __post_init__(self) -> None:
        """A constraint is due once the last of its parameters has been decided."""
        positions = {parameter.name: at for at, parameter in enumerate(self.parameters, start=1)}
        self._due = [[] for _ in range(len(self.parameters) + 1)]
        for constraint in self.constraints:
            self._due[max((positions[n] for n in constraint.names), default=0)].append(constraint)

    def settings_from(self, index: int, params: Params) -> Iterator[Params]:
        """Every setting that continues `params` from the parameter at `index` on."""
        if not self._is_open(index, params):
            return
        if index == len(self.parameters):
            yield params
            return
        parameter = self.parameters[index]
        if not is_active(parameter, params):
            yield from self.settings_from(index + 1, params)
            return
        for value in finite_values(parameter):
            self.steps_left -= 1
            if self.steps_left < 0:
                raise TooLargeError
            yield from self.settings_from(index + 1, {**params, parameter.name: value})

    def _is_open(self, index: int, params: Params) -> bool:
        """Whether what was decided last leaves the branch open."""
        if any(constraint.decide(params) is False for constraint in self._due[index]):
            return False
        is_size = index == 0 or self.parameters[index - 1].name in WORLD
        return not is_size or fits(self.study, params)


def finite_values(parameter: Parameter) -> Sequence[ParamValue]:
    """The values of a parameter; raises TooLargeError for a continuous one."""
    if isinstance(parameter, Choices):
        return parameter.values
    if isinstance(parameter, IntRange):
        return range(parameter.low, parameter.high + 1, parameter.step)
    if parameter.low == parameter.high:
        return (parameter.low,)
    raise TooLargeError
