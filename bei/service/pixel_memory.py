"""Images that are decoded and wait for the engine, bounded by their bytes: a file of a hundred bytes may be megabytes
of pixels, and threads decode them faster than an engine reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bei.metrics.registry import ModelMetrics
from bei.port import Answer, EnginePort, Item, OnAnswers, PortStats, Submission

# Of a model, from when an image is decoded until it is answered: 45 images of 1,800 tokens of Qwen3-VL, 1,700 of CLIP.
MOST_PIXEL_BYTES = 1 << 28
_LOOK_AGAIN_S = 0.1  # whether the request that waits for room is cancelled


class PixelMemory:
    """The bytes of a model's images that wait. Safe in threads."""

    def __init__(self, most_bytes: int = MOST_PIXEL_BYTES) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._held: dict[int, dict[int, int]] = {}  # bytes, by request and place
        self.num_bytes = 0

    def wait(self, is_cancelled: Callable[[], bool]) -> None:
        """Return when there is room for an image, or ``is_cancelled``. Blocks."""
        with self._changed:
            while self.num_bytes >= self._most_bytes and not is_cancelled():
                self._changed.wait(_LOOK_AGAIN_S)

    def keep(self, request_id: int, items: Seq[Item]) -> None:
        """Count the images among ``items``, until they are released."""
        sizes = {place: num_bytes for place, one in items if (num_bytes := one.num_pixel_bytes)}
        if sizes:
            with self._changed:
                held = self._held.setdefault(request_id, {})
                self.num_bytes += sum(size - held.get(place, 0) for place, size in sizes.items())
                held.update(sizes)

    def release(self, request_id: int, places: Seq[int] | None = None) -> None:
        """Those at ``places`` of a request, or all of it, are answered, or never will be."""
        with self._changed:
            if (held := self._held.get(request_id)) is None:
                return
            for place in [*held] if places is None else places:
                self.num_bytes -= held.pop(place, 0)
            if not held:
                del self._held[request_id]
            self._changed.notify_all()


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
