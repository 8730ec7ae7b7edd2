"""A job's shards: read, answered and committed, several at a time and each of them once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from bei.bulk.chunks import ChunkSize, TextChunk, chunks_of
from bei.bulk.folder import JobFolder
from bei.bulk.parts import PartFormat, ShardRecord
from bei.bulk.row_task import Outcome, RowTask
from bei.bulk.shard_service import ShardService
from bei.bulk.sources.rows import Rows
from bei.bulk.sources.source import Reader
from bei.errors import BadRowError, BeiError, JobError, MalformedRequestError
from bei.service.call import ModelInput

if TYPE_CHECKING:
    import pyarrow as pa

# In memory: one shard that is read or tokenized, one on the engine, one that is written.
_SHARDS_AT_ONCE = 3
_RECORDS_AT_ONCE = 32

OnError: TypeAlias = Literal["skip", "null", "fail"]

# As ``RowTask`` has it.
Check: TypeAlias = Callable[[object, int], ModelInput]

# Called with the record of each shard as it is done.
OnShard: TypeAlias = Callable[[ShardRecord], None]


class Output(NamedTuple):
    """``id``: the column of the input that is a row's id in the output; None: its number is. ``plan``: the digest."""

    folder: JobFolder
    form: PartFormat
    on_error: OnError
    plan: str
    id: str | None

    def record(self, shard: int) -> ShardRecord | None:
        """That of a shard of this job that is done."""
        record = self.form.record(self.folder, shard)
        return record if record is not None and record.plan == self.plan else None

    def records(self, shards: Seq[int]) -> list[ShardRecord | None]:
        """Those of ``shards``, several asked for at once: a bucket takes a tenth of a second for each. Blocks."""
        with ThreadPoolExecutor(_RECORDS_AT_ONCE, "bei-records") as pool:
            return list(pool.map(self.record, shards))


class Job:
    """Works on shards. Used on one event loop; ``close`` ends its threads."""

    def __init__(
        self, reader: Reader, service: ShardService, task: RowTask, output: Output, chunk_size: ChunkSize | None
    ) -> None:
        self._reader = reader
        self._service = service
        self._task = task
        self._output = output
        self._chunk_size = chunk_size
        self._reading = ThreadPoolExecutor(1, "bei-reader")
        self._writing = ThreadPoolExecutor(1, "bei-writer")

    async def run(self, shards: Seq[int], on_shard: OnShard) -> None:
        """Have ``shards`` answered and committed. Raises the first error; other shards that are under way are given
        up. Raises BadRowError, JobError, DiskFullError, EngineDeadError."""
        running: set[asyncio.Task[ShardRecord]] = set()
        try:
            for shard in shards:
                if len(running) == _SHARDS_AT_ONCE:
                    running = await _some_done(running, on_shard)
                running.add(asyncio.create_task(self._shard(shard)))
            while running:
                running = await _some_done(running, on_shard)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def close(self) -> None:
        """End the threads. Blocks."""
        self._reading.shutdown()
        self._writing.shutdown()

    async def _shard(self, shard: int) -> ShardRecord:
        import pyarrow as pa

        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(self._reading, self._reader.shard, shard)
        check = self._task.check if self._chunk_size is None else _checked_as_text(self._task.check)
        asked = _Inputs.of(rows, self._reader.bounds(shard)[0], check, self._task.stand_in)
        if self._chunk_size is not None:
            asked = await self._chunked(asked)
        with self._service.ticket(len(asked.inputs)) as ticket:
            outcome: Outcome = await self._task.run(asked.inputs, ticket, asked.errors)
        try:
            return await loop.run_in_executor(self._writing, self._commit, shard, rows, asked, outcome)
        except pa.ArrowException as error:
            raise JobError(
                f"{self._output.form.part(shard)} cannot be written: {str(error).rstrip('.')}. A copied column has a "
                "value that has no place in it: leave it out of --columns, choose another --output-format, or, for "
                "values of many megabytes, fewer --shard-rows."
            ) from error

    async def _chunked(self, asked: _Inputs) -> _Inputs:
        assert self._chunk_size is not None  # its caller has asked
        whole = [str(value) for value in asked.inputs]
        return asked.cut(await chunks_of(self._service, whole, self._chunk_size))

    def _commit(self, shard: int, rows: Rows, asked: _Inputs, outcome: Outcome) -> ShardRecord:
        """In the writer's thread."""
        output, errors = self._output, {**asked.errors, **outcome.errors}
        dead = f"_dead/dead-{shard:05}.jsonl"
        if errors:
            output.folder.commit(dead, self._dead_rows(shard, rows, asked, errors))
        else:  # of a run that has ended here
            output.folder.remove(dead)
        if errors and output.on_error == "fail":
            raise self._bad_row(shard, rows, asked, errors)
        kept: list[int | None] = [*range(len(asked.inputs))]
        if output.on_error == "skip":
            kept = [place for place in kept if place not in errors]
        table = _table(rows, asked, kept, self._reader.bounds(shard)[0] if output.id is None else None)
        values = [None if place in errors else place for place in kept]
        for field in self._task.fields:
            table = table.append_column(field, _taken(outcome.columns[field.name], values))
        record = ShardRecord(
            plan=output.plan,
            shard=shard,
            rows=table.num_rows,
            dead=len(errors),
            truncated=sum(place not in errors for place in outcome.truncated),
            tokens=outcome.num_tokens,
        )
        for name, content in output.form.files(table.replace_schema_metadata(self._task.metadata or None), record):
            output.folder.commit(name, content)
        return record

    def _dead_rows(self, shard: int, rows: Rows, asked: _Inputs, errors: Mapping[int, BeiError]) -> bytes:
        lines = [self._dead_row(shard, rows, asked, place, errors[place]) for place in sorted(errors)]
        return b"".join(msgspec.json.encode(line, enc_hook=str) + b"\n" for line in lines)

    def _dead_row(self, shard: int, rows: Rows, asked: _Inputs, place: int, error: BeiError) -> dict[str, object]:
        own = asked.row_of(place)
        row = self._reader.bounds(shard)[0] + own
        file, number = self._reader.file_of(row)
        found: dict[str, object] = {"row": row, "file": file, "row_in_file": number}
        if self._output.id is not None:
            found["id"] = rows.copied.column(self._output.id)[own].as_py()
        if asked.chunks is not None:
            found["chunk"] = asked.chunks[place].number
        return found | {"code": error.code, "reason": str(error)}

    def _bad_row(self, shard: int, rows: Rows, asked: _Inputs, errors: Mapping[int, BeiError]) -> BadRowError:
        place = min(errors)
        line = self._dead_row(shard, rows, asked, place, errors[place])
        named = f"id {line['id']!r}, " if "id" in line else ""
        return BadRowError(
            f"Row {line['row_in_file']:,} of {line['file']} ({named}counted from 0) has no answer: {errors[place]} "
            "Mend it, or begin anew in another folder with --on-error skip or null."
        )


class _Inputs(NamedTuple):
    """What is asked of the model for the rows of a shard: an input for each, or ``chunks`` of it. ``rows``: of each
    input; None: the one at its place. ``errors`` of inputs that are not to be run, by their places."""

    inputs: Seq[ModelInput]
    errors: Mapping[int, BeiError]
    rows: Seq[int] | None = None
    chunks: Seq[TextChunk] | None = None

    @classmethod
    def of(cls, rows: Rows, first: int, check: Check, stand_in: ModelInput) -> _Inputs:
        """``first``: the number of the first row."""
        errors, inputs = dict(rows.errors), []
        for place, value in enumerate(rows.inputs):
            checked = stand_in
            if place not in errors:
                try:
                    checked = check(value, first + place)
                except BeiError as error:
                    errors[place] = error
            inputs.append(checked)
        return cls(inputs, errors)

    def cut(self, chunks: Seq[Seq[TextChunk]]) -> _Inputs:
        """The same with ``chunks`` of each input in its place."""
        texts: list[ModelInput] = []
        rows: list[int] = []
        errors: dict[int, BeiError] = {}
        for row, (value, own) in enumerate(zip(self.inputs, chunks, strict=True)):
            if row in self.errors:
                errors[len(texts)] = self.errors[row]
            texts += [str(value)[chunk.start : chunk.stop] for chunk in own]
            rows += [row] * len(own)
        return _Inputs(texts, errors, rows, [chunk for own in chunks for chunk in own])

    def row_of(self, place: int) -> int:
        """The row of the shard that the input at ``place`` is of."""
        return place if self.rows is None else self.rows[place]


def _checked_as_text(check: Check) -> Check:
    """``check`` for what is cut into chunks."""

    def checked(value: object, place: int) -> ModelInput:
        if not isinstance(value, str | None):
            raise MalformedRequestError(f"inputs {place} is not a text, and --chunk-tokens cuts texts alone.", "inputs")
        return check(value, place)

    return checked


async def _some_done(running: set[asyncio.Task[ShardRecord]], on_shard: OnShard) -> set[asyncio.Task[ShardRecord]]:
    done, rest = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        on_shard(task.result())
    return rest


def _table(rows: Rows, asked: _Inputs, kept: Seq[int | None], first: int | None) -> pa.Table:
    """The columns that are copied, of the inputs at the places ``kept``; ``first``: the number of the first row, where
    numbers are ids."""
    import pyarrow as pa

    places = [place for place in kept if place is not None]
    owners = [asked.row_of(place) for place in places]
    copied = _copied(rows.copied, owners) if rows.copied.num_columns else None
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    if first is not None:
        columns["row"] = pa.array([first + row for row in owners], pa.int64())
    if copied is not None:
        columns |= {name: copied.column(name) for name in copied.column_names}
    if asked.chunks is not None:
        chunks = [asked.chunks[place] for place in places]
        columns["chunk"] = pa.array([chunk.number for chunk in chunks], pa.int32())
        columns["start"] = pa.array([chunk.start for chunk in chunks], pa.int64())
        columns["stop"] = pa.array([chunk.stop for chunk in chunks], pa.int64())
    return pa.table(columns)


def _copied(table: pa.Table, owners: Seq[int]) -> pa.Table:
    """The rows ``owners``, in ascending order, one perhaps several times: it has several chunks. In halves where the
    strings of all have more than 2 GB, which an array does not hold."""
    import pyarrow as pa

    start, stop = (owners[0], owners[-1] + 1) if owners else (0, 0)
    try:
        return table.slice(start, stop - start).take(pa.array([owner - start for owner in owners], pa.int64()))
    except (pa.ArrowInvalid, pa.ArrowCapacityError):  # of strings, of the dictionaries of several chunks
        if len(owners) < 2:
            raise
        middle = len(owners) // 2
        return pa.concat_tables([_copied(table, owners[:middle]), _copied(table, owners[middle:])])


def _taken(column: pa.Array, places: Seq[int | None]) -> pa.Array:
    """The values at ``places``, null where there is none."""
    import pyarrow as pa

    if places == [*range(len(column))]:
        return column
    return column.take(pa.array(places, pa.int64()))
