"""``bei serve`` whose engines say which build they are: real process, signals and HTTP, and fake engines.

``engine/fake.bin`` holds the number of the build, which is component 5 of every vector. Behind the number may stand
``waits``: such an engine is loaded when a line ``load`` (or the end) comes on standard input.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bei.artifact import store
from bei.artifact.manifest import Artifact, Manifest
from bei.cli import main
from bei.core import Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine, fake_row
from tests.support.artifacts import CANARY_TEXT, save_artifact, token_ids

log = logging.getLogger(__name__)

PLACE = 5
_STEP_S = 0.003  # so that something is in flight whenever a swap comes

_may_load = threading.Event()


def save_build(path: Path, number: int, *, name: str = "tiny", waits: bool = False, canary_of: int = 0) -> Artifact:
    """The artifact of build ``number`` in the new folder ``path``, with the canary of build ``canary_of``, if given."""
    canary = vector_of(token_ids(CANARY_TEXT), canary_of or number)
    unit = [value / float(np.linalg.norm(canary)) for value in canary]
    made = save_artifact(path, canary=unit, name=name, embedding={"normalize": False})
    (made.engine_dir / "fake.bin").write_text(f"{number} waits" if waits else f"{number}")
    return store.save(path, made.manifest, made.certificate)


def put_in_place(new: Path, out: Path) -> None:
    """As ``bei build`` does: what is there steps aside, and goes."""
    aside = out.rename(out.with_name(out.name + ".replaced"))
    new.rename(out)
    shutil.rmtree(aside)


def vector_of(ids: Sequence[int], number: int) -> list[float]:
    """What build ``number`` answers."""
    row = fake_row(np.array(ids, np.int32)).tolist()
    return [*row[:PLACE], float(number), *row[PLACE + 1 :]]


class NumberedEngine(FakeEngine):
    """Build ``number``."""

    def __init__(self, limits: Limits, number: int) -> None:
        super().__init__(limits)
        self._number = number

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Take a while, and answer."""
        rows = super().run(batch)["embedding"]
        self.batches.clear()
        threading.Event().wait(_STEP_S)
        rows[:, PLACE] = self._number
        return {"embedding": rows}


def load_engine(folder: Path, manifest: Manifest, *_: Any) -> NumberedEngine:
    """Instead of the real one."""
    number, *waits = (folder / "fake.bin").read_text().split()
    if waits:
        log.info("engine is being loaded")
        _may_load.wait()
    return NumberedEngine(manifest.limits, int(number))


def _obey() -> None:
    for line in sys.stdin:
        if line == "load\n":
            _may_load.set()
    _may_load.set()


if __name__ == "__main__":
    threading.Thread(target=_obey, daemon=True).start()
    with (
        mock.patch("bei.service.loader.load_engine", load_engine),
        mock.patch("bei.server.lifecycle.drain.LINGER_S", 5),
    ):
        main.main(["serve", *sys.argv[1:], "--port", "0"])
