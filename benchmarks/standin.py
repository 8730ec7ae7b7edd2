"""``bei serve`` over an engine whose steps take a millisecond and none of the processor, as those of a GPU do.

    python -m benchmarks.standin serve ARTIFACT... [flags of bei serve]

Its processes, where it has several, are made of this module too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bei.artifact.certificate import canary
from bei.artifact.manifest import Manifest
from bei.cli import main as cli
from bei.core import Outputs, PackedBatch
from bei.multiprocess import __main__
from bei.multiprocess.supervisor import supervisor
from bei.service import loader
from tests.e2e.wide_server import WideEngine

_STEP_S = 0.001


class TimedEngine(WideEngine):
    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Rows of a table, after a millisecond."""
        time.sleep(_STEP_S)
        return super().run(batch, outputs)


def load_engine(_: Path, manifest: Manifest, *__: Any) -> TimedEngine:
    return TimedEngine(manifest)


@contextmanager
def standing_in() -> Iterator[None]:
    """Engines of this process are ``TimedEngine``, and the processes that it starts are of this module."""
    command = (sys.executable, "-m", "benchmarks.standin", "process")
    with (
        mock.patch.object(loader, "load_engine", load_engine),
        mock.patch.object(canary, "deviation", return_value=None),  # rows of the table are no canary's
        mock.patch.object(supervisor, "COMMAND", command),
    ):
        yield


def main() -> None:
    """A server, or one of its processes."""
    kind, *rest = sys.argv[1:]
    with standing_in():
        if kind == "serve":
            cli.main(["serve", *rest, "--tune=off"])
        else:
            sys.argv[1:] = rest
            __main__.main()


if __name__ == "__main__":
    main()
