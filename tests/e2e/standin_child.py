"""A process of a server in several processes, with an engine whose inputs choose its faults (token ids below).

The engine is that of ``tests.e2e.swapping_server``: vectors name the build. Files in the working directory let go of
what waits: ``open`` what holds, ``load`` the loading of an engine of a build that ``waits``. While there is a file
``refuse`` no engine can be loaded. SIGUSR1 lets the main thread hang, which is the event loop's in a front end. With
the variable LEAVE_S front ends leave a connection to another one for so long, though that one pauses.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

from bei.artifact.manifest import Manifest
from bei.core import Outputs, PackedBatch
from bei.errors import EngineError
from bei.multiprocess import __main__
from tests.e2e.swapping_server import NumberedEngine

log = logging.getLogger(__name__)

KILLS = 120  # the engine's process, whenever it is run
CRASHES_ONCE = 121  # SIGSEGV, of the first process that runs it
HOLDS = 122  # until there is a file "open"
HANGS_ONCE = 123  # the first process that runs it, for ever

_POLL_S = 0.01


class FaultyEngine(NumberedEngine):
    """Fails or answers."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """As the token ids say."""
        ids = set(batch.input_ids.tolist())
        if KILLS in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if CRASHES_ONCE in ids and is_first("crashed"):
            ctypes.string_at(0)
        if HANGS_ONCE in ids and is_first("hung"):
            log.info("engine hangs")
            threading.Event().wait()
        if HOLDS in ids:
            log.info("engine holds")
            wait_for("open")
        return super().run(batch, outputs)


def is_first(name: str) -> bool:
    """Whether nobody has asked before, in any process."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def wait_for(name: str) -> None:
    """Return when there is a file of this name."""
    while not Path(name).exists():
        threading.Event().wait(_POLL_S)


def load_engine(folder: Path, manifest: Manifest, *_: Any) -> FaultyEngine:
    """Instead of the real one."""
    if Path("refuse").exists():
        raise EngineError("There is no device.")
    number, *waits = (folder / "fake.bin").read_text().split()
    if waits:
        log.info("engine is being loaded")
        wait_for("load")
    return FaultyEngine(manifest.limits, int(number))


def dies_of(name: str) -> None:
    """Let a tokenizer's thread die of the text ``die``, in the front end ``name``."""
    from bei.tokenizer import pool as tokenizer_pool

    encode = tokenizer_pool.TokenizerPool._run

    def run(pool: Any, job: Any) -> None:
        if threading.current_thread().name.startswith("bei-tokenizer") and "die" in job.inputs and is_first("died"):
            log.info("a tokenizer of %s dies", name)
            raise SystemExit
        encode(pool, job)

    tokenizer_pool.TokenizerPool._run = run  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2)
    signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait())
    if sys.argv[1].startswith("front"):
        dies_of(sys.argv[1])
        if "LEAVE_S" in os.environ:
            mock.patch("bei.server.http.listener._LEAVE_S", float(os.environ["LEAVE_S"])).start()
    with (
        mock.patch("bei.service.loader.load_engine", load_engine),
        mock.patch("bei.server.lifecycle.drain.LINGER_S", 5),
    ):
        __main__.main()
