"""Lance as an output format: one dataset, whose data files are the parts.

A part is a data file with a name of its own. The last process writes the dataset's first version, which has them all,
in one call that only one process succeeds with: before it there is no dataset, after it nothing changes any more.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bei.bulk.file_systems import load_lance
from bei.bulk.folder import JobFolder
from bei.bulk.parts import PartFormat, ShardRecord, record_name
from bei.errors import JobError
from bei.utils.full_disk import naming_full_disk

if TYPE_CHECKING:
    import pyarrow as pa

_DATASET = "data.lance"
# Later storage versions write the same rows to other bytes each time (lance 14.0.2).
_STORAGE_VERSION = "2.0"
_ONE_FILE = 1 << 60


class _LanceRecord(ShardRecord, frozen=True):
    """``fragment``: what Lance says of the part, as its JSON; None: the part would have no rows, and is not there.
    ``schema``: as Arrow writes one."""

    fragment: dict[str, Any] | None
    schema: bytes


class LanceParts(PartFormat):
    """The record of a part is a file of its own, behind it."""

    ending = ".lance"
    package = "pylance"

    def __init__(self) -> None:
        self._lance = load_lance("--output-format lance")

    def part(self, shard: int) -> str:
        return f"{_DATASET}/data/{super().part(shard)}"

    def files(self, table: pa.Table, record: ShardRecord) -> Iterator[tuple[str, bytes | memoryview]]:
        fragment: dict[str, Any] | None = None
        if table.num_rows:
            fragment, content = self._written(table)
            fragment["id"] = record.shard
            fragment["files"][0]["path"] = self.part(record.shard).rpartition("/")[2]
            yield self.part(record.shard), content
        schema = table.schema.serialize().to_pybytes()
        full = _LanceRecord(**msgspec.structs.asdict(record), fragment=fragment, schema=schema)
        yield record_name(record.shard), msgspec.json.encode(full)

    def record(self, folder: JobFolder, shard: int) -> ShardRecord | None:
        content = folder.read(record_name(shard))
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            record = _RECORD.decode(content or b"")
            if record.fragment is None or folder.exists(self.part(shard)):
                return record
        return None

    def finish(self, folder: JobFolder, records: Seq[ShardRecord]) -> None:
        """Write the dataset's first version, unless it is there."""
        import pyarrow as pa

        if not records:  # no rows, so nothing says what columns they would have
            return
        known = [record for record in records if isinstance(record, _LanceRecord)]
        fragments = [
            self._lance.FragmentMetadata.from_json(json.dumps(record.fragment)) for record in known if record.fragment
        ]
        operation = self._lance.LanceOperation.Overwrite(pa.ipc.read_schema(pa.py_buffer(known[0].schema)), fragments)
        with _scratch() as scratch:
            self._lance.LanceDataset.commit(str(scratch), operation)
            (version,) = (scratch / "_versions").glob("*.manifest")
            name = f"{_DATASET}/_versions/{version.name}"
            if folder.exists(name):
                return
            for transaction in (scratch / "_transactions").iterdir():
                folder.commit(f"{_DATASET}/_transactions/{transaction.name}", transaction.read_bytes())
            folder.create(name, version.read_bytes())  # False: another process has written the same one

    def _written(self, table: pa.Table) -> tuple[dict[str, Any], bytes]:
        """What Lance says of a data file with the rows of ``table``, and the file. Raises OSError."""
        with _scratch() as scratch:
            fragments = self._lance.fragment.write_fragments(
                table,
                str(scratch),
                mode="create",
                data_storage_version=_STORAGE_VERSION,
                max_rows_per_file=_ONE_FILE,
                max_bytes_per_file=_ONE_FILE,
            )
            if len(fragments) != 1 or len(fragments[0].files) != 1:
                raise JobError("Lance has written a part as several files: choose fewer --shard-rows.")
            found: dict[str, Any] = json.loads(json.dumps(fragments[0].to_json()))
            return found, (scratch / "data" / fragments[0].files[0].path).read_bytes()


_RECORD = msgspec.json.Decoder(_LanceRecord)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A place for a dataset, which is removed."""
    with tempfile.TemporaryDirectory(prefix="bei-") as folder, naming_full_disk(Path(folder)):
        yield Path(folder, _DATASET)
