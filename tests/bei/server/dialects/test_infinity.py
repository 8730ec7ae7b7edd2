"""What Infinity's answers have beside what the wire's examples show."""

from __future__ import annotations

import numpy as np
import pytest

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import answer
from tests.support.artifacts import LIMITS


@pytest.mark.parametrize("dimensions", [0, 4])
def test_vectors_have_unit_length_whatever_the_checkpoint_says(
    dimensions: int, make_app: MakeApp, second_artifact: Artifact
) -> None:
    """As Infinity's own code normalizes all but late interaction; the checkpoint's lengths were answered."""
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    asked = {"input": ["cat", "the cats"], "model": "org/second", "dimensions": dimensions}
    vectors = [np.array(one["embedding"]) for one in answer(app, "/infinity/embeddings", **asked)["data"]]
    np.testing.assert_allclose([np.linalg.norm(one) for one in vectors], 1, rtol=1e-5)
    (raw, _) = answer(app, "/v1/embeddings", **{**asked, "dimensions": dimensions or None})["data"]
    assert np.linalg.norm(raw["embedding"]) != pytest.approx(1, rel=1e-3)
