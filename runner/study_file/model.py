"""The study file's shape in pydantic: sections, types, limits and defaults, one field a line.

Every field's description says in words what is allowed; a mistake is answered with it. What needs
more than one field (a condition's names, the ladder's rungs) is checked in study_resolve.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from runner.study_file.mistake import Mistakes, show, unknown

MOST = 10**12  # no number of a study file is larger
PLAIN = "text, a number, true or false"


def _plain_value(value: object) -> object:
    if isinstance(value, str) and "\0" in value:
        raise PydanticCustomError("plain", "not a plain value")
    if isinstance(value, bool | int | float | str):
        return value
    raise PydanticCustomError("plain", "not a plain value")


def _environment_name(name: object) -> object:
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        raise PydanticCustomError("environment", "no name of an environment variable")
    return name


def _environment_value(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PydanticCustomError("environment", "neither text nor a number")
    if "\0" in str(value):
        raise PydanticCustomError("environment", "no value of an environment variable")
    return str(value)


def _lengths(value: object) -> object:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return {"fixed": value} if is_number else value


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _lengths_or_auto(value: object) -> object:
    return _auto(_lengths(value))


# A union would make pydantic report every member by itself, so each kind of value has one type.
Plain: TypeAlias = Annotated[Any, BeforeValidator(_plain_value)]
EnvironmentName: TypeAlias = Annotated[str, BeforeValidator(_environment_name)]
EnvironmentValue: TypeAlias = Annotated[str, BeforeValidator(_environment_value)]
Size: TypeAlias = Annotated[int, Field(ge=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]


def keys_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The keys a section may have, as written in the file."""
    return tuple(field.alias or name for name, field in section.model_fields.items())


class Section(BaseModel):
    """A part of the study file. A known key with nothing after it counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nothing(cls, document: object) -> object:
        if not isinstance(document, dict):
            return document
        known = keys_of(cls)
        return {k: v for k, v in document.items() if v is not None or k not in known}


class EngineSection(Section):
    kind: Literal["simulated", "emulated", "sglang"] = Field(
        "emulated", description="simulated, emulated or sglang"
    )
    profile: str | None = Field(
        None, min_length=1, description="the name of a hardware profile, or a .yaml file"
    )
    time_scale: float = Field(
        1.0, gt=0, le=1000, description="a number above 0, at most 1000: times faster than real"
    )
    model: str | None = Field(None, min_length=1, description="the model's path or name")
    python: str | None = Field(None, min_length=1, description="the path of a Python interpreter")
    args: dict[str, Plain] = Field(
        default_factory=dict, description=f"server parameters, each {PLAIN}"
    )
    env: dict[EnvironmentName, EnvironmentValue] = Field(
        default_factory=dict, description="environment variables, each text or a number"
    )


class HardwareSection(Section):
    gpus: int = Field(8, ge=1, le=1024, description="a whole number, 1 or more: GPUs per node")
    nodes: int = Field(1, ge=1, le=1024, description="a whole number, 1 or more")
    isolation: Literal["exclusive"] = Field("exclusive", description="exclusive")


class ParameterSection(Section):
    choices: list[Plain] | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description=f"a list of 1 to 1000 values, each {PLAIN}",
    )
    int_range: list[int] | None = Field(
        None, alias="int", min_length=2, max_length=2, description="[low, high], two whole numbers"
    )
    float_range: list[float] | None = Field(
        None, alias="float", min_length=2, max_length=2, description="[low, high], two numbers"
    )
    step: int | None = Field(None, ge=1, description="a whole number, 1 or more")
    log: bool | None = Field(None, description="true or false")
    when: str | None = Field(None, description="an expression such as pp_size > 1")


class LengthsSection(Section):
    fixed: int | None = Field(None, ge=1, description="a whole number of tokens, 1 or more")
    uniform: list[Size] | None = Field(
        None, min_length=2, max_length=2, description="[low, high], two whole numbers, 1 or more"
    )
    normal: list[float] | None = Field(
        None, min_length=2, max_length=2, description="[mean, sd], two numbers"
    )
    file: str | None = Field(None, min_length=1, description="the path of a JSON lines file")
    recorded: list[Size] | None = Field(
        None, min_length=1, description="a list of whole numbers, 1 or more"
    )
    paired: bool | None = Field(None, description="true or false")


LENGTHS = (
    "a whole number of tokens above 0, {uniform: [low, high]}, {normal: [mean, sd]} "
    "or {file: lengths.jsonl}"
)
LengthsField: TypeAlias = Annotated[LengthsSection, BeforeValidator(_lengths)]


class WorkloadSection(Section):
    protocol: Literal["closed_loop", "burst", "open_loop"] = Field(
        "closed_loop", description="closed_loop, burst or open_loop"
    )
    prompt_tokens: LengthsField = Field(LengthsSection(fixed=256), description=LENGTHS)
    output_tokens: LengthsField = Field(LengthsSection(fixed=256), description=LENGTHS)
    concurrency: list[Annotated[int, Field(ge=1, le=100_000)]] | None = Field(
        None, min_length=1, max_length=100, description="a list of 1 to 100 whole numbers above 0"
    )
    rate: list[Annotated[float, Field(gt=0, le=100_000)]] | None = Field(
        None, min_length=1, max_length=100, description="a list of 1 to 100 numbers above 0"
    )
    arrivals: Literal["poisson", "constant"] | None = Field(None, description="poisson or constant")
    shared_prefix: float = Field(
        0.0, ge=0, lt=1, description="a number from 0 to below 1: the share of a prompt"
    )


class ObjectiveSection(Section):
    metric: str = Field(description="the name of a metric such as output_throughput")
    concurrency: int | None = Field(None, description="one of workload.concurrency")
    rate: float | None = Field(None, description="one of workload.rate")
    direction: Literal["maximize", "minimize"] | None = Field(
        None, description="maximize or minimize"
    )


class SearchSection(Section):
    sampler: Literal["auto", "tpe", "random", "qmc", "nsga2"] = Field(
        "auto", description="auto, tpe, random, qmc or nsga2"
    )
    trials: int = Field(40, ge=1, le=1_000_000, description="a whole number, 1 or more")
    seed: int = Field(0, ge=0, lt=2**32, description="a whole number from 0 to 4294967295")
    minutes: Positive | None = Field(None, description="a number of minutes above 0, or null")
    launches: Size | None = Field(None, description="a whole number, 1 or more, or null")
    energy_j: Positive | None = Field(None, description="a number of joules above 0, or null")
    parallel: Annotated[Size | None, BeforeValidator(_auto)] = Field(
        None, description="auto, or a whole number, 1 or more"
    )
    output_tokens: Annotated[LengthsSection | None, BeforeValidator(_lengths_or_auto)] = Field(
        None, description=f"auto, {LENGTHS}"
    )


class MeasureSection(Section):
    precision: float = Field(0.01, gt=0, lt=1, description="a number between 0 and 1, such as 0.01")
    min_window_s: Positive = Field(10.0, description="a number of seconds above 0")
    max_window_s: Positive = Field(120.0, description="a number of seconds above 0")
    repeats: int = Field(1, ge=1, le=1000, description="a whole number, 1 or more")
    finalists: int = Field(3, ge=0, le=1000, description="a whole number, 0 or more")


class TrackingSection(Section):
    uri: str | None = Field(None, min_length=1, description="an MLflow URI, or null")


class StudyDocument(Section):
    """The whole study file."""

    name: str = Field(description="a name of a-z, 0-9, '.', '_' and '-', at most 100 long")
    engine: EngineSection = Field(
        description="a section that says which engine, e.g. {kind: emulated, profile: ...}"
    )
    hardware: HardwareSection = Field(HardwareSection())
    parameters: dict[str, ParameterSection] = Field(
        min_length=1,
        max_length=50,
        description="1 to 50 parameters, e.g. tp_size: {choices: [1, 2]}",
    )
    constraints: list[str] = Field(
        default_factory=list, max_length=100, description="a list of at most 100 expressions"
    )
    baselines: list[dict[str, Plain]] = Field(
        default_factory=list,
        max_length=100,
        description=f"a list of at most 100 settings with a name; each value is {PLAIN}",
    )
    workload: WorkloadSection = Field(WorkloadSection())
    objectives: list[ObjectiveSection] | None = Field(
        None, min_length=1, description="a list with at least one {metric: ...}"
    )
    slo: dict[str, dict[str, Positive]] = Field(
        default_factory=dict,
        description="limits in seconds above 0, e.g. {ttft_s: {p99: 2.0}}",
    )
    search: SearchSection = Field(SearchSection())
    measure: MeasureSection = Field(MeasureSection())
    storage: str | None = Field(None, min_length=1, description="an Optuna storage URL, or null")
    tracking: TrackingSection = Field(TrackingSection())


def read_document(document: Mapping[str, object], mistakes: Mistakes) -> StudyDocument:
    """The document in its shape; raises ConfigError with the mistakes it has."""
    try:
        return StudyDocument.model_validate(dict(document))
    except ValidationError as err:
        # An unknown key first: it is often why another one is missing.
        errors = sorted(err.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        at = _locate(errors[0]["loc"])
        mistakes.add(at.place, _say(errors[0], at))
        mistakes.unsaid = len(errors) - 1
        mistakes.stop()
        raise


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a mistake is: its place in the file, the section around it, the field it is in."""

    place: str
    around: type[BaseModel]
    field: FieldInfo | None
    field_place: str


def _locate(loc: tuple[int | str, ...]) -> _Location:
    section: type[BaseModel] | None = StudyDocument
    around: type[BaseModel] = StudyDocument
    inner: type[BaseModel] | None = None
    field: FieldInfo | None = None
    parts = [str(part) for part in loc if part != "fixed"]
    field_place = ""
    for depth, part in enumerate(parts, start=1):
        if section is None:  # an entry of a list or mapping: the section starts after it
            section, inner = inner, None
            continue
        around = section
        fields = {each.alias or name: each for name, each in section.model_fields.items()}
        if part in fields:
            field, field_place = fields[part], ".".join(parts[:depth])
            section = _section_in(field.annotation)
            if not _is_section(field.annotation):
                section, inner = None, section
    return _Location(".".join(parts), around, field, field_place)


def _is_section(annotation: object) -> bool:
    """Whether a field holds one section, not a list or mapping of them."""
    if isinstance(annotation, type):
        return issubclass(annotation, BaseModel)
    is_container = get_origin(annotation) in (list, dict)
    return not is_container and any(_is_section(each) for each in get_args(annotation))


def _section_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for each in get_args(annotation) if (s := _section_in(each))), None)


def _say(error: ErrorDetails, at: _Location) -> str:
    if error["type"] == "extra_forbidden":
        return unknown("key", str(error["loc"][-1]), keys_of(at.around))
    expected = at.field.description if at.field is not None else None
    if error["type"] == "missing":
        return f"missing; expected {expected}"
    found, is_inside = show(error["input"]), at.place != at.field_place
    section = _section_in(at.field.annotation) if at.field is not None else None
    if section is not None and (is_inside or expected is None):
        return f"found {found}, expected a section with {', '.join(keys_of(section))}"
    if is_inside:
        return f"found {found}; {at.field_place} takes {expected}{_hint(error['input'])}"
    return f"found {found}, expected {expected}{_hint(error['input'])}"


def _hint(found: object) -> str:
    """What YAML made of the value, where that surprises."""
    if isinstance(found, bool):
        return " (YAML reads yes, no, on and off as true and false)"
    if isinstance(found, str):
        value = _number(found)
        return "" if value is None or abs(value) > MOST else f"; write the number as {value!r}"
    return ""


def _number(text: str) -> int | float | None:
    """The number that was probably meant by a text such as 0x10, 1e3 or 1_000."""
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value
