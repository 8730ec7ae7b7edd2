"""Clients of npm: what they return is what plain HTTP gets.

`npm install --ignore-scripts` in this folder gets them. Node 20 or later.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import Expected, post
from tests.e2e.kinds import MODELS, QUERY, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server, serve
from tests.e2e.test_batches import Batches, kill_within, lines
from tests.support.builds import build_artifact
from tests.support.zoo import save_case

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    not (FOLDER / "node_modules").is_dir(), reason="the clients are not there: npm install --ignore-scripts"
)
row = pytest.mark.client_call


def ask(server: Server, call: str, **more: str) -> Any:
    """What the client returns."""
    given = json.dumps({"texts": TEXTS, "query": QUERY, **more})
    command = ["node", "calls.mjs", call, server.url, given]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return json.loads(done.stdout)


def refused(server: Server, call: str) -> dict[str, Any]:
    """The error that the client raises."""
    found: dict[str, Any] = ask(server, call)["error"]
    return found


@row("openai (npm)", "OpenAI", "/v1", "embeddings.create: base64, usage; float, dimensions")
def test_openai(server: Server, expected: Expected) -> None:
    found = ask(server, "openai embeddings")
    expected.check_vectors(found["vectors"])
    assert found["tokens"] == expected.num_tokens
    expected.check_vectors(ask(server, "openai dimensions"), "short")


@row("openai (npm)", "OpenAI", "/v1", "files.create, list, content, delete; batches.create, retrieve")
def test_openai_s_batches(server: Server, expected: Expected) -> None:
    found = ask(server, "openai batch")
    expected.check_vectors(found["vectors"])
    assert found["counts"] == {"total": len(TEXTS), "completed": len(TEXTS), "failed": 0}
    assert found["left"] == ["batch_output"]


def test_openai_s_batch_outlives_its_server(tmp_path: Path, env: Mapping[str, str]) -> None:
    path, batches = tmp_path / "in.jsonl", Batches(tmp_path, env)
    path.write_bytes(lines(6_000))
    with batches.serve(CHECKPOINT_S="0.05") as server:
        batch = ask(server, "openai batch begun", path=str(path))
        kill_within(server, batches)
    with batches.serve() as server:
        found = ask(server, "openai batch ended", id=batch)
    assert found["status"] == "completed"
    assert found["done"] == [f"c{n}" for n in range(6_000) if n % 10]
    assert found["failed"] == [f"c{n}" for n in range(0, 6_000, 10)]


@row("openai (npm)", "OpenAI", "/v1", "embeddings.create: errors: unknown model; text too long, at /vllm/v1")
def test_openai_gets_errors_of_its_own_classes(server: Server) -> None:
    unknown = refused(server, "openai unknown model")
    assert (unknown["status"], unknown["code"]) == (404, "model_not_found")
    assert refused(server, "openai too long")["status"] == 400


@row("cohere-ai (npm)", "Cohere", "/cohere", "v2.embed, v2.rerank")
def test_cohere(server: Server, expected: Expected) -> None:
    expected.check_vectors(ask(server, "cohere embed"))
    expected.check_ranking(ask(server, "cohere rerank"), 2)


@row("@langchain/openai (npm)", "OpenAI", "/v1", "OpenAIEmbeddings.embedDocuments, .embedQuery")
def test_langchain_openai(server: Server, expected: Expected) -> None:
    found = ask(server, "langchain openai")
    expected.check_vectors([*found["vectors"]])
    np.testing.assert_allclose(found["first"], expected.vectors[0], atol=TOLERANCE)


@row(
    "@langchain/cohere (npm)", "Cohere", "/cohere", "CohereEmbeddings.embedDocuments, .embedQuery; CohereRerank.rerank"
)
def test_langchain_cohere(server: Server, expected: Expected) -> None:
    found = ask(server, "langchain cohere")
    expected.check_vectors(found["vectors"])
    np.testing.assert_allclose(found["first"], expected.vectors[0], atol=TOLERANCE)
    expected.check_ranking(ask(server, "langchain rerank"), 2)


@row("@llamaindex/openai (npm)", "OpenAI", "/v1", "OpenAIEmbedding.getTextEmbeddings, .getTextEmbedding")
def test_llamaindex(server: Server, expected: Expected) -> None:
    found = ask(server, "llamaindex openai")
    expected.check_vectors(found["vectors"])
    np.testing.assert_allclose(found["first"], expected.vectors[0], atol=TOLERANCE)


@row("ai, @ai-sdk/openai (npm)", "OpenAI", "/v1", "embedMany, embed; usage")
def test_ai_sdk(server: Server, expected: Expected) -> None:
    found = ask(server, "ai openai")
    expected.check_vectors(found["vectors"])
    np.testing.assert_allclose(found["first"], expected.vectors[0], atol=TOLERANCE)
    assert found["tokens"] == expected.num_tokens


@row("ai, @ai-sdk/openai-compatible (npm)", "OpenAI", "/v1", "embedMany")
def test_ai_sdk_of_compatible_servers(server: Server, expected: Expected) -> None:
    expected.check_vectors(ask(server, "ai compatible"))


@row("voyageai (npm)", "Voyage", "/voyage/v1", "embed, rerank; usage")
def test_voyage(server: Server, expected: Expected) -> None:
    found = ask(server, "voyage embed")
    expected.check_vectors(found["vectors"])
    assert found["tokens"] == expected.num_tokens
    expected.check_ranking(ask(server, "voyage rerank"), 2)


@row("@chroma-core/openai (npm)", "OpenAI", "/v1", "OpenAIEmbeddingFunction.generate")
def test_chroma(server: Server, expected: Expected) -> None:
    expected.check_vectors(ask(server, "chroma openai"))


@row("@huggingface/inference (npm)", "TEI", "/tei/embed", "featureExtraction")
def test_huggingface_features(server: Server, expected: Expected) -> None:
    expected.check_vectors(ask(server, "huggingface features"))


@row("@huggingface/inference (npm)", "TEI", "/tei/similarity", "sentenceSimilarity")
def test_huggingface_similarity(server: Server) -> None:
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}
    expected = post(server, "/tei/similarity", **body)
    np.testing.assert_allclose(ask(server, "huggingface similarity"), expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """A server of the classifier alone."""
    folder = tmp_path_factory.mktemp("npm")
    checkpoint = save_case(folder / "classifier", MODELS["classifier"])
    built = build_artifact(checkpoint, folder / "built", name="classifier", reference="engine")
    with serve([built.path], env, home) as server:
        yield server


@row("@huggingface/inference (npm)", "TEI", "/tei", "textClassification with parameters: {}, of one served model")
def test_huggingface_classes(classifier: Server) -> None:
    found = ask(classifier, "huggingface classes")
    expected = post(classifier, "/tei/predict", inputs=TEXTS[0])
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    np.testing.assert_allclose([one["score"] for one in found], [one["score"] for one in expected], atol=TOLERANCE)


@row(
    "@huggingface/inference (npm)",
    "TEI",
    "/tei",
    "textClassification without parameters",
    fails="TEI's answer to one text is no list of lists, which this client expects: send `parameters: {}`",
)
def test_huggingface_classes_without_parameters(classifier: Server) -> None:
    assert refused(classifier, "huggingface classes without parameters")["name"] == "ProviderOutputError"


@row(
    "@huggingface/inference (npm)",
    "TEI",
    "/tei",
    "featureExtraction",
    fails="where several models are served, the root does not know which is meant: point it at /tei/embed",
)
def test_huggingface_features_at_the_root(server: Server) -> None:
    assert refused(server, "huggingface features at the root")["status"] == 422
