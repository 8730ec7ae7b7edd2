"""The engine port of a model that reads images: counts those that wait."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from bei.metrics.registry import ModelMetrics
from bei.port import Answer, EnginePort, OnAnswers, PortStats, Submission
from bei.service.decoding_turns import DecodingTurns


class PixelPort:
    """Implements ``EnginePort`` over the one that ``open_port`` opens, whose images the memory of ``turns`` counts."""

    def __init__(
        self,
        open_port: Callable[[OnAnswers, ModelMetrics], EnginePort],
        turns: DecodingTurns,
        on_answers: OnAnswers,
        metrics: ModelMetrics,
    ) -> None:
        self._memory = turns.memory
        self._on_answers = on_answers
        self._port = open_port(self._answered, metrics)
        turns.watch(self.stats)

    def submit(self, submission: Submission) -> None:
        self._memory.keep(submission.request_id, submission.items)
        try:
            self._port.submit(submission)
        except BaseException:  # raised again: what was not taken is never answered
            self._memory.release(submission.request_id, [item.place for item in submission.items])
            raise

    def cancel(self, request_id: int) -> None:
        self._memory.release(request_id)
        self._port.cancel(request_id)

    def stats(self) -> PortStats:
        return self._port.stats()

    def close(self) -> None:
        self._port.close()

    def _answered(self, answers: Seq[Answer]) -> None:
        for request_id, place, _, _ in answers:
            self._memory.release(request_id, [place])
        self._on_answers(answers)
