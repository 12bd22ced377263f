"""Rungs and power samples as Parquet tables that read back exactly. Used by store.py alone.

A rung's requests are the rows of its file; what belongs to the rung itself (window, client
health) and the keys of its power samples are in the file's key-value metadata. The samples of
all rungs of a trial are one table, each reading once, sorted by time.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from runner.record.codec import decode, encode
from runner.record.files import Buffer, damaged
from runner.trial import (
    ClientHealth,
    LoadRun,
    PowerSample,
    RequestRecord,
    RequestStatus,
    RungRecord,
)

SCHEMA_VERSION = 1
RUNG_KEY = b"runner.rung"
POWER_KEY = b"runner.power_keys"
REMEDY = "Delete it and continue the study: this rung is measured again"

POWER_REMEDY = "Delete it and the rungs beside it, then continue the study: they are measured again"
UNUSABLE = (TypeError, ValueError, KeyError, struct.error, zlib.error)

PowerKey: TypeAlias = tuple[float, str]
PowerTable: TypeAlias = Mapping[PowerKey, PowerSample]


@dataclasses.dataclass(frozen=True, slots=True)
class RungHead:
    """What a rung's file says besides its requests."""

    position: int
    concurrency: int
    started_s: float
    window_start_s: float
    window_end_s: float
    is_steady: bool
    client: ClientHealth
    schema_version: int = SCHEMA_VERSION


def file_name(rung: RungRecord) -> str:
    """The file of a rung: `rung-0-c64.parquet`."""
    return f"rung-{rung.position}-c{rung.concurrency}.parquet"


def rung_bytes(rung: RungRecord) -> Buffer:
    """The rung's file, without the values of its power samples."""
    load = rung.load
    head = RungHead(
        position=rung.position,
        concurrency=rung.concurrency,
        started_s=load.started_s,
        window_start_s=load.window_start_s,
        window_end_s=load.window_end_s,
        is_steady=load.is_steady,
        client=load.client,
    )
    metadata = {
        RUNG_KEY: json.dumps(encode(head), allow_nan=False).encode(),
        POWER_KEY: _pack_keys([key_of(sample) for sample in rung.power]),
    }
    return _table_bytes(_request_schema().with_metadata(metadata), load.records)


def power_bytes(samples: Iterable[PowerSample]) -> Buffer:
    """The power table: sorted by time, the first reading of each GPU and time."""
    unique: dict[PowerKey, PowerSample] = {}
    for sample in samples:
        unique.setdefault(key_of(sample), sample)
    return _table_bytes(_power_schema(), [unique[key] for key in sorted(unique)])


def read_rung(path: Path, power: PowerTable) -> RungRecord:
    """The rung as it was written. Raises StudyError when the file is damaged."""
    table = _read_table(path, REMEDY)
    try:
        head = decode(RungHead, json.loads(table.schema.metadata[RUNG_KEY]))
        samples = tuple(_pick(table.schema.metadata, power))
        records = tuple(_request(row) for row in table.to_pylist())
    except UNUSABLE as error:
        raise damaged(path, _why(error), REMEDY) from error
    load = LoadRun(
        records=records,
        started_s=head.started_s,
        window_start_s=head.window_start_s,
        window_end_s=head.window_end_s,
        is_steady=head.is_steady,
        client=head.client,
    )
    return RungRecord(head.position, head.concurrency, load, samples)


def samples_of(path: Path, power: PowerTable) -> list[PowerSample]:
    """The power samples of the rung in this file, without reading its requests."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return _pick(parquet.read_schema(path).metadata, power)
    except (OSError, *UNUSABLE, pa.ArrowException) as error:
        raise damaged(path, _why(error), REMEDY) from error


def read_power(path: Path) -> dict[PowerKey, PowerSample]:
    """The samples of a trial by time and GPU; empty when there is no file."""
    if not path.exists():
        return {}
    try:
        samples = [PowerSample(**row) for row in _read_table(path, POWER_REMEDY).to_pylist()]
    except TypeError as error:
        raise damaged(path, error, POWER_REMEDY) from error
    return {key_of(sample): sample for sample in samples}


def _pick(metadata: Mapping[bytes, bytes], power: PowerTable) -> list[PowerSample]:
    return [power[key] for key in _unpack_keys(metadata[POWER_KEY])]


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing in it or in power.parquet"
    return str(error)


def _request(row: dict[str, Any]) -> RequestRecord:
    status, token_s = RequestStatus(row.pop("status")), tuple(row.pop("token_s"))
    return RequestRecord(**row, status=status, token_s=token_s)


def key_of(sample: PowerSample) -> PowerKey:
    """What identifies a reading within a trial."""
    return (sample.time_s, sample.gpu_uuid)


def _table_bytes(schema: Any, rows: Sequence[RequestRecord | PowerSample]) -> Buffer:  # noqa: ANN401
    import pyarrow as pa
    from pyarrow import parquet

    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns, schema=schema), sink, compression="zstd")
    content: Buffer = sink.getvalue()
    return content


def _read_table(path: Path, remedy: str) -> Any:  # noqa: ANN401 - pyarrow ships no types
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, error, remedy) from error


def _request_schema() -> Any:  # noqa: ANN401 - pyarrow ships no types
    import pyarrow as pa

    return pa.schema(
        [
            ("request_id", pa.string()),
            ("replica", pa.int32()),
            ("send_s", pa.float64()),
            ("first_token_s", pa.float64()),
            ("end_s", pa.float64()),
            ("token_s", pa.list_(pa.float64())),
            ("prompt_tokens", pa.int64()),
            ("output_tokens", pa.int64()),
            ("wanted_tokens", pa.int64()),
            ("cached_tokens", pa.int64()),
            ("status", pa.string()),
            ("error", pa.string()),
        ]
    )


def _power_schema() -> Any:  # noqa: ANN401 - pyarrow ships no types
    import pyarrow as pa

    return pa.schema(
        [
            ("time_s", pa.float64()),
            ("gpu_uuid", pa.string()),
            ("power_w", pa.float64()),
            ("energy_j", pa.float64()),
            ("utilization", pa.float64()),
            ("memory_used_bytes", pa.int64()),
            ("sm_clock_mhz", pa.float64()),
            ("throttled", pa.bool_()),
            ("foreign_pid", pa.int64()),
        ]
    )


def _pack_keys(keys: Sequence[PowerKey]) -> bytes:
    """Times as they are in memory and GPUs by number: exact, and small when compressed."""
    gpus = list(dict.fromkeys(gpu for _, gpu in keys))
    number = {gpu: index for index, gpu in enumerate(gpus)}
    times = struct.pack(f"<{len(keys)}d", *(time_s for time_s, _ in keys))
    order = struct.pack(f"<{len(keys)}H", *(number[gpu] for _, gpu in keys))
    packed = base64.b64encode(zlib.compress(times + order)).decode()
    return json.dumps({"gpus": gpus, "count": len(keys), "keys": packed}).encode()


def _unpack_keys(content: bytes) -> list[PowerKey]:
    document = json.loads(content)
    count, gpus = document["count"], document["gpus"]
    raw = zlib.decompress(base64.b64decode(document["keys"]))
    times = struct.unpack_from(f"<{count}d", raw)
    order = struct.unpack_from(f"<{count}H", raw, 8 * count)
    return [(time_s, gpus[index]) for time_s, index in zip(times, order, strict=True)]
