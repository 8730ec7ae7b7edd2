"""What a process says of a model that it serves to others."""

from __future__ import annotations

from typing import Any

import msgspec

from bei.core import EngineInfo
from bei.scheduler.cost_model import CostModel


class Hello(msgspec.Struct, frozen=True):
    """The facts of a served model: what the other side needs to admit work and to cut batches.

    ``model``: what it is asked for by, "NAME@DIGEST" with the digest of the artifact's manifest. ``costs``: the data of
    its cost model, with what has been observed so far.
    """

    model: str
    engine: EngineInfo
    costs: dict[str, Any]

    @classmethod
    def of(cls, model: str, engine: EngineInfo, costs: CostModel) -> Hello:
        """As things stand."""
        return cls(model, engine, costs.continued(costs.limits).to_json())

    def cost_model(self) -> CostModel:
        """A model of its own, which predicts what the one over there predicted then."""
        return CostModel.from_json(self.costs)
