"""Inputs with images on their way through an image tower and the decoder that reads its states, bounded by the bytes of
these. Not thread-safe: callers lock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum
from typing import NamedTuple

from bei.core import Encoding, Float32Array
from bei.port import LANES, Lane, LaneStats, Submission
from bei.scheduler.cost_model import CostModel

# States that a lane's images may have at a time, from when the tower is asked for them until the decoder has answered:
# an image of 1,024 states of width 2,048 has 8.4 MB. Each lane has its own, so that neither holds up the other.
MOST_STATES_BYTES = 1 << 27


class ImageReading(NamedTuple):
    """How a decoder reads images: the ``width`` of the tower's rows, one a token of it, and what steps of both engines
    cost."""

    width: int
    tower_costs: CostModel
    decoder_costs: CostModel


class InputStage(Enum):
    """Where an input is: ASKED: the decoder is asked whether it knows the answer; HELD: it waits for others' states to
    be read; ADMITTED: there is room for its states, which the tower computes, unless the decoder is asked once more;
    READ: the decoder has them."""

    ASKED = 0
    HELD = 1
    ADMITTED = 2
    READ = 3


class BoundedInput:
    """An input with images. ``states``: the tower's, of each image. ``asked_at``: how many inputs the decoder had
    answered when it was asked."""

    __slots__ = (
        "asked_at",
        "decoder_s",
        "encoding",
        "is_cancelled",
        "num_bytes",
        "num_states",
        "place",
        "stage",
        "states",
        "submission",
        "tower_s",
    )

    def __init__(self, place: int, encoding: Encoding, submission: Submission, reading: ImageReading) -> None:
        assert encoding.images, "the caller has asked"
        self.place = place
        self.encoding = encoding
        self.submission = submission
        lengths = [len(image.patches.levels) for image in encoding.images]
        self.states: list[Float32Array | None] = [None] * len(lengths)
        self.num_states = sum(lengths)
        self.num_bytes = 4 * self.num_states * reading.width
        self.tower_s = sum(map(reading.tower_costs.sequence_seconds, lengths))
        self.decoder_s = reading.decoder_costs.sequence_seconds(encoding.num_tokens)
        self.stage = InputStage.ASKED
        self.asked_at = 0
        self.is_cancelled = False

    def add_states(self, number: int, rows: Float32Array) -> Encoding | None:
        """The tower has computed ``rows`` of the image of this ``number``. What the decoder reads when that was the
        last one."""
        self.states[number] = rows
        states = [one for one in self.states if one is not None]
        return self.encoding.with_features(states) if len(states) == len(self.states) else None


class _LaneInputs:
    """The inputs of one lane. What is held back goes in the order in which it came, but flows take turns."""

    def __init__(self) -> None:
        self.held: OrderedDict[int, deque[BoundedInput]] = OrderedDict()  # by flow
        self.num_held = self.num_unread = self.num_tokens = self.num_bytes = 0
        self.tower_s = self.decoder_s = 0.0

    def hold(self, one: BoundedInput) -> None:
        one.stage = InputStage.HELD
        self.held.setdefault(one.submission.flow, deque()).append(one)
        self.num_held += 1
        self.num_tokens += one.num_states
        self.tower_s += one.tower_s
        self.num_unread += 1
        self.decoder_s += one.decoder_s

    def next(self, *, is_bounded: bool) -> BoundedInput | None:
        """Admit the next input: there is room for its states, or there are no others."""
        if not self.held:
            return None
        flow, inputs = next(iter(self.held.items()))
        if is_bounded and self.num_bytes and self.num_bytes + inputs[0].num_bytes > MOST_STATES_BYTES:
            return None
        one = inputs[0]
        self._release(one)
        if flow in self.held:
            self.held.move_to_end(flow)
        one.stage = InputStage.ADMITTED
        self.num_bytes += one.num_bytes
        return one

    def read(self, one: BoundedInput) -> None:
        """The decoder counts it from now on."""
        one.stage = InputStage.READ
        self._forget_decoder(one)

    def remove(self, one: BoundedInput) -> None:
        if one.stage is InputStage.HELD:
            self._release(one)
        elif one.stage is not InputStage.ASKED:
            self.num_bytes -= one.num_bytes
        if one.stage in (InputStage.HELD, InputStage.ADMITTED):
            self._forget_decoder(one)

    def _release(self, one: BoundedInput) -> None:
        inputs = self.held[one.submission.flow]
        inputs.remove(one)
        if not inputs:
            del self.held[one.submission.flow]
        self.num_held -= 1
        self.num_tokens -= one.num_states
        self.tower_s = self.tower_s - one.tower_s if self.num_held else 0.0  # sums of floats are not quite 0

    def _forget_decoder(self, one: BoundedInput) -> None:
        self.num_unread -= 1
        self.decoder_s = self.decoder_s - one.decoder_s if self.num_unread else 0.0


class BoundedInputs:
    """All inputs with images that have no answer yet. ``is_bounded``: until the port closes, which lets all go."""

    def __init__(self) -> None:
        self.is_bounded = True
        self._num_answered = 0
        self._lanes: dict[Lane, _LaneInputs] = {lane: _LaneInputs() for lane in LANES}
        self._requests: dict[int, dict[int, BoundedInput]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, inputs: Iterable[BoundedInput]) -> None:
        """New ones, of which the decoder is asked."""
        for one in inputs:
            self._requests.setdefault(one.submission.request_id, {})[one.place] = one
            one.asked_at = self._num_answered

    def hold(self, one: BoundedInput) -> None:
        """The decoder does not know it: hold it back until ``admit``."""
        self._lanes[one.submission.lane].hold(one)

    def find(self, request_id: int, place: int) -> BoundedInput | None:
        """None if it is answered, was cancelled, or is none."""
        return self._requests.get(request_id, {}).get(place)

    def admit(self) -> tuple[list[BoundedInput], list[BoundedInput]]:
        """Those for whose states there is room: for the tower; and to ask the decoder of once more, which has answered
        others in the meantime."""
        known: list[BoundedInput] = []
        unknown: list[BoundedInput] = []
        for lane in self._lanes.values():
            while (one := lane.next(is_bounded=self.is_bounded)) is not None:
                (unknown if one.asked_at == self._num_answered else known).append(one)
                one.asked_at = self._num_answered
        return unknown, known

    def read(self, one: BoundedInput) -> None:
        """The decoder gets its states."""
        self._lanes[one.submission.lane].read(one)

    def settle(self, inputs: Iterable[BoundedInput]) -> None:
        """They are answered."""
        for one in inputs:
            self._num_answered += one.stage is InputStage.READ
            request_id = one.submission.request_id
            if self.find(request_id, one.place) is one:
                self._lanes[one.submission.lane].remove(one)
                del self._requests[request_id][one.place]
                if not self._requests[request_id]:
                    del self._requests[request_id]

    def cancel(self, request_id: int) -> None:
        """Forget those of the request."""
        inputs = [*self._requests.get(request_id, {}).values()]
        for one in inputs:
            one.is_cancelled = True
        self.settle(inputs)

    def lanes(self) -> dict[Lane, LaneStats]:
        """What is held back, as it would wait for the tower, and what the decoder has yet to do for inputs that it has
        not."""
        return {
            lane: LaneStats(own.num_held, own.num_tokens, own.tower_s + own.decoder_s)
            for lane, own in self._lanes.items()
        }


def by_submission(inputs: Iterable[BoundedInput]) -> Iterable[tuple[Submission, Seq[BoundedInput]]]:
    """``inputs`` of each submission together."""
    found: dict[int, list[BoundedInput]] = {}
    for one in inputs:
        found.setdefault(id(one.submission), []).append(one)
    return [(group[0].submission, group) for group in found.values()]
