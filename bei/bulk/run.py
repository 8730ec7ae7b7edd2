"""``bei embed``: from what was asked for to the last shard."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from bei.artifact.manifest import Artifact, Manifest
from bei.bulk.chunks import ChunkSize
from bei.bulk.folder import JobFolder, folder_at
from bei.bulk.input_check import check_inputs, images_a_row
from bei.bulk.job import Job, OnError, OnShard, Output
from bei.bulk.output_formats import FORMATS
from bei.bulk.parts import PLAN, SUCCESS, ShardRecord
from bei.bulk.plan import JobPlan, machine_for, versions_for
from bei.bulk.row_task import TASKS, RowTask
from bei.bulk.shard_service import ShardService
from bei.bulk.sources.rows import Columns
from bei.bulk.sources.source import Contents, ShardSize, Source
from bei.config.settings import ServeConfig
from bei.errors import ConfigError, JobDiffersError, JobError
from bei.service.adapted import adapted
from bei.service.loader import Loaded, load_model, verified_at
from bei.tokenizer.adapters import adapter_called
from bei.utils.full_disk import naming_full_disk

log = logging.getLogger(__name__)

_STDIN = "-"
_PLAN = msgspec.json.Decoder(JobPlan)

# The output of a shard, and rows of it at most and at least.
_SHARD_BYTES = 1 << 26
_MOST_ROWS, _LEAST_ROWS = 10_000, 100
# The images of a shard, as the model reads them.
_IMAGES_BYTES = 1 << 27

_OF_CHUNKS = ("chunk", "start", "stop")


class JobOptions(NamedTuple):
    """``task_options``: of the task, as ``bei.Model`` has them. ``part``: which of how many equal parts of the shards
    this process works on. ``max_rows``: only the first rows of the input. ``adapter``: the one of the model's that
    reads all rows."""

    inputs: tuple[str, ...]
    output: str
    task: str = "embed"
    columns: Columns = Columns()
    input_format: str | None = None
    output_format: str = "parquet"
    task_options: Mapping[str, Any] = {}
    chunk_size: ChunkSize | None = None
    on_error: OnError = "skip"
    part: tuple[int, int] = (0, 1)
    shard_rows: int | None = None
    max_rows: int | None = None
    adapter: str | None = None

    def check(self) -> None:
        """Raise ConfigError for options that do not go together, and names of nothing."""
        if not all((*self.inputs, self.output)):
            raise ConfigError("--input and --output must not be empty, which would be this folder: give . for it.")
        if (self.columns.query is None) is (self.task == "rerank"):
            raise ConfigError(
                "--task rerank needs --query-column."
                if self.columns.query is None
                else f"--query-column is for --task rerank; --task {self.task} reads --text-column alone."
            )
        if self.columns.image is not None and self.columns.query is not None:
            raise ConfigError(
                "--image-column is for --task embed, and --query-column for --task rerank: leave one out."
            )
        if self.chunk_size is not None and self.task in ("classify", "rerank", "extract"):
            raise ConfigError(f"--chunk-tokens is for vectors, not for --task {self.task}: leave it out.")
        made = ["embedding", "indices", "weights", "token_embeddings", "label", "score", "scores", "spans"]
        taken = [*(() if self.columns.id else ("row",)), *(_OF_CHUNKS if self.chunk_size else ()), *made]
        for name in self.columns.copied:
            if name in taken:
                raise ConfigError(
                    f"The output has a column {name!r} of its own: rename that of the input, or leave it out."
                )
        if len({*self.columns.copied}) < len(self.columns.copied):
            raise ConfigError("--columns names a column twice, or the one of --id-column: name each once.")

    def lasting(self, config: ServeConfig) -> dict[str, Any]:
        """Those that the output's bytes depend on, for the plan; of ``config`` too."""
        return {
            **({} if "truncate" in self.task_options else {"auto_truncate": config.auto_truncate}),
            **self.task_options,
            "output_format": self.output_format,
            "on_error": self.on_error,
            "chunk_tokens": self.chunk_size.tokens if self.chunk_size else None,
            "chunk_overlap": self.chunk_size.overlap if self.chunk_size else None,
            "max_rows": self.max_rows,
            **({} if self.adapter is None else {"adapter": self.adapter}),
        }


class JobProgress(msgspec.Struct, frozen=True):
    """How far a process is with its part of a job. Rows are of the output, ``dead`` ones of the input have no answer.
    ``resumed``: of ``shards_done`` those that were done before it began. Rates are of what it has done itself;
    ``engine_share``: of its time that in which the engine had work; None where engines are elsewhere."""

    shards: int
    shards_done: int
    resumed: int
    rows: int
    dead: int
    truncated: int
    tokens: int
    elapsed_s: float
    tokens_per_s: float
    engine_share: float | None
    left_s: float | None


# Called after each shard.
Tell: TypeAlias = Callable[[JobProgress], None]


@contextmanager
def opened_source(options: JobOptions) -> Iterator[Source]:
    """The files of the input; standard input, ``-``, is copied to a file first. Raises JobInputError."""
    if options.inputs != (_STDIN,):
        if _STDIN in options.inputs:
            raise ConfigError("Standard input (-) is the only input of a job: give files, or - alone.")
        yield Source(options.inputs, options.columns, options.input_format, options.output)
        return
    form = options.input_format or "jsonl"
    if form == "lance":
        raise ConfigError("A Lance dataset is a folder and has no place on standard input (-): give its path.")
    with tempfile.TemporaryDirectory(prefix="bei-") as scratch, naming_full_disk(Path(scratch)):
        path = Path(scratch) / f"stdin.{form}"
        with path.open("wb") as stream:
            shutil.copyfileobj(sys.stdin.buffer, stream)
        yield Source((str(path),), options.columns, form)


def run_job(
    source: Source, artifact: Path | Artifact, options: JobOptions, config: ServeConfig, tell: Tell
) -> JobProgress:
    """Do the job, or this process's part of it.

    Raises ConfigError, JobError and its subclasses, DiskFullError, ArtifactError and its subclasses,
    TaskNotSupportedError, InvalidRequestError, EngineError.
    """

    async def run() -> JobProgress:
        job = OpenJob(source, artifact, options, config)
        try:
            count = DoneShards(tell, lambda: job.engine_s)
            own = part_of(job.num_shards, options.part)
            todo = count.begin(job.output, own)
            if todo:
                await job.begin()
                await job.run(todo, count.add)
            job.finish(own)
            return count.progress()
        finally:
            await asyncio.get_running_loop().run_in_executor(None, job.close)

    return asyncio.run(run())


class OpenJob:
    """A job with its engine loaded and its plan agreed on. Made and used on one event loop, which is held meanwhile.

    ``output``: where its shards go. Raises what ``run_job`` raises.
    """

    def __init__(self, source: Source, artifact: Path | Artifact, options: JobOptions, config: ServeConfig) -> None:
        folder, form = folder_at(options.output), FORMATS[options.output_format]()
        stored = _stored_plan(folder)
        verified = verified_at(artifact, config)
        images = _images_a_row(source, options, verified.manifest)
        contents = _contents(source, stored, options, verified.manifest, images)
        loaded = load_model(verified, config)
        self._source = source
        self._service = ShardService(loaded, config)
        try:
            task = _task(self._service, options)
            form.check(task.fields, options.on_error)
            reader = source.reader(contents)
            form.check_columns(reader.schema)
            lasting = {**options.lasting(config), "input_format": source.form}
            packages = form.package, "pillow" if images else None
            plan = _plan(contents, loaded, options, lasting, *packages)
            _agree(folder, plan, stored)
            folder.clean()
            self.num_shards = len(contents.shards)
            self.output = Output(folder, form, options.on_error, plan.digest, options.columns.id)
            self._job = Job(reader, self._service, task, self.output, options.chunk_size)
        except BaseException:  # its threads would outlive whatever ends this
            self._service.close()
            raise

    @property
    def engine_s(self) -> float:
        """Seconds in which the engine had work."""
        return self._service.engine_s

    async def begin(self) -> None:
        """Once before ``run``: raise EngineError where the engine answers otherwise than at build time."""
        await self._service.check_canary()

    async def run(self, shards: Seq[int], on_shard: OnShard) -> None:
        """Have ``shards`` answered and committed."""
        await self._job.run(shards, on_shard)

    def finish(self, own: Seq[int]) -> None:
        """Say that the job is done, if all shards are, whoever has done them; ``own``: those that this process knows to
        be. Raises JobInputError where the input has changed, JobError where parts of ``own`` are gone."""
        self._source.check_unchanged()
        missing = sorted({*own} & {*finish(self.output, self.num_shards)})
        if missing:
            names = ", ".join(self.output.form.part(shard) for shard in missing[:3])
            raise JobError(
                f"{self.output.folder.shown} has not all parts that were written to it: {names} "
                f"{'... ' * (len(missing) > 3)}cannot be found. Is another process removing files? The same command "
                "makes them again."
            )

    def close(self) -> None:
        """End the threads, free the engine. Blocks; not for the event loop."""
        self._job.close()
        self._service.close()


def _images_a_row(source: Source, options: JobOptions, manifest: Manifest) -> int:
    """About how many images a row has. Raises ConfigError where the model reads nothing of the rows."""
    file, kinds = source.kinds()
    chunks = options.chunk_size is not None
    image = options.columns.image
    check_inputs(kinds, file, manifest, options.task, options.task_options, chunks=chunks, image=image)
    return images_a_row(kinds, manifest, image)


def _task(service: ShardService, options: JobOptions) -> RowTask:
    """Raises InvalidRequestError, TaskNotSupportedError, ConfigError."""
    if options.chunk_size is not None:
        options.chunk_size.check(service.manifest.max_seq_len)
    given = {name: value for name, value in options.task_options.items() if value is not None}
    if options.adapter is not None:
        service = adapted(service, adapter_called(service.manifest, options.adapter))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        task = TASKS[options.task](service, given)
    for warning in found:
        log.warning("%s", warning.message)
    return task


def _stored_plan(folder: JobFolder) -> JobPlan | None:
    """The plan of the job that has the folder. Raises JobDiffersError where there is something else."""
    content = folder.read(PLAN)
    # Read again: another process may have begun the job.
    if content is None and not folder.is_empty() and (content := folder.read(PLAN)) is None:
        raise JobDiffersError(f"{folder.shown} has files and no {PLAN}: it is not a job's. Name an empty folder.")
    if content is None:
        return None
    try:
        return _PLAN.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobDiffersError(
            f"{folder.shown}/{PLAN} is not a plan of this version ({error}): name an empty folder."
        ) from error


def _contents(source: Source, stored: JobPlan | None, options: JobOptions, manifest: Manifest, images: int) -> Contents:
    """What the files have; not looked through again where they are as the plan has seen them. Unless the options say
    how many rows a shard has, those of the plan stay."""
    planned = None if stored is None else stored.contents.size.rows
    rows = options.shard_rows or planned or _shard_rows(manifest, options, images)
    size = ShardSize(rows, max_rows=options.max_rows)
    if stored is not None and stored.contents.size == size and source.is_as_before(stored.contents.files):
        return stored.contents
    return source.contents(size)


def _shard_rows(manifest: Manifest, options: JobOptions, images: int) -> int:
    """So many that a shard's output has some dozen megabytes, and so have images, of which a row has about ``images``,
    as the tower reads them, which takes 150 kB for a thumbnail of 1 kB (ViT-B/32)."""
    width = manifest.dimension("token_embedding" if options.task == "tokens" else "embedding") or 1
    if options.task in ("classify", "rerank", "extract"):
        width = 1
    a_row = 4 * width * (manifest.max_seq_len if options.task == "tokens" else 1)
    rows = max(_LEAST_ROWS, min(_MOST_ROWS, _SHARD_BYTES // a_row))
    if not images or manifest.image_tower is None:
        return rows
    return max(1, min(rows, _IMAGES_BYTES // (images * manifest.image_tower.image_bytes)))


def _plan(
    contents: Contents, loaded: Loaded, options: JobOptions, lasting: Mapping[str, Any], *packages: str | None
) -> JobPlan:
    """``lasting``: what the plan keeps of the options and settings. ``packages``: besides the engine's, those that the
    output's bytes depend on."""
    manifest = loaded.artifact.manifest
    return JobPlan(
        contents=contents,
        columns=options.columns,
        artifact=manifest.digest,
        task=options.task,
        options=dict(lasting),
        versions=versions_for(manifest.target, *packages),
        machine=machine_for(manifest.target, loaded.engine.info.device),
    )


def _agree(folder: JobFolder, plan: JobPlan, stored: JobPlan | None) -> None:
    """Write ``plan`` if nobody has written one. Raises JobDiffersError where there is another one."""
    if stored is None and folder.create(PLAN, msgspec.json.format(msgspec.json.encode(plan), indent=1)):
        return
    stored = stored or _stored_plan(folder)
    if stored is not None and stored.digest != plan.digest:
        found = "; ".join(stored.differences(plan))
        raise JobDiffersError(
            f"{folder.shown} has another job's output. It differs: {found}. Give it what that job was given, or name "
            "an empty folder."
        )


def part_of(num_shards: int, part: tuple[int, int]) -> list[int]:
    """The shards of a part: neighbours, which are read in one go."""
    index, count = part
    return [*range(index * num_shards // count, (index + 1) * num_shards // count)]


def finish(output: Output, num_shards: int) -> list[int]:
    """Say that the job is done, if all shards are; those that are not."""
    records = output.records(range(num_shards))
    done = [record for record in records if record is not None]
    if len(done) < num_shards:
        return [shard for shard, record in enumerate(records) if record is None]
    sums = {name: sum(getattr(one, name) for one in done) for name in ("rows", "dead", "truncated", "tokens")}
    output.form.finish(output.folder, done)
    content = msgspec.json.encode({"plan": output.plan, "shards": num_shards, **sums})
    output.folder.commit(SUCCESS, content + b"\n")
    return []


class DoneShards:
    """Counts what is done. ``engine_s``: seconds in which the engine had work, where it is in this process."""

    def __init__(self, tell: Tell, engine_s: Callable[[], float] | None = None) -> None:
        self._tell = tell
        self._engine_s = engine_s
        self._started = time.monotonic()
        self._records: list[ShardRecord] = []
        self._resumed = 0
        self._todo = 0

    def begin(self, output: Output, shards: Seq[int]) -> list[int]:
        """Those of ``shards`` that are not done yet."""
        todo: list[int] = []
        for shard, record in zip(shards, output.records(shards), strict=True):
            if record is None:
                todo.append(shard)
            else:
                self._records.append(record)
        self._started, self._todo, self._resumed = time.monotonic(), len(todo), len(self._records)
        self._tell(self.progress())
        return todo

    def add(self, record: ShardRecord) -> None:
        """Count one that has just been done."""
        self._records.append(record)
        self._tell(self.progress())

    def progress(self) -> JobProgress:
        """So far."""
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        own = self._records[self._resumed :]
        records = self._records
        tokens = sum(record.tokens for record in own)
        return JobProgress(
            shards=self._resumed + self._todo,
            shards_done=len(records),
            resumed=self._resumed,
            rows=sum(record.rows for record in records),
            dead=sum(record.dead for record in records),
            truncated=sum(record.truncated for record in records),
            tokens=sum(record.tokens for record in records),
            elapsed_s=round(elapsed_s, 3),
            tokens_per_s=round(tokens / elapsed_s, 1),
            engine_share=None
            if self._engine_s is None
            else round(min(1.0, self._engine_s() / max(elapsed_s, 1e-9)), 3),
            left_s=round(elapsed_s / len(own) * (self._todo - len(own)), 1) if own else None,
        )
