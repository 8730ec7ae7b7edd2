"""``bei embed``: runs a job and shows how far it is."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console

from bei.artifact.manifest import Artifact
from bei.bulk.run import JobOptions, JobProgress, Tell, opened_source, run_job
from bei.bulk.watchdog import Watchdog
from bei.cli.embed.arguments import job_options
from bei.config.settings import ServeConfig
from bei.errors import ConfigError, JobError
from bei.printable import one_line
from bei.utils.full_disk import write_whole
from bei.utils.share_done import shown_time

# Opens the artifact of the configuration's only model.
OpenArtifact = Callable[[ServeConfig], AbstractContextManager[list["Path | Artifact"]]]

_LOG_EVERY_S = 30.0


def embed(options: Mapping[str, Any], config: ServeConfig, artifacts: OpenArtifact) -> int:
    """Run the job. Returns the exit code. Raises what ``run_job`` raises."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    job = job_options(options)
    # A job's steps depend on nothing that is measured.
    config = dataclasses.replace(config, tune="off")
    if options["ray_workers"] is not None and options["ray"] is None:
        raise ConfigError("--ray-workers is for --ray, which is missing: give its address, or leave it out.")
    # Files are listed before a checkpoint is built, which takes minutes.
    with (
        Watchdog(config.hang_timeout, _end_now),
        opened_source(job) as source,
        artifacts(config) as (artifact,),
        _shown(options) as tell,
    ):
        if options["ray"] is None:
            done = run_job(source, artifact, job, config, tell)
        else:
            from bei.ray.jobs import Cluster, run_on_ray

            done = run_on_ray(source, artifact, job, config, Cluster(options["ray"], options["ray_workers"]), tell)
    if not options["json"]:
        print(_summary(done, job), file=sys.stderr)  # noqa: T201
    num_answered = done.rows - done.dead * (job.on_error == "null")
    if done.dead and num_answered <= 0 and job.part == (0, 1):  # a part may have bad rows alone
        print(  # noqa: T201
            f"error: No row has an answer: {job.output}/_dead says why. Mend the input, or name another column by "
            "--text-column, and give another --output.",
            file=sys.stderr,
        )
        return 1
    return 0


def _end_now(error: JobError) -> NoReturn:
    """End the process as it is: a thread of it does not end."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:  # behind the progress
        console.show_cursor()
        console.line()
    print(f"error: {one_line(str(error))}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(2)


@contextmanager
def _shown(options: Mapping[str, Any]) -> Iterator[Tell]:
    """Tell of progress in the way that was asked for."""
    metrics_file: Path | None = options["metrics_file"]

    def also(tell: Tell) -> Tell:
        def both(progress: JobProgress) -> None:
            if metrics_file is not None:
                write_whole(metrics_file, metrics(progress).encode())
            tell(progress)

        return both

    console = Console(stderr=True, highlight=False)
    if options["json"]:
        yield also(_print_event)
    elif console.is_terminal:
        with console.status("") as status:
            yield also(lambda progress: status.update(words(progress)))
    else:
        yield also(_Logged())


class _Logged:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def __call__(self, progress: JobProgress) -> None:
        if time.monotonic() - self._last_s >= _LOG_EVERY_S:
            self._last_s = time.monotonic()
            print(words(progress), file=sys.stderr, flush=True)  # noqa: T201


def _print_event(progress: JobProgress) -> None:
    print(msgspec.json.encode(progress).decode(), flush=True)  # noqa: T201


def words(progress: JobProgress) -> str:
    """One line."""
    parts = [
        f"{progress.shards_done} of {progress.shards} shards",
        f"{progress.rows:,} rows",
        f"{progress.tokens_per_s:,.0f} tokens/s",
    ]
    if progress.engine_share is not None:
        parts.append(f"engine {progress.engine_share:.0%} busy")
    if progress.dead:
        parts.append(f"{progress.dead:,} dead")
    if progress.left_s is not None:
        parts.append(f"{shown_time(progress.left_s)} left")
    return ", ".join(parts)


def metrics(progress: JobProgress) -> str:
    """In the text format of Prometheus."""
    gauges = {name: getattr(progress, name) for name in ("shards", "shards_done", "tokens_per_s")}
    if progress.engine_share is not None:
        gauges["engine_share"] = progress.engine_share
    counters = {name: getattr(progress, name) for name in ("rows", "dead", "truncated", "tokens")}
    lines = [f"# TYPE bei_job_{name} gauge\nbei_job_{name} {value}" for name, value in gauges.items()]
    lines += [f"# TYPE bei_job_{name}_total counter\nbei_job_{name}_total {value}" for name, value in counters.items()]
    return "\n".join(lines) + "\n"


def _summary(done: JobProgress, job: JobOptions) -> str:
    """The last line."""
    own = "" if job.part == (0, 1) else f" (part {job.part[0]} of {job.part[1]})"
    resumed = f", {done.resumed} of {done.shards} shards were done before" if done.resumed else ""
    busy = "" if done.engine_share is None else f", engine {done.engine_share:.0%} busy"
    rate = f" in {shown_time(done.elapsed_s)}: {done.tokens_per_s:,.0f} tokens/s{busy}"
    dead = f"\nRows without an answer: {done.dead:,}; {job.output}/_dead says why." if done.dead else ""
    cut = f"\nInputs that were cut to what the model reads: {done.truncated:,}." if done.truncated else ""
    return f"{done.rows:,} rows in {job.output}{own}{rate if done.shards > done.resumed else ''}{resumed}.{dead}{cut}"
