"""Stand-in engines in every process of a cluster, where Ray's hook for workers installs them: one that takes its time
without a core, and one that hangs once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Set
from pathlib import Path

import bei.service.loader
from bei.core import Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from tests.support.artifacts import LIMITS

SLOW_HOOK = f"{__name__}.install_slow"
HANGING_HOOK = f"{__name__}.install_hanging"
# The variable with the path of a file that says that an engine has hung.
HAS_HUNG = "BEI_TESTS_HAS_HUNG"
# A step of sixteen tokens, which a text of the tests has at most, takes 16 ms.
_SECONDS_A_TOKEN = 1e-3


class SlowEngine(FakeEngine):
    """A step takes as long as its tokens do."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Answer late."""
        answers = super().run(batch, outputs)
        self.batches.clear()
        time.sleep(batch.num_tokens * _SECONDS_A_TOKEN)
        return answers


class HangingEngine(FakeEngine):
    """Of all engines one hangs, in its eleventh step."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Answer, or never."""
        if len(self.batches) == 10 and self._is_the_one():
            threading.Event().wait()
        return super().run(batch, outputs)

    def _is_the_one(self) -> bool:
        try:
            Path(os.environ[HAS_HUNG]).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def install_slow() -> None:
    """Let every engine of this process be a slow one."""
    _install(SlowEngine)


def install_hanging() -> None:
    """Let every engine of this process be one that may hang."""
    _install(HangingEngine)


def _install(kind: type[FakeEngine]) -> None:
    setattr(bei.service.loader, "load_engine", lambda *_: kind(LIMITS))  # noqa: B010  # it is not exported
