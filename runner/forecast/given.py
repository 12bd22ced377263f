"""`--params name=value,...`: one setting as the user wrote it on the command line."""

from __future__ import annotations

from collections.abc import Collection

from runner.errors import ConfigError
from runner.machine.shape import PARTITION
from runner.settings import StudySettings
from runner.study_file.mistake import near_match, show
from runner.study_file.reading import parse_yaml
from runner.study_file.server_args import KNOWN, LOOKALIKES, name_mistake, settle, value_mistake
from runner.trial import Params, ParamValue

EXPECTED = "expected name=value,... for example --params pp_size=8,tp_size=1"


def parse_params(settings: StudySettings, text: str) -> Params:
    """The setting; raises ConfigError for an unknown or doubled name and for a wrong value."""
    declared = {parameter.name for parameter in settings.parameters}
    params: dict[str, ParamValue] = {}
    for part in _parts(text):
        name, equals, written = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise ConfigError(f"--params: found {part.strip()!r}, {EXPECTED}")
        if wrong := _name_mistake(name, {*declared, *settings.engine.args}):
            raise ConfigError(f"--params: {wrong}")
        if name in params:
            raise ConfigError(f"--params: {name} is given twice; keep one")
        params[name] = _value(name, written)
    return params


def _parts(text: str) -> list[str]:
    """The settings of the text; only pp_layer_partition has commas in its value: 8,8,7,8."""
    parts: list[str] = []
    for piece in text.split(","):
        if parts and parts[-1].strip().startswith(PARTITION) and piece.strip().isdecimal():
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def _name_mistake(name: str, of_study: Collection[str]) -> str | None:
    if name in of_study:
        return None
    if wrong := name_mistake(name):
        return wrong
    if name in KNOWN or name in LOOKALIKES:
        return None
    close = near_match(name, (*KNOWN, *of_study))
    guess = f"did you mean {close!r}?" if close else f"the study has {', '.join(sorted(of_study))}"
    return f"unknown parameter {name!r}; {guess}"


def _value(name: str, written: str) -> ParamValue:
    value = parse_yaml(written, f"--params {name}")
    if not isinstance(value, bool | int | float | str):
        wrong = value_mistake(name, "") or "a number, text, true or false"
        raise ConfigError(f"--params {name}: found {show(value)}, expected {wrong}")
    if allowed := value_mistake(name, value):
        raise ConfigError(f"--params {name}: found {show(value)}, expected {allowed}")
    return settle(name, value)
