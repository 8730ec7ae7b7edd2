"""Files of lines: JSON objects, CSV records, plain texts. Rows begin at offsets of the (uncompressed) file."""

from __future__ import annotations

import csv
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from bei.bulk.sources.columnar import without_columns
from bei.bulk.sources.kinds import JSON_VALUES, STRINGS, ColumnKinds
from bei.bulk.sources.rows import Columns, Open, RowPlace, RowRange, Rows
from bei.errors import BeiError, JobInputError, MalformedRequestError
from bei.utils.surrogates import check_characters

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self

# A longer line is a bad row, and is passed over without being held.
MOST_LINE_BYTES = 1 << 26
# The types of the columns are those of so many rows.
SAMPLED_ROWS = 1000
_ROWS_AT_ONCE = 1024
_MARK = b"\xef\xbb\xbf"  # what some editors put in front of UTF-8


class Record(NamedTuple):
    """A row as it stands in the file: where it begins, its bytes with the line break, and its values or its error."""

    offset: int
    num_bytes: int
    values: Mapping[str, object]
    error: BeiError | None = None


class Lines:
    """The lines of a file from ``stop`` on: ``start`` and ``stop`` are where the last one begins, and the next one.

    A line of more than ``MOST_LINE_BYTES`` is None. ``seen`` gets all bytes that are read.
    """

    def __init__(self, stream: IO[bytes], stop: int = 0, seen: Callable[[bytes], object] | None = None) -> None:
        self.start = 0
        self.stop = stop
        self._stream = stream
        self._seen = seen
        self._again: list[tuple[bytes | None, int]] = []
        stream.seek(stop)

    def __iter__(self) -> Iterator[bytes | None]:
        return self

    def __next__(self) -> bytes | None:
        self.start = self.stop
        if self._again:
            line, num_bytes = self._again.pop()
            self.stop += num_bytes
            return line
        if not (line := self._part()):
            raise StopIteration
        self.stop += len(line)
        if len(line) < MOST_LINE_BYTES or line.endswith(b"\n"):
            return line if self.start else line.removeprefix(_MARK)
        while not line.endswith(b"\n") and (line := self._part()):
            self.stop += len(line)
        return None

    def put_back(self, taken: Seq[tuple[bytes | None, int]]) -> None:
        """Give the last lines again, each with its bytes: a packed file cannot go back in good time."""
        self.stop -= sum(num_bytes for _, num_bytes in taken)
        self._again += reversed(taken)

    def _part(self) -> bytes:
        part = self._stream.readline(MOST_LINE_BYTES)
        if self._seen is not None:
            self._seen(part)
        return part


class LineFile(ABC):
    """Rows of a file of lines."""

    _kinds: ClassVar = STRINGS

    def __init__(self, name: str, open_file: Open) -> None:
        self.name = name
        self.digest = ""
        self._open = open_file

    @abstractmethod
    def _records(self, lines: Lines, columns: Seq[str]) -> Iterator[Record]:
        """The rows of ``lines``. ``columns``: of which a row has one value."""

    def _begun(
        self,
        stream: IO[bytes],
        offset: int,
        seen: Callable[[bytes], object] | None = None,
        columns: Seq[str] = (),
    ) -> Iterator[Record]:
        """The rows from ``offset`` on, 0 or where a row begins. ``columns``: as ``_records`` has them."""
        return self._records(Lines(stream, offset, seen), columns)

    @classmethod
    @abstractmethod
    def schema(cls, files: Seq[Self], columns: Columns) -> pa.Schema:
        """As ``RowFile`` has it."""

    @classmethod
    def kinds(cls, files: Seq[Self], columns: Columns) -> tuple[str, Mapping[str, ColumnKinds]]:
        """As ``RowFile`` has it; which columns there are is not looked at."""
        return files[0].name, dict.fromkeys(columns.read, cls._kinds)

    def pieces(self, columns: Columns) -> Generator[RowRange, None, None]:
        content = hashlib.sha256()
        try:
            with self._open() as stream:
                for record in self._begun(stream, 0, content.update):
                    yield RowRange(1, record.num_bytes, record.offset)
        finally:  # also where no more rows are wanted
            self.digest = content.hexdigest()

    def rows(self, columns: Columns, schema: pa.Schema, start: RowPlace) -> Iterator[Rows]:
        """As ``RowFile`` has it. A value that is not of its column's type makes its row a bad one."""
        with self._open() as stream:
            records = self._begun(stream, start.offset, columns=(*columns.read, *columns.copied))
            while part := list(islice(records, _ROWS_AT_ONCE)):
                yield _rows_of(part, columns, schema)


class JsonLines(LineFile):
    """A JSON object in each line; blank lines are no rows."""

    _kinds: ClassVar = JSON_VALUES
    _decoder: ClassVar = msgspec.json.Decoder(dict[str, Any])

    @classmethod
    def schema(cls, files: Seq[Self], columns: Columns) -> pa.Schema:
        """As ``RowFile`` has it: the types of the first rows, in the order of the files. Where these are all null,
        strings. Later rows may lack a column, and have other types: then they are bad ones."""
        import pyarrow as pa

        with closing(_all_records(files)) as records:
            first = [*islice(records, SAMPLED_ROWS)]
        sample = [one.values for one in first if one.error is None]
        if first and not sample:
            raise JobInputError(
                f"None of the first {len(first):,} lines, from {files[0].name} on, is a JSON object: is this plain "
                "text? Give --input-format text. Or a JSON array? Write each of its objects in a line. The first one: "
                f"{first[0].error}"
            )
        sampled = f"the first {len(sample)} rows, from {files[0].name} on,"
        fields = []
        for name in (*columns.read, *columns.copied):
            if sample and not any(name in values for values in sample):
                raise JobInputError(
                    f"No {name!r} is in {sampled} which have "
                    f"{', '.join(dict.fromkeys(key for values in sample for key in values))}: name another one."
                )
        for name in columns.copied:
            try:
                found = pa.array([values.get(name) for values in sample]).type
            except (pa.ArrowException, OverflowError) as error:
                raise JobInputError(
                    f"{name!r} has several types in {sampled} and a column of the output has one: leave it out, or "
                    f"make them alike ({error})."
                ) from error
            fields.append((name, pa.string() if pa.types.is_null(found) else found))
        return pa.schema(fields)

    def _records(self, lines: Lines, columns: Seq[str]) -> Iterator[Record]:
        keys = {msgspec.json.encode(name): name for name in columns}
        for line in lines:
            num_bytes = lines.stop - lines.start
            if line is None:
                yield Record(lines.start, num_bytes, {}, _too_long())
            elif line.strip():
                values: Mapping[str, object] = {}
                wrong = None
                try:
                    values = self._decoder.decode(line)
                    for key, name in keys.items():
                        if line.count(key) > 1 and _is_twice(line, name):  # the first is rare, the second slow
                            wrong = MalformedRequestError(f"The line has {name!r} twice: leave one out.", name)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    wrong = MalformedRequestError(f"The line is not a JSON object: {error}.")
                yield Record(lines.start, num_bytes, {} if wrong else values, wrong)


def _is_twice(line: bytes, name: str) -> bool:
    """True if the object of ``line`` has the key ``name`` twice, of which decoders keep the last."""
    outer: list[tuple[str, object]] = []

    def keep(pairs: list[tuple[str, object]]) -> None:
        outer[:] = pairs  # the outermost object's come last

    json.loads(line, object_pairs_hook=keep, parse_int=len, parse_float=len)
    return sum(key == name for key, _ in outer) > 1


class TextLines(LineFile):
    """A text in each line. Empty ones are rows too, and bad ones, so that a row's number is its line's."""

    @classmethod
    def schema(cls, files: Seq[Self], columns: Columns) -> pa.Schema:
        """As ``RowFile`` has it: no column."""
        import pyarrow as pa

        if columns != Columns():
            raise JobInputError(
                f"{files[0].name} is a text file, which has no columns: leave out the flags that name some."
            )
        return pa.schema([])

    def _records(self, lines: Lines, columns: Seq[str]) -> Iterator[Record]:
        for line in lines:
            num_bytes = lines.stop - lines.start
            text, error = ("", _too_long()) if line is None else _decoded(line)
            yield Record(lines.start, num_bytes, {"text": text.rstrip("\r\n")}, error)


# Each quote that is not closed may have the rest of a file read once more, up to the longest field.
_MOST_READ_ANEW_BYTES = 8 * MOST_LINE_BYTES


class CsvRecords(LineFile):
    """Records of RFC 4180 behind a header. All values are strings; empty lines are no rows, and a file of such alone
    needs no header."""

    delimiter = ","

    @classmethod
    def schema(cls, files: Seq[Self], columns: Columns) -> pa.Schema:
        """As ``RowFile`` has it: strings."""
        import pyarrow as pa

        for file in files:
            with file._open() as stream:
                names = file._header(_CsvLines(Lines(stream)))
            for name in (*columns.read, *columns.copied) if names else ():
                if name not in names:
                    raise JobInputError(
                        f"{file.name} has no column {name!r}; it has {', '.join(names)}: name another one."
                    )
        return pa.schema([(name, pa.string()) for name in columns.copied])

    def _begun(
        self,
        stream: IO[bytes],
        offset: int,
        seen: Callable[[bytes], object] | None = None,
        columns: Seq[str] = (),
    ) -> Iterator[Record]:
        lines = Lines(stream, 0, seen)
        names = self._header(_CsvLines(lines))
        return self._named(lines if offset <= lines.stop else Lines(stream, offset, seen), names)

    def _records(self, lines: Lines, columns: Seq[str]) -> Iterator[Record]:
        return self._named(lines, self._header(_CsvLines(lines)))

    def _named(self, lines: Lines, names: Seq[str]) -> Iterator[Record]:
        left = _MOST_READ_ANEW_BYTES
        while True:
            start, text = lines.stop, _CsvLines(lines)
            values: list[str] | None = []
            try:
                # A reader for each: after an error it would go on within a field.
                values = next(self._reader(text), None)
            except csv.Error as error:
                fault = f"The record is not CSV: {error}."
                if len(text.taken) > 1:
                    # A quote in the first line may be none of CSV's, and the lines behind it records of their own.
                    fault += f" It had {len(text.taken):,} lines by its quotes; those behind the first are read anew."
                    left -= sum(num_bytes for _, num_bytes in text.taken[1:])
                    if left < 0:
                        raise JobInputError(
                            f"{self.name} has many quotes that are not closed, one at byte {start:,}: write the file "
                            "anew with a library for CSV."
                        ) from error
                    lines.put_back(text.taken[1:])
                text.error = MalformedRequestError(fault)
            if values is None:
                return
            if values and len(values) != len(names):
                fault = f"The record has {len(values)} fields, and the header {len(names)}."
                if len(text.taken) > 1:
                    fault += f" It has {len(text.taken):,} lines by its quotes: is one of them not closed?"
                text.error = text.error or MalformedRequestError(fault)
            if text.error is not None:
                yield Record(start, lines.stop - start, {}, text.error)
            elif values:
                yield Record(start, lines.stop - start, dict(zip(names, values, strict=True)))

    def _header(self, text: _CsvLines) -> list[str]:
        """The names of the columns; none: the file has no records."""
        try:
            names = next(filter(None, self._reader(text)), [])
        except csv.Error as error:
            raise JobInputError(f"{self.name} has no CSV header: {error}.") from error
        if len({*names}) < len(names):
            raise JobInputError(f"{self.name} has two columns of one name: {', '.join(names)}.")
        return names

    def _reader(self, text: Iterator[str]) -> Iterator[list[str]]:
        csv.field_size_limit(MOST_LINE_BYTES)
        return csv.reader(text, delimiter=self.delimiter, strict=True)


class TsvRecords(CsvRecords):
    """CSV with tabs."""

    delimiter = "\t"


class _CsvLines:
    """Lines as the standard library's reader takes them. ``taken``: those so far, each with its bytes; ``error``: of
    one of them."""

    def __init__(self, lines: Lines) -> None:
        self.error: BeiError | None = None
        self.taken: list[tuple[bytes | None, int]] = []
        self._lines = lines

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.taken.append((line, self._lines.stop - self._lines.start))
        text, error = ("\n", _too_long()) if line is None else _decoded(line)
        self.error = self.error or error
        return text


def _all_records(files: Seq[LineFile]) -> Generator[Record, None, None]:
    for file in files:
        with file._open() as stream:
            yield from file._begun(stream, 0)


def _rows_of(records: Seq[Record], columns: Columns, schema: pa.Schema) -> Rows:
    import pyarrow as pa

    errors = {place: record.error for place, record in enumerate(records) if record.error is not None}
    read = [[record.values.get(name) for record in records] for name in columns.read]
    arrays = []
    for field in schema:
        values = [record.values.get(field.name) for record in records]
        try:
            array = pa.array(values, field.type) if _are_of(values, field.type) else _fitting(values, field, errors)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            array = _fitting(values, field, errors)
        arrays.append(array)
    copied = pa.table(arrays, schema) if arrays else without_columns(len(records))
    return Rows(columns.inputs(read), copied, errors)


def _fitting(values: Seq[object], field: pa.Field, errors: dict[int, BeiError]) -> pa.Array:
    """``values`` as the type of ``field``, null where one is not of it, which becomes an error of its row."""
    import pyarrow as pa

    fitting: list[object] = []
    for place, value in enumerate(values):
        try:
            if isinstance(value, str):
                check_characters(value, field.name, field.name)
            fits = pa.array([value], field.type) is not None and _are_of([value], field.type)
        except (pa.ArrowException, OverflowError, BeiError):
            fits = False
        if not fits:
            fault = f"{field.name} is not of the type {field.type}, which the first rows have."
            errors.setdefault(place, MalformedRequestError(fault, field.name))
            value = None
        fitting.append(value)
    return pa.array(fitting, field.type)


def _are_of(values: Iterable[object], kind: pa.DataType) -> bool:
    """False where Arrow would leave something of a value out: the decimals of a number in a column of whole ones, keys
    that an object of the first rows has not."""
    import pyarrow as pa

    if pa.types.is_integer(kind):
        return not any(isinstance(value, float) and not value.is_integer() for value in values)
    if pa.types.is_list(kind):
        return all(_are_of(value, kind.value_type) for value in values if isinstance(value, list))
    if pa.types.is_struct(kind):
        types = {field.name: field.type for field in kind}
        objects = [value for value in values if isinstance(value, dict)]
        return all(value.keys() <= types.keys() for value in objects) and all(
            _are_of([value.get(name) for value in objects], types[name]) for name in types
        )
    return True


def _decoded(line: bytes) -> tuple[str, BeiError | None]:
    try:
        return line.decode(), None
    except UnicodeDecodeError as error:
        return line.decode(errors="replace"), MalformedRequestError(f"The row is not UTF-8: {error}.")


def _too_long() -> BeiError:
    return MalformedRequestError(f"The line has more than {MOST_LINE_BYTES:,} bytes.")
