"""``bei serve`` in several processes, of a real artifact with two towers, whose image engine fails as its inputs say.

Images of one colour choose what happens to the process of the engine that runs them. While there is a file ``slow`` in
the working directory, every step of images takes a while, so that something is in flight whenever a process is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

from bei.core import Engine, Outputs, PackedBatch
from bei.engine.load import load_engine
from bei.multiprocess import __main__

KILLS = (1, 2, 3)  # the engine's process, whenever it is run
_STEP_S = 0.05
_CHILD = "child"


class FaultyImages:
    """``engine``, which ends its process by an image of the colour ``KILLS``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info = engine.info
        self.warmup = engine.warmup
        self.close = engine.close

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """As the colours say."""
        if batch.levels is not None:
            if (batch.levels.reshape(batch.num_tokens, -1, 3) == KILLS).all(axis=(1, 2)).any():
                os.kill(os.getpid(), signal.SIGKILL)
            if Path("slow").exists():
                threading.Event().wait(_STEP_S)
        return self._engine.run(batch, outputs)


def _load_faulty(*given: Any) -> Engine:
    return FaultyImages(load_engine(*given))


def main() -> None:
    """Be the server, or one of its processes."""
    if sys.argv[1] == _CHILD:
        del sys.argv[1]
        with mock.patch("bei.service.loader.load_engine", _load_faulty):
            __main__.main()
        return
    from bei.cli.main import main

    command = (sys.executable, "-m", "tests.e2e.image_processes", _CHILD)
    with mock.patch("bei.multiprocess.supervisor.supervisor.COMMAND", command):
        main(["serve", *sys.argv[1:], "--port", "0"])


if __name__ == "__main__":
    main()
