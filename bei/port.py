"""The engine port: the messages between a served model's front and whatever runs its engine.

The front (``bei.service.service``) submits tokenized sequences and gets an answer to each; batching, de-duplication
and the engine are behind the port. In one process the port is a ``BatchManager``. Messages are plain data and arrays,
and the two sides share no object that changes, so the same messages can cross a process border.

Times are seconds of ``time.monotonic()``, which on Linux is one clock for all processes of a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from bei.core import Encoding, Row
from bei.errors import BeiError

Lane: TypeAlias = Literal["interactive", "bulk"]

# A row's embedding at unit length. Every port with the output "embedding" has this one beside it, computed for a whole
# batch at once.
UNIT_EMBEDDING = "unit_embedding"

# The output of an image tower whose states a decoder reads.
STATES = "image_features"

# In the order in which they are served.
LANES: tuple[Lane, ...] = ("interactive", "bulk")


class Item(NamedTuple):
    """One tokenized input, and its place among the inputs of its request, which comes back with its answer."""

    place: int
    encoding: Encoding


class Submission(msgspec.Struct, frozen=True, array_like=True):
    """Sequences of one request. A request may come in several submissions, all with its ``request_id``.

    ``outputs``: the engine's outputs that the request wants, and nothing else is computed into its answers.
    ``deadline_s``: when the answer is of no use any more; None: never. ``flow``: whose it is: flows that wait in a lane
    share the engine's time. 0: the server's own, or of callers in its process. ``is_fresh``: answers
    of a cache do not do. ``is_probe``: only what is cached, or waits or runs for others, is answered with its row; the
    rest with an empty one, at once. Images of a decoder are then known by their digest, and need no states.
    """

    request_id: int
    lane: Lane
    outputs: frozenset[str]
    items: Seq[Item]
    deadline_s: float | None = None
    flow: int = 0
    is_fresh: bool = False
    is_probe: bool = False


class StepTimes(NamedTuple):
    """Start and end of a step."""

    started_s: float
    ended_s: float


class Answer(NamedTuple):
    """The answer to one ``Item``: a row, or the error of this item alone. ``step``: of the step that computed it; None
    where there was none, as for answers from a cache."""

    request_id: int
    place: int
    result: Row | BeiError
    step: StepTimes | None = None


# Called with answers in any order, in threads of the port's or on the service's event loop, one call at a time; it must
# return soon and not raise.
OnAnswers: TypeAlias = Callable[[Seq[Answer]], None]


class LaneStats(NamedTuple):
    """The queue of one lane: sequences, their tokens, and their predicted engine seconds."""

    num_sequences: int
    num_tokens: int
    cost_s: float

    def plus(self, other: LaneStats) -> LaneStats:
        """Both queues together."""
        return LaneStats(
            self.num_sequences + other.num_sequences, self.num_tokens + other.num_tokens, self.cost_s + other.cost_s
        )


class PortStats(NamedTuple):
    """The state of an engine and its queue.

    ``num_running``: sequences of the steps that run. ``running_s``: how much longer a running step is predicted to
    take, mean over those that run. ``slowdown``: how many times its cost work takes: more where other models use the
    device too, less where several steps run at once. ``interactive_share``: the share of the engine's recent time in
    which interactive work ran. ``is_alive``: answers still come. ``is_stalled``: a step has run for so long that the
    engine is taken to hang; it is being replaced.
    ``is_busy``: a step runs or waits. ``last_step_s``: when the last step ended; -inf before the first.
    ``step_cap_s``: the longest step of bulk work while interactive work waits or is expected. ``overtaking``: how
    many times longer a sequence may wait than in the order of arrival, as later ones of a fitting length overtake it.
    ``device``: what the engine runs on, in its own words; ``num_streams``: how many steps it runs side by side.
    ``unshared``: as ``EngineInfo`` has it.
    """

    lanes: Mapping[Lane, LaneStats]
    num_running: int
    running_s: float
    slowdown: float
    interactive_share: float
    is_alive: bool
    is_stalled: bool
    is_busy: bool
    last_step_s: float
    step_cap_s: float
    overtaking: float
    device: str
    num_streams: int
    unshared: str | None


class EnginePort(Protocol):
    """An engine as a service sees it. Methods are safe in any thread, and return at once unless said otherwise."""

    def submit(self, submission: Submission) -> None:
        """Take over ``submission``: each item gets exactly one answer, unless the request is cancelled before.

        Raises ShuttingDownError after ``close``, EngineDeadError when the engine is dead. Then nothing was taken over.
        """

    def cancel(self, request_id: int) -> None:
        """Forget the request: its queued items are not run, and no further answers are sent."""

    def stats(self) -> PortStats:
        """The state now."""

    def close(self) -> None:
        """Run what waits, answer it, end. Blocks until then."""
