"""What supervisor and children say to each other over their control sockets, and how it lies on the wire.

A frame is its length and number of descriptors (5 bytes), then MessagePack; descriptors travel with the 5 bytes. The
supervisor calls, a child answers each call once. Questions of one process to the others go through the supervisor.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.metrics.registry import SwapResult

HEADER = struct.Struct(">IB")
MOST_DESCRIPTORS = 250  # Linux lets 253 travel at once


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served: its verified artifact, and what is known of its engine.

    ``num_streams``: of each device's engine, ``costs``: a cost model's data, ``device``: in the engine's own words.
    Before the first engine has been loaded they are not known: 0, None, empty.
    """

    artifact: Artifact
    num_streams: int = 0
    costs: dict[str, Any] | None = None
    device: str = ""

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.artifact.manifest.name

    @property
    def key(self) -> str:
        """The name and the digest: while artifacts are swapped there are two of one name."""
        return f"{self.name}@{self.artifact.manifest.digest}"


# What the supervisor asks a child to do. It has done so when it answers.


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first call. ``index``: among those of its role. ``cores``: those an engine is pinned to, empty where it is
    not. ``has_queues``: this engine process is the only one, and has the batch managers.

    Descriptors come along: of the socket to listen on (engine, batch manager), of the endpoints to connect to (batch
    manager, front end), of the shared page (front end) and of the ledger (an engine that has queues).
    """

    config: ServeConfig
    index: int
    started_s: int
    cores: tuple[int, ...] = ()
    has_queues: bool = False


class Open(msgspec.Struct, frozen=True, tag=True):
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
    """Close the model when nobody uses it any more."""

    key: str


class Looked(msgspec.Struct, frozen=True, tag=True):
    """Who has the queues counts: the artifact of this model was looked at again."""

    name: str
    result: SwapResult


class Reload(msgspec.Struct, frozen=True, tag=True):
    """A front end: read API keys and certificates anew."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """A front end: refuse new requests. Done when all others are answered."""


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """A front end: answer at once that the server has stopped."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End. There is no answer but the end of the process."""


Step: TypeAlias = Configure | Open | Serve | Switch | Close | Looked | Reload | Drain | Abandon | Stop


# From the supervisor.


class Call(msgspec.Struct, frozen=True, tag=True):
    """Do this."""

    id: int
    step: Step


class Question(msgspec.Struct, frozen=True, tag=True):
    """Another process, or the supervisor, asks for what this one offers."""

    id: int
    kind: str


class Gathered(msgspec.Struct, frozen=True, tag=True):
    """What the others have answered to ``Ask``."""

    id: int
    answers: dict[str, bytes]
    silent: tuple[str, ...]


# From a child.


class Failure(msgspec.Struct, frozen=True):
    """Why a call has failed: an error's code and message."""

    code: str
    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
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


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Question``; None where it could not be computed."""

    id: int
    data: bytes | None


class Ailing(msgspec.Struct, frozen=True, tag=True):
    """This process cannot do its work any more, and wants to be replaced."""

    reason: str


class Hung(msgspec.Struct, frozen=True, tag=True):
    """Who has the queues: a step of the engine process ``index`` does not end."""

    index: int


FromSupervisor: TypeAlias = Call | Question | Gathered
FromChild: TypeAlias = Done | Offer | Ask | Reply | Ailing | Hung


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} is in no message")


def _typed(kind: type, value: Any) -> Any:
    return kind(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor, dec_hook=_typed)
_from_child = msgspec.msgpack.Decoder(FromChild, dec_hook=_typed)


def frame(message: FromSupervisor | FromChild, num_descriptors: int = 0) -> bytes:
    """``message`` as it is sent, with its header."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body), num_descriptors) + body


def from_supervisor(body: bytes) -> FromSupervisor:
    """What ``frame`` was made of, without the header."""
    message: FromSupervisor = _from_supervisor.decode(body)
    return message


def from_child(body: bytes) -> FromChild:
    """What ``frame`` was made of, without the header."""
    message: FromChild = _from_child.decode(body)
    return message
