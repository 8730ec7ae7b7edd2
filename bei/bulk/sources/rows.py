"""Rows of input files: what formats give, and what a shard gets of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec

from bei.bulk.sources.kinds import ColumnKinds
from bei.errors import BeiError

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Self

# Opens a file anew, for reading bytes.
Open: TypeAlias = Callable[[], AbstractContextManager[IO[bytes]]]


class WithImage(NamedTuple):
    """The values of a row's columns of a text and an image, of any type; null: it has none. ``image`` may be a list."""

    text: object
    image: object


class Columns(msgspec.Struct, frozen=True):
    """The columns of a job: the text, or for pairs the query and the text; the row's own id, and others that are copied
    to the output. ``image``: that of images which are one input with the text, or alone where it is ``text`` too."""

    text: str = "text"
    query: str | None = None
    id: str | None = None
    carried: tuple[str, ...] = ()
    image: str | None = None

    @property
    def read(self) -> tuple[str, ...]:
        """Those with what the model reads."""
        image = None if self.image == self.text else self.image
        return tuple(name for name in (self.query, self.text, image) if name is not None)

    def inputs(self, values: Seq[Seq[object]]) -> Seq[object]:
        """``Rows.inputs`` of the values of the columns ``read``, each with one a row."""
        if self.image == self.text:
            return [WithImage(None, image) for image in values[0]]
        if self.image is not None:
            return [WithImage(*both) for both in zip(*values, strict=True)]
        return values[0] if len(values) == 1 else list(zip(*values, strict=True))

    @property
    def copied(self) -> tuple[str, ...]:
        """Those of the output."""
        return self.carried if self.id is None else (self.id, *self.carried)


class Rows(NamedTuple):
    """Consecutive rows. ``inputs[i]``: the value of the text column, a tuple of query and text, or ``WithImage``,
    of any type.
    ``copied``: the columns for the output, null where a row could not be read; ``errors`` of these by their places."""

    inputs: Seq[object]
    copied: pa.Table
    errors: Mapping[int, BeiError]

    def sliced(self, start: int, stop: int) -> Rows:
        errors = {place - start: error for place, error in self.errors.items() if start <= place < stop}
        return Rows(self.inputs[start:stop], self.copied.slice(start, stop - start), errors)


def joined(parts: Seq[Rows]) -> Rows:
    """All rows of ``parts`` (at least one), in order."""
    import pyarrow as pa

    inputs: list[object] = []
    errors: dict[int, BeiError] = {}
    for part in parts:
        errors |= {len(inputs) + place: error for place, error in part.errors.items()}
        inputs += part.inputs
    return Rows(inputs, pa.concat_tables([part.copied for part in parts]), errors)


class RowRange(NamedTuple):
    """Consecutive rows of a file: how many, their bytes, and where the first begins, in formats whose rows begin at an
    offset."""

    num_rows: int
    num_bytes: int
    offset: int = 0


class RowPlace(msgspec.Struct, frozen=True, array_like=True):
    """A row of a job's input: its file and its row there, both from 0, and the row's offset (``RowRange``)."""

    file: int
    row: int
    offset: int = 0


class RowFile(Protocol):
    """A file of some format. All methods raise JobInputError for one that is not of the format."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @classmethod
    def schema(cls, files: Seq[Self], columns: Columns) -> pa.Schema:
        """The types of the columns for the output, of all rows of ``files`` (at least one). Files without rows tell
        nothing. Raises JobInputError where a column of ``columns`` is missing, or rows of two files do not fit."""

    @classmethod
    def kinds(cls, files: Seq[Self], columns: Columns) -> tuple[str, Mapping[str, ColumnKinds]]:
        """What each column that the model reads can hold, and the name of the file that tells it. Raises JobInputError
        where one is missing."""

    def pieces(self, columns: Columns) -> Generator[RowRange, None, None]:
        """All rows. ``digest`` is known when it has ended, or was closed."""

    @property
    def digest(self) -> str:
        """SHA-256 of what tells the file from any other: of a Parquet file its footer and the pages of the columns
        that are read, of lines all bytes, as far as rows were asked for."""

    def rows(self, columns: Columns, schema: pa.Schema, start: RowPlace) -> Iterator[Rows]:
        """The rows from ``start`` on, in parts of a few thousand."""
