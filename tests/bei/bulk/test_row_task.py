"""Each task of a job gives what the method of ``bei.Model`` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei import Model
from bei.bulk.run import JobOptions, opened_source, run_job
from bei.bulk.sources.rows import Columns
from bei.config.settings import ServeConfig
from bei.errors import InvalidRequestError
from bei.tasks.vector_formats import DenseDType
from tests.bei.offline.test_parity import canary_of
from tests.bei.server.kinds import save_kind

_TEXTS = ["cat", "the cats", "hello world", "a " * 9, "cat", "b c d"]
_Job = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[Model, _Job]]]:
    """``job(kind)``: a Model of that kind, and a function that gives the rows of a job over the texts with it."""
    models: list[Model] = []

    def made(kind: str) -> tuple[Model, _Job]:
        artifact, engine = save_kind(tmp_path / "model", kind, **canary_of(kind))
        monkeypatch.setattr("bei.service.loader.load_engine", lambda *_: engine)
        models.append(Model(artifact.path, tune="off", tokenizer_threads=1))
        pq.write_table(
            pa.table({"text": [*_TEXTS, None], "query": ["cat", "dog"] * 3 + [None]}), tmp_path / "in.parquet"
        )

        def run(**options: Any) -> list[dict[str, Any]]:
            given = JobOptions((str(tmp_path / "in.parquet"),), str(tmp_path / "out"), shard_rows=4, **options)
            given.check()
            with opened_source(given) as source:
                run_job(source, artifact.path, given, ServeConfig(tune="off", tokenizer_threads=1), lambda _: None)
            rows: list[dict[str, Any]] = pq.read_table(tmp_path / "out").to_pylist()
            assert [row["row"] for row in rows] == [*range(len(_TEXTS))]
            return rows

        return models[0], run

    yield made
    for model in models:
        model.close()


def test_labels_and_their_scores(job: Callable[[str], tuple[Model, _Job]], tmp_path: Path) -> None:
    model, run = job("classifier")
    rows, expected = run(task="classify"), model.classify(_TEXTS)
    np.testing.assert_allclose([row["scores"] for row in rows], expected.scores, rtol=1e-6)
    assert [row["label"] for row in rows] == [expected[i][0].label for i in range(len(_TEXTS))]
    np.testing.assert_allclose([row["score"] for row in rows], expected.scores.max(axis=1), rtol=1e-6)
    assert b"labels" in pq.read_schema(tmp_path / "out" / "part-00000.parquet").metadata


def test_scores_of_pairs(job: Callable[[str], tuple[Model, _Job]]) -> None:
    model, run = job("reranker")
    rows = run(task="rerank", columns=Columns(query="query"))
    expected = [model.rerank(["cat", "dog"][i % 2], [text])[0].score for i, text in enumerate(_TEXTS)]
    np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=1e-6)


def test_sparse_vectors(job: Callable[[str], tuple[Model, _Job]]) -> None:
    model, run = job("splade")
    for row, vector in zip(
        run(task="sparse", task_options={"top_k": 3, "prompt_name": "cats"}),
        model.embed_sparse(_TEXTS, top_k=3, prompt_name="cats"),
        strict=True,
    ):
        assert row["indices"] == vector.indices.tolist()
        np.testing.assert_array_equal(np.array(row["weights"], np.float32), vector.values)


def test_vectors_of_tokens(job: Callable[[str], tuple[Model, _Job]]) -> None:
    model, run = job("colbert")
    for row, vectors in zip(
        run(task="tokens", task_options={"input_type": "query"}),
        model.embed_all(_TEXTS, input_type="query"),
        strict=True,
    ):
        np.testing.assert_array_equal(np.array(row["token_embeddings"], np.float32), vectors)


def test_labels_that_no_text_can_be_read_behind_are_refused_at_the_start(
    job: Callable[[str], tuple[Model, _Job]], tmp_path: Path
) -> None:
    _, run = job("spans")
    with pytest.raises(InvalidRequestError, match="shorter labels"):
        run(task="extract", task_options={"labels": ["cat " * 100]})
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("dtype", get_args(DenseDType))
def test_dense_vectors_in_every_number_format(dtype: DenseDType, job: Callable[[str], tuple[Model, _Job]]) -> None:
    model, run = job("embedder")
    rows = run(task_options={"output_dtype": dtype, "prompt_name": "cats"})
    expected = model.embed(_TEXTS, output_dtype=dtype, prompt_name="cats")
    found = np.array([row["embedding"] for row in rows], expected.dtype)
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), atol=1e-6)
