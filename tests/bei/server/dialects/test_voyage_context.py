"""Voyage's contextualized chunks are late chunking of each document, in the form of Voyage."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Set

import numpy as np
import pytest

from bei.artifact.manifest import OutputInfo
from bei.core import EngineInfo, Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from tests.bei.server.app import App
from tests.bei.server.kinds import answer, post
from tests.support.artifacts import LIMITS, save_artifact

WIDTH = 8
PATH = "/voyage/v1/contextualizedembeddings"
DOCUMENTS = [["cat", "the cats"], ["hello"]]


MEAN = {"pooling": "mean", "layers_follow_pooling": False}


class StatesEngine(FakeEngine):
    """Gives the state of each token, which depends on its place in the document, too."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        widths = {"embedding": WIDTH, "token_embedding": WIDTH}
        self.info = EngineInfo("fake", "fp32", "none", limits, widths, frozenset({"token_embedding"}))

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        numbers = batch.input_ids[:, None] * (np.arange(WIDTH) + 1) % 13
        places = np.arange(len(batch.input_ids))[:, None] / 8
        states = np.asarray(numbers + places, np.float32)
        return {"token_embedding": states, **super().run(batch)}


OUTPUTS = [
    OutputInfo(name="embedding", dimension=WIDTH),
    OutputInfo(name="token_embedding", dimension=WIDTH, per_token=True),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    artifact = save_artifact(
        tmp_path_factory.mktemp("late") / "tiny", outputs=OUTPUTS, tasks=["embed", "embed_tokens"], embedding=MEAN
    )
    app = App((artifact, StatesEngine()), max_client_batch_size=4)
    yield app
    app.close()


def test_chunks_have_the_vectors_of_late_chunking(served: App) -> None:
    found = answer(served, PATH, inputs=DOCUMENTS, input_type="document")
    assert (found["object"], found["model"]) == ("list", "tiny")
    tokens = 0
    for index, (chunks, document) in enumerate(zip(DOCUMENTS, found["data"], strict=True)):
        openai = answer(served, "/v1/embeddings", input=chunks, late_chunking=True, input_type="document")
        assert (document["object"], document["index"]) == ("list", index)
        assert [chunk["embedding"] for chunk in document["data"]] == [one["embedding"] for one in openai["data"]]
        assert [chunk["index"] for chunk in document["data"]] == [*range(len(chunks))]
        tokens += openai["usage"]["total_tokens"]
    assert found["usage"] == {"total_tokens": tokens}
    alone = answer(served, PATH, inputs=[["the cats"]])["data"][0]["data"][0]["embedding"]
    assert alone != found["data"][0]["data"][1]["embedding"]  # without the document around it


def test_forms_are_those_of_embeddings(served: App) -> None:
    numbers = answer(served, PATH, inputs=DOCUMENTS, output_dimension=4)["data"][0]["data"][0]["embedding"]
    coded = answer(served, PATH, inputs=DOCUMENTS, output_dimension=4, encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(coded["data"][0]["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(decoded, np.array(numbers, np.float32))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs is an empty list"),
        ([["a"], []], "inputs is an empty list"),
        ([["a", ""]], "is an empty text"),
        ([["a"]] * 5, "has 5 inputs, the limit is 4"),
        ([["a", "b"]] * 3, "has 6 inputs, the limit is 4"),
        ([["cat " * 40]], "more than the model's 16 tokens"),
        ("cat", "Expected `array`"),
    ],
)
def test_what_is_wrong_is_said_in_voyage_s_form(served: App, inputs: object, message: str) -> None:
    response = post(served, PATH, inputs=inputs)
    assert response.status_code in (400, 422)
    assert set(response.json()) == {"detail"}
    assert message in response.json()["detail"]


def test_a_model_that_cannot_is_refused(kinds: App) -> None:
    response = post(kinds, PATH, inputs=[["a"]], model="embedder")
    assert response.status_code == 400
    assert "--token-embeddings" in response.json()["detail"]
