"""``bei embed --ray``: Ray places the shards of a job, the job commits them.

An actor holds an engine. A shard whose actor or node dies is given to another one; whether a shard is done is seen in
the output folder, so the driver may die as well.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

from bei.artifact import store
from bei.artifact.manifest import Artifact
from bei.bulk.folder import folder_at
from bei.bulk.job import Output
from bei.bulk.output_formats import FORMATS
from bei.bulk.parts import ShardRecord
from bei.bulk.run import DoneShards, JobOptions, JobProgress, OpenJob, Tell, finish, opened_source
from bei.bulk.sources.source import Source
from bei.bulk.watchdog import Watchdog
from bei.config.settings import ServeConfig
from bei.errors import ArtifactError, BeiError, ConfigError, JobError
from bei.utils import libraries
from bei.utils.file_lock import acquire, try_acquire
from bei.utils.untrusted_files import home_expanded

log = logging.getLogger(__name__)

# A shard that so many actors died with is taken to be what they died of.
_MOST_DEATHS = 3
# Given to an actor at a time: while the engine has one, the next is read and tokenized, or the last is written.
_SHARDS_AT_ONCE = 2
_CHUNK_BYTES = 1 << 26
_TOLD_EVERY_S = 30.0
_UNUSED_S = 30 * 86_400.0
# For so long a client of NFS may remember that a file was not there.
_SEEN_WITHIN_S = 90.0

ObjectRef: TypeAlias = Any  # Ray has types only in part
Actor: TypeAlias = Any


class Cluster(NamedTuple):
    """``address`` as ``ray.init`` takes it. ``workers``: actors with an engine each; None: one a GPU, or one a node."""

    address: str
    workers: int | None = None


class ShippedArtifact(NamedTuple):
    """An artifact for nodes: where it lies on the driver's, its digest, and its files' bytes in Ray's object store."""

    path: str
    digest: str
    files: Mapping[str, Seq[ObjectRef]]

    def on_this_node(self, cache_dir: Path) -> Path:
        """Its folder here: the driver's, where that is seen from here, else a copy that all actors of the node
        share."""
        if _is_it(Path(self.path), self.digest):
            return Path(self.path)
        folder = home_expanded(str(cache_dir)) / "ray" / self.digest
        folder.parent.mkdir(parents=True, exist_ok=True)
        with acquire(_lock_of(folder)):
            if not _is_it(folder, self.digest):
                self._write(folder)
            os.utime(folder)
        _remove_unused(folder.parent)
        return folder

    def _write(self, folder: Path) -> None:
        import ray

        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            for name, parts in self.files.items():
                path = Path(scratch, "artifact", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as stream:
                    for part in parts:
                        stream.write(ray.get(part))
            Path(scratch, "artifact").rename(folder)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_unused(copies: Path) -> None:
    """Remove copies that no job has begun with for a month. Engines that run need their files no more."""
    for folder in copies.iterdir():
        with suppress(OSError):  # another worker removes it
            if folder.is_dir() and time.time() - folder.stat().st_mtime > _UNUSED_S:
                lock = try_acquire(_lock_of(folder))
                if lock is not None:
                    with lock:
                        shutil.rmtree(folder)
                        lock.path.unlink()


class ShardWorker:
    """An actor's side. All methods run on the actor's event loop."""

    async def open(self, artifact: ShippedArtifact, options: JobOptions, config: ServeConfig) -> tuple[str, int]:
        """Load the engine; the digest of the job's plan, and the number of its shards."""
        # To Ray a worker that hangs has died: another one gets its shards.
        self._watchdog = Watchdog(config.hang_timeout, _end_worker).__enter__()
        self._source = opened_source(options)
        path = artifact.on_this_node(Path(config.cache_dir))
        self._job = OpenJob(self._source.__enter__(), path, options, config)
        await self._job.begin()
        return self._job.output.plan, self._job.num_shards

    async def run(self, shard: int) -> ShardRecord:
        """Have a shard answered and committed."""
        records: list[ShardRecord] = []
        await self._job.run([shard], records.append)
        return records[0]


def _end_worker(error: JobError) -> NoReturn:
    print(error, file=sys.stderr, flush=True)  # noqa: T201  # into Ray's log of the worker
    os._exit(1)


class _Placement(NamedTuple):
    """How many actors, the CPUs and GPUs of each."""

    workers: int
    num_cpus: int
    num_gpus: int


def run_on_ray(
    source: Source,
    artifact: Path | Artifact,
    options: JobOptions,
    config: ServeConfig,
    cluster: Cluster,
    tell: Tell,
) -> JobProgress:
    """Do the job on a cluster. The input, the output and bei are where every node finds them; ``source``: the input as
    it was when the job began.

    Raises what ``bei.bulk.run.run_job`` raises, and JobError where actors do not start or die again and again.
    """
    if "-" in options.inputs or options.part != (0, 1):
        raise ConfigError("--ray takes files that every node finds, and all of their shards: leave out - and --shard.")
    ray = libraries.load("ray", "ray", "scale", "bei embed --ray")
    options = options._replace(inputs=tuple(map(_absolute, options.inputs)), output=_absolute(options.output))
    path = artifact.path if isinstance(artifact, Artifact) else artifact
    manifest = store.load_manifest(path)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    try:
        placement = _placement(ray, manifest.target, cluster)
        config = replace(config, engine_threads=config.engine_threads or placement.num_cpus)
        crew = _Crew(ray, (_shipped(ray, path, manifest.digest), options, config), placement)
        plan, num_shards = crew.opened()
        output = Output(
            folder_at(options.output), FORMATS[options.output_format](), options.on_error, plan, options.columns.id
        )
        count = DoneShards(tell)
        for record in crew.run(count.begin(output, range(num_shards))):
            count.add(record)
        source.check_unchanged()
        _finish(output, num_shards)
        return count.progress()
    finally:
        ray.shutdown()


def _absolute(path: str) -> str:
    """The same for processes with other working folders."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))  # patterns too


def _finish(output: Output, num_shards: int) -> None:
    """Say that the job is done. Raises JobError where what the workers have written is not seen from here."""
    give_up_s = time.monotonic() + _SEEN_WITHIN_S
    while finish(output, num_shards):
        if time.monotonic() > give_up_s:
            raise JobError(
                f"The workers have written parts that {output.folder.shown} has not as it is seen from here: every "
                "node must find the same folder. Name one on a shared disk, or of a bucket."
            )
        time.sleep(1.0)


class _Crew:
    """The actors, and the shards that they work on. ``opening``: what ``ShardWorker.open`` is called with."""

    def __init__(
        self, ray: Any, opening: tuple[ShippedArtifact, JobOptions, ServeConfig], placement: _Placement
    ) -> None:
        self._ray = ray
        self._opening = opening
        self._worker = ray.remote(
            num_cpus=placement.num_cpus, num_gpus=placement.num_gpus, scheduling_strategy="SPREAD", max_restarts=0
        )(ShardWorker)
        self._idle: list[Actor] = []
        self._calls: dict[ObjectRef, tuple[Actor, int | None]] = {}  # the actor's shard; None: it is opening the job
        self._gone: list[Actor] = []
        self._todo: deque[int] = deque()
        self._deaths: Counter[int | None] = Counter()
        for _ in range(placement.workers):
            self._hire()

    def opened(self) -> tuple[str, int]:
        """The plan's digest and the number of shards, as soon as one actor has them."""
        while (answer := self._answer()) is None:
            pass
        opened: tuple[str, int] = answer
        return opened

    def run(self, todo: Seq[int]) -> Iterator[ShardRecord]:
        """The records of all shards in ``todo``, as they are done."""
        self._todo.extend(todo)
        while self._todo or any(shard is not None for _, shard in self._calls.values()):
            while self._idle and self._todo:
                actor, shard = self._idle.pop(), self._todo.popleft()
                self._calls[actor.run.remote(shard)] = actor, shard
            answer = self._answer()
            if isinstance(answer, ShardRecord):
                yield answer

    def _hire(self) -> None:
        actor = self._worker.remote()
        self._calls[actor.open.remote(*self._opening)] = actor, None

    def _answer(self) -> Any:
        """The next answer of an actor, which is idle then; None if it died instead, and another one was asked for."""
        while not (ready := self._ray.wait([*self._calls], num_returns=1, timeout=_TOLD_EVERY_S)[0]):
            waiting = sum(shard is None for _, shard in self._calls.values())
            if waiting == len(self._calls):
                log.warning("no worker is there: %d wait for a place in the cluster, or for their engine", waiting)
        actor, shard = self._calls.pop(ready[0])
        try:
            answer = self._ray.get(ready[0])
        except self._ray.exceptions.RayTaskError as error:
            raise (
                error.cause if isinstance(error.cause, BeiError) else JobError(f"A worker failed: {error.cause!r}.")
            ) from None
        except self._ray.exceptions.RayError as error:
            self._replace(actor, shard, error)
            return None
        if shard is None:
            self._deaths[None] = 0
        self._idle += [actor] * (_SHARDS_AT_ONCE if shard is None else 1)
        return answer

    def _replace(self, actor: Actor, shard: int | None, error: Exception) -> None:
        """Give the shard of an actor that has died to another one."""
        if shard is not None:
            self._todo.appendleft(shard)
        self._idle = [one for one in self._idle if one is not actor]
        if actor in self._gone:  # its other shard has told it
            return
        self._gone.append(actor)
        self._deaths[shard] += 1
        reason = str(error).partition("\n")[0]
        if self._deaths[shard] == _MOST_DEATHS:
            what = "as they opened the job" if shard is None else f"with shard {shard}"
            raise JobError(f"{_MOST_DEATHS} workers died {what}: {reason} See Ray's logs.") from error
        log.warning("a worker died, another one takes its place: %s", reason)
        self._ray.kill(actor)  # where it is only out of reach
        self._hire()


def _placement(ray: Any, target: str, cluster: Cluster) -> _Placement:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if target not in ("cpu", "cuda-twin", "fake"):
        gpus = sum(int(node.get("GPU", 0)) for node in nodes)
        if not gpus:
            raise JobError(f"The model is built for {target}, and no node of the cluster has a GPU.")
        return _Placement(cluster.workers or gpus, 1, 1)
    if not cpus:
        raise JobError("No node of the cluster has a CPU for workers.")
    if cluster.workers is None:
        return _Placement(len(cpus), min(cpus), 0)
    # An actor is on one node: the most CPUs of which every worker finds as many on one.
    fitting = (most for most in range(max(cpus), 1, -1) if sum(count // most for count in cpus) >= cluster.workers)
    return _Placement(cluster.workers, next(fitting, 1), 0)


def _shipped(ray: Any, path: Path, digest: str) -> ShippedArtifact:
    files: dict[str, list[ObjectRef]] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                files[str(file.relative_to(path))] = [
                    ray.put(part) for part in iter(partial(stream.read, _CHUNK_BYTES), b"")
                ]
    return ShippedArtifact(str(path.resolve()), digest, files)


def _is_it(path: Path, digest: str) -> bool:
    try:
        return store.is_artifact(path) and store.load_manifest(path).digest == digest
    except (ArtifactError, OSError):
        return False
