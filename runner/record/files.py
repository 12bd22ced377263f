"""Files that appear whole or not at all, and JSON that holds no NaN."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from runner.errors import StudyError
from runner.record.codec import Json, encode


class Buffer(Protocol):
    """Bytes of any kind (bytes, memoryview, an Arrow buffer)."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


def write_whole(path: Path, content: Buffer) -> None:
    """Write a file under a passing name, then rename it; a reader sees all of it or nothing.

    Raises StudyError when it cannot be written (a full disk); nothing is left behind then.
    """
    partial = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StudyError(
            f"{path} cannot be written: {error.strerror}. "
            "Make room or give write access, then continue the study; nothing measured is lost"
        ) from error


def write_json(path: Path, document: Mapping[str, object], indent: int | None = 2) -> None:
    """Write a JSON object; NaN and infinity are refused by the name of their field."""
    try:
        text = json.dumps(encode(document), indent=indent, allow_nan=False)
    except ValueError as error:
        raise StudyError(f"{path.name} would hold a value that JSON cannot: {error}") from error
    write_whole(path, text.encode() + b"\n")


def read_json(path: Path, remedy: str) -> dict[str, Json]:
    """Read a JSON object. Raises FileNotFoundError, or StudyError that ends with `remedy`."""
    try:
        document = json.loads(
            path.read_bytes(), parse_constant=_finite, parse_float=_finite, parse_int=_whole
        )
        json.dumps(document, ensure_ascii=False).encode()  # half a character is none
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error, remedy) from error
    if not isinstance(document, dict):
        raise damaged(path, "not a JSON object", remedy)
    return document


def damaged(path: Path, why: object, remedy: str) -> StudyError:
    """The error for a file that is there but cannot be used."""
    return StudyError(f"{path} is damaged ({why}). {remedy}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)
