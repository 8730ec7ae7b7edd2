"""Images on their way through an image tower and the decoder that reads its states, bounded by the bytes of these. Not
thread-safe: callers lock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from bei.core import Encoding
from bei.port import LANES, Lane, LaneStats, Submission
from bei.scheduler.cost_model import CostModel

# States that a lane's images may have at a time, from when the tower is asked for them until the decoder has answered:
# an image of 1,024 states of width 2,048 has 8.4 MB. Each lane has its own, so that neither holds up the other.
MOST_STATES_BYTES = 1 << 27


class ImageReading(NamedTuple):
    """How a decoder reads images: the ``width`` of the tower's states, and what steps of both engines cost."""

    width: int
    tower_costs: CostModel
    decoder_costs: CostModel


class BoundedImage:
    """An image of a request. ``is_held``: it waits for others' states to be read. ``is_in_decoder``: the decoder has
    its states."""

    __slots__ = (
        "decoder_s",
        "encoding",
        "is_cancelled",
        "is_held",
        "is_in_decoder",
        "num_bytes",
        "place",
        "submission",
        "tower",
    )

    def __init__(self, place: int, encoding: Encoding, submission: Submission, reading: ImageReading) -> None:
        assert encoding.image is not None, "the caller has asked"
        num_states = len(encoding.image.levels)
        self.place = place
        self.encoding = encoding
        self.submission = submission
        self.num_bytes = 4 * num_states * reading.width
        self.tower = LaneStats(1, num_states, reading.tower_costs.sequence_seconds(num_states))
        self.decoder_s = reading.decoder_costs.sequence_seconds(encoding.num_tokens)
        self.is_held = self.is_in_decoder = self.is_cancelled = False


class _LaneImages:
    """The images of one lane. What is held back goes in the order in which it came, but flows take turns."""

    def __init__(self) -> None:
        self.held: OrderedDict[int, deque[BoundedImage]] = OrderedDict()  # by flow
        self.num_held = self.num_waiting = self.num_tokens = self.num_bytes = 0
        self.tower_s = self.decoder_s = 0.0

    def add(self, image: BoundedImage) -> None:
        self.num_waiting += 1
        self.decoder_s += image.decoder_s
        image.is_held = True
        self.num_held += 1
        self.num_tokens += image.tower.num_tokens
        self.tower_s += image.tower.cost_s
        self.held.setdefault(image.submission.flow, deque()).append(image)

    def next(self, *, is_bounded: bool) -> BoundedImage | None:
        """Take the next image that may go to the tower: there is room for its states, or there are no others."""
        if not self.held:
            return None
        flow, images = next(iter(self.held.items()))
        if is_bounded and self.num_bytes and self.num_bytes + images[0].num_bytes > MOST_STATES_BYTES:
            return None
        image = images.popleft()
        if images:
            self.held.move_to_end(flow)
        else:
            del self.held[flow]
        self._release(image)
        self.num_bytes += image.num_bytes
        return image

    def remove(self, image: BoundedImage) -> None:
        if image.is_held:
            images = self.held[image.submission.flow]
            images.remove(image)
            if not images:
                del self.held[image.submission.flow]
            self._release(image)
        else:
            self.num_bytes -= image.num_bytes
        if not image.is_in_decoder:
            self.read(image)

    def read(self, image: BoundedImage) -> None:
        """The decoder has it, and counts it from now on."""
        self.num_waiting -= 1
        self.decoder_s = self.decoder_s - image.decoder_s if self.num_waiting else 0.0

    def _release(self, image: BoundedImage) -> None:
        image.is_held = False
        self.num_held -= 1
        self.num_tokens -= image.tower.num_tokens
        self.tower_s = self.tower_s - image.tower.cost_s if self.num_held else 0.0


class BoundedImages:
    """All images without an answer. ``is_bounded``: until the port closes, which lets all go."""

    def __init__(self) -> None:
        self.is_bounded = True
        self._lanes: dict[Lane, _LaneImages] = {lane: _LaneImages() for lane in LANES}
        self._requests: dict[int, dict[int, BoundedImage]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, images: Iterable[BoundedImage]) -> None:
        """Hold back new ones, until ``ready``."""
        for image in images:
            self._requests.setdefault(image.submission.request_id, {})[image.place] = image
            self._lanes[image.submission.lane].add(image)

    def find(self, request_id: int, place: int) -> BoundedImage | None:
        """None if it is answered, was cancelled, or is none."""
        return self._requests.get(request_id, {}).get(place)

    def ready(self) -> list[BoundedImage]:
        """Take those that may go to the tower now."""
        found = []
        for lane in self._lanes.values():
            while (image := lane.next(is_bounded=self.is_bounded)) is not None:
                found.append(image)
        return found

    def read(self, image: BoundedImage) -> None:
        """The decoder gets its states."""
        image.is_in_decoder = True
        self._lanes[image.submission.lane].read(image)

    def settle(self, images: Iterable[BoundedImage]) -> None:
        """They are answered."""
        for image in images:
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
