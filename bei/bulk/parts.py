"""Output formats: the files of a shard, and how one sees that a shard is done."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import orjson

from bei.bulk.folder import JobFolder
from bei.bulk.sources.arrow_types import with_changed_parts
from bei.errors import ConfigError, JobInputError

if TYPE_CHECKING:
    import pyarrow as pa

# Readers of folders (Arrow's, Spark's, DuckDB's) pass over names that begin with an underscore.
PLAN = "_plan.json"
SUCCESS = "_SUCCESS"
_METADATA = b"bei"


class ShardRecord(msgspec.Struct, frozen=True):
    """What was done in a shard of the plan with the digest ``plan``. ``rows``: in the output; ``dead``: rows of the
    input without an answer; ``truncated``: inputs that were cut; ``tokens``: that the engine has run."""

    plan: str
    shard: int
    rows: int
    dead: int
    truncated: int
    tokens: int


_RECORD = msgspec.json.Decoder(ShardRecord)


class PartFormat(ABC):
    """An output format."""

    ending: str
    package: str | None = None  # besides pyarrow: its version decides what is written

    def part(self, shard: int) -> str:
        """The name of the shard's file."""
        return f"part-{shard:05}{self.ending}"

    @abstractmethod
    def files(self, table: pa.Table, record: ShardRecord) -> Iterator[tuple[str, bytes | memoryview]]:
        """The shard's files in the order in which they must appear: with the last one the shard is done."""

    @abstractmethod
    def record(self, folder: JobFolder, shard: int) -> ShardRecord | None:
        """That of a shard that is done; None: it is not, or what is there is no such file."""

    def check(self, fields: Seq[pa.Field], on_error: str) -> None:  # noqa: B027  # most formats hold anything
        """Raise ConfigError where it cannot hold the ``fields`` of the task."""

    def check_columns(self, schema: pa.Schema) -> None:
        """Raise ConfigError where it cannot hold columns that are copied from the input: a row of nulls is tried."""
        import pyarrow as pa

        for field in schema:
            try:
                row = pa.table({field.name: pa.nulls(1, field.type)})
                _ = [*self.files(row.take([0]), ShardRecord("", 0, 1, 0, 0, 0))]
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(
                    f"--output-format {self.ending[1:]} does not hold all values of the type {field.type}, which the "
                    f"column {field.name!r} has: leave it out, or choose another format."
                ) from error

    def finish(self, folder: JobFolder, records: Seq[ShardRecord]) -> None:  # noqa: B027  # most have nothing to add
        """Once all shards are done, before the job is. May be called by several processes."""


class ParquetParts(PartFormat):
    """The record stands in the footer, which a file without its end has not."""

    ending = ".parquet"

    def files(self, table: pa.Table, record: ShardRecord) -> Iterator[tuple[str, bytes | memoryview]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = {**(table.schema.metadata or {}), _METADATA: msgspec.json.encode(record)}
        table = table.replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        floats = [f"{field.name}.list.element" for field in table.schema if _is_float_vector(field.type)]
        strings = [field.name for field in table.schema if pa.types.is_string(field.type)]
        pq.write_table(table, sink, compression="zstd", use_dictionary=strings, use_byte_stream_split=floats)
        yield self.part(record.shard), memoryview(sink.getvalue())

    def record(self, folder: JobFolder, shard: int) -> ShardRecord | None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with suppress(FileNotFoundError), folder.opened(self.part(shard)) as stream, suppress(pa.ArrowException):
            return _decoded((pq.read_metadata(stream).metadata or {}).get(_METADATA, b""))
        return None


class _WithRecordFile(PartFormat):
    """A format whose files have no place for the record: it has a file of its own, behind the part."""

    def files(self, table: pa.Table, record: ShardRecord) -> Iterator[tuple[str, bytes | memoryview]]:
        yield from self._contents(table, record.shard)
        yield record_name(record.shard), msgspec.json.encode(record)

    def record(self, folder: JobFolder, shard: int) -> ShardRecord | None:
        content = folder.read(record_name(shard))
        if content is None or not folder.exists(self.part(shard)):
            return None
        return _decoded(content)

    @abstractmethod
    def _contents(self, table: pa.Table, shard: int) -> Iterator[tuple[str, bytes]]: ...


def record_name(shard: int) -> str:
    """Of a shard's record, where it is a file."""
    return f"_records/part-{shard:05}.json"


class JsonLinesParts(_WithRecordFile):
    """A JSON object for each row."""

    ending = ".jsonl"

    def check_columns(self, schema: pa.Schema) -> None:
        """As ``PartFormat`` has it."""
        _check_for_json(schema)
        super().check_columns(schema)

    def _contents(self, table: pa.Table, shard: int) -> Iterator[tuple[str, bytes]]:
        for name in table.column_names:
            _check_finite(name, table.column(name), self.part(shard))
        columns = [_values(name, table.column(name), self.part(shard)) for name in table.column_names]
        lines = io.BytesIO()
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        for values in zip(*columns, strict=True):
            lines.write(orjson.dumps(dict(zip(table.column_names, values, strict=True)), str, options))
        yield self.part(shard), lines.getvalue()


class NpyParts(_WithRecordFile):
    """Vectors as one array [rows, width], and beside it the other columns in lines of JSON."""

    ending = ".npy"

    def check_columns(self, schema: pa.Schema) -> None:
        """As ``PartFormat`` has it."""
        JsonLinesParts().check_columns(schema)

    def check(self, fields: Seq[pa.Field], on_error: str) -> None:
        import pyarrow as pa

        if len(fields) != 1 or not pa.types.is_fixed_size_list(fields[0].type):
            raise ConfigError("--output-format npy holds dense vectors: choose parquet or jsonl for this task.")
        if on_error == "null":
            raise ConfigError("An array has no null rows: choose another --on-error than null, or --output-format.")

    def _contents(self, table: pa.Table, shard: int) -> Iterator[tuple[str, bytes]]:
        *copied, name = table.column_names
        (beside,) = JsonLinesParts()._contents(table.select(copied), shard)
        yield f"part-{shard:05}.ids.jsonl", beside[1]
        array = io.BytesIO()
        np.save(array, _matrix(table.column(name)), allow_pickle=False)
        yield self.part(shard), array.getvalue()


def _check_for_json(schema: pa.Schema) -> None:
    import pyarrow as pa

    def types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
        yield kind
        for index in range(kind.num_fields):
            yield from types_in(kind.field(index).type)

    is_odd = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    for field in schema:
        are_odd = (*is_odd, pa.types.is_duration, pa.types.is_union)
        if any(is_one(kind) for is_one in are_odd for kind in types_in(field.type)):
            raise ConfigError(
                f"JSON has no form for the type {field.type}, which the column {field.name!r} has: leave it out, or "
                "choose another --output-format."
            )


def _check_finite(name: str, column: pa.ChunkedArray, part: str) -> None:
    """Raise JobInputError where ``column`` has a NaN or an infinity, at any depth: orjson writes them as null."""
    if all(map(_is_finite, column.chunks)):
        return
    row = next(row for row in range(len(column)) if not all(map(_is_finite, column.slice(row, 1).chunks)))
    value = str(column[row].as_py())
    raise JobInputError(
        f"JSON has no form for NaN and infinity, and the column {name!r} has {value[:80]} in row {row} of {part}: "
        "leave the column out, or choose another --output-format."
    )


def _is_finite(array: pa.Array) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_floating(kind):
        return bool(pc.all(pc.is_finite(array.cast(pa.float64()))).as_py() is not False)
    if pa.types.is_dictionary(kind):
        return _is_finite(array.dictionary_decode())
    if pa.types.is_map(kind):
        return _is_finite(array.cast(pa.list_(kind.field(0).type)))
    if pa.types.is_struct(kind) or kind.num_fields == 1:  # lists of all kinds have one
        parts = array.flatten()  # without what is null
        return all(map(_is_finite, parts)) if isinstance(parts, list) else _is_finite(parts)
    return True


def _values(name: str, column: pa.ChunkedArray, part: str) -> list[object]:
    """What orjson writes: rows of vectors as arrays, in as few digits as give the same float32. Raises JobInputError
    for a time that Python does not hold."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type) and not column.null_count:
        element = column.type.value_type
        are_numbers = pa.types.is_integer(element) or element in (pa.float32(), pa.float64())
        if are_numbers and not column.combine_chunks().flatten().null_count:
            return list(_matrix(column))
    values: list[object] = []
    try:
        kind = _without_nanoseconds(column.type)
        for value in column if kind == column.type else column.cast(kind):
            values.append(value.as_py())  # their number tells which one failed
    except (OverflowError, ValueError) as error:  # Arrow's, of a time zone that nobody knows, is a ValueError too
        raise JobInputError(
            f"JSON has no form for the value that the column {name!r} has in row {len(values)} of {part} ({error}): "
            "leave the column out, or choose another --output-format."
        ) from error
    return values


def _without_nanoseconds(kind: pa.DataType) -> pa.DataType:
    """``kind`` with times to the nanosecond as strings: Python has none, but where pandas is there."""
    import pyarrow as pa

    if (pa.types.is_timestamp(kind) or pa.types.is_time64(kind)) and kind.unit == "ns":
        return pa.string()
    if pa.types.is_dictionary(kind):
        plain = _without_nanoseconds(kind.value_type)
        return kind if plain == kind.value_type else plain
    return with_changed_parts(kind, _without_nanoseconds)


def _matrix(column: pa.ChunkedArray) -> np.ndarray[tuple[int, int], np.dtype[np.generic]]:
    """A column of vectors as [rows, width]."""
    flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(flat.reshape(len(column), column.type.list_size))


def _is_float_vector(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind)) and kind.value_type in (pa.float32(), pa.float16())


def _decoded(content: bytes) -> ShardRecord | None:
    try:
        return _RECORD.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
