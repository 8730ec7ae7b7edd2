"""A model that reads images alone behind HTTP, in ``bei.Model``, in bulk and in several processes; texts are errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest

import bei
from bei.artifact.manifest import Artifact
from bei.bulk.run import JobOptions, opened_source, run_job
from bei.config.settings import ServeConfig
from bei.core import Float32Array
from bei.errors import ConfigError, InvalidRequestError
from tests.bei.image.test_decode import HOSTILE
from tests.e2e.process import Server
from tests.e2e.test_images import bulk
from tests.support.builds import build_artifact
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, save_clip, save_tower, tower_vectors

FILES = drawn_files()[:9]
IMAGES = [{"image": data_url(content)} for content in FILES]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tower(tmp_path_factory.mktemp("checkpoint") / "dinov2", "Dinov2Model", image_size=80)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "dinov2", name="dinov2")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Float32Array:
    return tower_vectors(checkpoint, FILES, "pooler_output")


@pytest.fixture(scope="module")
def served(artifact: Artifact) -> Iterator[Served]:
    app = Served(artifact)
    yield app
    app.close()


def assert_close(actual: object, expected: Float32Array) -> None:
    np.testing.assert_allclose(np.array(actual), expected, atol=2e-4)


def test_images_have_the_librarys_vectors_and_the_server_is_ready(served: Served, expected: Float32Array) -> None:
    answer = served.post("/v1/embeddings", {"input": IMAGES})
    assert_close([item["embedding"] for item in answer.json()["data"]], expected)
    assert served.get("/health").status_code == 200
    assert served.get("/v1/models").json()["data"][0]["input_modalities"] == ["image"]
    assert served.get("/info").json()["images"]["tokens"] == 10
    assert "The vectors of images against the reference" in served.get("/certificate").text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a cat", IMAGES[0]]}),
        ("/v1/embeddings", {"input": "a cat"}),
        ("/embed", {"inputs": "a cat"}),
        ("/tokenize", {"inputs": "a cat"}),
        ("/decode", {"ids": [0]}),
    ],
)
def test_a_text_is_an_error_that_names_the_model(path: str, body: dict[str, object], served: Served) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "dinov2 reads no texts: send images" in answer.text
    assert served.post("/v1/embeddings", {"input": IMAGES[:1]}).status_code == 200


def test_with_a_report_a_text_fails_alone(served: Served, expected: Float32Array) -> None:
    answer = served.post("/v1/embeddings", {"input": ["a cat", *IMAGES]}, **{"x-bei-report": "true"})
    assert answer.status_code == 200, answer.text
    assert answer.text.count("dinov2 reads no texts") == 1
    assert_close([item["embedding"] for item in answer.json()["data"]][1:], expected)


def test_hostile_files_are_errors_and_the_server_goes_on(served: Served, expected: Float32Array) -> None:
    inputs = [{"image": data_url(content)} for content, _ in HOSTILE.values()]
    answer = served.post("/v1/embeddings", {"input": [*inputs, IMAGES[0]]}, **{"x-bei-report": "true"})
    assert answer.status_code == 200, answer.text
    assert answer.text.count("invalid_image") > len(HOSTILE) // 2
    assert_close(answer.json()["data"][-1]["embedding"], expected[0])


def test_with_a_report_an_image_of_a_model_of_texts_fails_alone(tmp_path: Path) -> None:
    artifact = build_artifact(save_clip(tmp_path / "clip"), tmp_path / "texts", images=False, verify=False)
    app = Served(artifact)
    try:
        answer = app.post("/v1/embeddings", {"input": ["a cat", IMAGES[0]]}, **{"x-bei-report": "true"})
        assert answer.status_code == 200, answer.text
        assert answer.text.count("reads no images") == 1
    finally:
        app.close()


def test_images_are_scored_by_the_cosine_of_the_librarys_vectors(served: Served, expected: Float32Array) -> None:
    parts = [{"content": [{"type": "image_url", "image_url": {"url": one["image"]}}]} for one in IMAGES]
    answer = served.post("/score", {"data_1": parts[0], "data_2": parts[1:]})
    assert answer.status_code == 200, answer.text
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], unit[1:] @ unit[0], atol=1e-3)
    refused = served.post("/score", {"data_1": "a cat", "data_2": parts[0]})
    assert refused.status_code == 400
    assert "dinov2 reads no texts" in refused.text


def test_the_model_class_reads_images_and_refuses_texts(artifact: Artifact, expected: Float32Array) -> None:
    with bei.Model(artifact.path, tune="off") as model:
        assert_close(model.embed(FILES), expected)
        with pytest.raises(InvalidRequestError, match=r"inputs 1 is a text\. dinov2 reads no texts"):
            model.embed([FILES[0], "a cat"])


def test_a_bulk_job_reads_a_column_of_images(artifact: Artifact, expected: Float32Array, tmp_path: Path) -> None:
    table = pa.table({"number": [*range(len(FILES)), 99], "image": [*FILES, b"junk"]})
    found = bulk(artifact, table, tmp_path / "job", "--on-error", "null")["embedding"].to_pylist()
    assert found.pop() is None
    assert_close(found, expected)


def test_a_bulk_job_of_texts_is_refused_at_its_start(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a cat"}\n')
    job = JobOptions((str(tmp_path / "rows.jsonl"),), str(tmp_path / "out"))
    with (
        pytest.raises(
            ConfigError, match=r"The column 'text' of .*rows\.jsonl holds JSON's values, and dinov2 reads images"
        ),
        opened_source(job) as source,
    ):
        run_job(source, artifact.path, job, ServeConfig(tune="off"), lambda _: None)


@pytest.mark.slow
def test_several_processes_have_the_same_vectors(
    artifact: Artifact, expected: Float32Array, env: Mapping[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "bei", "serve", artifact.path, "--port", "0", "--http-workers", "2"]
    with Server([*command, "--tune", "off"], env, tmp_path) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": IMAGES}, timeout=60)
        assert_close([item["embedding"] for item in answer.json()["data"]], expected)
        refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a cat"}, timeout=60)
        assert (refused.status_code, "reads no texts" in refused.text) == (400, True)
