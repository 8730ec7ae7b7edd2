"""A model with two towers behind HTTP, in ``bei.Model`` and in bulk: transformers' vectors, in every API's words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from PIL import Image

import bei
from bei.artifact.manifest import Artifact
from bei.core import Float32Array
from bei.errors import InvalidImageError
from bei.image.fetch import ImageFetcher
from tests.support.builds import build_artifact
from tests.support.served import Served
from tests.support.two_towers import PATCH, SIDE, TEXTS, WIDTH, data_url, drawn_files, library_vectors, png, save_clip

FILES = drawn_files()[:12]
NUM_PATCHES = (SIDE // PATCH) ** 2 + 1


def assert_close(actual: object, expected: Float32Array) -> None:
    np.testing.assert_allclose(np.array(actual), expected, atol=2e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("checkpoint") / "clip")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "clip")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Float32Array:
    """Of FILES, then of TEXTS."""
    return library_vectors(checkpoint, transformers.CLIPModel, FILES, TEXTS)


@pytest.fixture(scope="module")
def served(artifact: Artifact) -> Iterator[Served]:
    app = Served(artifact, cache_megabytes=8)
    yield app
    app.close()


def vectors(response: httpx.Response) -> Float32Array:
    """Of OpenAI's answer."""
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


OPENAI = [{"type": "image_url", "image_url": {"url": data_url(content)}} for content in FILES]
MIXED_FORMS: dict[str, list[object]] = {
    "content parts": [*OPENAI, *({"type": "text", "text": text} for text in TEXTS)],
    "Jina's objects": [*({"image": data_url(content)} for content in FILES), *({"text": text} for text in TEXTS)],
    "the words of Jina's clients": [*({"bytes": data_url(content).partition(",")[2]} for content in FILES), *TEXTS],
    "base64 alone": [*({"image": data_url(content).partition(",")[2]} for content in FILES), *TEXTS],
}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/jina/v1/embeddings"])
@pytest.mark.parametrize("form", MIXED_FORMS)
def test_texts_and_images_of_one_request_have_the_librarys_vectors(
    form: str, path: str, served: Served, expected: Float32Array
) -> None:
    answer = served.post(path, {"input": MIXED_FORMS[form]})
    assert_close(vectors(answer), expected)
    texts = served.post(path, {"input": TEXTS}).json()["usage"]["total_tokens"]
    assert answer.json()["usage"]["total_tokens"] == texts + len(FILES) * NUM_PATCHES


def test_texts_first_an_image_alone_and_the_word_modality(served: Served, expected: Float32Array) -> None:
    mixed = served.post("/v1/embeddings", {"input": [TEXTS[0], OPENAI[0], TEXTS[1]]})
    assert_close(vectors(mixed), expected[[len(FILES), 0, len(FILES) + 1]])
    alone = served.post("/v1/embeddings", {"input": OPENAI[1]})
    assert_close(vectors(alone), expected[1:2])
    urls = [data_url(content) for content in FILES]
    worded = served.post("/v1/embeddings", {"input": urls, "modality": "image"})
    assert_close(vectors(worded), expected[: len(FILES)])


def test_vllm_s_messages_hold_one_image(served: Served, expected: Float32Array) -> None:
    for path in ("/v1/embeddings", "/vllm/v1/embeddings"):
        message = {"role": "user", "content": [OPENAI[1]]}
        answer = served.post(path, {"messages": [message], "model": "clip", "encoding_format": "float"})
        assert_close(vectors(answer), expected[1:2])
        assert answer.json()["usage"]["total_tokens"] == NUM_PATCHES


_USER = {"role": "user", "content": [OPENAI[0]]}
_NOT_READ: dict[str, dict[str, object]] = {
    "a text": {"messages": [{"role": "user", "content": "a cat"}]},
    "a text beside the image": {"messages": [{"role": "user", "content": [OPENAI[0], {"type": "text", "text": "a"}]}]},
    "two images": {"messages": [{"role": "user", "content": OPENAI[:2]}]},
    "two messages": {"messages": [_USER, _USER]},
    "an instruction": {"messages": [{"role": "system", "content": "find"}, _USER]},
    "no message": {"messages": []},
    "a template": {"messages": [_USER], "chat_template": "{{ messages }}"},
    "a processor's setting": {"messages": [_USER], "mm_processor_kwargs": {"size": 7}},
    "both forms": {"messages": [_USER], "input": "a cat"},
}


@pytest.mark.parametrize("name", _NOT_READ)
def test_what_of_vllm_s_messages_is_not_honoured_is_refused_by_name(name: str, served: Served) -> None:
    answer = served.post("/v1/embeddings", _NOT_READ[name])
    assert answer.status_code == 400
    blamed = next(
        (field for field in ("chat_template", "mm_processor_kwargs", "input") if field in _NOT_READ[name]), "messages"
    )
    assert answer.json()["error"]["param"] == blamed


def test_voyages_multimodal_embeddings_name_the_pixels(served: Served, expected: Float32Array) -> None:
    images = [{"content": [{"type": "image_base64", "image_base64": data_url(content)}]} for content in FILES]
    texts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = served.post("/voyage/v1/multimodalembeddings", {"inputs": [*images, *texts], "model": "clip"})
    assert_close(vectors(answer), expected)
    usage = answer.json()["usage"]
    assert usage["image_pixels"] == len(FILES) * SIDE * SIDE
    assert usage["total_tokens"] - usage["text_tokens"] == len(FILES) * NUM_PATCHES
    both = {"inputs": [{"content": [images[0]["content"][0], texts[0]["content"][0]]}]}
    refused = served.post("/voyage/v1/multimodalembeddings", both)
    assert refused.status_code == 400
    assert "a text or an image" in refused.json()["detail"]


def test_coheres_images_and_inputs(served: Served, expected: Float32Array) -> None:
    urls = [data_url(content) for content in FILES]
    for path in ("/v1/embed", "/v2/embed"):
        body = {"images": urls, "input_type": "image", "embedding_types": ["float"], "model": "clip"}
        answer = served.post(path, body)
        assert answer.status_code == 200, answer.text
        assert_close(answer.json()["embeddings"]["float"], expected[: len(FILES)])
        assert answer.json()["texts"] == []
    parts = [{"content": [part]} for part in MIXED_FORMS["content parts"]]
    answer = served.post("/v2/embed", {"inputs": parts, "model": "clip", "embedding_types": ["float"]})
    assert_close(answer.json()["embeddings"]["float"], expected)
    assert served.post("/v2/embed", {"images": urls, "texts": TEXTS}).status_code == 400
    assert served.post("/v2/embed", {"texts": TEXTS, "input_type": "image"}).status_code == 400


def test_tei_reads_objects_with_an_image(served: Served, expected: Float32Array) -> None:
    images = [{"image": data_url(content)} for content in FILES]
    for inputs, rows in (([*images, *TEXTS], slice(None)), (images[0], slice(0, 1))):
        answer = served.post("/embed", {"inputs": inputs})
        assert answer.status_code == 200, answer.text
        assert_close(answer.json(), expected[rows])
    assert served.post("/embed", {"inputs": [1, images[0]]}).status_code == 400
    assert served.post("/embed_sparse", {"inputs": images[0]}).status_code == 400


def test_texts_are_scored_against_images_by_their_vectors(served: Served, expected: Float32Array) -> None:
    images = [{"content": [part]} for part in OPENAI]
    answer = served.post("/score", {"text_1": TEXTS[0], "text_2": images})
    assert answer.status_code == 200, answer.text
    found = [one["score"] for one in answer.json()["data"]]
    np.testing.assert_allclose(found, expected[: len(FILES)] @ expected[len(FILES)], atol=1e-3)


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/rerank", lambda url: {"image": url}),
        ("/v2/rerank", lambda url: {"content": [{"type": "image_url", "image_url": {"url": url}}]}),
        ("/vllm/rerank", lambda url: {"type": "image_url", "image_url": {"url": url}}),
    ],
    ids=["jina", "vllm", "part"],
)
def test_images_are_ranked_by_their_vectors(
    path: str, form: Callable[[str], object], served: Served, expected: Float32Array
) -> None:
    documents = [*map(form, map(data_url, FILES)), TEXTS[1], {"text": TEXTS[1]}]
    body = {"query": TEXTS[0], "documents": documents, "return_documents": True, "score_mode": "dense"}
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    scores = expected @ expected[len(FILES)]
    own = [*scores[: len(FILES)], *[scores[len(FILES) + 1]] * 2]
    found = [one["relevance_score"] for one in results]
    assert found == sorted(found, reverse=True)
    for one in results:
        assert one["relevance_score"] == pytest.approx(own[one["index"]], abs=1e-3)
        of_image = one["index"] < len(FILES)
        content = data_url(FILES[one["index"]]) if of_image else TEXTS[1]
        assert one["document"] == {"image" if of_image else "text": content}
    body = {"query": form(data_url(FILES[0])), "documents": TEXTS, "score_mode": "dense"}
    of_texts = expected[len(FILES) :] @ expected[0]
    for one in served.post(path, body).json()["results"]:
        assert one["relevance_score"] == pytest.approx(of_texts[one["index"]], abs=1e-3)


def test_images_are_returned_where_they_are_asked_for(served: Served) -> None:
    body = {"query": TEXTS[0], "documents": [{"image": data_url(FILES[0])}, TEXTS[1]], "score_mode": "dense"}
    for fields in ({}, {"return_documents": False}):
        answer = served.post("/v1/rerank", {**body, **fields}).json()["results"]
        assert ["document" in one for one in sorted(answer, key=lambda one: one["index"])] == [False, not fields]


def test_nims_modality_is_one_word_or_one_for_each_input(served: Served, expected: Float32Array) -> None:
    urls = [data_url(content) for content in FILES]
    alone = served.post("/nim/v1/embeddings", {"input": urls, "modality": "image", "model": "clip"})
    assert_close(vectors(alone), expected[: len(FILES)])
    words = ["image"] * len(urls) + ["text"] * len(TEXTS)
    mixed = served.post("/nim/v1/embeddings", {"input": [*urls, *TEXTS], "modality": words, "model": "clip"})
    assert_close(vectors(mixed), expected)
    short = served.post("/nim/v1/embeddings", {"input": urls, "modality": ["image"], "model": "clip"})
    assert short.status_code == 400
    assert "modality has 1 entries" in short.text
    assert served.post("/nim/v1/embeddings", {"input": urls, "modality": "text_image"}).status_code == 400


def test_a_url_is_fetched_where_the_setting_names_its_host(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(fetcher: ImageFetcher, url: str, param: str) -> bytes:
        assert fetcher.hosts == ("images.example.com",)
        assert (fetcher.seconds, fetcher.max_bytes) == (2.0, 20_000_000)
        assert url == "https://images.example.com/cat.png"
        return FILES[0]

    monkeypatch.setattr(ImageFetcher, "fetch", fetched)
    app = Served(artifact, image_url_hosts=("images.example.com",), image_url_seconds=2.0)
    try:
        parts = [{"type": "image_url", "image_url": {"url": "https://images.example.com/cat.png"}}, OPENAI[0]]
        found = vectors(app.post("/v1/embeddings", {"input": parts}))
        np.testing.assert_array_equal(found[0], found[1])
    finally:
        app.close()


BAD = [
    {"image": "https://example.com/cat.png"},
    {"image": data_url(b"<svg/>")},
    {"image": data_url(png()[:60])},
    {"type": "text", "image": data_url(png())},
    {"text": "a", "image": data_url(png())},
    {"video": "data:video/mp4;base64,AA=="},
    {},
]


@pytest.mark.parametrize("part", BAD)
def test_a_bad_image_is_a_400_that_says_what_to_do(part: dict[str, str], served: Served) -> None:
    answer = served.post("/v1/embeddings", {"input": ["a cat", part]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "input"
    assert vectors(served.post("/v1/embeddings", {"input": ["a cat"]})).shape == (1, WIDTH)


def test_with_a_report_a_bad_image_fails_alone(served: Served, expected: Float32Array) -> None:
    bad = [{"image": data_url(b"junk")}, {"image": "http://10.0.0.1/"}]
    answer = served.post("/v1/embeddings", {"input": [OPENAI[0], *bad, TEXTS[0]]}, **{"x-bei-report": "true"})
    assert answer.status_code == 200, answer.text
    report = answer.json()
    text = json.dumps(report)
    assert text.count("invalid_image") == 2
    assert "fetches no URLs" in text


def test_equal_images_are_computed_once_and_kept(served: Served, expected: Float32Array) -> None:
    def shared(kind: str) -> float:
        lines = [line for line in served.get("/metrics").text.splitlines() if kind in line and "shared" in line]
        return sum(float(line.split()[-1]) for line in lines if not line.startswith("#"))

    before = shared("cache")
    again = served.post("/v1/embeddings", {"input": [OPENAI[2]] * 5})
    assert_close(vectors(again), expected[[2] * 5])
    assert shared("cache") > before


def test_health_info_and_certificate_know_the_tower(served: Served) -> None:
    assert served.get("/health").status_code == 200
    assert "The vectors of images against the reference" in served.get("/certificate").text
    assert served.get("/info").json()["images"] == {"width": SIDE, "height": SIDE, "tokens": NUM_PATCHES}


def test_a_model_of_texts_refuses_images(checkpoint: Path, tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "texts", images=False, verify=False)
    app = Served(artifact)
    try:
        answer = app.post("/v1/embeddings", {"input": OPENAI[:1]})
        assert answer.status_code == 400
        assert "reads no images" in answer.json()["error"]["message"]
    finally:
        app.close()


def test_the_model_class_reads_images_bytes_and_paths(
    artifact: Artifact, expected: Float32Array, tmp_path: Path
) -> None:
    path = tmp_path / "first"
    path.write_bytes(FILES[0])
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed([path, *FILES[1:], *TEXTS])
        assert_close(found, expected)
        assert model.encode(Image.open(path)).shape == (WIDTH,)
        assert_close(model.embed([FILES[1]]), expected[1:2])
        with pytest.raises(InvalidImageError, match="of no format"):
            model.embed([FILES[0], b"junk"])
        report = bei.Report()
        partly = model.embed([FILES[0], b"junk", tmp_path / "none.png"], report=report)
        assert sorted(report.errors) == [1, 2]
        assert_close(partly[0], expected[0])


def bulk(artifact: Artifact, table: pa.Table, folder: Path, *flags: str) -> pa.Table:
    """What ``bei embed`` makes of a Parquet file, by its row numbers."""
    folder.mkdir()
    pq.write_table(table, folder / "rows.parquet")
    out = folder / "out"
    command = [sys.executable, "-m", "bei", "embed", str(artifact.path), "--input", str(folder / "rows.parquet")]
    command += ["--output", str(out), "--text-column", "image", "--id-column", "number", *flags]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return pq.read_table(sorted(out.glob("*.parquet"))).sort_by("number")


@pytest.mark.parametrize("form", ["bytes", "structs of the datasets library"])
def test_a_bulk_job_reads_a_column_of_images(
    form: str, artifact: Artifact, expected: Float32Array, tmp_path: Path
) -> None:
    values: list[object] = list(FILES)
    if form != "bytes":
        values = [{"bytes": content, "path": None} for content in FILES]
    table = pa.table({"number": list(range(len(FILES))), "image": values})
    found = bulk(artifact, table, tmp_path / "job")
    assert_close(np.array(found["embedding"].to_pylist()), expected[: len(FILES)])


def test_a_bad_image_of_a_job_is_an_error_of_its_row(artifact: Artifact, tmp_path: Path) -> None:
    table = pa.table({"number": [0, 1, 2], "image": [FILES[0], b"junk", FILES[1]]})
    found = bulk(artifact, table, tmp_path / "job", "--on-error", "null")
    assert [row is None for row in found["embedding"].to_pylist()] == [False, True, False]


def test_without_pillow_a_model_with_images_is_refused_with_the_command(artifact: Artifact) -> None:
    code = (
        "import sys; sys.modules['PIL'] = None; from bei.config.settings import ServeConfig;"
        "from bei.service.loader import load_model; from pathlib import Path;"
        f"load_model(Path({str(artifact.path)!r}), ServeConfig(tune='off'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'bei[image]'" in ended.stderr
