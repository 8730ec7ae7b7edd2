"""A stand-in engine that takes its time without a core, in every process of a cluster: Ray's hook for workers calls
``install``."""

from __future__ import annotations

import time
from collections.abc import Set

import bei.service.loader
from bei.core import Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from tests.support.artifacts import LIMITS

HOOK = f"{__name__}.install"
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


def install() -> None:
    """Let every engine of this process be a slow one."""
    setattr(bei.service.loader, "load_engine", lambda *_: SlowEngine(LIMITS))  # noqa: B010  # it is not exported
