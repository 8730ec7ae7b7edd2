"""Qwen3-VL-Reranker: scores of queries and documents that are texts, images or both, by transformers' class."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import bei
from bei.artifact.image_sequence import MOST_IMAGES
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.errors import BeiError, ConfigError, InvalidImageError, InvalidRequestError
from bei.image import encoder
from bei.image.decode import ImageLimits, decoded
from bei.image.source import ImageInput, ImagesInText, MixedInput
from bei.tasks.rerank import read_pairs
from tests.support.builds import build_artifact
from tests.support.cpus import needs_bf16
from tests.support.qwen3_vl import RERANKER, library_scores, save_reranker
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, png

FILES = [*drawn_files()[:14], png(1, 1), png(3, 600), png(2000, 1400)]
QUERY = "what is in the picture?"
TEXTS = ["hello world", "", "a page of a report <|im_end|> and more " * 3]
# Of a document: what is given, and its parts in the order in which the model's own code writes them.
BOTH = [(FILES[0], "its caption"), (FILES[3], "")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reranker(tmp_path_factory.mktemp("reranker") / "qwen3_vl")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "reranker", **RERANKER)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[bei.Model]:
    with bei.Model(artifact.path, tune="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def served(artifact: Artifact) -> Iterator[Served]:
    app = Served(artifact)
    yield app
    app.close()


def parts_of(document: Any) -> Sequence[str | bytes]:
    return document if isinstance(document, tuple) else (document,)


def given(document: Any) -> Any:
    return {"image": document[0], "text": document[1]} if isinstance(document, tuple) else document


def ranked(model: bei.Model, query: Any, documents: Sequence[Any], **options: Any) -> list[float]:
    """The scores of ``documents``, in their order."""
    ranks = model.rerank(given(query), [given(one) for one in documents], **options)
    return [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]


@pytest.fixture(scope="module")
def documents() -> list[Any]:
    return [*FILES[:5], *TEXTS, *BOTH, *FILES[5:]]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, documents: list[Any]) -> list[float]:
    return library_scores(checkpoint, [((QUERY,), parts_of(one)) for one in documents])


def test_documents_of_all_kinds_have_the_librarys_scores(
    model: bei.Model, documents: list[Any], expected: list[float]
) -> None:
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(ranked(model, QUERY, documents), expected, atol=2e-4)


@pytest.mark.parametrize("query", [FILES[1], BOTH[0]], ids=["image", "both"])
def test_queries_may_have_an_image(query: Any, model: bei.Model, checkpoint: Path) -> None:
    expected = library_scores(checkpoint, [(parts_of(query), (text,)) for text in TEXTS])
    np.testing.assert_allclose(ranked(model, query, TEXTS), expected, atol=2e-4)


def test_one_image_has_a_score_for_each_query(model: bei.Model, checkpoint: Path) -> None:
    """Answers are cached, by the image and the text around it."""
    queries = ["one", "another?", "one"]
    expected = library_scores(checkpoint, [((query,), (FILES[2],)) for query in queries])
    assert abs(expected[0] - expected[1]) > 1e-4
    np.testing.assert_allclose([ranked(model, query, [FILES[2]])[0] for query in queries], expected, atol=2e-4)


def test_an_instruction_is_written_in_its_slot(model: bei.Model, checkpoint: Path) -> None:
    expected = library_scores(checkpoint, [((QUERY,), (FILES[0],))], "Find pictures like it.")
    found = ranked(model, QUERY, [FILES[0]], instruction="Find pictures like it.")
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert abs(found[0] - ranked(model, QUERY, [FILES[0]])[0]) > 1e-4


@pytest.mark.slow
@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, documents: list[Any], expected: list[float], tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "bf16", precision="bf16", **RERANKER)
    with bei.Model(artifact.path, tune="off") as model:
        found = ranked(model, QUERY, documents)
    assert np.corrcoef(found, expected)[0, 1] > 0.999


def test_the_certificate_compares_scores_of_images(artifact: Artifact) -> None:
    images, tower = artifact.certificate.images, artifact.manifest.image_tower
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert images.output is not None
    assert images.output.output == "logits"
    assert artifact.manifest.tasks == ["rerank"]
    assert tower is not None
    assert tower.sequence
    assert tower.sequence.around == ("<|vision_start|>", "<|vision_end|>")


def result(served: Served, path: str, **fields: Any) -> list[Any]:
    answer = served.post(path, fields)
    assert answer.status_code == 200, answer.text
    found: list[Any] = sorted(answer.json()["results"], key=lambda one: one["index"])
    return found


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/jina/v1/rerank"])
def test_routes_read_texts_images_and_both(path: str, served: Served, checkpoint: Path) -> None:
    images = [data_url(content) for content in FILES[:2]]
    documents: list[Any] = [TEXTS[0], {"image": images[0]}, {"text": "its caption", "image": images[0]}]
    expected = library_scores(
        checkpoint, [((QUERY,), parts) for parts in ((TEXTS[0],), (FILES[0],), (FILES[0], "its caption"))]
    )
    found = result(served, path, query=QUERY, documents=documents, return_documents=True)
    np.testing.assert_allclose([one["relevance_score"] for one in found], expected, atol=2e-4)
    assert found[2]["document"] == {"text": "its caption", "image": images[0]}
    found = result(served, path, query={"image": images[1], "text": "like this"}, documents=[TEXTS[0]])
    expected = library_scores(checkpoint, [((FILES[1], "like this"), (TEXTS[0],))])
    np.testing.assert_allclose([one["relevance_score"] for one in found], expected, atol=2e-4)


@pytest.mark.parametrize("path", ["/rerank", "/jina/v1/rerank"])
def test_parts_of_a_content_keep_their_order(path: str, served: Served, checkpoint: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(FILES[0])}}
    orders = [[image, {"type": "text", "text": "a"}], [{"type": "text", "text": "a"}, image]]
    expected = library_scores(checkpoint, [((QUERY,), (FILES[0], "a")), ((QUERY,), ("a", FILES[0]))])
    assert abs(expected[0] - expected[1]) > 1e-5
    found = result(served, path, query=QUERY, documents=[{"content": content} for content in orders])
    np.testing.assert_allclose([one["relevance_score"] for one in found], expected, atol=2e-4)
    asked = {"data_1": QUERY, "data_2": [{"content": content} for content in orders]}
    answer = served.post("/score", asked)
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], expected, atol=2e-4)


def test_texts_beside_an_image_have_nothing_between_them_as_in_the_library(
    served: Served, model: bei.Model, checkpoint: Path
) -> None:
    """HTTP wrote a line break there. Texts alone have one, as vLLM joins them."""
    contents: list[tuple[Any, ...]] = [("a", "b", FILES[0]), ("a", FILES[0], "b"), (FILES[0], "a", "b")]
    expected = library_scores(checkpoint, [((QUERY,), one) for one in [*contents, ("a\nb",)]])
    assert abs(library_scores(checkpoint, [((QUERY,), ("a\nb", FILES[0]))])[0] - expected[0]) > 1e-4
    documents = [{"content": [parted(one) for one in content]} for content in [*contents, ("a", "b")]]
    found = result(served, "/rerank", query=QUERY, documents=documents)
    np.testing.assert_allclose([one["relevance_score"] for one in found], expected, atol=2e-4)
    ranks = sorted(model.rerank(QUERY, [{"content": [*one]} for one in contents]), key=lambda rank: rank.index)
    np.testing.assert_allclose([rank.score for rank in ranks], expected[:3], atol=2e-4)


def parted(one: str | bytes) -> dict[str, Any]:
    if isinstance(one, str):
        return {"type": "text", "text": one}
    return {"type": "image_url", "image_url": {"url": data_url(one)}}


@pytest.mark.parametrize(
    ("query", "document", "message"),
    [
        (QUERY, {"image": data_url(b"junk")}, "image"),
        (QUERY, {"image": data_url(png(1, 201))}, "200 times"),
        (QUERY, {"image": data_url(FILES[0]), "text": "a <|image_pad|> b"}, "<|image_pad|> in it"),
        (QUERY, {"image": data_url(FILES[0]), "text": "a long text " * 900}, "send shorter texts"),
        (QUERY, "a <|image_pad|> b", "<|image_pad|> in it"),
    ],
    ids=["junk", "stripe", "place", "long", "place in a text"],
)
def test_what_cannot_be_read_is_refused(query: Any, document: Any, message: str, served: Served) -> None:
    answer = served.post("/rerank", {"query": query, "documents": [document]})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_the_place_of_an_image_in_an_instruction_is_refused(served: Served) -> None:
    """A score was computed without an image."""
    for document in ("a text", {"image": data_url(FILES[0])}):
        answer = served.post("/rerank", {"query": QUERY, "documents": [document], "instruction": "find <|image_pad|>"})
        assert answer.status_code == 400
        assert "<|image_pad|> in it" in answer.json()["error"]["message"]


def test_settings_of_texts_that_would_be_passed_over_are_refused(served: Served, model: bei.Model) -> None:
    both = {"image": data_url(FILES[0]), "text": "a"}
    answer = served.post("/rerank", {"query": QUERY, "documents": [both], "max_tokens_per_doc": 5})
    assert answer.status_code == 400
    assert "max_tokens_per_doc" in answer.text
    with pytest.raises(InvalidRequestError, match="beside its text"):
        ranked(model, QUERY, [("no image", "a")])


def test_a_pair_may_have_several_images(model: bei.Model, served: Served, checkpoint: Path) -> None:
    """On both sides, in their order: that of a query is read once for all documents."""
    query = (FILES[1], "like this, not ", FILES[3])
    documents: list[Any] = [(FILES[0],), (FILES[3], FILES[1], "two pages"), ("text",), (FILES[1],)]
    expected = library_scores(checkpoint, [(query, document) for document in documents])
    assert np.ptp(expected) > 1e-3
    ranks = model.rerank({"content": [*query]}, [{"content": [*one]} if len(one) > 1 else one[0] for one in documents])
    found = [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    sides = [
        {"content": [{"text": one} if isinstance(one, str) else {"image": data_url(one)} for one in side]}
        for side in (query, *documents)
    ]
    results = result(served, "/v1/rerank", query=sides[0], documents=sides[1:], return_documents=True)
    np.testing.assert_allclose([one["relevance_score"] for one in results], expected, atol=2e-4)
    assert results[1]["document"] == sides[2]
    answer = served.post("/score", {"data_1": sides[0], "data_2": sides[1:]})
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], expected, atol=2e-4)
    many = {"content": [{"image": data_url(FILES[0])}] * MOST_IMAGES}
    answer = served.post("/rerank", {"query": sides[1], "documents": [many]})
    assert answer.status_code == 400
    message = f"documents 0: A query and its document have {MOST_IMAGES + 1} images together, and qwen3_vl reads "
    assert answer.json()["error"]["message"].startswith(f"{message}{MOST_IMAGES} at most in a pair")


def test_a_limit_of_tokens_holds_for_a_pair_with_an_image(served: Served) -> None:
    """It was passed over: the pair was read whole."""
    documents = [{"image": data_url(FILES[0])}]
    whole = served.post("/rerank", {"query": QUERY, "documents": documents})
    count = whole.json()["usage"]["total_tokens"]
    asked = {"query": QUERY, "documents": documents, "truncate_prompt_tokens": count}
    assert served.post("/rerank", asked).json()["results"] == whole.json()["results"]
    answer = served.post("/rerank", {**asked, "truncate_prompt_tokens": count - 1})
    assert answer.status_code == 400
    assert f"the request asks for up to {count - 1}" in answer.json()["error"]["message"]


def test_an_image_that_cannot_be_read_is_named_by_its_place(served: Served, model: bei.Model) -> None:
    """Of many documents it was not said which; a query's is no document's."""
    good, bad = {"image": data_url(FILES[0])}, {"image": data_url(b"junk")}
    documents = ["text", good, {"content": [good, bad]}, bad]
    for path, message in (
        ("/rerank", "documents 2, image 1: An image is of no format"),
        ("/v2/rerank", "documents 2, image 1: An image"),
    ):
        answer = served.post(path, {"query": QUERY, "documents": documents[:3]})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message)
        assert answer.json()["error"]["param"] == "documents"
    answer = served.post("/jina/v1/rerank", {"query": QUERY, "documents": ["text", bad]})
    assert answer.json()["detail"].startswith("documents 1: An image is of no format")
    answer = served.post("/rerank", {"query": bad, "documents": ["text", good]})
    assert answer.json()["error"]["message"].startswith("An image is of no format")
    answer = served.post("/rerank", {"query": {"content": [good, bad]}, "documents": [good, "text"]})
    assert answer.json()["error"]["message"].startswith("query, image 1: An image is of no format")
    answer = served.post("/score", {"data_1": [QUERY] * 4, "data_2": ["text", good, good, bad]})
    assert answer.json()["error"]["message"].startswith("data_2 3: An image")
    long = [{"content": [good, {"text": "a " * 2000}]}, good]
    assert "documents 0: An image and the texts" in served.post("/rerank", {"query": QUERY, "documents": long}).text
    with pytest.raises(InvalidImageError, match="documents 1: An image"):
        model.rerank(QUERY, [FILES[0], b"junk"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a", "image": data_url(FILES[0]), "image_url": data_url(FILES[1])}, "2 images beside its text: send"),
        ({"content": [{"text": "a"}], "image": data_url(FILES[0])}, "has image beside content: send all"),
        ({"content": []}, "has no parts: send at least one"),
    ],
    ids=["two images", "beside content", "nothing"],
)
def test_a_side_that_is_no_input_is_told_how_to_send_it(fields: dict[str, Any], message: str, served: Served) -> None:
    for asked in ({"query": fields, "documents": ["a"]}, {"query": "a", "documents": [fields]}):
        answer = served.post("/rerank", asked)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_a_query_of_many_images_stands_in_memory_once(artifact: Artifact) -> None:
    """8 MB of a body were 98 GB: a query of 6 MB for each of 16,384 images."""
    service: Any = SimpleNamespace(name="reranker", manifest=artifact.manifest)
    query = "a" * 1_000_000
    pairs = [(query, ImageInput(b"")) for _ in range(200)]
    tracemalloc.start()
    try:
        read = read_pairs(service, pairs)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(read) == 200
    assert most < 3_000_000


def test_a_querys_image_is_read_once_for_all_documents(
    served: Served, model: bei.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was fetched and decoded for each: one request was 16,384 of a host that it names."""
    read = []

    def counted(source: ImageInput, limits: ImageLimits) -> Any:
        read.append(source)
        return decoded(source, limits)

    texts = [f"document {place}" for place in range(12)]
    alone = [ranked(model, FILES[1], [text])[0] for text in texts]
    monkeypatch.setattr(encoder, "decoded", counted)
    assert ranked(model, FILES[1], texts) == pytest.approx(alone, abs=1e-5)
    assert len(read) == 1
    query = {"image": data_url(FILES[1])}
    found = result(served, "/v1/rerank", query=query, documents=[*texts, TEXTS[0]])
    assert [one["relevance_score"] for one in found[:-1]] == pytest.approx(alone, abs=1e-4)
    answer = served.post("/score", {"data_1": query, "data_2": texts})
    assert [one["score"] for one in answer.json()["data"]] == pytest.approx(alone, abs=1e-4)
    assert len(read) == 3
    answer = served.post("/rerank", {"query": {"image": data_url(b"junk")}, "documents": texts})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "query"
    assert len(read) == 4


def test_a_query_of_many_parts_costs_a_pair_nothing(artifact: Artifact) -> None:
    """1 MB of parts and 300 documents held up the event loop for 40 seconds."""
    service: Any = SimpleNamespace(name="reranker", manifest=artifact.manifest)
    query = MixedInput((*["a"] * 50_000, ImageInput(b""), *["b"] * 50_000))
    pairs = [(query, "a document") for _ in range(500)]
    tracemalloc.start()
    began_s = time.process_time()
    try:
        read = read_pairs(service, pairs)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - began_s < 5
    assert most < 3_000_000
    one = read[-1]
    assert isinstance(one, ImagesInText)
    assert "a" * 50_000 in one.texts[0][1]
    assert "b" * 50_000 in one.texts[1][0]


def test_texts_between_a_querys_images_stand_in_memory_once(artifact: Artifact) -> None:
    """A body of 100 kB was 150 MB of tuples: a query of 64 images and 16,384 documents."""
    service: Any = SimpleNamespace(name="reranker", manifest=artifact.manifest)
    query = MixedInput((*[part for place in range(63) for part in (ImageInput(b""), f"{place}")],))
    pairs = [(query, f"document {place}") for place in range(1_000)]
    tracemalloc.start()
    try:
        read = read_pairs(service, pairs)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4_000_000
    first, last = read[0], read[-1]
    assert isinstance(first, ImagesInText)
    assert isinstance(last, ImagesInText)
    assert first.texts[1:-1] == last.texts[1:-1]
    assert "document 999" in last.texts[-1][0]


def test_what_is_no_side_of_a_pair_is_told_what_one_is(model: bei.Model) -> None:
    wrongs: list[Any] = [{"image": FILES[0]}, {"text": "a"}, np.zeros((3, 3, 3), np.uint8)]
    for wrong in wrongs:
        with pytest.raises(BeiError, match=r"must be a text, an image \(of Pillow, .*\), or both"):
            model.rerank(QUERY, [wrong])
    with pytest.raises(InvalidRequestError, match="documents has the type dict") as caught:
        model.rerank(QUERY, {"text": "a"})  # was called inputs
    assert caught.value.param == "documents"


def test_images_are_no_embeddings(served: Served) -> None:
    assert served.post("/embed", {"inputs": [{"image": data_url(FILES[0])}]}).status_code == 400
    assert served.get("/ready").status_code == 200


def test_texts_alone_are_built_and_read_no_images(checkpoint: Path, tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "texts", images=False, verify=False, **RERANKER)
    with bei.Model(artifact.path, tune="off") as model:
        expected = library_scores(checkpoint, [((QUERY,), (text,)) for text in TEXTS])
        np.testing.assert_allclose(ranked(model, QUERY, TEXTS), expected, atol=2e-4)
        with pytest.raises(BeiError, match="must be a text"):
            model.rerank(QUERY, [FILES[0]])
    served = Served(artifact)
    answer = served.post("/rerank", {"query": QUERY, "documents": [{"image": data_url(FILES[0]), "text": "a"}]})
    served.close()
    assert answer.status_code == 400
    assert "reads no images in pairs" in answer.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rerank_body": "", "rerank_prefix": "", "rerank_suffix": "", "rerank_instruction": ""}, "rerank_body"),
        ({"rerank_body": "{query} {query} {document} {instruction}"}, "one place"),
        (
            {"score_tokens": ("no", "yes", "a"), "task": "classify", "rerank_body": ""},
            "rerank_prefix|rerank_body|needs",
        ),
    ],
    ids=["no template", "two places", "labels"],
)
def test_pairs_without_a_place_for_an_image_are_refused(
    changes: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(checkpoint, tmp_path / "out", **{**RERANKER, **changes})


def test_a_template_that_writes_no_image_is_refused(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "qwen3_vl")
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|vision_start|><|image_pad|><|vision_end|>", ""))
    with pytest.raises(BeiError, match="writes no image"):
        build_artifact(folder, tmp_path / "out", **RERANKER)


def test_a_manifest_of_pairs_without_a_template_is_refused(artifact: Artifact) -> None:
    assert manifest_fault(artifact.manifest) is None
    fault = manifest_fault(msgspec.structs.replace(artifact.manifest, rerank_template=None))
    assert fault is not None
    assert "rerank_template" in fault
