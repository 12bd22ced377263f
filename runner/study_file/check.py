"""Whether a study can be run at all: expressions that work, a space that is not empty, GPUs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from runner.errors import ConfigError
from runner.expression import Expression
from runner.launch import WORLD, world_size
from runner.settings import Choices, FloatRange, IntRange, Parameter, StudySettings
from runner.space import TooLargeError, Walk, fits
from runner.study_file.mistake import Mistakes
from runner.trial import ParamValue

MOST_STEPS = 10_000
MOST_PROBES = 500


def check_study(settings: StudySettings, mistakes: Mistakes) -> None:
    """Note what makes the study impossible."""
    _check_expressions(settings, mistakes)
    if not mistakes.found:
        _check_space(settings, mistakes)
    for position, baseline in enumerate(settings.baselines):
        if not fits(settings, baseline.params):
            needed = world_size({**settings.engine.args, **baseline.params})
            mistakes.add(
                f"baselines.{position}",
                f"{baseline.name} needs {needed} GPUs, hardware.gpus is {settings.hardware.gpus}",
            )


def _check_expressions(settings: StudySettings, mistakes: Mistakes) -> None:
    """Evaluate every expression at the ends of the ranges it sees."""
    placed = [(f"constraints.{i}", each) for i, each in enumerate(settings.constraints)]
    placed += [(f"parameters.{p.name}.when", p.when) for p in settings.parameters if p.when]
    for place, expression in placed:
        seen = [_ends(parameter) for parameter in _seen_by(settings, expression.names)]
        walk = Walk(settings, seen, (), MOST_STEPS)
        try:
            for params in islice(walk.settings_from(0, {}), MOST_PROBES):
                expression.decide(params)
        except ConfigError as err:
            mistakes.add(place, str(err))
        except TooLargeError:
            continue


def _check_space(settings: StudySettings, mistakes: Mistakes) -> None:
    """Say which constraint, or the number of GPUs, leaves no setting."""
    if _has_setting(settings, settings.constraints):
        return
    gpus = settings.hardware.gpus
    if not _has_setting(settings, ()):
        text = f"found {gpus}; every setting needs a server of more GPUs"
        mistakes.add("hardware.gpus", text)
        return
    for position, constraint in enumerate(settings.constraints):
        if not _has_setting(settings, [constraint]):
            text = f"{constraint.text!r} leaves no setting of servers with at most {gpus} GPUs"
            mistakes.add(f"constraints.{position}", text)
            return
    for position, constraint in enumerate(settings.constraints):
        if not _has_setting(settings, settings.constraints[: position + 1]):
            text = f"{constraint.text!r} leaves no setting together with the constraints before it"
            mistakes.add(f"constraints.{position}", text)
            return


def _has_setting(settings: StudySettings, constraints: Sequence[Expression]) -> bool:
    """Whether some setting keeps the constraints and fits; True where it takes too long to say."""
    names = frozenset(WORLD).union(*(constraint.names for constraint in constraints))
    walk = Walk(settings, _seen_by(settings, names), constraints, MOST_STEPS)
    try:
        return next(walk.settings_from(0, {}), None) is not None
    except TooLargeError:
        return True


def _seen_by(settings: StudySettings, names: Collection[str]) -> list[Parameter]:
    """The named parameters and those their conditions depend on, in order."""
    wanted = set(names)
    for parameter in reversed(settings.parameters):
        if parameter.name in wanted and parameter.when is not None:
            wanted |= parameter.when.names
    return [parameter for parameter in settings.parameters if parameter.name in wanted]


def _ends(parameter: Parameter) -> Choices:
    """The parameter with few values: both ends of a range, its middle and what is next to low."""
    match parameter:
        case Choices(values=values):
            few: Sequence[ParamValue] = values[:16]
        case IntRange(low=low, high=high, step=step):
            steps = (high - low) // step
            few = [low + step * at for at in sorted({0, min(1, steps), steps // 2, steps})]
        case FloatRange(low=low, high=high):
            few = [low, (low + high) / 2, high]
    return Choices(parameter.name, tuple(few), parameter.when)
