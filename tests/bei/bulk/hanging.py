"""``bei embed`` or ``bei run-batch`` in a process in which something does not return.

    python -m tests.bei.bulk.hanging WHAT ARGUMENT...

WHAT: nothing, the engine (or engine-of-a-gpu) in its third step, a read of an input file, or the write of a part.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

import fsspec.implementations.local as local_files

import bei.bulk.watchdog
import bei.service.loader
from bei.cli.main import main
from bei.core import Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from tests.support.artifacts import LIMITS


class _Engine(FakeEngine):
    is_well = True
    is_replaceable = True

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.info = replace(self.info, is_replaceable=self.is_replaceable)

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Answer twice."""
        answers = super().run(batch, outputs)
        if not self.is_well and len(self.batches) > 2:
            _hang()
        return answers


class _Reads:
    """An open file that never answers."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _Reads:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def readinto(self, _: object) -> int:
        """Never returns."""
        _hang()
        return 0


def _hang(*_: object) -> None:
    threading.Event().wait()


def _spoil(what: str) -> None:
    setattr(bei.service.loader, "load_engine", lambda *_: _Engine(LIMITS))  # noqa: B010  # it is not exported
    setattr(bei.bulk.watchdog, "_PATIENCE_WITH_STORES", 1.0)  # noqa: B010
    if what.startswith("engine"):
        _Engine.is_well = False
        _Engine.is_replaceable = what != "engine-of-a-gpu"
    elif what == "read":
        opened: Callable[..., Any] = local_files.LocalFileSystem.open
        local_files.LocalFileSystem.open = lambda *given, **named: _Reads(opened(*given, **named))
    elif what == "write":
        setattr(os, "fsync", _hang)  # noqa: B010  # of another signature


if __name__ == "__main__":
    _spoil(sys.argv[1])
    main(sys.argv[2:])
