"""When threads decode images that are not urgent: there is memory for them, and no step waits for the same cores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf

from bei.port import PortStats
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.service.pixel_memory import PixelMemory

# While interactive work is expected: one runs, and one waits.
_STEPS_AHEAD = 2


class DecodingTurns:
    """The turns of one model's threads. ``gate``: that of its engines, which compute on the host's cores; ``costs``: of
    their steps for images. Without a gate (the engines compute elsewhere, or in another process) threads wait for
    memory only.

    An engine on the host's cores has a thread on each, and its step ends with the last of them: beside decoding, steps
    took up to twice the time that was predicted, and interactive work waited for their ends. While such work is
    expected, images are therefore decoded between steps, a few of them before each.
    """

    def __init__(
        self, gate: DeviceGate | None = None, costs: CostModel | None = None, memory: PixelMemory | None = None
    ) -> None:
        self._gate = gate
        self._costs = costs
        self.memory = memory or PixelMemory()
        self._stats: Callable[[], PortStats] | None = None
        self._own = threading.local()

    def watch(self, stats: Callable[[], PortStats]) -> None:
        """``stats``: of the port to the model's engines."""
        self._stats = stats

    def enter(self, is_cancelled: Callable[[], bool]) -> None:
        """Return when the calling thread may decode an image, or ``is_cancelled``. Blocks."""
        if self._gate is None:
            self.memory.wait(self._has_room, is_cancelled)
        elif not (self._is_in and self._has_room() and self._gate.may_decode()):
            self.leave()
            self.memory.wait(self._has_room, is_cancelled)
            self._gate.begin_decoding()
            self._own.is_in = True

    def leave(self) -> None:
        """The calling thread has nothing to decode."""
        if self._gate is not None and self._is_in:
            self._gate.end_decoding()
            self._own.is_in = False

    @property
    def _is_in(self) -> bool:
        return getattr(self._own, "is_in", False)

    def _has_room(self) -> bool:
        return self.memory.has_room and self._ahead_s() < self._most_ahead_s()

    def _ahead_s(self) -> float:
        """Engine time of the images that wait."""
        num_images = self.memory.num_images
        if self._costs is None or not num_images:
            return 0.0
        return num_images * self._costs.sequence_seconds(self.memory.num_patches // num_images)

    def _most_ahead_s(self) -> float:
        if self._gate is None or self._stats is None or not self._gate.expects_interactive():
            return inf
        return _STEPS_AHEAD * self._stats().step_cap_s
