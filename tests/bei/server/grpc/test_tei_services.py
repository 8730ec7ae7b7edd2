"""text-embeddings-inference's services: the numbers of its HTTP routes, in its messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from bei import __version__
from tests.bei.server.app import App
from tests.bei.server.grpc.served import Grpc, tei
from tests.bei.server.kinds import answer

LONG = "the cat " * 20


@pytest.fixture(scope="module")
def served(kinds: App) -> Iterator[Grpc]:
    served = Grpc(kinds, max_client_batch_size=8)
    yield served
    served.close()


def test_embed(kinds: App, served: Grpc) -> None:
    (expected,) = answer(kinds, "/embed", inputs="the cat", model="embedder")
    found, metadata = served.call("/tei.v1.Embed/Embed", tei("EmbedRequest", inputs="the cat"))
    np.testing.assert_array_equal(found.embeddings, np.array(expected, np.float32))
    assert (found.metadata.compute_chars, found.metadata.compute_tokens) == (7, 4)
    parts = found.metadata.tokenization_time_ns + found.metadata.queue_time_ns + found.metadata.inference_time_ns
    assert 0 < parts <= found.metadata.total_time_ns < 10**10
    assert len(metadata["x-request-id"]) == 32


@pytest.mark.parametrize(
    "fields", [{"normalize": False}, {"dimensions": 3}, {"prompt_name": "cats"}, {"truncate": True, "inputs": LONG}]
)
def test_fields_of_embed_mean_what_they_mean_over_http(kinds: App, served: Grpc, fields: dict[str, Any]) -> None:
    asked = {"inputs": "cat", **fields}
    (expected,) = answer(kinds, "/embed", **asked, model="embedder")
    found, metadata = served.call("/tei.v1.Embed/Embed", tei("EmbedRequest", **asked))
    np.testing.assert_array_equal(found.embeddings, np.array(expected, np.float32))
    assert metadata.get("x-truncated-inputs") == ("0" if "truncate" in fields else None)
    assert ("x-bei-warning" in metadata) is ("dimensions" in fields or "prompt_name" not in fields)


def test_the_direction_of_a_cut(kinds: App, served: Grpc) -> None:
    left = tei("EmbedRequest", inputs=LONG + "hello", truncate=True, truncation_direction=1)
    body = {"inputs": LONG + "hello", "truncate": True, "truncation_direction": "Left", "model": "embedder"}
    found, _ = served.call("/tei.v1.Embed/Embed", left)
    np.testing.assert_array_equal(found.embeddings, np.array(answer(kinds, "/embed", **body)[0], np.float32))


def test_sparse_and_token_vectors(kinds: App, served: Grpc) -> None:
    found, _ = served.call("/tei.v1.Embed/EmbedSparse", tei("EmbedSparseRequest", inputs="the cat"))
    (expected,) = answer(kinds, "/embed_sparse", inputs="the cat", model="splade")
    assert [(one.index, one.value) for one in found.sparse_embeddings] == [
        (one["index"], np.float32(one["value"])) for one in expected
    ]
    found, _ = served.call("/tei.v1.Embed/EmbedAll", tei("EmbedAllRequest", inputs="the cat"))
    (rows,) = answer(kinds, "/embed_all", inputs="the cat", model="colbert")
    for token, row in zip(found.token_embeddings, rows, strict=True):
        np.testing.assert_array_equal(token.embeddings, np.array(row, np.float32))


@pytest.mark.parametrize("raw", [False, True])
def test_predict(served: Grpc, kinds: App, raw: bool) -> None:
    metadata = [("x-bei-model", "classifier")]
    found, _ = served.call("/tei.v1.Predict/Predict", tei("PredictRequest", inputs="cat", raw_scores=raw), metadata)
    expected = answer(kinds, "/predict", inputs="cat", raw_scores=raw, model="classifier")
    assert [(one.label, one.score) for one in found.predictions] == [
        (one["label"], pytest.approx(one["score"])) for one in expected
    ]
    pair, _ = served.call("/tei.v1.Predict/PredictPair", tei("PredictPairRequest", inputs=["cat", ""]), metadata)
    expected = answer(kinds, "/predict", inputs=["cat", ""], model="classifier")
    assert [one.label for one in pair.predictions] == [one["label"] for one in expected]
    alone, _ = served.call("/tei.v1.Predict/PredictPair", tei("PredictPairRequest", inputs=["cat"]), metadata)
    assert [one.label for one in alone.predictions] == [one.label for one in found.predictions]
    three = tei("PredictPairRequest", inputs=["a", "b", "c"])
    assert served.error("/tei.v1.Predict/PredictPair", three, metadata).code() is INVALID
    other = served.error("/tei.v1.Rerank/Rerank", tei("RerankRequest", query="a", texts=["b"]), metadata)
    assert other.code() is grpc.StatusCode.FAILED_PRECONDITION  # a model of another kind, as TEI has it


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("return_text", [False, True])
def test_rerank_and_its_stream(served: Grpc, kinds: App, return_text: bool) -> None:
    texts = ["hello", "the cat", ""]
    expected = answer(kinds, "/rerank", query="cat", texts=texts, return_text=return_text, model="reranker")
    one = tei("RerankRequest", query="cat", texts=texts, return_text=return_text)
    pairs = [tei("RerankStreamRequest", query="cat", text=text, return_text=return_text) for text in texts]
    for found in (served.call("/tei.v1.Rerank/Rerank", one)[0], served.gather("/tei.v1.Rerank/RerankStream", pairs)):
        assert [(rank.index, rank.score) for rank in found.ranks] == [
            (row["index"], pytest.approx(row["score"])) for row in expected
        ]
        assert [rank.text if rank.HasField("text") else None for rank in found.ranks] == [
            row.get("text") for row in expected
        ]


def test_a_stream_of_pairs_is_bounded_and_of_one_kind(served: Grpc) -> None:
    pairs = [tei("RerankStreamRequest", query="cat", text="a")] * 9
    mixed = [tei("RerankStreamRequest", query="a", text="a"), tei("RerankStreamRequest", text="a", truncate=True)]
    for requests, message in ((pairs, "9 inputs, the limit is 8"), (mixed, "of message 1 differ"), ([], "empty list")):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            served.gather("/tei.v1.Rerank/RerankStream", requests)
        assert caught.value.code() is INVALID
    large = [tei("RerankStreamRequest", query="cat", text="a" * 3_000_000)] * 3
    with pytest.raises(grpc.aio.AioRpcError, match="more than 8000000 bytes together"):
        served.gather("/tei.v1.Rerank/RerankStream", large)


def test_tokenize_and_decode(served: Grpc, kinds: App) -> None:
    metadata = [("x-bei-model", "embedder")]
    request = tei("EncodeRequest", inputs="the cat", add_special_tokens=True)
    found, _ = served.call("/tei.v1.Tokenize/Tokenize", request, metadata)
    (expected,) = answer(kinds, "/tokenize", inputs="the cat", model="embedder")
    for token, row in zip(found.tokens, expected, strict=True):
        assert (token.id, token.text, token.special) == (row["id"], row["text"], row["special"])
        assert (token.start if token.HasField("start") else None) == row["start"]
    ids = [row["id"] for row in expected]
    request = tei("DecodeRequest", ids=ids, skip_special_tokens=True)
    (text,) = answer(kinds, "/decode", ids=ids, model="embedder")
    assert served.call("/tei.v1.Tokenize/Decode", request, metadata)[0].text == text
    empty = served.error("/tei.v1.Tokenize/Decode", tei("DecodeRequest"), metadata)
    assert (empty.code(), empty.details()) == (INVALID, "ids is empty: send those of a text.")


def test_streams_answer_in_order(served: Grpc, kinds: App) -> None:
    texts = [f"cat {'the ' * (index % 5)}" for index in range(200)]
    found = served.stream("/tei.v1.Embed/EmbedStream", [tei("EmbedRequest", inputs=text) for text in texts])
    expected = {text: answer(kinds, "/embed", inputs=text, model="embedder")[0] for text in {*texts}}
    np.testing.assert_array_equal(
        np.array([one.embeddings for one in found]), np.array([expected[text] for text in texts], np.float32)
    )
    names = ("Predict/PredictStream", "PredictRequest"), ("Tokenize/TokenizeStream", "EncodeRequest")
    for path, request in names:
        metadata = [("x-bei-model", "classifier")]
        assert len(served.stream(f"/tei.v1.{path}", [tei(request, inputs="cat")] * 3, metadata)) == 3


def test_the_first_error_ends_a_stream(served: Grpc) -> None:
    texts = ["cat"] * 5 + [""] + ["cat"] * 5
    with pytest.raises(grpc.aio.AioRpcError, match="inputs 0 is an empty text") as caught:
        served.stream("/tei.v1.Embed/EmbedStream", [tei("EmbedRequest", inputs=text) for text in texts])
    assert caught.value.code() is INVALID


def test_info(make_info: Grpc) -> None:
    found, _ = make_info.call("/tei.v1.Info/Info", tei("InfoRequest"))
    assert (found.version, found.model_id, found.model_dtype) == (__version__, "tiny", "float32")
    assert (found.model_type, found.max_input_length, found.HasField("sha")) == (0, 16, False)


@pytest.fixture
def make_info(app: App) -> Iterator[Grpc]:
    served = Grpc(app)
    yield served
    served.close()
