"""Messages between front ends, batch managers and engine processes, over ``channel``.

Both ends are of one installation, so there are no versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec

from bei.core import EngineInfo, Float32Array, PackedBatch
from bei.errors import BeiError, EngineError
from bei.port import PortStats, StepTimes, Submission
from bei.scheduler.cost_model import CostModel
from bei.utils.msgspec_types import prepare_types

_Plain: TypeAlias = str | int | float | bool | None


class CarriedError(NamedTuple):
    """A BeiError as plain data: nothing is executed to read it."""

    name: str
    code: str
    message: str
    attributes: dict[str, _Plain]


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Each is a list in msgpack, with its name first."""


# Both services.


class ModelInfo(msgspec.Struct, frozen=True):
    """The facts of a served model: what a client needs to admit work and to cut batches.

    ``model``: what it is asked for by, "NAME@DIGEST" with the digest of the artifact's manifest. ``costs``: the data of
    its cost model, with what has been observed so far.
    """

    model: str
    engine: EngineInfo
    costs: dict[str, Any]

    @classmethod
    def of(cls, model: str, engine: EngineInfo, costs: CostModel) -> ModelInfo:
        return cls(model, engine, costs.continued(costs.limits).to_json())

    def cost_model(self) -> CostModel:
        """A model of its own, which predicts what the one over there predicted then."""
        return CostModel.from_json(self.costs)


class OpenConnection(_Message):
    """First message of a client: the model that it asks for. Answered by ``Welcome`` or ``Refused``."""

    model: str


class Refused(_Message):
    """It is not served here; the connection ends."""

    error: CarriedError


# The engine port.


class Submit(_Message):
    """``number``: counts those of the connection, from 1."""

    number: int
    submission: Submission


class Cancel(_Message):
    """As the port's."""

    request_id: int


class AnswerAt(NamedTuple):
    """As the port's ``Answer``."""

    request_id: int
    place: int
    result: dict[str, Float32Array] | CarriedError
    step: StepTimes | None


class Answers(_Message):
    """``num_seen``: so many submissions of the connection had been taken over. Either they are in the state that was
    told last, or they and what has been answered since make little difference to it."""

    answers: list[AnswerAt]
    num_seen: int


class PortState(_Message):
    """The port's state, without the submissions behind ``num_seen``. ``speed``: of the cost model, as corrected;
    0: as the ``ModelInfo`` has it."""

    stats: PortStats
    speed: float
    num_seen: int


class Welcome(_Message):
    """The model is served here. ``stats``: by engine ports.

    ``has_culprits``: the process that served it before ended while it ran steps, and what they had is suspected here.
    So nothing that only waited there has ended it.
    """

    model_info: ModelInfo
    stats: PortState | None = None
    has_culprits: bool = False


# The engine. A connection has one step at a time.


class Run(_Message):
    """A step."""

    batch: PackedBatch
    outputs: frozenset[str] | None


class Ran(_Message):
    """The outputs of a step."""

    outputs: dict[str, Float32Array]


class Failed(_Message):
    """The error of a step."""

    error: CarriedError


ToPortServer: TypeAlias = OpenConnection | Submit | Cancel
ToRemotePort: TypeAlias = Welcome | Refused | Answers | PortState
ToEngineServer: TypeAlias = OpenConnection | Run
ToRemoteEngine: TypeAlias = Welcome | Refused | Ran | Failed

prepare_types(ToPortServer, ToRemotePort, ToEngineServer, ToRemoteEngine)


def carried(error: BeiError) -> CarriedError:
    """``error`` as data, without the attributes that are no plain values."""
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    return CarriedError(type(error).__name__, error.code, str(error), attributes)


def arrived(data: CarriedError) -> BeiError:
    """The error as it was. A class that this process does not know becomes one of the same code, or an EngineError."""
    kinds = list(_tree(BeiError))
    named = [kind for kind in kinds if kind.__name__ == data.name]
    alike = [kind for kind in kinds if kind.code == data.code]
    kind: type[BeiError] = (*named, *alike, EngineError)[0]
    error: BeiError = kind.__new__(kind, data.message)  # not __init__, whose arguments made the message
    vars(error).update(data.attributes)
    return error


def _tree(root: type[BeiError]) -> Iterator[type[BeiError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)
