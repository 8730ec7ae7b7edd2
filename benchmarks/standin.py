"""``bei serve`` over an engine whose steps take a millisecond and none of the processor, as those of a GPU do.

    python -m benchmarks.standin serve ARTIFACT... [flags of bei serve]

Its processes, where it has several, are made of this module too. Each of those writes at its end how many arrays it has
copied into shared memory to ``COPIES/<its name>.json``, where the variable COPIES names a folder.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

from bei.artifact.manifest import Manifest
from bei.cli import main as cli
from bei.core import Outputs, PackedBatch
from tests.e2e.wide_server import WideEngine

COPIES = "STANDIN_COPIES"
_STEP_S = 0.001


class TimedEngine(WideEngine):
    """Its steps take their time."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Rows of a table, after a millisecond."""
        time.sleep(_STEP_S)
        return super().run(batch, outputs)


def load_engine(_: Path, manifest: Manifest, *__: Any) -> TimedEngine:
    """Instead of the real one."""
    return TimedEngine(manifest)


def count_copies(folder: Path, name: str) -> None:
    """Write, at the end of this process, how many arrays it has copied into shared memory."""
    from bei.multiprocess.transport import lease

    lenders: list[lease.Lender] = []
    make = lease.Lender.__init__

    def noted(self: lease.Lender, *args: Any, **options: Any) -> None:
        lenders.append(self)
        make(self, *args, **options)

    lease.Lender.__init__ = noted  # type: ignore[method-assign]
    atexit.register(
        lambda: (folder / f"{name}.json").write_text(json.dumps(sum(lender.num_copied for lender in lenders)))
    )


def main() -> None:
    """A server, or one of its processes."""
    kind, *rest = sys.argv[1:]
    # Rows of the table are no canary's.
    with (
        mock.patch("bei.service.loader.load_engine", load_engine),
        mock.patch("bei.service.service.deviation", return_value=None),
    ):
        if kind == "serve":
            command = (sys.executable, "-m", "benchmarks.standin", "process")
            with mock.patch("bei.multiprocess.supervisor.supervisor.COMMAND", command):
                cli.main(["serve", *rest, "--tune=off"])
        else:
            from bei.multiprocess import __main__

            if COPIES in os.environ:
                count_copies(Path(os.environ[COPIES]), rest[0])
            sys.argv[1:] = rest
            __main__.main()


if __name__ == "__main__":
    main()
