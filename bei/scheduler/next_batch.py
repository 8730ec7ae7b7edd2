"""Which sequences run together: pure functions. Knows no threads and no time but what it is told.

A step is one run of the engine. The size of a step is decided here, by predicted time: bulk work alone runs in steps
of the most efficient size; while interactive work waits or is expected, a step of bulk work is capped, because a step
that runs cannot be interrupted, and whoever comes waits for its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import copy
from math import ceil, inf
from typing import NamedTuple, Protocol

from bei.core import Limits
from bei.port import Lane

# Up to this many attention slots a token, sequences are alike enough that running them together always pays.
_ALIKE_SLOTS_PER_TOKEN = 1.25

# Where so many of the largest efficient steps of interactive work wait, it runs in those: most of it waits for others'
# steps, which are fewer then.
_MANY_STEPS = 2


class StepCosts(Protocol):
    """The part of a cost model (``bei.scheduler.cost_model``) that the policy uses."""

    @property
    def tile(self) -> int:
        """The size of a tile, in tokens: the last tile of a step takes about as long however full it is."""

    def seconds(self, num_tokens: int, batch_size: int, longest: int) -> float:
        """The predicted time of a step."""

    def efficient_tokens(self, length: int) -> int:
        """The smallest step of sequences of this length, in tokens, at nearly the best rate."""

    def largest_efficient_tokens(self, length: int) -> int:
        """The largest such step that bulk work alone should run in."""


class QueueKey(NamedTuple):
    """A queued sequence as the policy sees it. Ordered by length, then by arrival."""

    num_tokens: int
    arrival: int


class LaneView(NamedTuple):
    """The waiting sequences of a lane in the order of their keys, and the position of the one to serve first."""

    queued: Seq[QueueKey]
    urgent: int


class StepBounds(NamedTuple):
    """Bounds on the size of the next step, besides the engine's limits.

    ``lead`` is the lane whose most urgent sequence the step is built around. It grows up to ``max_tokens`` and, in
    predicted time, ``max_s``. Sequences of the other lane ride along while the whole step stays within ``rider_s``;
    None: they do not. The urgent sequence itself runs whatever it costs.
    """

    lead: Lane
    max_tokens: int
    max_s: float = inf
    rider_s: float | None = None


def leading_lane(waiting: Mapping[Lane, bool], served_s: Mapping[Lane, float], bulk_share: float) -> Lane:
    """Interactive work goes first, unless bulk work waits and had less than its share of the recent engine time.

    ``served_s``: recent engine seconds of each lane, and for bulk work its share of what ran while none of it waited.
    At least one lane must wait.
    """
    if not waiting["bulk"]:
        return "interactive"
    if not waiting["interactive"]:
        return "bulk"
    total_s = served_s["interactive"] + served_s["bulk"]
    return "bulk" if served_s["bulk"] < bulk_share * total_s else "interactive"


def step_bounds(
    lanes: Mapping[Lane, LaneView],
    lead: Lane,
    costs: StepCosts,
    cap_s: float,
    *,
    waited_s: float = 0.0,
    interactive_expected: bool,
) -> StepBounds:
    """The bounds of a step led by ``lead``, whose most urgent sequence has waited for ``waited_s``.

    ``cap_s`` is the longest step of bulk work while interactive work waits or, as ``interactive_expected`` says, may
    come soon. An interactive step takes bulk work along, for a small step leaves much of the device unused: up to the
    cap if it came at once, less what it had to wait for a step to end, and none where that was a whole cap. Where many
    such steps wait they are as large as those of bulk work.
    """
    view = lanes[lead]
    length = view.queued[view.urgent].num_tokens
    if lead == "interactive":
        rider_s = max(0.0, cap_s - waited_s)
        largest = costs.largest_efficient_tokens(length)
        is_full = len(view.queued) * length >= _MANY_STEPS * largest
        return StepBounds(lead, largest if is_full else costs.efficient_tokens(length), rider_s=rider_s)
    if interactive_expected or lanes["interactive"].queued:
        return StepBounds(lead, costs.efficient_tokens(length), cap_s)
    return StepBounds(lead, costs.largest_efficient_tokens(length))


def next_batch(
    lanes: Mapping[Lane, LaneView], limits: Limits, costs: StepCosts, bounds: StepBounds
) -> dict[Lane, list[slice]]:
    """The step to run next: parts of each lane's queue, the last first (lanes without any are left out).

    The window of the leading lane contains its urgent sequence and grows towards that one's neighbours in length, the
    nearer first, while the limits and bounds hold and running the neighbour in this step is predicted to be no slower
    than running it later, in a step with those that wait beyond it. So nothing starves (the urgent sequence is always
    in), and lengths are grouped only as far as the engine's costs ask for it. Then sequences of the other lane ride
    along. Shorter sequences fill the last tile up. Sequences longer than ``limits.max_num_tokens`` do not reach the
    queue.
    """
    lead = lanes[bounds.lead]
    step = _Step(limits, costs, bounds.max_tokens, bounds.max_s)
    step.start(lead.queued[lead.urgent].num_tokens)
    window = step.grow(lead.queued, lead.urgent, lead.urgent + 1)
    parts = {bounds.lead: [window, *step.fill(lead.queued, window.start)]}
    if bounds.rider_s is not None:
        step.max_s = bounds.rider_s
        for lane, view in lanes.items():
            if lane != bounds.lead and view.queued:
                step, window = _with_riders(step, view.queued)
                riders = [part for part in (window, *step.fill(view.queued, window.start)) if part.start < part.stop]
                if riders:
                    parts[lane] = riders
    return parts


class _Step:
    """The step so far, and its predicted time. It grows up to ``max_s``.

    Steps are cut while the engine waits: what is asked of every sequence is written for speed.
    """

    def __init__(self, limits: Limits, costs: StepCosts, max_tokens: int, max_s: float) -> None:
        self.max_s = max_s
        self._max_tokens = min(max_tokens, limits.max_num_tokens)
        self._max_size = limits.max_batch_size
        self._costs = costs
        self._size = self._tokens = self.longest = 0
        self._seconds: float | None = None  # where it is known

    def start(self, length: int) -> None:
        """Take the urgent sequence in, whatever it costs."""
        self._size, self._tokens, self.longest = 1, length, length

    @property
    def seconds(self) -> float:
        if self._seconds is None:
            self._seconds = self._costs.seconds(self._tokens, self._size, self.longest)
        return self._seconds

    def grow(self, queued: Seq[QueueKey], low: int, high: int, *, must_pay: bool = True) -> slice:
        """Widen the window ``queued[low:high]`` while a neighbour joins: the nearer in length or, if it may not, the
        other."""
        num_queued = len(queued)
        while self._size < self._max_size:
            left = queued[low - 1].num_tokens if low else None
            right = queued[high].num_tokens if high < num_queued else None
            longest = self.longest
            if right is not None and (left is None or right - longest <= longest - left):
                if self._joins(right, num_queued - high, must_pay):
                    high += 1
                elif left is not None and self._joins(left, low, must_pay):
                    low -= 1
                else:
                    break
            elif left is not None and self._joins(left, low, must_pay):
                low -= 1
            elif right is not None and self._joins(right, num_queued - high, must_pay):
                high += 1
            else:
                break
        return slice(low, high)

    def fill(self, queued: Seq[QueueKey], end: int) -> list[slice]:
        """Take in, of ``queued[:end]``, the longest sequences that fit into the last tile: their places, the last
        first."""
        found: list[slice] = []
        while self._size < self._max_size and (room := -self._tokens % self._costs.tile):
            end = bisect_left(queued, QueueKey(room + 1, 0), 0, end) - 1
            if end < 0 or not self._joins(queued[end].num_tokens, end + 1, must_pay=True):
                break
            found.append(slice(end, end + 1))
        return found

    def _joins(self, length: int, num_beyond: int, must_pay: bool) -> bool:
        """Take in a sequence of ``length`` tokens, the nearest of ``num_beyond`` that wait on its side, if it may."""
        tokens, size, longest = self._tokens + length, self._size + 1, self.longest
        if length > longest:
            longest = length
        if tokens > self._max_tokens:
            return False
        is_welcome = not must_pay or size * longest <= _ALIKE_SLOTS_PER_TOKEN * tokens
        together_s = None
        if not is_welcome or self.max_s != inf:
            together_s = self._costs.seconds(tokens, size, longest)
            if together_s > self.max_s or not (is_welcome or self._pays(together_s, length, num_beyond)):
                return False
        self._tokens, self._size, self.longest, self._seconds = tokens, size, longest, together_s
        return True

    def _pays(self, together_s: float, length: int, num_beyond: int) -> bool:
        """True if the step with a sequence of ``length`` is predicted to take no longer than both apart: the sequence
        in a later step with those beyond."""
        others = max(1, min(num_beyond, self._max_size, self._max_tokens // length))
        later_s = self._costs.seconds(others * length, others, length) / others
        return together_s <= self.seconds + later_s

    def seconds_apart(self, keys: Seq[QueueKey], num_queued: int) -> float:
        """The predicted seconds of ``keys`` in a later step: their share, by tokens, of a step of an efficient size, or
        of a smaller one where fewer sequences like them wait."""
        longest, num_tokens = keys[-1].num_tokens, sum(key.num_tokens for key in keys)
        mean = num_tokens / len(keys)
        most = max(num_tokens, int(min(self._max_size, num_queued) * mean))
        together = min(max(num_tokens, self._costs.efficient_tokens(longest)), most)
        return self._costs.seconds(together, ceil(together / mean), longest) * num_tokens / together


def _with_riders(step: _Step, queued: Seq[QueueKey]) -> tuple[_Step, slice]:
    """``step`` with sequences of another lane that ride along, and which those are: as many as fit, if they take no
    longer here than in the step that they would be in otherwise.

    One by one they may not pay: the first that is longer than those in the step pads them, and saves only its own part
    of a later step. Where all together do not pay either, those ride that pay one by one.
    """
    place = bisect_left(queued, QueueKey(step.longest, 0))
    full = copy(step)
    window = full.grow(queued, place, place, must_pay=False)
    if window.start == window.stop or full.seconds <= step.seconds + step.seconds_apart(queued[window], len(queued)):
        return full, window
    return step, step.grow(queued, place, place)
