"""What becomes known of a request on its way: for its metrics, its line of the log, its trace."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.metrics.request_timing import Timing
from bei.port import Lane

# Where an ASGI scope has its request's Work.

Inputs: TypeAlias = Seq[str | tuple[str, str] | list[int]]


class Work:
    """``model`` and ``num_inputs``: of whom the request asks how much. ``lane``: once it is accepted. ``timing``: where
    anybody wants to know the times."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.lane: Lane | None = None
        self.num_inputs = 0
        self.timing: Timing | None = None

    def asks(self, model: str, inputs: Inputs) -> None:
        """``model`` is asked for ``inputs``; of a request in parts each comes here."""
        self.model = model
        self.num_inputs += len(inputs)
