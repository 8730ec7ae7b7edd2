"""``bei serve`` whose engine fails as its inputs say: real process, signals and HTTP, and a fake engine.

What a token id does to the step that runs it is in the table below. Lines on standard input let go of what waits:
``open`` what holds, ``load`` the loading of another engine; the end of the input both.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bei.artifact.manifest import Manifest
from bei.cli import main
from bei.core import Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine

log = logging.getLogger(__name__)

RAISES = 90
NAN = 91
HOLDS = 92  # until "open"; a slow step
HANGS = 93  # on the first engine, until "open"
STUCK = 94  # on every engine; and another one cannot be loaded
DIES = 95  # takes the engine's thread along

_is_open, _may_load, _is_stuck = threading.Event(), threading.Event(), threading.Event()


class FaultyEngine(FakeEngine):
    """The ``number``-th that was loaded."""

    def __init__(self, limits: Limits, number: int) -> None:
        super().__init__(limits)
        self._number = number

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Fail or answer."""
        ids = set(batch.input_ids.tolist())
        if DIES in ids:
            raise SystemExit
        if RAISES in ids:
            raise RuntimeError("poison")
        if HOLDS in ids:
            log.info("engine holds")
            _is_open.wait()
        if HANGS in ids and self._number == 0:
            log.info("engine hangs")
            _is_open.wait()
        if STUCK in ids:
            _is_stuck.set()
            log.info("engine hangs")
            _is_open.wait()
        rows = super().run(batch)["embedding"]
        rows[[NAN in values for values in np.split(batch.input_ids, batch.cu_seqlens[1:-1])]] = np.nan
        return {"embedding": rows}


_engines: list[FaultyEngine] = []


def load_engine(folder: Path, manifest: Manifest, options: Any) -> FaultyEngine:
    """Instead of the real one."""
    if _engines:
        log.info("loading another engine")
        _may_load.wait()
        if _is_stuck.is_set():
            raise RuntimeError("the device is gone")
    _engines.append(FaultyEngine(manifest.limits, len(_engines)))
    return _engines[-1]


def _obey() -> None:
    words = {"open\n": _is_open, "load\n": _may_load}
    for line in sys.stdin:
        words[line].set()
    _is_open.set()
    _may_load.set()


if __name__ == "__main__":
    threading.Thread(target=_obey, daemon=True).start()
    with (
        mock.patch("bei.service.loader.load_engine", load_engine),
        mock.patch("bei.server.lifecycle.drain.LINGER_S", 5),
    ):
        main.main(["serve", *sys.argv[1:], "--port", "0"])
