"""The lines of a file through the whole application, in this process and without a socket: ``bei run-batch``."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bei.artifact.manifest import Artifact
from bei.artifact.store import load_manifest
from bei.config.settings import ServeConfig
from bei.errors import EngineDeadError
from bei.server.batches.answer_files import Checkpoint
from bei.server.batches.in_process import BatchClient, LineAnswer, post
from bei.server.batches.lines import RequestLine, read_lines
from bei.server.batches.resumable_run import AnsweredBy, ResumableRun, resumable_run
from bei.server.batches.runner import LineRunner
from bei.server.make_app import make_app
from bei.server.process_tuning import collect_rarely, run_on_loop
from bei.utils.ranges import WEEK_S
from bei.utils.share_done import Tell

# Settings that say what answers are. Limits, which refuse lines that may be asked for again, are none.
ANSWERING = ("alias", "any_model_name", "auto_truncate", "dialect", "openai_token_ids", "untrained_dimensions")

FindArtifacts: TypeAlias = Callable[[], AbstractContextManager[Seq[Path | Artifact]]]


class BatchFiles(NamedTuple):
    """The requests, and where their answers go."""

    input: Path
    output: Path
    errors: Path


class BatchEnd(NamedTuple):
    """How a run has ended: ``signal`` has stopped it; None: every line is answered. ``num_answered``: in this run."""

    reached: Checkpoint
    num_answered: int
    signal: signal.Signals | None


def run_batch(files: BatchFiles, find_artifacts: FindArtifacts, config: ServeConfig, tell: Tell) -> BatchEnd:
    """LineAnswer the lines that have no answer yet. A first SIGTERM or SIGINT lets those under way end.

    ``find_artifacts`` may build them, and is called if there is something to answer. Raises what it,
    ``resumable_run`` and ``make_app`` raise, before anything is asked; later EngineDeadError, DiskFullError, OSError.
    """
    with resumable_run(*files, config.payload_limit) as run:
        before = run.files.reached
        ended: list[signal.Signals | None] = []
        tell(before.completed + before.failed, run.num_lines)
        if before.completed + before.failed < run.num_lines:
            with find_artifacts() as artifacts:
                run.begin(_served(artifacts, config))
                try:
                    run_on_loop(_answer_lines(run, artifacts, _config_of(config), tell, ended.append))
                except EngineDeadError as error:
                    raise EngineDeadError(
                        "The engine answers no more, as the log says: the same command goes on with another one."
                    ) from error
        after = run.files.reached
        num_answered = after.completed + after.failed - before.completed - before.failed
        return BatchEnd(after, num_answered, ended[0] if ended else None)


def _served(artifacts: Seq[Path | Artifact], config: ServeConfig) -> AnsweredBy:
    """Raises ArtifactError."""
    manifests = [one.manifest if isinstance(one, Artifact) else load_manifest(one) for one in artifacts]
    settings = {name: getattr(config, name) for name in ANSWERING}
    return AnsweredBy([(one.name, one.digest) for one in manifests], {**settings, "alias": [*config.alias]})


def _config_of(config: ServeConfig) -> ServeConfig:
    """``config`` for one client of this process: no keys, and no limit on the time that bulk work waits."""
    return dataclasses.replace(
        config,
        api_keys=None,
        api_keys_file=None,
        metrics_need_key=False,
        batch_dir=None,
        bulk_max_wait=float(WEEK_S),
    )


async def _answer_lines(
    run: ResumableRun,
    artifacts: Seq[Path | Artifact],
    config: ServeConfig,
    tell: Tell,
    on_signal: Callable[[signal.Signals], object],
) -> None:
    async with await make_app(artifacts, config) as whole:
        client = BatchClient(flow=0)

        async def ask(line: RequestLine) -> LineAnswer:
            return await post(whole.app, line.url, line.body, client)

        def progress() -> None:
            tell(run.files.reached.completed + run.files.reached.failed, run.num_lines)

        runner = LineRunner(ask, run.files, progress, is_numbered=True)
        collect_rarely()
        _stop_on_signals(runner, on_signal)
        at = run.files.reached
        await runner.run(read_lines(run.input, config.payload_limit, at.input_bytes, at.num_lines))


def _stop_on_signals(runner: LineRunner, on_signal: Callable[[signal.Signals], object]) -> None:
    """The second one ends the process, as if nobody had listened: what is written goes on with the next run."""
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        on_signal(number)
        runner.stop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)
            signal.signal(one, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
