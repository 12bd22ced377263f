"""Before the first launch: has this server a flag for every parameter of the study? Pure."""

from __future__ import annotations

from collections.abc import Iterator

from runner.engines.sglang.environment import ServerEnvironment
from runner.engines.sglang.flags import clash, mistake
from runner.settings import Choices, Parameter, StudySettings
from runner.study_file.mistake import Mistakes
from runner.trial import ParamValue


def check_parameters(settings: StudySettings, environment: ServerEnvironment) -> None:
    """Check every name and value of `parameters`, `baselines` and `engine.args`.

    Exactly: SGLang itself takes any unambiguous beginning of a flag. Raises ConfigError with the
    place of the first mistake and the number of the others.
    """
    mistakes = Mistakes()
    for place, name, value in _values(settings):
        if wrong := mistake(name, value, environment):
            mistakes.add(place, wrong)
    for place, names in _settings(settings):
        if wrong := clash(names, environment):
            mistakes.add(place, wrong)
    mistakes.stop()


def _values(settings: StudySettings) -> Iterator[tuple[str, str, ParamValue]]:
    """Each value that a server may be given, with its place in the study file."""
    for name, value in settings.engine.args.items():
        yield f"engine.args.{name}", name, value
    for parameter in settings.parameters:
        for value in _possible(parameter):
            yield f"parameters.{parameter.name}", parameter.name, value
    for baseline in settings.baselines:
        for name, value in baseline.params.items():
            yield f"baseline {baseline.name}: {name}", name, value


def _possible(parameter: Parameter) -> tuple[ParamValue, ...]:
    return parameter.values if isinstance(parameter, Choices) else (parameter.low, parameter.high)


def _settings(settings: StudySettings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names that one server may be given together."""
    fixed = tuple(settings.engine.args)
    searched = tuple(parameter.name for parameter in settings.parameters)
    yield "parameters", tuple(dict.fromkeys((*fixed, *searched)))
    for baseline in settings.baselines:
        yield f"baseline {baseline.name}", tuple(dict.fromkeys((*fixed, *baseline.params)))
