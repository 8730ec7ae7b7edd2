"""Images that are decoded and wait for the engine, bounded by their bytes: a file of a hundred bytes may be megabytes
of pixels, and threads decode them faster than an engine reads them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.metrics.registry import ModelMetrics
from bei.port import Answer, EnginePort, Item, OnAnswers, PortStats, Submission

# Of a model, from when an image is decoded until it is answered: 45 images of 1,800 tokens of Qwen3-VL, 1,700 of CLIP.
MOST_PIXEL_BYTES = 1 << 28
_LOOK_AGAIN_S = 0.1  # whether the request that waits for room is cancelled


# An image's levels in memory: which object, and its bytes.
_Levels: TypeAlias = "tuple[int, int]"


class PixelMemory:
    """The bytes of a model's images that wait; of one that several inputs have, as pairs have a query's, once. Safe in
    threads."""

    def __init__(self, most_bytes: int = MOST_PIXEL_BYTES) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._held: dict[int, dict[int, list[_Levels]]] = {}  # by request and place
        self._times = Counter[_Levels]()
        self.num_bytes = 0

    def wait(self, is_cancelled: Callable[[], bool]) -> None:
        """Return when there is room for an image, or ``is_cancelled``. Blocks."""
        with self._changed:
            while self.num_bytes >= self._most_bytes and not is_cancelled():
                self._changed.wait(_LOOK_AGAIN_S)

    def keep(self, request_id: int, items: Seq[Item]) -> None:
        """Count the images among ``items``, until they are released."""
        found = {place: levels for place, one in items if (levels := [(id(own), own.nbytes) for own in one.levels])}
        if found:
            with self._changed:
                held = self._held.setdefault(request_id, {})
                for place, levels in found.items():
                    self._drop(held.get(place, ()))
                    held[place] = levels
                    self.num_bytes += sum(one[1] for one in {*levels} if not self._times[one])
                    self._times.update(levels)

    def release(self, request_id: int, places: Seq[int] | None = None) -> None:
        """Those at ``places`` of a request, or all of it, are answered, or never will be."""
        with self._changed:
            if (held := self._held.get(request_id)) is None:
                return
            for place in [*held] if places is None else places:
                self._drop(held.pop(place, ()))
            if not held:
                del self._held[request_id]
            self._changed.notify_all()

    def _drop(self, levels: Seq[_Levels]) -> None:
        self._times.subtract(levels)
        for one in {*levels}:
            if not self._times[one]:
                del self._times[one]
                self.num_bytes -= one[1]


class PixelPort:
    """Implements ``EnginePort`` over the one that ``open_port`` opens, whose images ``memory`` counts."""

    def __init__(
        self,
        open_port: Callable[[OnAnswers, ModelMetrics], EnginePort],
        memory: PixelMemory,
        on_answers: OnAnswers,
        metrics: ModelMetrics,
    ) -> None:
        self._memory = memory
        self._on_answers = on_answers
        self._port = open_port(self._answered, metrics)

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
