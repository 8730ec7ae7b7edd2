"""The input of a job: which files, in which order, and the rows of a shard."""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from bei.bulk.file_systems import FileSystem, file_system_of, plain_errors
from bei.bulk.sources.columnar import ArrowRows, ParquetRows
from bei.bulk.sources.kinds import ColumnKinds
from bei.bulk.sources.lance_rows import ENDING as ENDING_OF_LANCE
from bei.bulk.sources.lance_rows import LanceRows, dataset_of, opened_dataset
from bei.bulk.sources.lines import CsvRecords, JsonLines, TextLines, TsvRecords
from bei.bulk.sources.listing import files_below, is_dataset, is_passed_over, is_pattern, kind_of, matching
from bei.bulk.sources.open_file import COMPRESSIONS, opened_file, reaching
from bei.bulk.sources.rows import Columns, RowFile, RowPlace, RowRange, Rows, joined
from bei.bulk.watchdog import watched_store
from bei.errors import JobInputError

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS: Mapping[str, Any] = {
    "parquet": ParquetRows,
    "arrow": ArrowRows,
    "lance": LanceRows,
    "jsonl": JsonLines,
    "csv": CsvRecords,
    "tsv": TsvRecords,
    "text": TextLines,
}
_ENDINGS = {
    **{".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"},
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".txt": "text", ".text": "text"},
    ENDING_OF_LANCE: "lance",
}
# What file systems say of a file that changes with it: S3, disks, Google's, the hub, Azure, WebHDFS, FTP.
_STAMPS = (
    *("ETag", "etag", "mtime", "LastModified", "updated", "blob_id", "last_modified", "modificationTime", "modify"),
)


class InputFile(msgspec.Struct, frozen=True):
    """A file of the input as the plan has it.

    ``name``: below the folder that all files have in common, so that machines may have it in different places.
    ``digest``: of its content. ``stamp`` tells that the file has not changed without reading it: it is compared with
    the one that was seen on this machine or elsewhere, and says nothing if it differs.
    """

    name: str
    size: int
    num_rows: int
    digest: str
    stamp: str


class FoundFile(msgspec.Struct, frozen=True):
    """A file that was listed: its path in ``file_system``."""

    name: str
    path: str
    size: int
    stamp: str


class ShardSize(msgspec.Struct, frozen=True):
    """A shard has at most ``rows``, and ends behind the row with which it has so many ``bytes``. ``max_rows``: those of
    the input that are read; None: all."""

    rows: int
    bytes: int = 1 << 26
    max_rows: int | None = None


class Contents(msgspec.Struct, frozen=True):
    """What there is in the files: their rows (as far as ``size`` asks for them), the types of the columns that are
    copied, as Arrow writes a schema, and where each shard begins."""

    files: list[InputFile]
    schema: bytes
    size: ShardSize
    shards: list[RowPlace]

    @property
    def num_rows(self) -> int:
        """Of all files."""
        return sum(file.num_rows for file in self.files)


class Source:
    """The files of a job's input, of one format, in the order of their names.

    ``patterns``: files, folders (all files below with an ending that is known), patterns with ``*``, also as URLs of
    fsspec. ``form``: the format, None: by the files' endings. ``output``: of the job; files below it are none of the
    input's. Raises JobInputError, MissingDependencyError.
    """

    def __init__(
        self, patterns: Seq[str], columns: Columns, form: str | None = None, output: str | None = None
    ) -> None:
        self.columns = columns
        self._file_system, paths = _found(patterns, form, output)
        names = _names(paths)
        self.files = [
            _described(self._file_system, path, name) for path, name in sorted(zip(paths, names, strict=True))
        ]
        self.form = form or _only_form(paths)

    def contents(self, size: ShardSize) -> Contents:
        """Look through all files. Reads all bytes of those with lines, of Parquet files the footers and the columns."""
        schema: pa.Schema = FORMATS[self.form].schema(self._all_opened(), self.columns)
        files: list[InputFile] = []
        cutter = _Cutter(size)
        room = sys.maxsize if size.max_rows is None else size.max_rows
        for index, found in enumerate(self.files):
            opened = self._opened(found)
            num_rows = 0
            with closing(opened.pieces(self.columns)) as pieces:
                for piece in pieces if room else ():
                    taken = min(piece.num_rows, room)
                    cutter.add(RowPlace(index, num_rows, piece.offset), piece._replace(num_rows=taken))
                    num_rows += taken
                    room -= taken
                    if not room:
                        break
            files.append(InputFile(found.name, found.size, num_rows, opened.digest, found.stamp))
        return Contents(files, schema.serialize().to_pybytes(), size, cutter.shards)

    def kinds(self) -> tuple[str, Mapping[str, ColumnKinds]]:
        found: tuple[str, Mapping[str, ColumnKinds]] = FORMATS[self.form].kinds(self._all_opened(), self.columns)
        return found

    def is_as_before(self, files: Seq[InputFile]) -> bool:
        """True if these are the files, unchanged as far as can be told without reading them."""
        seen = [(file.name, file.size, file.stamp) for file in self.files]
        return seen == [(file.name, file.size, file.stamp) for file in files]

    def check_unchanged(self, places: slice = slice(None)) -> None:
        """Raise JobInputError where a file, of those at ``places``, is not what it was when it was listed."""
        self._file_system.invalidate_cache()
        for file in self.files[places]:
            if _described(self._file_system, file.path, file.name) != file:
                raise JobInputError(f"{file.path} has changed since the job began: give it a folder of its own.")

    def reader(self, contents: Contents) -> Reader:
        """Reads shards of what ``contents`` has seen."""
        return Reader(self._all_opened(), self.columns, contents, self.check_unchanged)

    def _all_opened(self) -> list[RowFile]:
        return [self._opened(found) for found in self.files]

    def _opened(self, found: FoundFile) -> RowFile:
        opener = opened_dataset if self.form == "lance" else opened_file
        opened: RowFile = FORMATS[self.form](found.path, functools.partial(opener, self._file_system, found.path))
        return opened


class Reader:
    """Reads shards. Those that follow each other are read in one go. Not safe in threads. ``check``: raises where files
    at some places have changed."""

    def __init__(
        self, files: Seq[RowFile], columns: Columns, contents: Contents, check: Callable[[slice], None]
    ) -> None:
        import pyarrow as pa

        self._files = files
        self._columns = columns
        self._check = check
        self._counts = [file.num_rows for file in contents.files]
        self._names = [file.name for file in contents.files]
        self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(contents.schema))
        self._starts = contents.shards
        self._rows_before = [0]
        for count in self._counts:
            self._rows_before.append(self._rows_before[-1] + count)
        self._next_row = -1
        self._parts: Iterator[Rows] = iter(())
        self._rest: Rows | None = None

    def bounds(self, shard: int) -> tuple[int, int]:
        """The shard's first row, counted over all files, and the one behind its last."""
        start = self._row(self._starts[shard])
        last = shard + 1 == len(self._starts)
        return start, self._rows_before[-1] if last else self._row(self._starts[shard + 1])

    def file_of(self, row: int) -> tuple[str, int]:
        """The file that has ``row``, as the plan names it, and the row's number there."""
        index = self._file_at(row)
        return self._names[index], row - self._rows_before[index]

    def shard(self, shard: int) -> Rows:
        """All rows of it. Raises JobInputError, also where its files have changed: what was read is not to be kept."""
        start, stop = self.bounds(shard)
        if start != self._next_row:
            self._parts, self._rest = self._from(self._starts[shard]), None
        parts: list[Rows] = []
        missing = stop - start
        while missing:
            part = self._rest or next(self._parts, None)
            if part is None:
                raise JobInputError("The input has fewer rows than when the job was planned: its files have changed.")
            size = part.copied.num_rows
            self._rest = part.sliced(missing, size) if size > missing else None
            parts.append(part.sliced(0, min(missing, size)))
            missing -= min(missing, size)
        self._next_row = stop
        self._check(slice(self._file_at(start), self._file_at(max(start, stop - 1)) + 1))
        return joined(parts)

    def _file_at(self, row: int) -> int:
        return bisect_right(self._rows_before, row) - 1

    def _row(self, place: RowPlace) -> int:
        return self._rows_before[place.file] + place.row

    def _from(self, place: RowPlace) -> Iterator[Rows]:
        """All rows from ``place`` on. A file that has grown or shrunk ends the job."""
        for index in range(place.file, len(self._files)):
            first = place if index == place.file else RowPlace(index, 0)
            num_rows = first.row
            if not self._counts[index]:  # such a file may lack the columns
                continue
            for part in self._files[index].rows(self._columns, self.schema, first):
                num_rows += part.copied.num_rows
                yield part
            if num_rows != self._counts[index]:
                raise JobInputError(
                    f"{self._files[index].name} has {num_rows:,} rows and had {self._counts[index]:,} when the job was "
                    "planned: it has changed."
                )


class _Cutter:
    """Where shards begin: wherever the one before is full."""

    def __init__(self, size: ShardSize) -> None:
        self.shards: list[RowPlace] = []
        self._size = size
        self._rows = self._bytes = 0

    def add(self, place: RowPlace, piece: RowRange) -> None:
        """Rows from ``place`` on, which are taken to be of one size."""
        num_rows, done = piece.num_rows, 0
        a_row = -(-piece.num_bytes // max(1, num_rows))
        while done < num_rows:
            if not self.shards or self._rows >= self._size.rows or self._bytes >= self._size.bytes:
                self.shards.append(RowPlace(place.file, place.row + done, place.offset))
                self._rows = self._bytes = 0
            fitting = -(-(self._size.bytes - self._bytes) // max(1, a_row))
            taken = min(num_rows - done, self._size.rows - self._rows, max(1, fitting))
            self._rows += taken
            self._bytes += taken * a_row
            done += taken


def _found(patterns: Seq[str], form: str | None, output: str | None) -> tuple[FileSystem, list[str]]:
    """The file system and the paths of all files that ``patterns`` mean, but for those below ``output``."""
    file_system: FileSystem = None
    paths: list[str] = []
    for pattern in patterns:
        with _watching(pattern):
            own, path = file_system_of(os.path.expanduser(pattern))
            if file_system is not None and own is not file_system:
                raise JobInputError("All inputs of a job must lie in one file system.")
            file_system = own
            found = _matching(own, path, pattern, form)
            made = frozenset[str]() if output is None else _below(output, own, found)
            if len(made) == len(found):
                raise JobInputError(f"{pattern} has nothing but this job's output: give both folders of their own.")
            paths += [one for one in found if one not in made]
    if len({*paths}) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise JobInputError(f"{twice} is named twice, and its rows would be twice in the output: name it once.")
    return file_system, paths


def _below(output: str, file_system: FileSystem, paths: Seq[str]) -> frozenset[str]:
    """Those of ``paths`` that are below ``output``, which may be in another file system."""
    protocol, known = output.partition("://")[0] if "://" in output else "file", file_system.protocol
    if protocol not in ((known,) if isinstance(known, str) else known):
        return frozenset()
    _, root = file_system_of(os.path.expanduser(output))
    return frozenset(path for path in paths if path.startswith(root.rstrip("/") + "/"))


def _matching(file_system: FileSystem, path: str, pattern: str, form: str | None) -> list[str]:
    kind = kind_of(file_system, path)
    if kind is None:
        found = matching(file_system, path) if is_pattern(path) else []
    elif kind != "directory":  # whatever letters its name has
        found = [path]
    elif form == "lance" or is_dataset(path):
        found = [path.rstrip("/")]
    else:
        below = [one for one in files_below(file_system, path) if not _is_hidden(one, path)]
        found = [one for one in dict.fromkeys(dataset_of(one, path) for one in below) if form or _form_of(one)]
    if not found:
        raise JobInputError(f"{pattern} means no file: name files, a folder with such, or a pattern that matches some.")
    return found


def _is_hidden(path: str, folder: str) -> bool:
    return any(is_passed_over(part) for part in path[len(folder) :].split("/"))


def _form_of(path: str) -> str | None:
    stem, ending = posixpath.splitext(path.lower())
    return _ENDINGS.get(posixpath.splitext(stem)[1] if ending in COMPRESSIONS else ending)


def _only_form(paths: Seq[str]) -> str:
    forms = {_form_of(path): path for path in paths}
    if None in forms:
        raise JobInputError(
            f"{forms[None]} has no ending that tells its format ({', '.join(_ENDINGS)}): give --input-format."
        )
    if len(forms) > 1:
        raise JobInputError(
            f"{' and '.join(forms.values())} are of different formats: give the files of one, or --input-format."
        )
    return str(next(iter(forms)))


def _names(paths: Seq[str]) -> list[str]:
    """The paths below the folder that all have in common."""
    common = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    return [posixpath.relpath(path, common) for path in paths]


def _described(file_system: FileSystem, path: str, name: str) -> FoundFile:
    with _watching(path):
        info = file_system.info(path)
        if info.get("type") == "directory":
            with opened_dataset(file_system, path) as dataset:
                return FoundFile(name, path, 0, str(dataset.version))
        if info.get("type") == "other":
            raise JobInputError(
                f"{path} is a pipe or a device, and files are read twice: give a file, or - for standard input."
            )
        known = {key: str(info[key]) for key in _STAMPS if key in info}
        return FoundFile(name, path, int(info["size"] or 0), hashlib.sha256(repr(known).encode()).hexdigest()[:16])


@contextmanager
def _watching(path: str) -> Iterator[None]:
    """A context for a call of a file system, whose errors become JobInputError."""
    with reaching(path), watched_store(path), plain_errors():
        yield
