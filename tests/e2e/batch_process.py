"""``bei run-batch`` and ``bei serve`` with a fake engine whose steps take a while: a batch is killed in the middle.

Checkpoints are kept at every write, or as the variable CHECKPOINT_S says.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

from bei.artifact.manifest import Manifest
from bei.cli import main
from bei.core import Outputs, PackedBatch
from bei.engine.fake import FakeEngine

_STEP_S = 0.02


class SlowEngine(FakeEngine):
    """Every step takes the same time."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Wait, and answer."""
        time.sleep(_STEP_S)
        return super().run(batch, outputs)


def load_engine(folder: Path, manifest: Manifest, *_: Any) -> SlowEngine:
    """Instead of the real one."""
    return SlowEngine(manifest.limits)


if __name__ == "__main__":
    with (
        mock.patch("bei.service.loader.load_engine", load_engine),
        mock.patch("bei.server.lifecycle.drain.LINGER_S", 5),
        mock.patch("bei.server.batches.answer_files._CHECKPOINT_S", float(os.environ.get("CHECKPOINT_S", "0"))),
    ):
        main.main(sys.argv[1:])
