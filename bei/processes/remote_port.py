"""The engine port of a front end, whose batch manager is in another process."""

from __future__ import annotations

from pathlib import Path

from bei.costs import CostModel
from bei.metrics import ModelMetrics
from bei.port import OnAnswers, PortStats, Submission
from bei.processes.hello import Hello
from bei.service import OpenPort


def ask_hello(address: Path, model: str, timeout_s: float | None = None) -> Hello:
    """What the process at ``address`` says of ``model``. Blocks until it is there (None: however long that takes).

    Raises ModelNotFoundError where it does not serve it, EngineDiedError after ``timeout_s``.
    """
    raise NotImplementedError


def remote_port(address: Path, model: str, costs: CostModel | None = None) -> OpenPort:
    """Opens ``RemotePort`` for a service. ``costs``: the service's, which is corrected as the other side corrects its
    own."""
    raise NotImplementedError


class RemotePort:
    """Implements ``EnginePort`` over a socket to a ``PortServer``. Reconnects by itself and submits again what is
    unanswered; an item that three processes have been given without an answer gets an EngineError.

    Made in any thread; returns when the other side has said hello (so ask for it before, where that may take long).
    ``stats().is_stalled`` while the batch manager's process, or every engine process, is away.
    """

    def __init__(
        self, address: Path, model: str, on_answers: OnAnswers, metrics: ModelMetrics, costs: CostModel | None = None
    ) -> None:
        raise NotImplementedError

    @property
    def hello(self) -> Hello:
        """The latest."""
        raise NotImplementedError

    def submit(self, submission: Submission) -> None:
        """As the port says. Never blocks, whatever the other process does."""
        raise NotImplementedError

    def cancel(self, request_id: int) -> None:
        """As the port says."""
        raise NotImplementedError

    def stats(self) -> PortStats:
        """What the other side said last, and what has been submitted since."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait until all is answered, then leave. Rows that are in use stay as they are."""
        raise NotImplementedError
