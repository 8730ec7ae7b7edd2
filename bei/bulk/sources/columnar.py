"""Files with a schema, as of Parquet and Arrow: rows of columns with types, counted without reading them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from bei.bulk.sources.arrow_types import with_changed_parts
from bei.bulk.sources.kinds import ColumnKinds, kinds_of
from bei.bulk.sources.rows import Columns, RowPlace, RowRange, Rows
from bei.errors import JobInputError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from typing_extensions import Self

ROWS_AT_ONCE = 2048
_BUFFER_BYTES = 1 << 20
# Of Parquet: the length of the footer and the letters PAR1.
_TAIL_BYTES = 8
_MOST_FOOTER_BYTES = 1 << 28


class FileTypes(NamedTuple):
    """``schema``: of all columns."""

    schema: pa.Schema
    has_rows: bool


class ColumnarFile(ABC):
    """Rows of a file with a schema."""

    digest = ""

    def __init__(self, name: str, open_file: Callable[[], AbstractContextManager[Any]]) -> None:
        self.name = name
        self._open = open_file

    @abstractmethod
    def _types(self) -> FileTypes:
        """What the file says of itself."""

    @abstractmethod
    def _batches(self, names: list[str], first_row: int) -> Iterator[pa.RecordBatch]:
        """The columns ``names``, from a batch on that holds ``first_row`` or begins there; the first batch is cut."""

    @abstractmethod
    def pieces(self, columns: Columns) -> Generator[RowRange, None, None]:
        """As ``RowFile`` has it."""

    @classmethod
    def schema(cls, files: Seq[Self], columns: Columns) -> pa.Schema:
        import pyarrow as pa

        telling = _telling(files, (*columns.read, *columns.copied))
        _, types = next(telling)
        fields = [types.field(name).remove_metadata() for name in columns.copied]
        schema = pa.schema([field.with_type(_checked_plain(field)) for field in fields])
        for file, types in telling:
            for field in schema:
                own = _plain(types.field(field.name).type)
                if field.type != own:
                    raise JobInputError(
                        f"The column {field.name!r} is {own} in {file.name} and {field.type} in the files before: "
                        "make them alike, or give the files to two jobs."
                    )
        return schema

    @classmethod
    def kinds(cls, files: Seq[Self], columns: Columns) -> tuple[str, Mapping[str, ColumnKinds]]:
        """As ``RowFile`` has it: the first file with rows tells them."""
        file, types = next(_telling(files, columns.read))
        return file.name, {name: kinds_of(types.field(name).type) for name in columns.read}

    def rows(self, columns: Columns, schema: pa.Schema, start: RowPlace) -> Iterator[Rows]:
        import pyarrow as pa

        names = list(dict.fromkeys((*columns.read, *columns.copied)))
        with self._reading():
            for batch in self._batches(names, start.row):
                read = [batch.column(name).to_pylist() for name in columns.read]
                arrays = [_as_plain(batch.column(name), schema.field(name).type) for name in columns.copied]
                copied = pa.table(arrays, schema) if arrays else without_columns(batch.num_rows)
                yield Rows(columns.inputs(read), copied, {})

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A context in which pyarrow's errors become JobInputError."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise JobInputError(f"{self.name} cannot be read: {error}") from error


class ParquetRows(ColumnarFile):
    """A Parquet file."""

    def pieces(self, columns: Columns) -> Generator[RowRange, None, None]:
        with self._reading(), self._open() as stream:
            content = hashlib.sha256(_footer(stream))
            metadata = self._parquet(stream).metadata
            wanted = {*columns.read, *columns.copied}
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                parts = [group.column(place) for place in range(group.num_columns)]
                parts = [part for part in parts if _is_within(part.path_in_schema, wanted)]
                # Other values may have the same sizes, which are all that the footer tells.
                for block in chain.from_iterable(_pages(stream, part) for part in parts):
                    content.update(block)
                self.digest = content.hexdigest()
                yield RowRange(group.num_rows, sum(part.total_uncompressed_size for part in parts))
            self.digest = content.hexdigest()

    def _types(self) -> FileTypes:
        with self._open() as stream:
            file = self._parquet(stream)
            return FileTypes(file.schema_arrow, file.metadata.num_rows > 0)

    def _batches(self, names: list[str], first_row: int) -> Iterator[pa.RecordBatch]:
        with self._open() as stream:
            file = self._parquet(stream)
            counts = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
            group = 0
            while group < len(counts) and first_row >= counts[group]:
                first_row -= counts[group]
                group += 1
            groups = list(range(group, len(counts)))
            if not groups:
                return
            for batch in file.iter_batches(ROWS_AT_ONCE, groups, names, use_threads=False):
                if first_row < batch.num_rows:
                    yield batch.slice(first_row)
                first_row = max(0, first_row - batch.num_rows)

    def _parquet(self, stream: IO[bytes]) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        # Without pre-buffering: a row group may have gigabytes, and its pages are read as they are needed.
        return pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)


class ArrowRows(ColumnarFile):
    """An Arrow IPC file (Feather, version 2)."""

    def pieces(self, columns: Columns) -> Generator[RowRange, None, None]:
        import pyarrow as pa

        content = hashlib.sha256()
        with self._reading(), self._open() as stream:
            while block := stream.read(_BUFFER_BYTES):
                content.update(block)
            stream.seek(0)
            self.digest = content.hexdigest()
            file = pa.ipc.open_file(stream)
            for index in range(file.num_record_batches):
                batch = file.get_batch(index)
                yield RowRange(batch.num_rows, batch.nbytes)

    def _types(self) -> FileTypes:
        import pyarrow as pa

        with self._open() as stream:
            file = pa.ipc.open_file(stream)
            has_rows = any(file.get_batch(index).num_rows for index in range(file.num_record_batches))
            return FileTypes(file.schema, has_rows)

    def _batches(self, names: list[str], first_row: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        with self._open() as stream:
            file = pa.ipc.open_file(stream)
            for index in range(file.num_record_batches):
                batch = file.get_batch(index).select(names)
                while first_row < batch.num_rows:
                    part = batch.slice(first_row, ROWS_AT_ONCE)
                    first_row += part.num_rows
                    yield part
                first_row -= batch.num_rows


def _telling(files: Seq[ColumnarFile], names: Seq[str]) -> Iterator[tuple[ColumnarFile, pa.Schema]]:
    """The files with rows and their types; where none has any, the first one. Raises JobInputError where such a file
    lacks one of ``names``."""

    def checked(file: ColumnarFile, types: pa.Schema) -> tuple[ColumnarFile, pa.Schema]:
        for name in names:
            if types.get_field_index(name) < 0:
                raise JobInputError(
                    f"{file.name} has no column {name!r}; it has {', '.join(types.names)}: name another one."
                )
        return file, types

    empty: pa.Schema | None = None
    is_told = False
    for file in files:
        with file._reading():
            types, has_rows = file._types()
        if has_rows:
            is_told = True
            yield checked(file, types)
        elif empty is None:
            empty = types
    if not is_told:
        yield checked(files[0], empty)


def without_columns(num_rows: int) -> pa.Table:
    """A table of ``num_rows`` rows and no columns."""
    import pyarrow as pa

    return pa.table({"": pa.nulls(num_rows)}).select([])


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the same values that Arrow's functions and the output formats know, where it has another one."""
    import pyarrow as pa

    if pa.types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.string() if pa.types.is_string_view(kind) else pa.binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain(kind.value_type), kind.ordered)
    return with_changed_parts(kind, _plain)


def _checked_plain(field: pa.Field) -> pa.DataType:
    """The plain type of a column that is copied. Raises JobInputError where Arrow has no way to it."""
    import pyarrow as pa

    kind = _plain(field.type)
    try:
        _as_plain(pa.nulls(1, field.type), kind)
    except pa.ArrowException as error:
        raise JobInputError(
            f"Values of the type {field.type}, which the column {field.name!r} has, cannot be copied: leave it out of "
            f"--columns ({error})."
        ) from error
    return kind


def _as_plain(array: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    return (pc.run_end_decode(array) if pa.types.is_run_end_encoded(array.type) else array).cast(kind)


def _is_within(path: str, columns: Set[str]) -> bool:
    """True if the part of a column at ``path`` belongs to one of ``columns``, whose names may have dots too."""
    steps = path.split(".")
    return any(".".join(steps[:end]) in columns for end in range(1, len(steps) + 1))


def _footer(stream: IO[bytes]) -> bytes:
    """A Parquet file's footer, which has the offset and the size of every page's column."""
    size = stream.seek(0, 2)
    stream.seek(max(0, size - _TAIL_BYTES))
    length = int.from_bytes(stream.read(4), "little")
    if not 0 < length <= min(_MOST_FOOTER_BYTES, size - _TAIL_BYTES):
        raise ValueError("it has no Parquet footer")
    stream.seek(size - _TAIL_BYTES - length)
    footer = stream.read(length)
    stream.seek(0)
    return footer


def _pages(stream: IO[bytes], part: pq.ColumnChunkMetaData) -> Iterator[bytes]:
    """The pages of a column in a row group, as they are stored."""
    start, left = part.data_page_offset, part.total_compressed_size
    if part.has_dictionary_page and 0 < (part.dictionary_page_offset or 0) < start:  # as Arrow reads it
        start = part.dictionary_page_offset
    stream.seek(start)
    while left > 0 and (block := stream.read(min(left, _BUFFER_BYTES))):
        yield block
        left -= len(block)
