"""Triton's HTTP client, which speaks the Open Inference Protocol; by default with tensors as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.clients.conftest import Expected, run
from tests.e2e.kinds import LABELS, QUERY, TEXTS, TOLERANCE
from tests.e2e.process import Server

row = pytest.mark.client_call

BINARY = pytest.mark.parametrize("is_binary", [True, False])


def address(server: Server) -> str:
    """Without the scheme, as the client wants it."""
    return f"{server.url.removeprefix('http://')}/oip"


def inputs_of(texts: list[Any], *, is_binary: bool = True, kind: Any = triton) -> list[Any]:
    """The one input of bei's models."""
    tensor = np.array(texts, object)
    given = kind.InferInput("text", list(tensor.shape), "BYTES")
    given.set_data_from_numpy(tensor, binary_data=is_binary)
    return [given]


def outputs_of(*names: str, is_binary: bool) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name, binary_data=is_binary) for name in names]


@row(
    "tritonclient", "Open Inference Protocol", "/oip", "is_server_live, is_server_ready, is_model_ready, get_*_metadata"
)
def test_the_client_sees_the_models(server: Server) -> None:
    with triton.InferenceServerClient(address(server)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("embedder")
        assert not client.is_model_ready("other")
        assert client.get_server_metadata()["name"] == "bei"
        (output,) = client.get_model_metadata("embedder")["outputs"]
        assert (output["name"], output["datatype"]) == ("embedding", "FP32")


@row("tritonclient", "Open Inference Protocol", "/oip", "infer: an embedder's vectors, as bytes and in JSON")
@BINARY
def test_the_client_embeds(server: Server, expected: Expected, is_binary: bool) -> None:
    with triton.InferenceServerClient(address(server)) as client:
        by_default = client.infer("embedder", inputs_of(TEXTS, is_binary=is_binary))
        expected.check_vectors(by_default.as_numpy("embedding"))
        asked = outputs_of("embedding", is_binary=is_binary)
        short = client.infer("embedder", inputs_of(TEXTS), outputs=asked, parameters={"dimensions": 8}, request_id="a")
        expected.check_vectors(short.as_numpy("embedding"), "short")
        assert short.get_response()["id"] == "a"


@row(
    "tritonclient",
    "Open Inference Protocol",
    "/oip",
    "infer: a classifier's scores and labels; a reranker's scores of pairs",
)
@BINARY
def test_the_client_classifies_and_ranks(server: Server, expected: Expected, is_binary: bool) -> None:
    with triton.InferenceServerClient(address(server)) as client:
        asked = outputs_of("scores", "labels", is_binary=is_binary)
        found = client.infer("classifier", inputs_of(TEXTS, is_binary=is_binary), outputs=asked)
        labels = [label.decode() if isinstance(label, bytes) else label for label in found.as_numpy("labels")]
        places = [labels.index(label) for label in LABELS]
        np.testing.assert_allclose(found.as_numpy("scores")[:, places], expected.labels, atol=TOLERANCE)
        pairs = inputs_of([[QUERY, text] for text in TEXTS], is_binary=is_binary)
        scores = client.infer("reranker", pairs, outputs=outputs_of("scores", is_binary=is_binary))
        np.testing.assert_allclose(scores.as_numpy("scores"), expected.scores, atol=TOLERANCE)
        logits = client.infer("reranker", pairs, parameters={"raw_scores": True})
        np.testing.assert_allclose(logits.as_numpy("scores"), expected.logits, atol=TOLERANCE)


@row("tritonclient", "Open Inference Protocol", "/oip", "aio: infer, is_model_ready")
def test_the_asynchronous_client(server: Server, expected: Expected) -> None:
    async def call() -> Any:
        async with triton_aio.InferenceServerClient(address(server)) as client:
            assert await client.is_model_ready("embedder")
            return await client.infer("embedder", inputs_of(TEXTS, kind=triton_aio))

    expected.check_vectors(run(call()).as_numpy("embedding"))


@row(
    "tritonclient",
    "Open Inference Protocol",
    "/oip",
    "infer: errors: no such model, an empty text, a parameter that is not honoured",
)
def test_the_client_shows_what_is_wrong(server: Server) -> None:
    with triton.InferenceServerClient(address(server)) as client:
        with pytest.raises(InferenceServerException, match=r"\[404\] Model 'other' is not served here"):
            client.infer("other", inputs_of(TEXTS))
        with pytest.raises(InferenceServerException, match=r"\[400\] inputs 1 is an empty text"):
            client.infer("embedder", inputs_of(["a", ""]))
        with pytest.raises(InferenceServerException, match="unknown field `sequence_id`"):
            client.infer("embedder", inputs_of(TEXTS), sequence_id=5)


@row("tritonclient", "Open Inference Protocol", "/oip", "infer: gzip requests")
def test_the_client_compresses_requests(server: Server, expected: Expected) -> None:
    with triton.InferenceServerClient(address(server)) as client:
        found = client.infer(
            "embedder",
            inputs_of(TEXTS),
            request_compression_algorithm="gzip",
        )
    expected.check_vectors(found.as_numpy("embedding"))
