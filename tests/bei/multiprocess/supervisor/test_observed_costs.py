"""What steps have been observed to cost, on its way from the batch manager to whoever opens the model next."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.multiprocess.control.messages import Served
from bei.multiprocess.roles.batch_manager import observed_costs
from bei.multiprocess.supervisor.fleet import ObservedCosts
from bei.scheduler.cost_model import CostModel
from tests.support.artifacts import LIMITS, save_artifact


def test_the_last_that_was_said_of_a_model_is_applied_until_it_is_forgotten(tmp_path: Path) -> None:
    costs = CostModel.assumed(LIMITS)
    served = Served(artifact=save_artifact(tmp_path / "tiny"), costs=costs.to_json(), num_streams=2)
    observed = ObservedCosts()
    observed.note(None)  # silent
    assert observed.applied(served) is served
    for factor in (2.0, 3.0):
        for _ in range(40):
            costs.observe(8, 1, 8, factor * CostModel.assumed(LIMITS).seconds(8, 1, 8))
        observed.note(observed_costs({served.key: costs, "other@0": CostModel.assumed(LIMITS)}))
        found = observed.applied(served)
        assert found.costs is not None
        predicted_s = CostModel.from_json(found.costs).seconds(8, 1, 8)
        assert predicted_s == pytest.approx(factor * CostModel.assumed(LIMITS).seconds(8, 1, 8))
    observed.note(None)
    assert observed.applied(served) == found
    assert (found.key, found.num_streams) == (served.key, 2)
    observed.forget(served.key)
    observed.forget(served.key)
    assert observed.applied(served) is served
