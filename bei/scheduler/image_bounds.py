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


class ImageStage(Enum):
    """Where an image is: ASKED: the decoder is asked whether it knows the answer; HELD: it waits for others' states to
    be read; ADMITTED: there is room for its states, which the tower computes, unless the decoder is asked once more;
    READ: the decoder has them."""

    ASKED = 0
    HELD = 1
    ADMITTED = 2
    READ = 3


class BoundedImage:
    """An input of a request with an image, or several. ``states``: the tower's, of each image. ``asked_at``: how many
    inputs the decoder had answered when it was asked."""

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
        self.stage = ImageStage.ASKED
        self.asked_at = 0
        self.is_cancelled = False

    def add_states(self, number: int, rows: Float32Array) -> Encoding | None:
        """The tower has computed ``rows`` of the image of this ``number``. What the decoder reads when that was the
        last one."""
        self.states[number] = rows
        states = [one for one in self.states if one is not None]
        return self.encoding.with_features(states) if len(states) == len(self.states) else None


class _LaneImages:
    """The images of one lane. What is held back goes in the order in which it came, but flows take turns."""

    def __init__(self) -> None:
        self.held: OrderedDict[int, deque[BoundedImage]] = OrderedDict()  # by flow
        self.num_held = self.num_unread = self.num_tokens = self.num_bytes = 0
        self.tower_s = self.decoder_s = 0.0

    def hold(self, image: BoundedImage) -> None:
        image.stage = ImageStage.HELD
        self.held.setdefault(image.submission.flow, deque()).append(image)
        self.num_held += 1
        self.num_tokens += image.num_states
        self.tower_s += image.tower_s
        self.num_unread += 1
        self.decoder_s += image.decoder_s

    def next(self, *, is_bounded: bool) -> BoundedImage | None:
        """Admit the next image: there is room for its states, or there are no others."""
        if not self.held:
            return None
        flow, images = next(iter(self.held.items()))
        if is_bounded and self.num_bytes and self.num_bytes + images[0].num_bytes > MOST_STATES_BYTES:
            return None
        image = images[0]
        self._release(image)
        if flow in self.held:
            self.held.move_to_end(flow)
        image.stage = ImageStage.ADMITTED
        self.num_bytes += image.num_bytes
        return image

    def read(self, image: BoundedImage) -> None:
        """The decoder counts it from now on."""
        image.stage = ImageStage.READ
        self._forget_decoder(image)

    def remove(self, image: BoundedImage) -> None:
        if image.stage is ImageStage.HELD:
            self._release(image)
        elif image.stage is not ImageStage.ASKED:
            self.num_bytes -= image.num_bytes
        if image.stage in (ImageStage.HELD, ImageStage.ADMITTED):
            self._forget_decoder(image)

    def _release(self, image: BoundedImage) -> None:
        images = self.held[image.submission.flow]
        images.remove(image)
        if not images:
            del self.held[image.submission.flow]
        self.num_held -= 1
        self.num_tokens -= image.num_states
        self.tower_s = self.tower_s - image.tower_s if self.num_held else 0.0  # sums of floats are not quite 0

    def _forget_decoder(self, image: BoundedImage) -> None:
        self.num_unread -= 1
        self.decoder_s = self.decoder_s - image.decoder_s if self.num_unread else 0.0


class BoundedImages:
    """All images without an answer. ``is_bounded``: until the port closes, which lets all go."""

    def __init__(self) -> None:
        self.is_bounded = True
        self._num_answered = 0
        self._lanes: dict[Lane, _LaneImages] = {lane: _LaneImages() for lane in LANES}
        self._requests: dict[int, dict[int, BoundedImage]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, images: Iterable[BoundedImage]) -> None:
        """New ones, of which the decoder is asked."""
        for image in images:
            self._requests.setdefault(image.submission.request_id, {})[image.place] = image
            image.asked_at = self._num_answered

    def hold(self, image: BoundedImage) -> None:
        """The decoder does not know it: hold it back until ``admit``."""
        self._lanes[image.submission.lane].hold(image)

    def find(self, request_id: int, place: int) -> BoundedImage | None:
        """None if it is answered, was cancelled, or is none."""
        return self._requests.get(request_id, {}).get(place)

    def admit(self) -> tuple[list[BoundedImage], list[BoundedImage]]:
        """Those for whose states there is room: for the tower; and to ask the decoder of once more, which has answered
        others in the meantime."""
        known: list[BoundedImage] = []
        unknown: list[BoundedImage] = []
        for lane in self._lanes.values():
            while (image := lane.next(is_bounded=self.is_bounded)) is not None:
                (unknown if image.asked_at == self._num_answered else known).append(image)
                image.asked_at = self._num_answered
        return unknown, known

    def read(self, image: BoundedImage) -> None:
        """The decoder gets its states."""
        self._lanes[image.submission.lane].read(image)

    def settle(self, images: Iterable[BoundedImage]) -> None:
        """They are answered."""
        for image in images:
            self._num_answered += image.stage is ImageStage.READ
            request_id = image.submission.request_id
            if self.find(request_id, image.place) is image:
                self._lanes[image.submission.lane].remove(image)
                del self._requests[request_id][image.place]
                if not self._requests[request_id]:
                    del self._requests[request_id]

    def cancel(self, request_id: int) -> None:
        """Forget those of the request."""
        images = [*self._requests.get(request_id, {}).values()]
        for image in images:
            image.is_cancelled = True
        self.settle(images)

    def lanes(self) -> dict[Lane, LaneStats]:
        """What is held back, as it would wait for the tower, and what the decoder has yet to do for images that it has
        not."""
        return {
            lane: LaneStats(own.num_held, own.num_tokens, own.tower_s + own.decoder_s)
            for lane, own in self._lanes.items()
        }


def by_submission(images: Iterable[BoundedImage]) -> Iterable[tuple[Submission, Seq[BoundedImage]]]:
    """``images`` of each submission together."""
    found: dict[int, list[BoundedImage]] = {}
    for image in images:
        found.setdefault(id(image.submission), []).append(image)
    return [(group[0].submission, group) for group in found.values()]
