"""The class for Ray Data, without Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from bei.errors import InvalidRequestError
from bei.ray import Embedder
from tests.bei.offline.given import expected, texts
from tests.support.artifacts import LIMITS, expected_vectors, save_artifact, token_ids


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: FakeEngine(LIMITS))
    return save_artifact(tmp_path / "tiny")


def test_a_batch_gets_a_column_of_vectors(artifact: Artifact) -> None:
    embedder = Embedder(artifact.path, settings={"tokenizer_threads": 1})
    batch = embedder({"text": np.array(texts(5)), "id": np.arange(5)})
    np.testing.assert_allclose(batch["embedding"], expected(texts(5)), atol=1e-6)
    assert batch["id"].tolist() == [0, 1, 2, 3, 4]


def test_options_are_those_of_the_model(artifact: Artifact) -> None:
    embedder = Embedder(artifact.path, column="body", output_column="vector", normalize=False)
    batch = embedder({"body": np.array(["cat"])})
    np.testing.assert_allclose(batch["vector"], expected_vectors([token_ids("cat")], normalize=False), atol=1e-6)
    with pytest.raises(InvalidRequestError, match="empty"):
        embedder({"body": np.array(["cat", ""])})
