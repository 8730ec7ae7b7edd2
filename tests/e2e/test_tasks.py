"""Classifier, reranker, token classifier, sparse and dense embedder in one process, over HTTP, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import baseten_performance_client
import cohere
import httpx
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
import voyageai.client
from tokenizers import Tokenizer

from bei.artifact.manifest import Artifact
from bei.core import Float32Array
from bei.engine.postprocess import apply_function, unit_length
from tests.e2e.kinds import LABELS, MODELS, QUERY, TAGS, TEXTS, TOLERANCE, case, labels
from tests.e2e.process import DEADLINE_S, Server, serve
from tests.support.builds import build_artifact
from tests.support.zoo import save_case


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save_case(folder / name, case) for name, case in MODELS.items()}


@pytest.fixture(scope="module")
def artifacts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("artifacts")
    return {
        name: build_artifact(checkpoint, folder / name, name=name, reference="engine")
        for name, checkpoint in checkpoints.items()
    }


@pytest.fixture(scope="module")
def tasks(artifacts: dict[str, Artifact], env: Mapping[str, str], home: Path) -> Iterator[Server]:
    with serve([artifact.path for artifact in artifacts.values()], env, home) as server:
        yield server


Run = Callable[[str, Sequence[str | tuple[str, str]]], list[Float32Array]]


@pytest.fixture(scope="module")
def run_hf(checkpoints: dict[str, Path], artifacts: dict[str, Artifact]) -> Run:
    """``run_hf(model, inputs)``: what the HF class gives for each text or pair, alone; pairs with their token types."""

    def run(name: str, inputs: Sequence[str | tuple[str, str]]) -> list[Float32Array]:
        tokenizer = Tokenizer.from_file(str(checkpoints[name] / "tokenizer.json"))
        tokenizer.enable_truncation(artifacts[name].manifest.max_seq_len)
        model = getattr(transformers, MODELS[name].architecture).from_pretrained(checkpoints[name]).eval()
        outputs = []
        for encoded in tokenizer.encode_batch(inputs):
            with torch.no_grad():
                given = {"input_ids": torch.tensor([encoded.ids]), "token_type_ids": torch.tensor([encoded.type_ids])}
                outputs.append(model(**given)[0][0].numpy())
        return outputs

    return run


def post(server: Server, path: str, **body: object) -> Any:
    """The content of a good answer."""
    response = httpx.post(server.url + path, json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response.json()


def by_label(entries: list[dict[str, Any]], labels: list[str]) -> list[float]:
    """Scores in the order of ``labels``."""
    scores = {entry["label"]: entry["score"] for entry in entries}
    return [scores[label] for label in labels]


def test_a_classifier_gives_transformers_probabilities_for_texts_and_pairs(tasks: Server, run_hf: Run) -> None:
    inputs: list[Any] = [*TEXTS, *((QUERY, text) for text in TEXTS)]
    logits = np.stack(run_hf("classifier", inputs))
    batch = [[one] if isinstance(one, str) else list(one) for one in inputs]
    for raw in (False, True):
        wanted = logits if raw else apply_function(logits, "softmax")
        found = [by_label(entry, LABELS) for entry in post(tasks, "/predict", inputs=batch, raw_scores=raw)]
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    of_texts = [entry["probs"] for entry in post(tasks, "/classify", input=TEXTS)["data"]]
    np.testing.assert_allclose(of_texts, apply_function(logits[: len(TEXTS)], "softmax"), atol=TOLERANCE)


@pytest.fixture(scope="module")
def relevance(run_hf: Run) -> Float32Array:
    """The reranker's logits for QUERY with each of TEXTS."""
    logits: Float32Array = np.stack(run_hf("reranker", [(QUERY, text) for text in TEXTS]))[:, 0]
    return logits


def test_a_reranker_reads_pairs_with_their_token_types(tasks: Server, relevance: Float32Array) -> None:
    ranks = post(tasks, "/rerank", query=QUERY, texts=TEXTS, raw_scores=True)
    assert [rank["index"] for rank in ranks] == np.argsort(-relevance, kind="stable").tolist()
    np.testing.assert_allclose([rank["score"] for rank in ranks], np.sort(relevance)[::-1], atol=TOLERANCE)
    results = post(tasks, "/v1/rerank", query=QUERY, documents=TEXTS, model="reranker")["results"]
    scores = {result["index"]: result["relevance_score"] for result in results}
    probabilities = apply_function(relevance, "sigmoid")
    np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], probabilities, atol=TOLERANCE)


def test_a_token_classifier_gives_transformers_scores_for_every_token(tasks: Server, run_hf: Run) -> None:
    found = post(tasks, "/predict_tokens", inputs=[[text] for text in TEXTS], raw_scores=True)
    for tokens, rows in zip(found, run_hf("ner", TEXTS), strict=True):
        scores = [[token["results"][tag] for tag in TAGS] for token in tokens]
        np.testing.assert_allclose(scores, rows[1:-1], atol=TOLERANCE)
    for strategy in ("simple", "first", "average", "max"):
        (entities,) = post(tasks, "/predict_tokens", inputs=TEXTS[:1], aggregation_strategy=strategy)
        assert all(entity["token"] == TEXTS[0][entity["start"] : entity["end"]] for entity in entities)


def test_a_masked_language_model_gives_splade_vectors(tasks: Server, run_hf: Run) -> None:
    for entries, logits in zip(post(tasks, "/embed_sparse", inputs=TEXTS), run_hf("splade", TEXTS), strict=True):
        expected = np.log1p(np.maximum(logits, 0)).max(axis=0)
        found = np.zeros_like(expected)
        found[[entry["index"] for entry in entries]] = [entry["value"] for entry in entries]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def vectors(run_hf: Run) -> Float32Array:
    """The embedder's unit vectors of TEXTS: mean pooling."""
    return unit_length(np.stack([states.mean(axis=0) for states in run_hf("embedder", TEXTS)]))


def test_an_embedder_answers_in_both_dialects(tasks: Server, vectors: Float32Array) -> None:
    np.testing.assert_allclose(post(tasks, "/embed", inputs=TEXTS), vectors, atol=TOLERANCE)
    openai_s = [entry["embedding"] for entry in post(tasks, "/v1/embeddings", input=TEXTS)["data"]]
    np.testing.assert_allclose(openai_s, vectors, atol=TOLERANCE)


def test_a_model_that_cannot_says_what_it_can(tasks: Server) -> None:
    body = {"query": "a", "texts": ["b"], "model": "embedder"}
    response = httpx.post(tasks.url + "/rerank", json=body, timeout=DEADLINE_S)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "task_not_supported")
    assert response.json()["error"]["message"].startswith("embedder cannot rerank; it can do: embed. /v1/rerank with")


def test_every_model_is_described(tasks: Server) -> None:
    for name in MODELS:
        info = httpx.get(tasks.url + "/info", params={"model": name}, timeout=DEADLINE_S).json()
        assert (info["served_model_name"], info["certificate"]["passed"]) == (name, True)


# Clients that people have


@pytest.fixture
def cohere_options(tasks: Server) -> Iterator[dict[str, Any]]:
    """How its clients find the server. They do not close connections of their own."""
    with httpx.Client(timeout=DEADLINE_S) as client:
        yield {"api_key": "none", "base_url": tasks.url, "httpx_client": client}


@pytest.mark.client_call("cohere", "Cohere", "/", "Client.rerank, ClientV2.rerank")
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cohere_s_client_ranks(cohere_options: dict[str, Any], relevance: Float32Array, version: str) -> None:
    client: Any = cohere.Client(**cohere_options) if version == "v1" else cohere.ClientV2(**cohere_options)
    response = client.rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=3)
    best = np.argsort(-relevance, kind="stable")[:3]
    assert [result.index for result in response.results] == best.tolist()
    probabilities = apply_function(relevance, "sigmoid")[best]
    np.testing.assert_allclose([result.relevance_score for result in response.results], probabilities, atol=TOLERANCE)
    assert response.meta.billed_units.search_units == 1
    if version == "v1":
        assert response.results[0].document.text == TEXTS[best[0]]


LONG = [f"{number} {'cat ' * 200}" for number in range(600)]


@pytest.mark.client_call("cohere", "Cohere", "/", "Client.rerank: 600 documents")
@pytest.mark.client_call("baseten-performance-client", "BEI", "/", "rerank: 600 texts")
@pytest.mark.client_call("huggingface_hub", "TEI", "/embed", "InferenceClient.feature_extraction: 1,805 texts")
def test_a_streamed_answer_is_read_by_every_client(tasks: Server, cohere_options: dict[str, Any]) -> None:
    texts = [*TEXTS, *LONG, *LONG, *LONG]
    ranked: Any = cohere.Client(**cohere_options).rerank(model="reranker", query=QUERY, documents=LONG)
    assert sorted(result.document.text for result in ranked.results) == sorted(LONG)
    client = baseten_performance_client.PerformanceClient(base_url=tasks.url, api_key="none")
    preference = baseten_performance_client.RequestProcessingPreference(batch_size=len(LONG))
    returned: Any = client.rerank(QUERY, LONG, return_text=True, truncate=True, preference=preference)
    assert sorted(entry.text for entry in returned.data) == sorted(LONG)
    try:
        hugging_face: Any = huggingface_hub.InferenceClient(f"{tasks.url}/embed", timeout=DEADLINE_S)
        found = hugging_face.feature_extraction(texts, truncate=True)
        expected = post(tasks, "/embed", inputs=texts[:3], truncate=True)
    finally:
        huggingface_hub.close_session()
    assert found.shape == (len(texts), 32)
    np.testing.assert_allclose(found[:3], expected, atol=TOLERANCE)


@pytest.mark.client_call("cohere", "Cohere", "/", "ClientV2.rerank: errors: a model that cannot")
def test_cohere_s_client_raises_our_message(cohere_options: dict[str, Any]) -> None:
    with pytest.raises(cohere.BadRequestError, match="embedder cannot rerank"):
        cohere.ClientV2(**cohere_options).rerank(model="embedder", query="a", documents=["b"])


@pytest.mark.client_call(
    "huggingface_hub",
    "TEI",
    "/embed, /similarity, /predict",
    "InferenceClient.feature_extraction, .sentence_similarity, .text_classification",
)
def test_hugging_face_s_client_embeds_compares_and_classifies(tasks: Server, vectors: Float32Array) -> None:
    def client(path: str) -> huggingface_hub.InferenceClient:
        return huggingface_hub.InferenceClient(tasks.url + path, timeout=DEADLINE_S)

    try:
        found = client("/embed").feature_extraction(TEXTS[0], normalize=True, truncate=True)
        np.testing.assert_allclose(found, vectors[:1], atol=TOLERANCE)
        similar = client("/similarity").sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
        np.testing.assert_allclose(similar, vectors[1:] @ vectors[0], atol=TOLERANCE)
        best: Any = client("/predict").text_classification(TEXTS[0])  # of a bare list it gives the first
        assert best == post(tasks, "/predict", inputs=TEXTS[0])[0]
        with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="No served model can embed tokens"):
            client("/embed_all").feature_extraction(TEXTS[0])
    finally:
        huggingface_hub.close_session()


@pytest.mark.client_call("baseten-performance-client", "BEI", "/", "embed, rerank, classify")
def test_baseten_s_client_embeds_ranks_and_classifies(
    tasks: Server, vectors: Float32Array, relevance: Float32Array
) -> None:
    client = baseten_performance_client.PerformanceClient(base_url=tasks.url, api_key="none")
    preference = baseten_performance_client.RequestProcessingPreference(batch_size=len(TEXTS))
    embedded = client.embed(TEXTS, model="embedder", preference=preference)
    np.testing.assert_allclose(embedded.numpy(), vectors, atol=TOLERANCE)
    ranked = client.rerank(QUERY, TEXTS, raw_scores=True, truncate=True, preference=preference)
    scores = {entry.index: entry.score for entry in ranked.data}
    np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], relevance, atol=TOLERANCE)
    classified = client.classify(TEXTS, model="classifier", truncate=True, preference=preference)
    assert [{entry.label for entry in entries} for entries in classified.data] == [set(LABELS)] * len(TEXTS)


# The dialects' mount points, and the root, by the clients that people have.


@pytest.fixture(scope="module")
def voyage(tasks: Server) -> Any:
    return voyageai.client.Client(api_key="none", base_url=f"{tasks.url}/voyage/v1", timeout=DEADLINE_S)


@pytest.mark.client_call(
    "voyageai", "Voyage", "/voyage/v1", "Client.embed, .rerank; errors: int8, unknown model, top_k 0"
)
def test_voyage_s_client_embeds_ranks_and_reads_errors(
    voyage: Any, vectors: Float32Array, relevance: Float32Array
) -> None:
    found = voyage.embed(TEXTS, model="embedder", input_type="document")
    np.testing.assert_allclose(found.embeddings, vectors, atol=TOLERANCE)
    bits = voyage.embed(TEXTS, model="embedder", output_dtype="ubinary").embeddings
    assert np.array_equal(bits, np.packbits(np.array(found.embeddings) > 0, axis=1))
    best = np.argsort(-relevance, kind="stable")
    ranked = voyage.rerank(QUERY, TEXTS, model="reranker", top_k=2).results
    assert [(one.index, one.document) for one in ranked] == [(index, TEXTS[index]) for index in best[:2]]
    np.testing.assert_allclose(
        [one.relevance_score for one in ranked], apply_function(relevance, "sigmoid")[best[:2]], atol=TOLERANCE
    )
    signed, unsigned = (
        np.array(voyage.embed(TEXTS, model="embedder", output_dtype=dtype).embeddings) for dtype in ("int8", "uint8")
    )
    assert np.array_equal(unsigned, signed + 128)
    assert np.abs(signed).max() <= 127
    assert np.einsum("ij,ij->i", unit_length(signed.astype(np.float32)), vectors).min() > 0.999
    with pytest.raises(voyageai.error.InvalidRequestError, match="Served: "):
        voyage.embed(TEXTS, model="voyage-3")
    with pytest.raises(voyageai.error.MalformedRequestError, match="top_k"):
        voyage.rerank(QUERY, TEXTS, model="reranker", top_k=0)


@pytest.mark.client_call(
    "cohere", "Cohere", "/", "Client.embed, ClientV2.embed: types, output_dimension; errors: int8, empty text"
)
@pytest.mark.client_call(
    "cohere", "Cohere", "/cohere", "Client.embed, ClientV2.embed: types, output_dimension; errors: int8, empty text"
)
@pytest.mark.parametrize("root", ["", "/cohere"])
def test_cohere_s_client_embeds_and_reads_errors(
    tasks: Server, cohere_options: dict[str, Any], vectors: Float32Array, root: str
) -> None:
    options = {**cohere_options, "base_url": tasks.url + root}
    first: Any = cohere.Client(**options).embed(texts=TEXTS, model="embedder", input_type="search_document")
    np.testing.assert_allclose(first.embeddings, vectors, atol=TOLERANCE)
    second: Any = cohere.ClientV2(**options)
    asked = {"texts": TEXTS, "model": "embedder", "input_type": "search_query"}
    by_type = second.embed(**asked, embedding_types=["float", "ubinary", "binary"]).embeddings
    np.testing.assert_allclose(by_type.float_, vectors, atol=TOLERANCE)
    bits = np.packbits(np.array(by_type.float_) > 0, axis=1).astype(int)
    assert np.array_equal(by_type.ubinary, bits)
    assert np.array_equal(by_type.binary, bits - 128)
    short = second.embed(**asked, embedding_types=["float"], output_dimension=8).embeddings.float_
    np.testing.assert_allclose(short, unit_length(vectors[:, :8]), atol=TOLERANCE)
    in_bytes = second.embed(**asked, embedding_types=["int8", "uint8"]).embeddings
    assert np.array_equal(np.array(in_bytes.int8) + 128, in_bytes.uint8)
    assert np.einsum("ij,ij->i", unit_length(np.array(in_bytes.int8, np.float32)), vectors).min() > 0.999
    with pytest.raises(cohere.BadRequestError, match="leave it out"):
        second.embed(texts=["a", ""], model="embedder", input_type="search_query", embedding_types=["float"])


NLI = ("contradiction", "neutral", "entailment")


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    """A model of natural language inference: its checkpoint and artifact."""
    folder = tmp_path_factory.mktemp("nli")
    checkpoint = save_case(folder / "nli", case("BertForSequenceClassification", **labels(*NLI)))
    return checkpoint, build_artifact(checkpoint, folder / "artifact", name="nli", reference="engine")


@pytest.mark.client_call(
    "huggingface_hub",
    "TEI",
    "/",
    "InferenceClient.feature_extraction, .sentence_similarity, .text_classification; errors; one model served",
)
@pytest.mark.client_call(
    "huggingface_hub",
    "TEI",
    "/tei",
    "InferenceClient.feature_extraction, .sentence_similarity, .text_classification; errors; one model served",
)
@pytest.mark.parametrize("root", ["", "/tei"])
def test_hugging_face_s_client_needs_nothing_but_the_address(
    root: str,
    artifacts: dict[str, Artifact],
    vectors: Float32Array,
    run_hf: Run,
    env: Mapping[str, str],
    home: Path,
) -> None:
    try:
        with serve([artifacts["embedder"].path], env, home) as server:
            client = huggingface_hub.InferenceClient(server.url + root, timeout=DEADLINE_S)
            np.testing.assert_allclose(client.feature_extraction(TEXTS), vectors, atol=TOLERANCE)
            similar = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
            np.testing.assert_allclose(similar, vectors[1:] @ vectors[0], atol=TOLERANCE)
            with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="empty text"):
                client.feature_extraction(["a", ""])
        with serve([artifacts["classifier"].path], env, home) as server:
            client = huggingface_hub.InferenceClient(server.url + root, timeout=DEADLINE_S)
            probabilities = apply_function(run_hf("classifier", TEXTS[:1])[0], "softmax")
            found: Any = client.text_classification(TEXTS[0])
            np.testing.assert_allclose(by_label(found, LABELS), probabilities, atol=TOLERANCE)
            assert [one.label for one in client.text_classification(TEXTS[0], top_k=2)] == [
                LABELS[index] for index in np.argsort(-probabilities)[:2]
            ]
    finally:
        huggingface_hub.close_session()


@pytest.mark.client_call("huggingface_hub", "TEI", "/", "InferenceClient.token_classification, one model served")
def test_hugging_face_s_client_reads_entities_as_the_pipeline_gives_them(
    checkpoints: dict[str, Path], artifacts: dict[str, Artifact], env: Mapping[str, str], home: Path
) -> None:
    text = TEXTS[0]
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_file=str(checkpoints["ner"] / "tokenizer.json"), pad_token="[PAD]")
    model: Any = transformers.BertForTokenClassification.from_pretrained(checkpoints["ner"])
    try:
        with serve([artifacts["ner"].path], env, home) as server:
            client = huggingface_hub.InferenceClient(server.url, timeout=DEADLINE_S)
            for strategy in ("simple", "first", "none"):
                pipeline = transformers.pipeline(
                    "token-classification", model=model.eval(), tokenizer=tokenizer, aggregation_strategy=strategy
                )
                expected: Any = pipeline(text)
                found: Any = client.token_classification(text, aggregation_strategy=strategy)
                key = "entity" if strategy == "none" else "entity_group"
                assert [(one[key], one.start, one.end) for one in found] == [
                    (one[key], one["start"], one["end"]) for one in expected
                ]
                np.testing.assert_allclose(
                    [one.score for one in found], [one["score"] for one in expected], atol=TOLERANCE
                )
    finally:
        huggingface_hub.close_session()


@pytest.mark.client_call("huggingface_hub", "TEI", "/", "InferenceClient.zero_shot_classification, one model served")
@pytest.mark.parametrize("multi_label", [False, True])
def test_labels_of_the_request_get_the_pipeline_s_scores(
    nli: tuple[Path, Artifact], env: Mapping[str, str], home: Path, multi_label: bool
) -> None:
    checkpoint, artifact = nli
    candidates, template = ["travel", "cooking", "dancing"], "It is about {}."
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    model: Any = transformers.BertForSequenceClassification.from_pretrained(checkpoint)
    model.eval()
    rows = []
    for label in candidates:
        encoded = tokenizer.encode(TEXTS[0], template.format(label))
        with torch.no_grad():
            given = {"input_ids": torch.tensor([encoded.ids]), "token_type_ids": torch.tensor([encoded.type_ids])}
            rows.append(model(**given)[0][0].numpy())
    logits = np.stack(rows)
    alone = apply_function(logits[:, [0, 2]], "softmax")[:, 1]
    expected = alone if multi_label else apply_function(logits[:, 2], "softmax")
    try:
        with serve([artifact.path], env, home) as server:
            client = huggingface_hub.InferenceClient(server.url, timeout=DEADLINE_S)
            found: Any = client.zero_shot_classification(
                TEXTS[0], candidates, multi_label=multi_label, hypothesis_template=template
            )
    finally:
        huggingface_hub.close_session()
    np.testing.assert_allclose(by_label(found, candidates), expected, atol=TOLERANCE)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
