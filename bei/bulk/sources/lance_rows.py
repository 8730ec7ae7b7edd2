"""Lance datasets: folders, each with the rows of its newest version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bei.bulk.file_systems import FileSystem, load_lance
from bei.bulk.sources.columnar import ROWS_AT_ONCE, ColumnarFile, FileTypes
from bei.bulk.sources.rows import Columns, RowRange
from bei.bulk.watchdog import watched_store

if TYPE_CHECKING:
    import pyarrow as pa

ENDING = ".lance"


class LanceRows(ColumnarFile):
    """A dataset. Its fragments are in the order in which they were added; deleted rows are none."""

    def pieces(self, columns: Columns) -> Generator[RowRange, None, None]:
        with self._reading(), self._open() as dataset:
            fragments = dataset.get_fragments()
            told = [json.dumps(fragment.metadata.to_json(), sort_keys=True, default=str) for fragment in fragments]
            self.digest = hashlib.sha256("\n".join([str(dataset.schema), *told]).encode()).hexdigest()
            for fragment in fragments:
                sizes = [file.file_size_bytes or 0 for file in fragment.metadata.files]
                yield RowRange(fragment.count_rows(), sum(sizes))

    def _types(self) -> FileTypes:
        with self._open() as dataset:
            return FileTypes(dataset.schema, dataset.count_rows() > 0)

    def _batches(self, names: list[str], first_row: int) -> Iterator[pa.RecordBatch]:
        with self._open() as dataset:
            for fragment in dataset.get_fragments():
                num_rows = fragment.count_rows()
                if first_row < num_rows:
                    batches = fragment.to_batches(columns=names, batch_size=ROWS_AT_ONCE, offset=first_row or None)
                    yield from _each_watched(self.name, iter(batches))
                first_row = max(0, first_row - num_rows)


def dataset_of(path: str, folder: str) -> str:
    """The dataset below ``folder`` that the file ``path`` is in; a file that is in none as it is."""
    parts = path[len(folder) :].split("/")
    last = next((index for index, part in enumerate(parts) if part.lower().endswith(ENDING)), len(parts))
    return folder + "/".join(parts[: last + 1])


@contextmanager
def opened_dataset(file_system: FileSystem, path: str) -> Iterator[Any]:
    """Of class ``lance.LanceDataset``, its newest version."""
    lance = load_lance("input from Lance")
    is_local = "file" in file_system.protocol
    with watched_store(path):
        dataset = lance.dataset(path if is_local else file_system.unstrip_protocol(path))
    yield dataset


def _each_watched(name: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while True:
        with watched_store(name):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
