"""ColPali behind HTTP: adapters beside images, and builds that read no images."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

import bei
from bei.artifact.manifest import Artifact
from bei.bulk.shard_service import ShardService
from bei.config.settings import ServeConfig
from bei.core import Encoding, Engine, Float32Array, ImageFeatures, Outputs, PackedBatch, rows_of_sequences
from bei.engine.postprocess import unit_length
from bei.errors import EngineError
from bei.image.source import ImageInput
from bei.service.call import InferenceResult, ModelRequest
from bei.service.loader import load_model
from bei_build.weights.peft_adapter import CONFIG, WEIGHTS
from tests.support.builds import build_artifact, running
from tests.support.checkpoints import read_tensors, write_json, write_tensors
from tests.support.colpali import library_processor, library_rows, save_colpali
from tests.support.served import Served
from tests.support.two_towers import data_url, png


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_colpali(tmp_path_factory.mktemp("colpali") / "colpali")


@pytest.fixture(scope="module")
def of_texts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("artifact") / "texts"
    app = Served(build_artifact(checkpoint, folder, images=False, verify=False))
    yield app
    app.close()


def test_pages_are_ranked_as_the_library_scores_them(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No mode is needed: token vectors are all that the model has."""
    files, texts = [png(*size) for size in ((40, 30), (64, 64), (20, 50))], ["a page about cats", "a text"]
    rows = [torch.from_numpy(one) for one in library_rows(checkpoint, files, texts)]
    pages, query, other = rows[: len(files)], rows[-2], rows[-1]
    of_text, of_page = (
        library_processor(checkpoint).score_retrieval([one], [*pages, other])[0] for one in (query, pages[0])
    )

    artifact = build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "colpali", verify=False)
    app = Served(artifact)
    try:
        documents = [*({"image": data_url(file)} for file in files), texts[1]]
        for path in ("/rerank", "/v1/rerank", "/jina/v1/rerank"):
            answer = app.post(path, {"query": texts[0], "documents": documents})
            assert answer.status_code == 200, answer.text
            found = sorted(answer.json()["results"], key=lambda one: int(one["index"]))
            np.testing.assert_allclose([one["relevance_score"] for one in found], of_text, atol=1e-3)
    finally:
        app.close()
    with bei.Model(artifact.path, tune="off") as own:
        for asked, theirs in ((texts[0], of_text), (files[0], of_page)):
            ranks = sorted(own.rerank(asked, [*files, texts[1]]), key=lambda one: one.index)
            np.testing.assert_allclose([one.score for one in ranks], theirs, rtol=1e-4, atol=1e-3)
        opened = [PIL.Image.open(io.BytesIO(file)) for file in files]
        ranks = sorted(own.rerank(texts[0], [*opened, texts[1]]), key=lambda one: one.index)
        np.testing.assert_allclose([one.score for one in ranks], of_text, rtol=1e-4, atol=1e-3)


def save_lora(folder: Path, checkpoint: Path) -> Path:
    """An adapter of random weights on some matrices of the decoder."""
    modules = ("q_proj", "v_proj", "up_proj")
    config = {"r": 4, "lora_alpha": 6, "bias": "none", "fan_in_fan_out": False, "target_modules": [*modules]}
    folder.mkdir()
    write_json(folder / CONFIG, {"peft_type": "LORA", **config})
    weights, random = {}, torch.Generator().manual_seed(1)
    for name, values in read_tensors(checkpoint).items():
        module = name.removesuffix(".weight")
        if "language_model" in name and module.rpartition(".")[2] in modules:
            rows, columns = values.shape
            weights[f"base_model.model.{module}.lora_A.weight"] = torch.randn((4, columns), generator=random) / 4
            weights[f"base_model.model.{module}.lora_B.weight"] = torch.randn((rows, 4), generator=random) / 4
    write_tensors(folder, weights, WEIGHTS)
    return folder


def image_of(artifact: Artifact) -> Encoding:
    """As the decoder reads it."""
    tower = artifact.manifest.image_tower
    assert tower is not None
    assert tower.sequence
    count, sequence = tower.max_seq_len, tower.sequence
    rows = np.random.default_rng(0).standard_normal((count, sequence.width), np.float32)
    ids = np.array([sequence.token_id] * count + [*sequence.after], np.int32)
    return Encoding(ids, features=(ImageFeatures(rows, b"image", np.arange(count, dtype=np.int32), (1, count)),))


def test_texts_of_an_adapter_and_an_image_in_one_step_have_the_vectors_of_each_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    lora = save_lora(tmp_path / "lora", checkpoint)
    artifact = build_artifact(checkpoint, tmp_path / "out", lora=(f"tuned={lora}",), verify=False)
    bare = Encoding(np.array([2, 300, 301, 302, 108], np.int32))
    together = [bare._replace(adapter=1), image_of(artifact), bare]
    with running(artifact) as engine:

        def rows(*encodings: Encoding) -> list[Float32Array]:
            batch = PackedBatch.from_encodings(encodings)
            return rows_of_sequences(engine.run(batch)["token_embedding"], batch, per_token=True)

        alone = [rows(one)[0] for one in together]
        assert np.abs(alone[0] - alone[2]).max() > 0.01  # the adapter changes vectors
        for mine, expected in zip(rows(*together), alone, strict=True):
            np.testing.assert_allclose(mine, expected, atol=2e-4)


@pytest.mark.parametrize("failing", [False, True], ids=["all", "but one"])
def test_jobs_compute_states_for_a_step_of_the_decoder_at_a_time(
    failing: bool, checkpoint: Path, tmp_path: Path
) -> None:
    """And a shard's rows are those of each image alone."""
    artifact = build_artifact(checkpoint, tmp_path / "out", verify=False, max_num_tokens=128, max_seq_len=64)
    files = [ImageInput(png(color=(9 * index, 100, 200))) for index in range(16)]
    if failing:
        files[3] = ImageInput(png(color=(0, 0, 0)))
    loaded = load_model(artifact.path, ServeConfig(tune="off", engine_streams=1))
    assert loaded.second is not None
    tower, decoder = Counted(loaded.second.engine), Counted(loaded.engine)
    loaded = loaded._replace(engine=decoder, second=loaded.second._replace(engine=tower))
    most = 0
    unread = 0

    def computed(batch: PackedBatch) -> None:
        nonlocal most, unread
        assert batch.levels is not None
        if failing and not batch.levels.reshape(batch.batch_size, -1).any(1).all():
            raise EngineError("broken")
        unread += batch.batch_size
        most = max(most, unread)

    def read(batch: PackedBatch) -> None:
        nonlocal unread
        assert batch.features is not None
        unread -= batch.batch_size

    tower.on_run, decoder.on_run = computed, read

    async def infer() -> InferenceResult:
        service = ShardService(loaded, ServeConfig(tune="off"))
        try:
            with service.ticket(len(files)) as ticket:
                request = ModelRequest([*files], failed={})
                return await service.infer(request, ticket=ticket, outputs=frozenset({"token_embedding"}))
        finally:
            service.close()

    found = asyncio.run(infer())
    assert [*found.errors] == ([3] if failing else [])
    assert len(found.rows) == 16 - failing
    assert unread == 0
    assert 1 < most <= 128 // len(found.rows[0]["token_embedding"])
    with bei.Model(artifact.path, tune="off") as model:
        expected = [
            model.embed_all([value.content])[0] for place, value in enumerate(files) if place not in found.errors
        ]
    for mine, theirs in zip(found.rows, expected, strict=True):
        np.testing.assert_allclose(unit_length(mine["token_embedding"]), theirs, atol=2e-4)


class Counted:
    """An engine that tells what it is about to run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info = engine.info
        self.on_run: Callable[[PackedBatch], None] = lambda batch: None

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        self.on_run(batch)
        return self._engine.run(batch, outputs)

    def warmup(self) -> None:
        self._engine.warmup()

    def close(self) -> None:
        self._engine.close()


def test_the_place_of_an_image_in_a_text_is_refused_as_by_the_library(checkpoint: Path, of_texts: Served) -> None:
    texts = ["hello", "what <image> is"]
    library_processor(checkpoint).process_queries(text=texts[:1])
    with pytest.raises(ValueError, match="image"):
        library_processor(checkpoint).process_queries(text=texts[1:])
    refused = of_texts.post("/embed_all", {"inputs": texts[1:]})
    assert refused.status_code == 400
    assert "has <image> in it" in refused.text
    reported = of_texts.post("/embed_all", {"inputs": texts}, **{"X-Bei-Report": "true"})
    assert reported.status_code == 200, reported.text
    assert reported.text.count("has <image> in it") == 1
    assert of_texts.post("/tokenize", {"inputs": texts}).status_code == 200


def test_an_image_is_the_error_of_that_input_where_the_model_reads_none(of_texts: Served) -> None:
    body = {"inputs": ["hello", {"image": data_url(png())}]}
    refused = of_texts.post("/embed_all", body)
    assert refused.status_code == 400
    assert "reads no images" in refused.text
    reported = of_texts.post("/embed_all", body, **{"X-Bei-Report": "true"})
    assert reported.status_code == 200, reported.text
    assert reported.text.count("reads no images") == 1
    vectors = of_texts.post("/embed_all", {"inputs": ["hello"]}).json()[0]
    assert str(vectors[0][0]) in reported.text
