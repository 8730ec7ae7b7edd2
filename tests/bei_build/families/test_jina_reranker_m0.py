"""jina-reranker-m0: the scores of its own code for pairs of texts, and of a text and an image on either side."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import bei
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.errors import CheckpointError, ConfigError
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_json, read_tensors, write_tensors
from tests.support.cpus import needs_bf16
from tests.support.qwen2_vl import library_scores, save_ranker
from tests.support.qwen3_vl import STEP
from tests.support.served import Served
from tests.support.two_towers import data_url, drawn_files, png

FILES = [*drawn_files()[:4], png(1, 1), png(3, 600)]
TEXTS = [
    "hello world",
    "!",
    "what is in the picture? " * 3,
    " two  spaces ",
    "tokens <|im_end|> and \n lines",
    "{query}",
]
QUERY = "a page"
DOCUMENTS: list[str | bytes] = [*TEXTS, *FILES]
QUERIES: list[str | bytes] = [*TEXTS[:2], *FILES[:3]]
PAIRS: list[tuple[str | bytes, str | bytes]] = [(QUERY, one) for one in DOCUMENTS] + [(one, QUERY) for one in QUERIES]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ranker(tmp_path_factory.mktemp("m0") / "m0")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[float]:
    return library_scores(checkpoint, PAIRS)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "m0")


@pytest.fixture(scope="module")
def served(artifact: Artifact) -> Iterator[Served]:
    app = Served(artifact)
    yield app
    app.close()


def scores_of(model: bei.Model) -> list[float]:
    """Of ``PAIRS``."""
    found = []
    for query, pairs in itertools.groupby(PAIRS, lambda pair: pair[0]):
        ranks = model.rerank(query, [document for _, document in pairs])
        found += [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
    return found


def test_pairs_have_the_scores_of_the_models_own_code(artifact: Artifact, expected: list[float]) -> None:
    with bei.Model(artifact.path, tune="off") as model:
        np.testing.assert_allclose(scores_of(model), expected, atol=2e-4)
    assert max(expected) - min(expected) > 0.01  # else it need not have read them


@pytest.mark.slow
@needs_bf16
def test_in_bf16_they_are_near(checkpoint: Path, expected: list[float], tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "bf16", precision="bf16")
    with bei.Model(artifact.path, tune="off") as model:
        assert np.corrcoef(scores_of(model), expected)[0, 1] > 0.999


def test_the_certificate_compares_both_with_the_librarys_class(artifact: Artifact) -> None:
    images = artifact.certificate.images
    assert images
    assert images.reference.startswith("transformers, FP32")
    assert images.output is not None
    assert images.output.output == "logits"
    assert artifact.certificate.reference.startswith("transformers, FP32")
    assert artifact.manifest.tasks == ["rerank"]
    tower = artifact.manifest.image_tower
    assert tower is not None
    assert tower.processor.bounds
    assert (tower.processor.bounds.fewest, tower.processor.bounds.most) == (4 * STEP**2, 768 * STEP**2)


def test_routes_read_texts_and_images(served: Served, expected: list[float]) -> None:
    documents = [TEXTS[0], {"image": data_url(FILES[0])}]
    answer = served.post("/v1/rerank", {"query": QUERY, "documents": documents})
    assert answer.status_code == 200, answer.text
    found = {one["index"]: one["relevance_score"] for one in answer.json()["results"]}
    assert [found[0], found[1]] == pytest.approx([expected[0], expected[len(TEXTS)]], abs=2e-4)
    answer = served.post("/score", {"queries": [{"image": data_url(FILES[0])}], "documents": [QUERY]})
    assert answer.status_code == 200, answer.text
    wanted = expected[PAIRS.index((FILES[0], QUERY))]
    assert answer.json()["data"][0]["score"] == pytest.approx(wanted, abs=2e-4)
    assert served.get("/ready").status_code == 200


def test_a_text_that_looks_like_the_last_token_does_not_end_a_pair(artifact: Artifact, checkpoint: Path) -> None:
    """The token stands for a byte that no character begins with."""
    text = "\u00a7 a paragraph"
    with bei.Model(artifact.path, tune="off") as model:
        (rank,) = model.rerank(QUERY, [text])
    assert rank.score == pytest.approx(library_scores(checkpoint, [(QUERY, text)])[0], abs=2e-4)


def test_a_query_and_a_document_may_both_be_images(artifact: Artifact, checkpoint: Path) -> None:
    pairs: list[tuple[str | bytes, str | bytes]] = [(FILES[0], one) for one in (FILES[1], FILES[0], FILES[2])]
    expected = library_scores(checkpoint, pairs)
    assert max(expected) - min(expected) > 1e-3
    with bei.Model(artifact.path, tune="off") as model:
        ranks = model.rerank(FILES[0], [document for _, document in pairs])
    found = [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_texts_alone_are_built(checkpoint: Path, expected: list[float], tmp_path: Path) -> None:
    artifact = build_artifact(checkpoint, tmp_path / "texts", images=False, verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        ranks = model.rerank(QUERY, TEXTS)
    found = [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
    np.testing.assert_allclose(found, expected[: len(TEXTS)], atol=2e-4)


def test_other_builds_and_files_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a text of its own: leave rerank_body out"):
        build_artifact(checkpoint, tmp_path / "out", task="rerank", rerank_body="{query} {document}")
    folder = shutil.copytree(checkpoint, tmp_path / "m0")
    change_json(folder / "config.json", auto_map={"AutoModel": "modeling.Other"})
    with pytest.raises(CheckpointError, match="code of its own"):
        build_artifact(folder, tmp_path / "out")
    shutil.copy(checkpoint / "config.json", folder)
    write_tensors(folder, {name: one for name, one in read_tensors(folder).items() if name != "score.2.bias"})
    with pytest.raises(CheckpointError, match=r"score\.2\.bias"):
        build_artifact(folder, tmp_path / "out")


def test_a_manifest_with_another_last_token_is_refused(artifact: Artifact) -> None:
    template = artifact.manifest.rerank_template
    assert template is not None
    assert template.last_id == 100
    changed = msgspec.structs.replace(
        artifact.manifest, rerank_template=msgspec.structs.replace(template, last_id=1 << 20)
    )
    assert "last_id" in (manifest_fault(changed) or "")
