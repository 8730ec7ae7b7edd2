"""``bei serve`` whose engine waits for the test: real process, signals and HTTP, and a fake engine behind a gate.

The canary of the start passes. From then on each batch that reaches the engine is a line in the log. A line ``one``
on standard input lets one batch through, ``open`` (or the end of the input) lets everything through from then on.
With the variable HANG_ON_DRAIN the event loop never comes back from the beginning of the drain. With HOLD_LOCK
something holds the interpreter's lock from the second signal on. EXIT_S is how long the process has after it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

from bei.artifact.manifest import Manifest
from bei.cli import main
from bei.core import Outputs, PackedBatch
from bei.engine.fake import FakeEngine

log = logging.getLogger(__name__)


class StdinGatedEngine(FakeEngine):
    """Waits for a line before it answers."""

    is_open = False

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Say what has arrived, wait, answer."""
        if not self.batches:
            return super().run(batch)
        starts = batch.cu_seqlens[:-1]
        log.info("engine has %s", batch.input_ids[starts].tolist())
        if not self.is_open and sys.stdin.readline() != "one\n":
            self.is_open = True
        return super().run(batch)


def load_engine(folder: Path, manifest: Manifest, *_: Any) -> StdinGatedEngine:
    """Instead of the real one."""
    return StdinGatedEngine(manifest.limits)


def hang(_: object) -> None:
    """Instead of the beginning of the drain."""
    log.info("the event loop hangs")
    threading.Event().wait()


def hold_lock(_: object) -> None:
    """Instead of giving up what waits: as a library that computes without releasing the interpreter's lock."""
    log.info("the interpreter's lock is held")
    ctypes.PyDLL(None).sleep(600)


if __name__ == "__main__":
    if "HOLD_LOCK" in os.environ:
        mock.patch("bei.server.endpoint.models.Models.abandon", hold_lock).start()
    if "HANG_ON_DRAIN" in os.environ:
        mock.patch("bei.server.endpoint.models.Models.begin_drain", hang).start()
    if "EXIT_S" in os.environ:
        mock.patch("bei.server.lifecycle.signals._EXIT_S", float(os.environ["EXIT_S"])).start()
    with (
        mock.patch("bei.service.loader.load_engine", load_engine),
        mock.patch("bei.server.lifecycle.drain.LINGER_S", 5),
    ):
        main.main(["serve", *sys.argv[1:], "--port", "0"])
