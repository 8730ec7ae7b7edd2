"""ColPali, ColQwen2, Qwen3-VL-Embedding and EmbeddingGemma 2 in several processes, and in jobs over files: the vectors
of transformers' classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei.artifact.manifest import Artifact
from bei.config.devices import usable_cores
from bei.core import Float32Array
from tests.e2e.process import DEADLINE_S, Server, run, serve
from tests.support import colpali, colqwen2, embedding_gemma2, qwen3_vl
from tests.support.builds import build_artifact
from tests.support.two_towers import data_url, drawn_files

FILES = drawn_files()[:12]
TEXTS = ["hello world", "what is it?"]


class Family(NamedTuple):
    """``rows`` of the library: of images, then of texts. ``task``: of jobs, ``other`` is one that it has not."""

    save: Callable[[Path], Path]
    rows: Callable[[Path, list[bytes], list[str]], list[Float32Array]]
    path: str = "/embed_all"
    task: str = "tokens"
    other: str = "embed"


FAMILIES = {
    "colpali": Family(colpali.save_colpali, colpali.library_rows),
    "colqwen2": Family(colqwen2.save_colqwen2, colqwen2.library_rows),
    "qwen3_vl": Family(qwen3_vl.save_qwen3_vl, qwen3_vl.library_rows, "/embed", "embed", "tokens"),
    "embedding_gemma2": Family(
        embedding_gemma2.save_embedding_gemma2, embedding_gemma2.library_rows, "/embed", "embed", "tokens"
    ),
}


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def checkpoint(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.save(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "colpali")


@pytest.fixture(scope="module")
def expected(family: Family, checkpoint: Path) -> list[Float32Array]:
    return family.rows(checkpoint, FILES, TEXTS)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, artifact: Artifact, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    flags: list[object] = ["--http-workers", 2]
    if request.param == "devices":
        cores = usable_cores()
        if len(cores) < 2:
            pytest.skip("there is one core")
        flags = ["--devices", f"{cores[0]},{cores[1]}"]
    with serve([artifact.path, "--cache-megabytes", 0, *flags], env, home) as opened:
        yield opened


# The first tier takes vectors of tokens on one side, and images in their own proportions on the other.
_SLOW = [
    *(("colpali", "front ends"), ("qwen3_vl", "devices"), ("colqwen2", "front ends"), ("colqwen2", "devices")),
    *(("embedding_gemma2", "front ends"), ("embedding_gemma2", "devices")),
]


@pytest.mark.parametrize(
    ("family", "server"),
    [
        ("colpali", "devices"),
        ("qwen3_vl", "front ends"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in _SLOW),
    ],
    indirect=True,
)
def test_vectors_are_those_of_the_library_whichever_process_computes_them(
    server: Server, family: Family, expected: list[Float32Array]
) -> None:
    inputs: list[object] = [*({"image": data_url(content)} for content in FILES), *TEXTS]

    def asked(shift: int) -> None:
        places = [(shift + index) % len(inputs) for index in range(len(inputs))]
        body = {"inputs": [inputs[place] for place in places]}
        answer = httpx.post(f"{server.url}{family.path}", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        for place, rows in zip(places, answer.json(), strict=True):
            np.testing.assert_allclose(np.array(rows), expected[place], atol=2e-4)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(asked, range(12)))


_EVERY = pytest.mark.parametrize(
    "family", ["colpali", "qwen3_vl", pytest.param("colqwen2", marks=pytest.mark.slow)], indirect=True
)


@_EVERY
def test_a_job_over_a_column_of_images_has_the_librarys_vectors(
    artifact: Artifact,
    family: Family,
    expected: list[Float32Array],
    env: Mapping[str, str],
    home: Path,
    tmp_path: Path,
) -> None:
    rows = [*FILES, FILES[0]]  # equal images are computed once
    pq.write_table(pa.table({"id": range(len(rows)), "page": rows}), tmp_path / "pages.parquet")
    flags = ["--text-column", "page", "--id-column", "id", "--task", family.task, "--output", tmp_path / "vectors"]
    done = run(["embed", artifact.path, "--input", tmp_path / "pages.parquet", *flags], env, home)
    assert done.returncode == 0, done.stderr
    parts = [pq.read_table(path) for path in sorted((tmp_path / "vectors").glob("*.parquet"))]
    found = {row["id"]: row for part in parts for row in part.to_pylist()}
    assert len(found) == len(rows)
    for index, row in found.items():
        (vectors,) = [value for name, value in row.items() if isinstance(value, list)]
        np.testing.assert_allclose(np.array(vectors), expected[index % len(FILES)], atol=2e-4)


@_EVERY
def test_a_column_of_images_is_refused_for_other_tasks(
    artifact: Artifact, family: Family, env: Mapping[str, str], home: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"page": FILES[:2]}), tmp_path / "pages.parquet")
    flags = ["--text-column", "page", "--output", tmp_path / "vectors", "--task", family.other]
    refused = run(["embed", artifact.path, "--input", tmp_path / "pages.parquet", *flags], env, home)
    assert refused.returncode
    assert family.other in refused.stderr


def test_a_reranker_reads_images_in_front_ends(env: Mapping[str, str], home: Path, tmp_path: Path) -> None:
    checkpoint = qwen3_vl.save_reranker(tmp_path / "reranker")
    artifact = build_artifact(checkpoint, tmp_path / "artifact", verify=False, **qwen3_vl.RERANKER)
    parts: list[tuple[str | bytes, ...]] = [(FILES[0],), (FILES[1], "a caption"), ("a text",), (FILES[0], FILES[2])]
    documents: list[object] = [
        {"image": data_url(FILES[0])},
        {"image": data_url(FILES[1]), "text": "a caption"},
        "a text",
        {"content": [{"image": data_url(FILES[0])}, {"image": data_url(FILES[2])}]},
    ]
    expected = qwen3_vl.library_scores(checkpoint, [((TEXTS[0],), part) for part in parts])
    with serve([artifact.path, "--http-workers", 2], env, home) as server:
        for _ in range(4):
            body = {"query": TEXTS[0], "documents": documents}
            answer = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=DEADLINE_S)
            assert answer.status_code == 200, answer.text
            found = sorted(answer.json()["results"], key=lambda one: int(one["index"]))
            np.testing.assert_allclose([one["relevance_score"] for one in found], expected, atol=2e-4)


@pytest.mark.slow
def test_content_parts_of_openai_have_one_vector(env: Mapping[str, str], home: Path, tmp_path: Path) -> None:
    checkpoint = embedding_gemma2.save_published(tmp_path / "checkpoint")
    artifact = build_artifact(checkpoint, tmp_path / "artifact", verify=False)
    inputs: list[tuple[str | bytes, ...]] = [
        (FILES[0], "a caption"),
        ("first: ", FILES[1], " second: ", FILES[2]),
        (FILES[3],),
    ]

    def part(one: str | bytes) -> dict[str, object]:
        if isinstance(one, str):
            return {"type": "text", "text": one}
        return {"type": "image_url", "image_url": {"url": data_url(one)}}

    given = [{"content": [part(one) for one in parts]} for parts in inputs]
    with serve([artifact.path], env, home) as server:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": given}, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    found = [one["embedding"] for one in answer.json()["data"]]
    np.testing.assert_allclose(found, embedding_gemma2.library_vectors(checkpoint, inputs), atol=2e-4)
