"""What steps have been observed to cost, so that it ends neither with the batch manager's process nor with an artifact.

The batch manager corrects its cost models by the steps that run. It is asked for them now and then, and before a swap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bei.multiprocess.control.messages import Served
from bei.scheduler.cost_model import CostModel

# The question that the batch manager answers with ``encoded``.
COSTS = "costs"

_decoder = msgspec.msgpack.Decoder(dict[str, dict[str, Any]])


def encoded(models: Mapping[str, CostModel]) -> bytes:
    """The cost models by their keys ("NAME@DIGEST"), each with the speed that was observed so far."""
    return msgspec.msgpack.encode({key: {**costs.to_json(), "speed": costs.speed} for key, costs in models.items()})


class ObservedCosts:
    """What was said last of each model."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Any]] = {}

    def note(self, answer: bytes | None) -> None:
        """The batch manager has said this; None: nothing, in time."""
        if answer is not None:
            self._models.update(_decoder.decode(answer))

    def applied(self, served: Served) -> Served:
        """``served`` with the costs that were observed, if any were."""
        costs = self._models.get(served.key)
        return served if costs is None else msgspec.structs.replace(served, costs=costs)

    def forget(self, key: str) -> None:
        """The model is closed."""
        self._models.pop(key, None)
