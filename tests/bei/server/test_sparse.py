"""Sparse vectors as an output type: the weights of ``/embed_sparse``, as indices and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bei.artifact.manifest import OutputInfo
from bei.core import EngineInfo, Outputs, PackedBatch
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.endpoint.test_input_report import LONG, ask
from tests.bei.server.kinds import KindEngine, answer, fake_output, post
from tests.support.artifacts import LIMITS, save_artifact, token_ids

TEXTS = ["cat", "the cats", "hello world"]
# Path -> the field of its inputs.
ROUTES = {"/v1/embeddings": "input", "/embeddings": "input", "/embed": "inputs", "/vllm/v1/embeddings": "input"}


def sparse(path: str, inputs: Any, **fields: Any) -> dict[str, Any]:
    return {ROUTES[path]: inputs, "output_dtype": "sparse", "model": "splade", **fields}


def vectors_of(body: Any) -> list[Any]:
    return [one["embedding"] for one in body["data"]] if isinstance(body, dict) else body


@pytest.mark.parametrize("path", ROUTES)
def test_weights_are_those_of_embed_sparse(kinds: App, path: str) -> None:
    expected = answer(kinds, "/embed_sparse", inputs=TEXTS, input_type="query", model="splade")
    found = vectors_of(answer(kinds, path, **sparse(path, TEXTS, input_type="query")))
    assert found == [
        {"indices": [one["index"] for one in weights], "values": [one["value"] for one in weights]}
        for weights in expected
    ]
    for vector in found:
        assert vector["indices"] == sorted(set(vector["indices"]))
        assert min(vector["values"]) > 0


@pytest.mark.parametrize("field", ["output_dtype", "embedding_type", "embedding_types", "encoding_type", "embed_dtype"])
def test_each_peer_s_word_asks_for_them(kinds: App, field: str) -> None:
    value = ["sparse"] if field == "embedding_types" else "sparse"
    found = answer(kinds, "/v1/embeddings", input=TEXTS, **{field: value}, model="splade")
    assert found == answer(kinds, "/v1/embeddings", **sparse("/v1/embeddings", TEXTS))
    assert found["usage"]["total_tokens"] == sum(len(token_ids(text)) for text in TEXTS)


def test_token_ids_have_them_too_and_the_only_model_that_can_answers(kinds: App) -> None:
    ids = token_ids("cat")
    asked = {"input": [ids, "cat"], "output_dtype": "sparse", "input_type": "document"}
    with_ids, with_text = vectors_of(answer(kinds, "/v1/embeddings", **asked))
    assert with_ids == with_text


def test_a_model_without_a_sparse_output_refuses_them(kinds: App) -> None:
    for path in ROUTES:
        refused = post(kinds, path, **sparse(path, TEXTS, model="embedder"))
        assert refused.status_code == 400
        assert "embedder cannot make sparse embeddings; it can do: embed" in refused.text


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"encoding_format": "base64"}, "send encoding_format float", "encoding_format"),
        ({"dimensions": 8}, "dense vectors", "dimensions"),
        ({"normalize": True}, "dense vectors", "normalize"),
        ({"late_chunking": True}, "dense vectors", "late_chunking"),
        ({"embedding_types": ["float"]}, "contradicts", "embedding_types"),
        ({"embedding_types": ["sparse", "float"]}, "contradicts", "embedding_types"),
    ],
)
def test_what_sparse_vectors_do_not_have_is_refused_by_name(
    kinds: App, fields: dict[str, Any], message: str, param: str
) -> None:
    check_error(post(kinds, "/v1/embeddings", **sparse("/v1/embeddings", TEXTS, **fields)), 400, message, param=param)


def test_they_are_never_bytes_alone(kinds: App) -> None:
    for path in (*ROUTES, "/embed_sparse"):
        body = sparse(path, "cat") if path in ROUTES else {"inputs": "cat", "model": "splade"}
        work = kinds.client.post(path, content=json.dumps(body), headers={"accept": "application/octet-stream"})
        assert kinds.run(work).status_code == 406


def test_messagepack_has_the_same_fields(kinds: App) -> None:
    body = sparse("/v1/embeddings", TEXTS)
    work = kinds.client.post("/v1/embeddings", content=json.dumps(body), headers={"accept": "application/msgpack"})
    found = msgspec.msgpack.decode(kinds.run(work).content)
    for one, expected in zip(vectors_of(found), vectors_of(answer(kinds, "/v1/embeddings", **body)), strict=True):
        assert one["indices"] == expected["indices"]
        np.testing.assert_array_equal(one["values"], expected["values"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/embed_sparse"])
def test_one_that_is_wrong_costs_the_others_nothing(kinds: App, path: str) -> None:
    inputs = ["cat", "", LONG, "hello"]
    body = sparse(path, inputs) if path in ROUTES else {"inputs": inputs, "model": "splade"}
    found = ask(kinds, path, {**body, "truncate": False}).json()
    good = {**body, "inputs" if "inputs" in body else "input": ["cat", "hello"]}
    expected = vectors_of(answer(kinds, path, **good))
    assert (found["embeddings"] if "embeddings" in found else vectors_of(found)) == [
        expected[0],
        None,
        None,
        expected[1],
    ]
    assert [one["tokens"] for one in found["report"]] == [3, 0, 0, 3]
    assert "allow truncation" in found["report"][2]["error"]["message"]


def test_an_answer_beyond_the_limit_is_refused(make_app: MakeApp, tmp_path: Path) -> None:
    outputs = [OutputInfo(name="sparse", dimension=64)]
    artifact = save_artifact(tmp_path / "splade", tasks=["embed_sparse"], embedding=None, outputs=outputs)
    app = App((artifact, KindEngine({"sparse": 64})), answer_limit=200, answer_memory=200)
    asked = {"output_dtype": "sparse"}
    assert post(app, "/v1/embeddings", input="cat", **asked).status_code == 200
    check_error(post(app, "/v1/embeddings", input=["the cats hello"] * 3, **asked), 413, code="answer_too_large")
    app.close()


class BothEngine(KindEngine):
    """As of BGE-M3: a vector, and a weight of each token."""

    def __init__(self) -> None:
        super().__init__({"token_weights": 1})
        outputs = {"embedding": 2, "token_weights": 1}
        self.info = EngineInfo("fake", "fp32", "none", LIMITS, outputs, frozenset({"token_weights"}))

    def run(self, batch: PackedBatch, outputs: Any = None) -> Outputs:
        self.batches.append(batch)
        ids = batch.input_ids
        weights = (ids % 5).astype(np.float32)[:, None] / 4
        vectors = np.array([[3.0, 4.0]] * (len(batch.cu_seqlens) - 1), np.float32)
        return {"embedding": vectors.astype(np.float32), "token_weights": weights.astype(np.float32)}


def test_a_model_with_both_answers_what_is_asked_for(tmp_path: Path) -> None:
    artifact = save_artifact(
        tmp_path / "both",
        tasks=["embed", "embed_sparse"],
        outputs=[
            OutputInfo(name="embedding", dimension=2),
            OutputInfo(name="token_weights", dimension=1, per_token=True),
        ],
    )
    app = App((artifact, BothEngine()))
    (dense,) = vectors_of(answer(app, "/v1/embeddings", input="the cats"))
    assert dense == pytest.approx([0.6, 0.8])
    (found,) = vectors_of(answer(app, "/v1/embeddings", input="the cats", output_dtype="sparse"))
    weights = answer(app, "/embed_sparse", inputs="the cats")[0]
    assert found == {"indices": [one["index"] for one in weights], "values": [one["value"] for one in weights]}
    inner = [token for token in token_ids("the cats")[1:-1] if token % 5]
    assert found == {"indices": sorted(set(inner)), "values": [token % 5 / 4 for token in sorted(set(inner))]}
    app.close()


def test_the_vocabulary_s_weights_are_the_engine_s(kinds: App) -> None:
    (found,) = vectors_of(answer(kinds, "/embed", **sparse("/embed", "the cats", prompt="")))
    ids = np.array(token_ids("the cats"), np.int32)
    width = 1 + max(found["indices"])
    expected = fake_output("sparse", ids, np.zeros_like(ids), max(width, ids.max() + 1))
    assert found["indices"] == np.flatnonzero(expected > 0).tolist()
    assert found["values"] == expected[expected > 0].tolist()
