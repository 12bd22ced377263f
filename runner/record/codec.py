"""Frozen dataclasses to JSON values and back, driven by their type hints.

Numbers keep their exact value (JSON text of a float round-trips). NaN and infinity are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")


def encode(value: object, where: str = "", *, lenient: bool = False) -> Json:
    """The JSON value of a dataclass, mapping, sequence, enum or plain value.

    A number that is not finite raises ValueError naming its field (`rungs[0].power_w`); with
    `lenient` it becomes text (what another program reported is kept, whatever it is).
    """
    match value:
        case StrEnum():
            return value.value
        case None | bool() | int() | str():
            return value
        case float():
            return _finite(value, where, lenient=lenient)
        case Mapping():
            items = [(str(key), item) for key, item in value.items()]
            return {key: encode(item, _dot(where, key), lenient=lenient) for key, item in items}
        case Sequence():
            numbered = enumerate(value)
            return [encode(item, f"{where}[{n}]", lenient=lenient) for n, item in numbered]
    if dataclasses.is_dataclass(value):
        return encode(fields_of(value), where, lenient=lenient)
    raise TypeError(f"{where or 'the value'}: {type(value).__name__} has no JSON form")


def fields_of(value: Any) -> dict[str, object]:  # noqa: ANN401 - any dataclass
    """The fields of a dataclass as they are."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def decode(kind: type[T], value: Json) -> T:
    """The dataclass `kind` from its JSON value; raises ValueError naming what does not fit.

    Keys that `kind` does not know are ignored; a key that is missing takes the field's default.
    """
    return cast("T", _decode(kind, value, ""))


def _finite(value: float, where: str, *, lenient: bool) -> Json:
    if math.isfinite(value):
        return value
    if lenient:
        return str(value)
    raise ValueError(f"{where or 'the value'} is {value}")


def _decode(kind: Any, value: Json, where: str) -> object:  # noqa: ANN401 - any type hint
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _decode(arguments[1], item, _dot(where, key)) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
        if value not in list(kind):
            raise ValueError(f"{where or 'the value'} is {value!r}, expected {' or '.join(kind)}")
        return kind(value)
    if kind is object or _is_plain(kind, value):
        return value
    raise ValueError(f"{where or 'the value'} is {value!r}, expected {_name(kind)}")


def _decode_dataclass(kind: Any, value: Json, where: str) -> object:  # noqa: ANN401 - a dataclass
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the document'} is no object: {value!r}")  # noqa: TRY004
    hints = _hints(kind)
    given = {name: value[name] for name in hints if name in value}
    fields = {name: _decode(hints[name], item, _dot(where, name)) for name, item in given.items()}
    if missing := [name for name in _required(kind) if name not in fields]:
        raise ValueError(f"{where or 'the document'} lacks {', '.join(missing)}")
    return kind(**fields)


def _decode_union(arguments: tuple[Any, ...], value: Json, where: str) -> object:
    if value is None and type(None) in arguments:
        return None
    options = [option for option in arguments if option is not type(None)]
    if len(options) == 1:
        return _decode(options[0], value, where)
    if any(_is_plain(option, value) for option in options):
        return value
    raise ValueError(f"{where} is {value!r}, expected {' or '.join(map(_name, options))}")


def _is_plain(kind: object, value: Json) -> bool:
    match value:
        case bool():
            return kind is bool
        case int():
            return kind in (int, float)
        case float():
            return kind is float
        case str():
            return kind is str
        case _:
            return False


@functools.cache
def _required(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - a dataclass
    """The fields that have no default."""
    without = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return tuple(f.name for f in fields if f.default is without and f.default_factory is without)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _dot(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))
