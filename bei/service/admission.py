"""Admission: counts the tokens and predicted engine time that a model has accepted, and refuses requests beyond limits.

A request is admitted once, as a whole, and holds a ``Ticket`` until the last byte of its answer is rendered. The cost
of its inputs is estimated from their characters, and corrected when they are tokenized. Limits are the server's: if
several processes accept requests, each knows the sum that the others have accepted (``Elsewhere``).
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

from bei.config.settings import ServeConfig
from bei.errors import BeiError, DeadlineExceededError, InvalidRequestError, OverloadedError, ShuttingDownError
from bei.metrics.request_timing import Timing
from bei.port import LANES, Lane, PortStats

# English has about four characters a token; special tokens come on top. Scripts with fewer characters a token are
# underestimated until their texts are tokenized.
_CHARS_PER_TOKEN = 4
_SPECIAL_TOKENS = 2

# A refused client comes back after up to this factor of the computed time, so that those who were refused together do
# not come back together.
_JITTER = 1.2
_MIN_RETRY_S = 0.1

# A request is accepted if it is predicted to be answered within this share of the time to its deadline: predictions are
# right on average, and with all of the time one in fifty came too late at three times the capacity.
_SURE = 0.9

# Bulk work is predicted to get at least this part of the engine's time: however busy interactive work was lately, that
# is no forecast for longer.
_LEAST_BULK = 0.05

# While the accepted engine seconds are below this share of the longest wait, requests without a deadline are accepted
# without asking the engine for its queue: even if several models share the device, none would be refused.
_QUIET = 0.1

# Other processes may overestimate the work of this one by this share of the limits. They are told of a smaller decrease
# with the next request that comes or goes, and of a larger one at once.
_UNTOLD = 0.001


class Costs(Protocol):
    """The part of a cost model (``bei.scheduler.cost_model``) that admission uses."""

    def sequence_seconds(self, length: int) -> float:
        """The engine time of one sequence among alike ones."""


@dataclass(frozen=True)
class AdmissionLimits:
    """``max_queue_tokens``: accepted and unanswered tokens of all requests; a single request may have as many.

    ``max_wait_s``: the longest predicted wait, by lane, with which a request without a deadline is still accepted.
    ``interactive_inputs`` and ``interactive_tokens``: a request of at most as many is interactive if it does not say;
    the tokens of one image are not counted.
    """

    max_queue_tokens: int
    max_wait_s: dict[Lane, float]
    interactive_inputs: int
    interactive_tokens: int
    bulk_share: float


class Demand(NamedTuple):
    """Estimated or known tokens, and the engine seconds they take. ``image_tokens``: of one image, where there are
    any."""

    num_tokens: int
    seconds: float
    image_tokens: int = 0

    def plus(self, other: Demand) -> Demand:
        """Both together."""
        image_tokens = max(self.image_tokens, other.image_tokens)
        return Demand(self.num_tokens + other.num_tokens, self.seconds + other.seconds, image_tokens)


NO_DEMAND = Demand(0, 0.0)


class Accepted(NamedTuple):
    """A model's accepted and unanswered work: open requests, their tokens, the engine seconds of all of them, done or
    not, and, by lane, the engine seconds of inputs that are not tokenized yet; of the tokens those in the lane bulk;
    and the number of flows. Numbers alone: processes share them as they are (``bei.multiprocess.shared_memory``)."""

    num_open: int
    num_tokens: int
    seconds: float
    interactive_s: float
    bulk_s: float
    bulk_tokens: int
    num_flows: int

    def expected_s(self, lane: Lane) -> float:
        """Engine seconds of inputs of one lane that are not tokenized yet."""
        return self.bulk_s if lane == "bulk" else self.interactive_s

    def tokens_in(self, lane: Lane) -> int:
        """The tokens in one lane."""
        return self.bulk_tokens if lane == "bulk" else self.num_tokens - self.bulk_tokens


NOTHING_ACCEPTED = Accepted(0, 0, 0.0, 0.0, 0.0, 0, 0)


class Elsewhere(Protocol):
    """The work that other processes of this server have accepted for the same model. Safe in threads."""

    def tell(self, own: Accepted) -> None:
        """Tell the others that this process has accepted ``own``, in all."""

    def others(self) -> Accepted:
        """The sum of the values that the other processes have told last."""


class Ticket:
    """The admitted work of one request. Held until its answer is rendered; ``close`` may be called twice.

    ``deadline_s`` and ``accepted_s`` are monotonic seconds. ``flow``: as ``Submission`` has it. ``check_tokens``, where
    the answer grows with the tokens, gets their number in a tokenizer's thread, and raises where they are too many,
    before the engine gets them. ``timing``, if any, gets the times of the request's calls. ``is_own``: the server's own
    work, which metrics of inputs leave out. A ticket may be used for several calls of the service, one after the other
    or at once. A closed ticket counts nothing any more: a tokenizer's thread may come late.
    """

    # Defaults of the class: most tickets keep them.
    check_tokens: Callable[[int], None] | None = None
    timing: Timing | None = None
    is_own = False
    _queued_tokens = 0
    _num_tokens = 0
    _is_open = True

    def __init__(
        self, admission: Admission, lane: Lane, num_inputs: int, demand: Demand, deadline_s: float | None, flow: int = 0
    ) -> None:
        self.lane: Lane = lane
        self.flow = flow
        self.deadline_s = deadline_s
        self.num_inputs = num_inputs
        self.accepted_s = time.monotonic()
        self._admission = admission
        self.admitted = demand
        self._expected = demand  # of inputs that are not tokenized yet

    @property
    def held_tokens(self) -> int:
        """Accepted and not answered yet."""
        return self._expected.num_tokens + self._queued_tokens

    def count_tokens(self, num_tokens: int) -> None:
        """Add ``num_tokens`` to the known tokens, and call ``check_tokens`` with the sum. Raises its error."""
        if self.check_tokens is None:
            return
        with self._admission.lock:
            if not self._is_open:
                return
            self._num_tokens += num_tokens
            total = self._num_tokens
        self.check_tokens(total)

    def moved(self, estimated: Demand, num_tokens: int) -> None:
        """Replace the ``estimated`` demand of inputs by their ``num_tokens``, which are handed to the engine now."""
        with self._admission.lock:
            if not self._is_open:
                return
            expected = self._expected
            if estimated is expected:  # of all inputs
                tokens, seconds, self._expected = expected.num_tokens, expected.seconds, NO_DEMAND
            else:
                tokens = min(estimated.num_tokens, expected.num_tokens)
                seconds = min(estimated.seconds, expected.seconds)
                self._expected = Demand(expected.num_tokens - tokens, expected.seconds - seconds)
            self._queued_tokens += num_tokens
            self._admission.count(self.lane, num_tokens - tokens, -seconds)

    def answered(self, num_tokens: int) -> None:
        """Release ``num_tokens`` queued tokens, which were run or never will be."""
        with self._admission.lock:
            num_tokens = min(num_tokens, self._queued_tokens)
            self._queued_tokens -= num_tokens
            self._admission.count(self.lane, -num_tokens, 0.0)

    def close(self) -> None:
        """Release all demand and tokens that the ticket still holds."""
        with self._admission.lock:
            num_tokens, expected_s = self.held_tokens, self._expected.seconds
            self._expected, self._queued_tokens, self._is_open = NO_DEMAND, 0, False
            self._admission.closed(self, num_tokens, expected_s)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Admission:
    """The open tickets of one model. Safe in threads.

    ``on_idle`` is called, under the lock, when the last ticket is closed. ``elsewhere`` None: no other process accepts
    requests for the model.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        costs: Costs,
        stats: Callable[[], PortStats],
        on_idle: Callable[[], None],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.num_tokens = 0  # of all lanes: accepted and not answered yet
        self._bulk_tokens = 0  # of them
        self._limits = limits
        self._costs = costs
        self._stats = stats
        self._on_idle = on_idle
        self._elsewhere = elsewhere
        self._expected_s: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        # Of all open tickets, done or not. As estimated at admission: only good for telling that little is accepted.
        self._accepted_s = 0.0
        self._open: set[Ticket] = set()
        self._num_open_of: Counter[int] = Counter()  # by flow, to tell
        self._half_of_tokens = limits.max_queue_tokens // 2
        most_tokens, most_s = limits.max_queue_tokens, min(limits.max_wait_s.values())
        self._most_untold = Demand(int(_UNTOLD * most_tokens), _UNTOLD * most_s)
        self._told = NOTHING_ACCEPTED
        self._is_draining = False

    @property
    def num_open(self) -> int:
        """Requests that are admitted now, by all processes."""
        return len(self._open) + self._others().num_open

    def demand(self, lengths: Seq[int]) -> Demand:
        """The demand of inputs with these numbers of tokens."""
        if len(lengths) == 1:
            return Demand(lengths[0], self._costs.sequence_seconds(lengths[0]))
        num_of_length = Counter(lengths)  # texts by the thousand have hundreds of lengths
        seconds = sum(count * self._costs.sequence_seconds(length) for length, count in num_of_length.items())
        return Demand(sum(lengths), seconds)

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    def lane_of(self, num_inputs: int, demand: Demand) -> Lane:
        """The lane of a request that does not name one. A client cannot send a shorter image, as it can a text: one is
        interactive however many tokens it has."""
        num_tokens = demand.num_tokens - demand.image_tokens
        few = num_inputs <= self._limits.interactive_inputs and num_tokens <= self._limits.interactive_tokens
        return "interactive" if few else "bulk"

    def admit(
        self, num_inputs: int, demand: Demand, lane: Lane | None, deadline_s: float | None, flow: int = 0
    ) -> Ticket:
        """A ticket for the whole request. ``flow``: as ``Submission`` has it.

        Raises ShuttingDownError, OverloadedError, DeadlineExceededError where even an idle engine would be too late,
        InvalidRequestError where the request could never be accepted.
        """
        if self._is_draining:
            raise ShuttingDownError("The server is shutting down: send the request to another replica.")
        limit = self._limits.max_queue_tokens
        if demand.num_tokens > limit:
            raise InvalidRequestError(
                f"The request has about {demand.num_tokens} tokens, the limit is {limit}: split it into smaller ones."
            )
        lane = lane or self.lane_of(num_inputs, demand)
        with self.lock:
            # Tell before checking: of two processes that admit at the same time, at least one then sees the other.
            self._tell(1, demand, lane, flow)
            try:
                self._check(num_inputs, demand, lane, deadline_s, flow)
            except BeiError:
                self._tell()
                raise
            return self._opened(Ticket(self, lane, num_inputs, demand, deadline_s, flow))

    def admit_anyway(
        self,
        num_inputs: int = 1,
        demand: Demand = NO_DEMAND,
        lane: Lane | None = "interactive",
        deadline_s: float | None = None,
    ) -> Ticket:
        """A ticket that is counted but never refused, for work that this process makes itself."""
        lane = lane or self.lane_of(num_inputs, demand)
        with self.lock:
            self._tell(1, demand, lane)
            return self._opened(Ticket(self, lane, num_inputs, demand, deadline_s))

    def wait_s(self, lane: Lane) -> float:
        """Predicted seconds from now until the work of a request that comes to ``lane`` begins, behind all that waits
        there."""
        return self._wait_s(lane, self._stats(), self._others())

    def _wait_s(self, lane: Lane, stats: PortStats, others: Accepted, of: tuple[int, float] | None = None) -> float:
        """``of``: a flow, and the seconds that its request takes: so much of each other flow runs before it is done
        (the queue is fair), and all that the flow has already."""
        queued = {name: stats.lanes[name].cost_s + self._expected_s[name] + others.expected_s(name) for name in LANES}
        if of is not None:
            queued[lane] = self._ahead_s(lane, queued[lane], others, *of)
        ahead_s = stats.running_s + queued["interactive"]
        if lane == "bulk":
            ahead_s += queued["bulk"] * self._stretch(lane, stats)
        elif queued["bulk"] > 0:
            ahead_s += queued["interactive"] * self._limits.bulk_share / (1 - self._limits.bulk_share)
        return ahead_s * stats.slowdown

    def _ahead_s(self, lane: Lane, queued_s: float, others: Accepted, flow: int, seconds: float) -> float:
        """The part of the ``queued_s`` of ``lane`` that is served before a request of ``flow`` that takes ``seconds``:
        of each flow at most what that flow has then.

        A flow has the part of the seconds that it has of the tokens. Of other processes the number of flows is known.
        """
        held, elsewhere = self._held(lane), others.tokens_in(lane)
        num_tokens = sum(held.values()) + elsewhere
        if not num_tokens or not queued_s:
            return queued_s
        token_s = queued_s / num_tokens
        most = held[flow] + seconds / token_s
        ahead = sum([min(tokens, most) for tokens in held.values()])
        return token_s * (ahead + min(elsewhere, others.num_flows * most))

    def _held(self, *lanes: Lane) -> Counter[int]:
        """The tokens of each flow. Asked where something may have to be refused: it takes a look at all tickets."""
        held: Counter[int] = Counter()
        for ticket in self._open:
            if ticket.lane in lanes:
                held[ticket.flow] += ticket.held_tokens
        return held

    def _stretch(self, lane: Lane, stats: PortStats) -> float:
        """Factor by which interactive work still to come lengthens the work of ``lane``."""
        if lane == "interactive":
            return 1.0
        return 1 / max(self._limits.bulk_share, 1 - stats.interactive_share, _LEAST_BULK)

    def count(self, lane: Lane, num_tokens: int, expected_s: float) -> None:
        """Add ``num_tokens`` and ``expected_s``, which may be negative, to the work held. The caller holds the lock."""
        self._change(lane, num_tokens, expected_s)
        if self._elsewhere is not None and self._is_worth_telling(lane):
            self._tell()

    def closed(self, ticket: Ticket, num_tokens: int, expected_s: float) -> None:
        """Remove ``ticket``, which still held ``num_tokens`` and ``expected_s``. The caller holds the lock."""
        if num_tokens or expected_s:
            self._change(ticket.lane, -num_tokens, -expected_s)
        if ticket in self._open:
            self._open.discard(ticket)
            self._accepted_s -= ticket.admitted.seconds
            if self._elsewhere is not None:
                self._num_open_of[ticket.flow] -= 1
                if not self._num_open_of[ticket.flow]:
                    del self._num_open_of[ticket.flow]
        if not self._open:
            self.num_tokens, self._bulk_tokens, self._accepted_s = 0, 0, 0.0
            self._expected_s = dict.fromkeys(LANES, 0.0)  # sums of floats do not end at 0
            self._on_idle()
        self._tell()

    def _change(self, lane: Lane, num_tokens: int, expected_s: float) -> None:
        self.num_tokens += num_tokens
        if lane == "bulk":
            self._bulk_tokens += num_tokens
        if expected_s:
            self._expected_s[lane] = max(0.0, self._expected_s[lane] + expected_s)

    def _is_worth_telling(self, lane: Lane) -> bool:
        told, most = self._told, self._most_untold
        if not 0 <= told.num_tokens - self.num_tokens <= most.num_tokens:
            return True
        return told.expected_s(lane) - self._expected_s[lane] > most.seconds

    def _tell(self, num_coming: int = 0, coming: Demand = NO_DEMAND, lane: Lane = "interactive", flow: int = 0) -> None:
        """Tell the other processes the work that this one has accepted. The caller holds the lock.

        ``num_coming`` requests of ``flow`` with the demand ``coming`` in ``lane``, which are not admitted yet, are
        added.
        """
        if self._elsewhere is None:
            return
        interactive_s, bulk_s, bulk_tokens = *self._expected_s.values(), self._bulk_tokens
        if lane == "bulk":
            bulk_s, bulk_tokens = bulk_s + coming.seconds, bulk_tokens + coming.num_tokens
        else:
            interactive_s += coming.seconds
        self._told = Accepted(
            len(self._open) + num_coming,
            self.num_tokens + coming.num_tokens,
            self._accepted_s + coming.seconds,
            interactive_s,
            bulk_s,
            bulk_tokens,
            len(self._num_open_of) + (num_coming and flow not in self._num_open_of),
        )
        self._elsewhere.tell(self._told)

    def _others(self) -> Accepted:
        return NOTHING_ACCEPTED if self._elsewhere is None else self._elsewhere.others()

    def _opened(self, ticket: Ticket) -> Ticket:
        self._open.add(ticket)
        if self._elsewhere is not None:
            self._num_open_of[ticket.flow] += 1
        self._accepted_s += ticket.admitted.seconds
        self._change(ticket.lane, ticket.admitted.num_tokens, ticket.admitted.seconds)
        return ticket

    def _check(self, num_inputs: int, demand: Demand, lane: Lane, deadline_s: float | None, flow: int) -> None:
        """Raise if the request has to come back later, or cannot be answered in time at all."""
        others = self._others()
        num_tokens = self.num_tokens + others.num_tokens
        if num_tokens + demand.num_tokens > self._half_of_tokens and num_tokens:
            self._check_tokens(demand, flow, others)
        if deadline_s is None and self._accepted_s + others.seconds < _QUIET * self._limits.max_wait_s[lane]:
            return  # so little is accepted that nobody has to wait for long
        stats = self._stats()
        wait_s = self._wait_s(lane, stats, others)
        if deadline_s is None:
            longest_s = self._limits.max_wait_s[lane]
            if wait_s > longest_s:  # behind everything; behind what its flow has to wait for?
                wait_s = self._wait_s(lane, stats, others, (flow, demand.seconds))
            if wait_s > longest_s:
                message = f"Work of {wait_s:.1f} s is waiting and the limit of the {lane} lane is {longest_s:g} s"
                raise _overloaded(message, wait_s - longest_s)
            return
        left_s = deadline_s - time.monotonic()
        num_inputs = max(1, num_inputs)  # which use no more streams than they are
        idle_s = demand.seconds / min(stats.num_streams, num_inputs)
        if idle_s > _SURE * left_s:
            raise DeadlineExceededError(
                f"The request is predicted to take {idle_s:.3f} s on an idle engine, too long for a deadline "
                f"{max(0.0, left_s):.3f} s ahead: allow more time, or send less at once."
            )
        own_s = demand.seconds * max(stats.slowdown, 1 / num_inputs) * self._stretch(lane, stats)
        if wait_s * stats.overtaking + own_s > _SURE * left_s:
            wait_s = self._wait_s(lane, stats, others, (flow, demand.seconds))
        longest_s = wait_s * stats.overtaking  # its last sequence may be overtaken until then
        if longest_s + own_s > _SURE * left_s:
            message = (
                f"Work of {wait_s:.3f} s is waiting and the request is predicted to take {own_s:.3f} s: "
                f"its deadline, {left_s:.3f} s ahead, might not be kept"
            )
            raise _overloaded(message, (longest_s + own_s - _SURE * left_s) / stats.overtaking)

    def _check_tokens(self, demand: Demand, flow: int, others: Accepted) -> None:
        """For when more than half of ``max_queue_tokens`` would be held: raise if the request would exceed that, or if
        its flow already holds tokens and would hold more than its share. The share is an equal part for each flow that
        waits, and for one more that may come."""
        limit, num_tokens = self._limits.max_queue_tokens, self.num_tokens + others.num_tokens
        too_many = num_tokens + demand.num_tokens - limit
        message = f"About {num_tokens} tokens are waiting and the limit is {limit}"
        if too_many <= 0:
            held_of = self._held(*LANES)
            held = held_of[flow]
            num_flows = len({flow, *held_of}) + others.num_flows
            share = limit // (num_flows + 1)
            too_many = held + demand.num_tokens - share
            if too_many <= 0 or not held:
                return
            message = f"About {held} tokens of this client are waiting and its share of the limit is {share}"
        of = (flow, demand.seconds)
        raise _overloaded(message, min(1.0, too_many / num_tokens) * self._wait_s("bulk", self._stats(), others, of))


def _overloaded(message: str, retry_s: float) -> OverloadedError:
    retry_s = max(_MIN_RETRY_S, retry_s) * random.uniform(1.0, _JITTER)
    return OverloadedError(f"{message}: retry in {ceil(retry_s)} s.", retry_after_s=retry_s)


def estimated_length(num_chars: int, max_seq_len: int) -> int:
    """The tokens of a text, guessed from its characters."""
    return min(max_seq_len, num_chars // _CHARS_PER_TOKEN + 1 + _SPECIAL_TOKENS)


def admission_limits(config: ServeConfig) -> AdmissionLimits:
    """The limits that ``config`` sets."""
    return AdmissionLimits(
        max_queue_tokens=config.max_queue_tokens,
        max_wait_s={"interactive": config.interactive_max_wait, "bulk": config.bulk_max_wait},
        interactive_inputs=config.interactive_inputs,
        interactive_tokens=config.interactive_tokens,
        bulk_share=config.bulk_share,
    )
