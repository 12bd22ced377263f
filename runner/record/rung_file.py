"""Rungs, power and batch samples as Parquet tables that read back exactly. Used by store.py alone.

A rung's requests are the rows of its file, `restart` says of which restart of its load; what
belongs to the restarts themselves (window, client health) and the keys of the rung's power samples
are in the file's key-value metadata. The samples of
all rungs of a trial are one table, each reading once, sorted by time. What the servers said of
their batches is one table too, in which `rung` says to which rung a row belongs.
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
    BatchSample,
    ClientHealth,
    LoadRun,
    LoadStart,
    PowerSample,
    RequestRecord,
    RequestStatus,
    RungRecord,
)

SCHEMA_VERSION = 2
RESTART = "restart"
RUNG = "rung"
RUNG_KEY = b"runner.rung"
POWER_KEY = b"runner.power_keys"
REMEDY = "Delete it and continue the study: this rung is measured again"

BATCH_REMEDY = (
    "Delete it and continue the study: only what the servers said of their batches is lost"
)
POWER_REMEDY = "Delete it and the rungs beside it, then continue the study: they are measured again"
UNUSABLE = (TypeError, ValueError, KeyError, IndexError, struct.error, zlib.error)

PowerKey: TypeAlias = tuple[float, str]
PowerTable: TypeAlias = Mapping[PowerKey, PowerSample]
BatchTable: TypeAlias = Mapping[int, Sequence[BatchSample]]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadHead:
    """What a rung's file says of one restart besides its requests."""

    started_s: float
    window_start_s: float
    window_end_s: float
    is_steady: bool
    client: ClientHealth
    start: LoadStart
    cut_below: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RungHead:
    """What a rung's file says besides its requests."""

    position: int
    concurrency: int
    loads: tuple[LoadHead, ...]
    schema_version: int = SCHEMA_VERSION


def file_name(rung: RungRecord) -> str:
    """The file of a rung: `rung-0-c64.parquet`."""
    return f"rung-{rung.position}-c{rung.concurrency}.parquet"


def rung_bytes(rung: RungRecord) -> Buffer:
    """The rung's file, without the values of its power samples."""
    head = RungHead(rung.position, rung.concurrency, tuple(map(_head_of, rung.loads)))
    metadata = {
        RUNG_KEY: json.dumps(encode(head), allow_nan=False).encode(),
        POWER_KEY: _pack_keys([key_of(sample) for sample in rung.power]),
    }
    rows = [(record, number) for number, load in enumerate(rung.loads) for record in load.records]
    schema = _request_schema().with_metadata(metadata)
    columns = _columns(schema.names[:-1], [record for record, _ in rows])
    return _table_bytes(schema, {**columns, RESTART: [number for _, number in rows]})


def power_bytes(samples: Iterable[PowerSample]) -> Buffer:
    """The power table: sorted by time, the first reading of each GPU and time."""
    unique: dict[PowerKey, PowerSample] = {}
    for sample in samples:
        unique.setdefault(key_of(sample), sample)
    schema = _power_schema()
    rows = [unique[key] for key in sorted(unique)]
    return _table_bytes(schema, _columns(schema.names, rows))


def batch_bytes(samples: BatchTable) -> Buffer:
    """The batch table: the rows of each rung in their own order."""
    rows = [(sample, position) for position in sorted(samples) for sample in samples[position]]
    schema = _batch_schema()
    columns = _columns(schema.names[:-1], [sample for sample, _ in rows])
    return _table_bytes(schema, {**columns, RUNG: [position for _, position in rows]})


def read_batches(path: Path) -> dict[int, list[BatchSample]]:
    """The batch samples of each rung of a trial, by position; empty when there is no file."""
    found: dict[int, list[BatchSample]] = {}
    if not path.exists():
        return found
    try:
        for row in _read_table(path, BATCH_REMEDY).to_pylist():
            found.setdefault(row.pop(RUNG), []).append(BatchSample(**row))
    except (TypeError, KeyError) as error:
        raise damaged(path, error, BATCH_REMEDY) from error
    return found


def read_rung(path: Path, power: PowerTable, batches: BatchTable) -> RungRecord:
    """The rung as it was written. Raises StudyError when the file is damaged."""
    table = _read_table(path, REMEDY)
    try:
        document = json.loads(table.schema.metadata[RUNG_KEY])
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"it has schema_version {document['schema_version']}")
        head = decode(RungHead, document)
        samples = tuple(_pick(table.schema.metadata, power))
        records: list[list[RequestRecord]] = [[] for _ in head.loads]
        for row in table.to_pylist():
            records[row.pop(RESTART)].append(_request(row))
    except UNUSABLE as error:
        raise damaged(path, _why(error), REMEDY) from error
    loads = tuple(map(_load_of, head.loads, records))
    told = tuple(batches.get(head.position, ()))
    return RungRecord(head.position, head.concurrency, loads, samples, told)


def _head_of(load: LoadRun) -> LoadHead:
    return LoadHead(**{f.name: getattr(load, f.name) for f in dataclasses.fields(LoadHead)})


def _load_of(head: LoadHead, records: Sequence[RequestRecord]) -> LoadRun:
    fields = {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
    return LoadRun(records=tuple(records), **fields)


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


def _columns(names: Sequence[str], rows: Sequence[object]) -> dict[str, list[object]]:
    return {name: [getattr(row, name) for row in rows] for name in names}


def _table_bytes(schema: Any, columns: Mapping[str, list[Any]]) -> Buffer:  # noqa: ANN401
    import pyarrow as pa
    from pyarrow import parquet

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
            ("due_s", pa.float64()),
            (RESTART, pa.int32()),
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


def _batch_schema() -> Any:  # noqa: ANN401 - pyarrow ships no types
    import pyarrow as pa

    return pa.schema(
        [
            ("time_s", pa.float64()),
            ("replica", pa.int32()),
            ("dp_rank", pa.int32()),
            ("running", pa.int32()),
            ("waiting", pa.int32()),
            ("in_graph", pa.bool_()),
            ("kv_usage", pa.float64()),
            ("retracted", pa.int32()),
            ("graph_passes", pa.int64()),
            ("eager_passes", pa.int64()),
            ("paused_s", pa.float64()),
            ("late_share", pa.float64()),
            (RUNG, pa.int32()),
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
