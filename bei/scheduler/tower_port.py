"""The engine port of a model with two towers: texts go to one engine, images or labels to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bei.port import LANES, Answer, EnginePort, OnAnswers, PortStats, Submission


class TowerPort:
    """Implements ``EnginePort`` over two, which share a device: work of both is one model's.

    ``open_texts`` and ``open_second`` make the two. A submission is for one of them.
    """

    def __init__(
        self,
        open_texts: Callable[[OnAnswers], EnginePort],
        open_second: Callable[[OnAnswers], EnginePort],
        on_answers: OnAnswers,
    ) -> None:
        answering = threading.Lock()

        def in_turn(answers: Seq[Answer]) -> None:
            with answering:
                on_answers(answers)

        self._second = open_second(in_turn)
        try:
            self._texts = open_texts(in_turn)
        except BaseException:  # raised again: the other engine's threads would outlive this
            self._second.close()
            raise

    def submit(self, submission: Submission) -> None:
        """As ``EnginePort`` has it."""
        port = self._second if submission.items[0].encoding.is_for_second else self._texts
        port.submit(submission)

    def cancel(self, request_id: int) -> None:
        """As ``EnginePort`` has it."""
        self._texts.cancel(request_id)
        self._second.cancel(request_id)

    def stats(self) -> PortStats:
        """The state of both together. Each engine waits for the other's steps: what these take is in the sums, so it is
        no slowdown."""
        texts, second = self._texts.stats(), self._second.stats()
        both = texts.is_busy and second.is_busy
        slowdown = max(texts.slowdown, second.slowdown) - (1 / texts.num_streams if both else 0.0)
        return PortStats(
            lanes={lane: texts.lanes[lane].plus(second.lanes[lane]) for lane in LANES},
            num_running=texts.num_running + second.num_running,
            running_s=texts.running_s + second.running_s,
            slowdown=max(slowdown, 1 / texts.num_streams),
            interactive_share=min(1.0, texts.interactive_share + second.interactive_share),
            is_alive=texts.is_alive and second.is_alive,
            is_stalled=texts.is_stalled or second.is_stalled,
            is_busy=texts.is_busy or second.is_busy,
            last_step_s=max(texts.last_step_s, second.last_step_s),
            step_cap_s=min(texts.step_cap_s, second.step_cap_s),
            overtaking=max(texts.overtaking, second.overtaking),
            device=texts.device,
            num_streams=texts.num_streams,
            unshared=texts.unshared,
        )

    def close(self) -> None:
        """As ``EnginePort`` has it."""
        self._texts.close()
        self._second.close()
