"""Turns of threads that decode images: so many images wait as two steps take, and none is decoded beside a step."""

from __future__ import annotations

import threading
from math import inf

import numpy as np
import pytest

from bei.core import Encoding, ImagePatches, Limits
from bei.port import LANES, Item, LaneStats, PortStats
from bei.scheduler import device_gate as gates
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate, GateUser
from bei.service.decoding_turns import DecodingTurns
from bei.service.pixel_memory import PixelMemory
from tests.support.engines import DEADLINE_S

LIMITS = Limits(max_seq_len=64, max_batch_size=32, max_num_tokens=512)
COSTS = CostModel.assumed(LIMITS)
IMAGE_S = COSTS.sequence_seconds(2)  # of an image of two patches
IDLE = dict.fromkeys(LANES, LaneStats(0, 0, 0.0))


def stats(step_cap_s: float) -> PortStats:
    return PortStats(IDLE, 0, 0.0, 1.0, 0.0, True, False, False, -inf, step_cap_s, 1.0, "none", 1, None)


class Decoder:
    """A thread that decodes image after image into ``turns``, as a pool's does."""

    def __init__(self, turns: DecodingTurns) -> None:
        self._turns = turns
        self._is_cancelled = threading.Event()
        self._images: list[ImagePatches] = []  # as a queue holds them
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        place = 0
        while not self._is_cancelled.is_set():
            self._turns.enter(self._is_cancelled.is_set)
            if self._is_cancelled.is_set():
                break
            patches = ImagePatches(np.zeros((2, 12), np.uint8), b"", (1, 2))
            self._images.append(patches)
            self._turns.memory.keep(place, [Item(0, Encoding(np.zeros(2, np.int32), image=patches))])
            place += 1
        self._turns.leave()

    def end(self) -> None:
        self._is_cancelled.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def user() -> GateUser:
    return DeviceGate().join(1, lambda: False, lambda: 0.01, uses_cores=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interactive work stays expected where it came, and nobody loses patience."""
    for name in ("_EXPECTED_S", "_LONGEST_DECODING_S", "_LONGEST_STEP_S"):
        monkeypatch.setattr(gates, name, 3600.0)


def settled(memory: PixelMemory) -> int:
    """How many images wait, when no more come."""
    found = -1
    while found != memory.num_images:
        found = memory.num_images
        threading.Event().wait(0.2)
    return found


def test_beside_interactive_work_images_for_two_capped_steps_are_decoded_and_then_as_they_are_answered(
    user: GateUser,
) -> None:
    user.note_interactive()
    turns = DecodingTurns(user.gate, COSTS)
    turns.watch(lambda: stats(step_cap_s=3.5 * IMAGE_S))
    decoder = Decoder(turns)
    assert settled(turns.memory) == 7
    assert user.gate._num_decoding == 0, "bulk work need not wait for a thread that waits for room"
    turns.memory.release(0)
    turns.memory.release(1)
    assert settled(turns.memory) == 7
    decoder.end()


def test_a_thread_keeps_its_turn_until_a_step_begins(user: GateUser) -> None:
    user.note_interactive()
    turns = DecodingTurns(user.gate, COSTS, PixelMemory(most_bytes=24 * 5))
    turns.watch(lambda: stats(step_cap_s=inf))
    turns.enter(lambda: False)
    turns.enter(lambda: False)
    assert user.gate._num_decoding == 1
    turns.leave()
    assert user.gate._num_decoding == 0
    turn = user.turn()
    decoder = Decoder(turns)
    assert settled(turns.memory) == 0
    turn.end(0.1)
    assert settled(turns.memory) == 5
    decoder.end()


@pytest.mark.parametrize("beside", ["no interactive work", "another process"])
def test_else_the_bytes_alone_are_bounded(beside: str, user: GateUser) -> None:
    gate = user.gate if beside == "no interactive work" else None
    turns = DecodingTurns(gate, COSTS, PixelMemory(most_bytes=24 * 9))
    turns.watch(lambda: stats(step_cap_s=3.5 * IMAGE_S))
    turn = user.turn()
    decoder = Decoder(turns)
    assert settled(turns.memory) == 9
    decoder.end()
    turn.end(0.1)
