"""Hardware profiles as YAML files: read, checked strictly, turned into frozen dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from runner.errors import ConfigError
from runner.machine.hardware import Profile

FOLDER = Path(__file__).parent / "profiles"


def profile_names() -> tuple[str, ...]:
    """The built-in profiles."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_profile(name: str) -> Profile:
    """A built-in profile by its name, or the one in a file by a path that ends in .yaml.

    Raises:
        ConfigError: there is no such profile, or its file is wrong.
    """
    if name.endswith(".yaml"):
        return _load(Path(name))
    if name not in profile_names():
        raise ConfigError(
            f"there is no hardware profile {name!r}; choose one of {', '.join(profile_names())}, "
            "or give the path of a .yaml file"
        )
    return _load(FOLDER / f"{name}.yaml")


def _load(path: Path) -> Profile:
    """Read once as long as the file is the same: every simulated launch asks for it."""
    try:
        state = path.stat()
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}") from err
    return _loaded(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=16)
def _loaded(path: Path, mtime_ns: int, size: int) -> Profile:  # noqa: ARG001 - a changed file is another
    return parse_profile(_read(path), str(path))


def parse_profile(document: object, place: str) -> Profile:
    """A profile from a parsed document; `place` names it in messages."""
    try:
        checked = _profile_model().model_validate(document)
    except ValidationError as err:
        problems = "; ".join(_describe(dict(error)) for error in err.errors())
        raise ConfigError(f"{place}: {problems}") from err
    profile: Profile = _build(Profile, checked)
    _check(profile, place)
    return profile


def profile_text(profile: Profile, heading: str = "") -> str:
    """The profile as a file that load_profile reads; `heading` becomes comments above it."""
    comments = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    document = dataclasses.asdict(profile)
    first = {"name": document.pop("name"), "fit": document.pop("fit")}
    body: str = yaml.safe_dump({**first, **document}, sort_keys=False, width=100)
    return comments + body


def _read(path: Path) -> object:
    try:
        document: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}") from err
    except (UnicodeDecodeError, yaml.YAMLError) as err:
        raise ConfigError(f"{path}: not a YAML file: {err}") from err
    return document


@functools.cache
def _profile_model() -> type[BaseModel]:
    return _model(Profile)


def _model(kind: type[Any]) -> type[BaseModel]:
    """A strict pydantic model with the fields of a dataclass, so that they are written once."""
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {
        field.name: (
            _checked_type(hints[field.name]),
            ... if field.default is dataclasses.MISSING else field.default,
        )
        for field in dataclasses.fields(kind)
    }
    config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    return create_model(kind.__name__, __config__=config, **fields)


def _checked_type(hint: Any) -> Any:  # noqa: ANN401 - a type expression
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _model(hint)
    if typing.get_origin(hint) is Mapping:
        keys, values = typing.get_args(hint)
        return dict[keys, _checked_type(values)]  # type: ignore[valid-type,misc] # built here
    return hint


def _build(kind: type[Any], checked: BaseModel) -> Any:  # noqa: ANN401 - an instance of `kind`
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            field.name: _value(hints[field.name], getattr(checked, field.name))
            for field in dataclasses.fields(kind)
        }
    )


def _value(hint: Any, value: Any) -> Any:  # noqa: ANN401 - follows the type expression
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value)
    if typing.get_origin(hint) is Mapping:
        return {name: _value(typing.get_args(hint)[1], item) for name, item in value.items()}
    return value


def _describe(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"]) or "the document"
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key"
    if error["type"] == "missing":
        return f"{place}: missing"
    return f"{place}: {error['msg']}, found {error['input']!r}"


def _check(profile: Profile, place: str) -> None:
    """What the types do not say; raises ConfigError."""
    for name, value in _numbers(profile):
        low, high = _limits(name)
        if not low <= value <= high:
            raise ConfigError(
                f"{place}: {name}: found {value:g}, expected a number from {low:g} to {high:g}"
            )
    gpu, model = profile.gpu, profile.model
    for name, value, limit_name, limit in (
        ("model.experts_per_token", model.experts_per_token, "model.experts", model.experts),
        ("gpu.server_idle_w", gpu.server_idle_w, "gpu.power_limit_w", gpu.power_limit_w),
        ("gpu.idle_w", gpu.idle_w, "gpu.power_limit_w", gpu.power_limit_w),
    ):
        if value > limit:
            raise ConfigError(f"{place}: {name}: {value:g} is above {limit_name}, {limit:g}")
    if profile.defaults.attention_backend not in profile.backends:
        raise ConfigError(
            f"{place}: defaults.attention_backend: {profile.defaults.attention_backend!r} "
            f"is not one of backends ({', '.join(profile.backends)})"
        )


def _numbers(section: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a profile with its dotted name."""
    if isinstance(section, Mapping):
        entries = [(str(name), value) for name, value in section.items()]
    elif dataclasses.is_dataclass(section):
        entries = [(each.name, getattr(section, each.name)) for each in dataclasses.fields(section)]
    else:
        entries = []
    for name, value in entries:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value
        else:
            yield from _numbers(value, f"{prefix}{name}.")


# By the end of a number's name, the first that fits: what no machine and no model is beyond.
LIMITS = (
    ("per_s", 1.0, 1e21),
    ("mem_fraction_static", 0.01, 1.0),
    ("routing_overlap", 0.0, 1.0),
    ("noise.stage", 0.0, 1.0),
    ("noise.run", 0.0, 1.0),
    ("power_limit_w", 1.0, 1e5),
    ("_w", 0.0, 1e5),
    ("_s", 0.0, 1e5),
    ("kv_bytes_per_token_layer", 1e-6, 1e9),
    ("gpus", 1, 1e6),
    ("memory_bytes", 1, 1e18),
    ("model.layers", 1, 1e5),
    ("hidden_size", 1, 1e7),
    ("attention_heads", 1, 1e6),
    ("context_length", 1, 1e10),
    ("_factor", 0.0, 1e4),
)


def _limits(name: str) -> tuple[float, float]:
    return next(((low, high) for end, low, high in LIMITS if name.endswith(end)), (0.0, 1e21))
