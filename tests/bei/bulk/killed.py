"""Runs one job again and again, each time killed at another point, and finished by a second process.

    python -m tests.bei.bulk.killed ARTIFACT INPUT FOLDER OUTPUT_FORMAT EVERY

EVERY: 1 for all points, 2 for every second one. Points are the calls that change a disk or give work to the engine.
Children are forks of a process that has loaded all modules and started no thread. Prints a JSON object: the number of
points, those whose output differs from that of a job that was not killed, and how many partial files were left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import bei.service.loader
from bei.bulk.job import Job
from bei.bulk.run import JobOptions, opened_source, run_job
from bei.bulk.shard_service import ShardService
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from tests.bei.bulk.conftest import digests
from tests.support.artifacts import LIMITS

_POINTS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("fsync", "replace", "link", "mkdir", "unlink")),
    *((ShardService, name) for name in ("_step", "_tokenized")),
    (Job, "_commit"),
)
_KILLED = -signal.SIGKILL


def main(artifact: Path, source: Path, folder: Path, output_format: str, every: int) -> dict[str, Any]:
    setattr(bei.service.loader, "load_engine", lambda *_: FakeEngine(LIMITS))  # noqa: B010  # it is not exported

    def run(output: Path) -> None:
        options = JobOptions(
            (str(source),), str(output), columns=Columns(id="id"), shard_rows=10, output_format=output_format
        )
        with opened_source(options) as opened:
            run_job(opened, artifact, options, ServeConfig(tune="off", tokenizer_threads=1), lambda _: None)

    assert _in_child(partial(run, folder / "whole")) == 0
    whole, left, points = digests(folder / "whole"), 0, 0
    wrong: list[int] = []
    while True:
        output = folder / f"killed-{points}"
        ended = _in_child(partial(run, output), point=points)
        if ended == 0:
            return {"points": points, "wrong": wrong, "left": left, "files": len(whole)}
        assert ended == _KILLED, ended
        assert _in_child(partial(run, output)) == 0
        found = digests(output)
        if output_format == "lance":
            assert _in_child(partial(_compare_datasets, output, folder / "whole")) == 0
        left += sum(name.endswith(".partial") for name in found)
        if found != whole:
            wrong.append(points)
        points += every


def _compare_datasets(output: Path, whole: Path) -> None:
    """Lance must not be loaded before a fork."""
    import lance

    found, expected = (lance.dataset(str(folder / "data.lance")) for folder in (output, whole))
    assert (found.version, found.to_table()) == (1, expected.to_table())


def _in_child(work: Callable[[], object], point: int | None = None) -> int:
    """The child's exit code, or the signal that ended it, negative. ``point``: as ``_kill_at`` has it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        if point is not None:
            _kill_at(point)
        work()
        status = 0
    except BaseException:  # shown: the child's status alone would not say why
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _kill_at(point: int) -> None:
    """End this process by SIGKILL before the call of that number."""
    left = [point]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return counting

    for owner, name in _POINTS:
        setattr(owner, name, counted(getattr(owner, name)))


if __name__ == "__main__":
    assert pq  # loaded before the first fork
    given = [Path(value) for value in sys.argv[1:4]]
    print(json.dumps(main(given[0], given[1], given[2], sys.argv[4], int(sys.argv[5]))))  # noqa: T201
