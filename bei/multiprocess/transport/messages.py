"""What processes of one server say to each other about sequences and vectors: headers of ``channel`` frames.

Arrays are not in the messages: token ids follow them as raw bytes, vectors lie in shared memory (``lending``). Both
ends are of one installation, so there are no versions.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from bei.multiprocess.transport.errors import CarriedError
from bei.multiprocess.transport.model_info import Hello
from bei.port import Lane, PortStats, StepTimes

# Not in a segment, but among the bytes that follow the message.
INLINE = 0


class ArrayAt(NamedTuple):
    """An array and where its bytes begin. ``segment``: as announced on this channel, or ``INLINE``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: int
    offset: int


class Lent(NamedTuple):
    """Arrays that were lent together. ``lease``: what is to be released when they are used no more; 0: nothing is."""

    lease: int
    arrays: list[ArrayAt]


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Each is a list in msgpack, with its name first."""


# Both services.


class Open(_Message):
    """First message of a client: what it asks for. Answered by ``Welcome`` or ``Refused``."""

    model: str


class Refused(_Message):
    """It is not; the connection ends."""

    error: CarriedError


class Announce(_Message):
    """A segment in which arrays will lie; its descriptor comes along."""

    segment: int
    size: int


class Forget(_Message):
    """Segments in which no array lies any more."""

    segments: list[int]


class Release(_Message):
    """Nobody uses the arrays of these leases any more."""

    leases: list[int]


# The engine port.


class ItemHead(NamedTuple):
    """An ``Item`` without its arrays. They follow as int32: the ids of all items, then the types of those that have
    them."""

    place: int
    num_tokens: int
    has_types: bool
    truncated: bool
    num_keys: int | None
    num_unpooled: int


class Submit(_Message):
    """A ``Submission``. ``number``: counts those of the connection, from 1."""

    number: int
    request_id: int
    lane: Lane
    outputs: frozenset[str]
    deadline_s: float | None
    items: list[ItemHead]


class Cancel(_Message):
    """As the port's."""

    request_id: int


class Bye(_Message):
    """The client submits nothing more and wants no more answers. It stays until it uses no lent array any more."""


class RowAt(NamedTuple):
    """The row of an item. ``step``: an index into the steps of its message; -1: no step."""

    request_id: int
    place: int
    step: int
    row: Lent


class ErrorAt(NamedTuple):
    """The error of an item."""

    request_id: int
    place: int
    step: int
    error: CarriedError


class Answers(_Message):
    """Answers, each to one item. ``num_seen``: so many submissions of the connection had been taken over. Either they
    are in the state that was told last, or they and what has been answered since make little difference to it."""

    steps: list[StepTimes]
    rows: list[RowAt]
    errors: list[ErrorAt]
    num_seen: int


class Stats(_Message):
    """The port's state, without the submissions behind ``num_seen``. ``speed``: of the cost model, as corrected;
    0: as the ``Hello`` has it."""

    stats: PortStats
    speed: float
    num_seen: int


class Welcome(_Message):
    """The model is served here. ``stats``: by engine ports.

    ``has_culprits``: the process that served it before ended while it ran steps, and what they had is suspected here.
    So nothing that only waited there has ended it.
    """

    hello: Hello
    stats: Stats | None = None
    has_culprits: bool = False


# The engine.


class Run(_Message):
    """A packed batch, whose arrays follow as int32, in this order where they are there: ``input_ids``, ``cu_seqlens``,
    ``token_type_ids``, ``key_lens``, ``unpooled_lens``."""

    number: int
    outputs: list[str] | None
    num_tokens: int
    batch_size: int
    has_types: bool
    has_key_lens: bool
    has_unpooled_lens: bool


class Ran(_Message):
    """The outputs of a ``Run``."""

    number: int
    outputs: Lent


class Failed(_Message):
    """What a ``Run`` raised."""

    number: int
    error: CarriedError


ToPortServer: TypeAlias = Open | Submit | Cancel | Release | Bye
ToRemotePort: TypeAlias = Welcome | Refused | Announce | Forget | Answers | Stats
ToEngineServer: TypeAlias = Open | Run | Release
ToRemoteEngine: TypeAlias = Welcome | Refused | Announce | Forget | Ran | Failed

Message: TypeAlias = ToPortServer | ToRemotePort | ToEngineServer | ToRemoteEngine
