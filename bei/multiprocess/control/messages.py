"""Messages between supervisor and children over their control sockets: headers of ``channel`` frames, some with
descriptors.

The supervisor calls, a child answers each call once. Questions of one process to the others go through the supervisor.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from bei.artifact.manifest import ENGINE_DIR, Artifact
from bei.config.settings import ServeConfig
from bei.errors import BeiError
from bei.utils.msgspec_types import prepare_types

# Kinds of questions of the supervisor.
HEARTBEAT = "heartbeat"  # answered if the process still works
COSTS = "costs"  # the observed costs of steps, by key


def second_key(key: str) -> str:
    """What the second tower of the model ``key`` is asked for by."""
    return f"{key}#second"


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A served model: its verified artifact, and facts about its engine.

    ``number``: index among the server's models; a new artifact keeps it. ``num_streams``: streams of each device's
    engine. ``costs``: data of a cost model. ``second_streams`` and ``second_costs``: of the second tower's engine,
    where there is one. ``device``: the engine's name of its device. Before the first engine is loaded, these are
    unknown: 0, None, empty.
    """

    artifact: Artifact
    number: int = 0
    num_streams: int = 0
    costs: dict[str, Any] | None = None
    second_streams: int = 0
    second_costs: dict[str, Any] | None = None
    device: str = ""

    @property
    def name(self) -> str:
        return self.artifact.manifest.name

    @property
    def key(self) -> str:
        """Name and digest. During a swap, two served models have one name but different keys."""
        key = f"{self.name}@{self.artifact.manifest.digest}"
        return second_key(key) if self.artifact.folder != ENGINE_DIR else key

    @property
    def of_second(self) -> Served | None:
        """The second tower as a model of its own; None: it has none."""
        if self.artifact.manifest.second_tower is None:
            return None
        return msgspec.structs.replace(
            self, artifact=self.artifact.of_second, num_streams=self.second_streams, costs=self.second_costs
        )

    @property
    def towers(self) -> tuple[Served, ...]:
        """What has an engine: it, and before it its second tower. Metrics have the limits of the last."""
        return (self,) if self.of_second is None else (self.of_second, self)


# Commands of the supervisor. A child answers when it has carried them out.


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first command. ``index``: among those of its role. ``cores``: those an engine is pinned to, empty where it is
    not. ``has_queues``: this engine process is the only one, and has the batch managers.

    Descriptors: the socket to listen on (engine, batch manager), the endpoints to connect to (batch manager, front
    end), the shared page (front end), the step records (an engine that has queues).
    """

    config: ServeConfig
    index: int
    num_models: int
    started_s: int
    cores: tuple[int, ...] = ()
    has_queues: bool = False


class OpenModel(msgspec.Struct, frozen=True, tag=True):
    """Load this model, or connect to where it is; a front end asks its canary. An engine answers with what it has found
    out, if it ``is_first`` to load this artifact. ``replaces``: what is served under its name so far.
    """

    served: Served
    is_first: bool = False
    replaces: Served | None = None


class Serve(msgspec.Struct, frozen=True, tag=True):
    """All models are open. A front end accepts connections on the sockets that come along."""


class Switch(msgspec.Struct, frozen=True, tag=True):
    """A front end: requests that come from now on are for this model and no longer for the other of its name."""

    key: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the model when nothing uses it any more."""

    key: str


class Reload(msgspec.Struct, frozen=True, tag=True):
    """A front end: read API keys and certificates anew."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """A front end: refuse new requests. Done when all others are answered."""


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """A front end: answer at once that the server has stopped."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End. Instead of an answer the process ends."""


Command: TypeAlias = Configure | OpenModel | Serve | Switch | Close | Reload | Drain | Abandon | Stop


# From the supervisor.


class Call(msgspec.Struct, frozen=True, tag=True):
    """A command."""

    id: int
    command: Command


class Question(msgspec.Struct, frozen=True, tag=True):
    """Another process, or the supervisor, asks for what this one offers."""

    id: int
    kind: str


class Gathered(msgspec.Struct, frozen=True, tag=True):
    """The answers of the others to ``Ask``."""

    id: int
    answers: dict[str, bytes]
    silent: tuple[str, ...]


# From a child.


class Failure(msgspec.Struct, frozen=True):
    """Why a call has failed: an error's code and message."""

    code: str
    message: str

    def error(self) -> BeiError:
        error = BeiError(self.message)
        error.code = self.code
        return error


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Call``."""

    id: int
    failure: Failure | None = None
    served: Served | None = None


class Offer(msgspec.Struct, frozen=True, tag=True):
    """This process answers questions of this kind."""

    kind: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Ask all others."""

    id: int
    kind: str


class QuestionReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Question``; None where it could not be computed."""

    id: int
    kind: str
    data: bytes | None


class Ailing(msgspec.Struct, frozen=True, tag=True):
    """This process cannot do its work any more, and wants to be replaced."""

    reason: str


class Hung(msgspec.Struct, frozen=True, tag=True):
    """The process with the queues: a step of the engine process ``index`` does not end."""

    index: int


FromSupervisor: TypeAlias = Call | Question | Gathered
FromChild: TypeAlias = CommandDone | Offer | Ask | QuestionReply | Ailing | Hung

prepare_types(FromSupervisor, FromChild)
