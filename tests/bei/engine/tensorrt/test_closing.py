"""Closing an engine in use: no thread waits for ever, and memory of running steps is not freed."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from bei.core import Outputs
from bei.engine.tensorrt import engine as tensorrt
from bei.errors import EngineError
from tests.bei.engine.tensorrt.rig import Rig, batch_of

_DEADLINE_S = 30.0


class Stuck:
    """A step on the engine's only stream that ends when it ``may``."""

    def __init__(self, rig: Rig, threads: ThreadPoolExecutor) -> None:
        self.rig, self.threads = rig, threads
        self.engine = rig.load(num_streams=1)
        self.is_inside, self.may = threading.Event(), threading.Event()
        rig.device.before_wait = self._wait
        self.answer = self.run()
        assert self.is_inside.wait(_DEADLINE_S)

    def _wait(self) -> None:
        self.is_inside.set()
        assert self.may.wait(_DEADLINE_S)

    def run(self) -> Future[Outputs]:
        return self.threads.submit(self.engine.run, batch_of([5, 6]))

    def end(self) -> None:
        """End the step, and check its outputs."""
        self.may.set()
        rows = self.answer.result(_DEADLINE_S)["embedding"]
        assert abs(rows - self.rig.graphs.expected(batch_of([5, 6]))["embedding"]).max() < 2e-5


def test_who_waits_for_a_stream_hears_that_the_engine_is_closed(rig: Rig) -> None:
    with ThreadPoolExecutor(4) as threads:
        stuck = Stuck(rig, threads)
        waiting: list[Future[Any]] = [stuck.run(), threads.submit(stuck.engine.warmup)]
        closed = threads.submit(stuck.engine.close)
        for future in waiting:
            with pytest.raises(EngineError, match=r"The engine is closed\."):
                future.result(_DEADLINE_S)
        assert not closed.done()
        stuck.end()
        closed.result(_DEADLINE_S)
    rig.check_clean()


def test_a_step_that_does_not_end_keeps_its_memory_until_it_has(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensorrt, "_CLOSE_PATIENCE_S", 0.01)
    with ThreadPoolExecutor(1) as threads:
        stuck = Stuck(rig, threads)
        held = rig.device.leaks()
        stuck.engine.close()
        assert "a step has not ended in 0 s: the GPU memory of NVIDIA H200 (SM90) is kept" in caplog.text
        assert rig.device.leaks() == held
        stuck.end()
    stuck.engine.close()
    rig.check_clean()
