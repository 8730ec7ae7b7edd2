"""Arrays that a Model returns belong to the caller: changing one changes no other result, nor the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Model
from bei.artifact.manifest import Classification, OutputInfo
from bei.core import Float32Array, Int32Array
from bei.engine.fake import FakeEngine
from tests.bei.offline.conftest import OpenModel
from tests.bei.tasks.test_embed import HeadEngine
from tests.support.artifacts import CANARY_TEXT, LIMITS, save_artifact, token_ids

WIDTH = 2


def id_and_place(ids: Int32Array) -> Float32Array:
    return np.stack([ids, np.arange(1, len(ids) + 1)], axis=1).astype(np.float32)


def first_ids(ids: Int32Array) -> Float32Array:
    return ids[:WIDTH].astype(np.float32)


def open_token_embedder(open_model: OpenModel, path: Path, **settings: Any) -> Model:
    artifact = save_artifact(
        path,
        tasks=["embed_tokens"],
        embedding=None,
        outputs=[OutputInfo(name="token_embedding", dimension=WIDTH, per_token=True)],
        output="token_embedding",
        canary=_unit(id_and_place(np.array(token_ids(CANARY_TEXT), np.int32))[0]),
    )
    return open_model(HeadEngine("token_embedding", WIDTH, id_and_place, per_token=True), artifact.path, **settings)


def open_classifier(open_model: OpenModel, path: Path, **settings: Any) -> Model:
    artifact = save_artifact(
        path,
        tasks=["classify"],
        embedding=None,
        classification=Classification(labels=["a", "b"], function="softmax"),
        outputs=[OutputInfo(name="logits", dimension=WIDTH)],
        output="logits",
        canary=first_ids(np.array(token_ids(CANARY_TEXT), np.int32)).tolist(),
    )
    return open_model(HeadEngine("logits", WIDTH, first_ids), artifact.path, **settings)


def open_embedder(open_model: OpenModel, _: Path, **settings: Any) -> Model:
    return open_model(FakeEngine(LIMITS), **settings)


def _unit(row: Float32Array) -> list[float]:
    unit: list[float] = (row / np.linalg.norm(row)).tolist()
    return unit


def test_equal_texts_have_token_embeddings_of_their_own(open_model: OpenModel, tmp_path: Path) -> None:
    model = open_token_embedder(open_model, tmp_path / "tiny")
    first, second = model.embed_all(["cat", "cat"])
    expected = second.copy()
    assert not np.shares_memory(first, second)
    first -= 1
    np.testing.assert_array_equal(second, expected)


@pytest.mark.parametrize(
    ("opened", "ask"),
    [
        (open_token_embedder, lambda model: model.embed_all(["cat"])[0]),
        (open_embedder, lambda model: model.embed(["cat"])),
        (open_embedder, lambda model: next(model.embed_iter(["cat"], chunk_size=1)).results),
        (open_embedder, lambda model: next(model.embed_iter(["cat"], dimensions=3, chunk_size=1)).results),
        (open_embedder, lambda model: next(model.embed_iter(["cat"], normalize=False, chunk_size=1)).results),
        (
            open_classifier,
            lambda model: next(model.classify_iter(["cat"], raw_scores=True, chunk_size=1)).results.scores,
        ),
    ],
    ids=["embed_all", "embed", "embed_iter", "embed_iter, cut", "embed_iter, not normalized", "classify_iter, raw"],
)
@pytest.mark.filterwarnings("ignore:tiny does not say that its vectors may be cut")
def test_the_cache_keeps_what_the_engine_gave_whatever_callers_do_with_theirs(
    opened: Callable[..., Model], ask: Callable[[Model], Float32Array], open_model: OpenModel, tmp_path: Path
) -> None:
    model = opened(open_model, tmp_path / "tiny", cache_megabytes=1)
    for _ in range(2):  # what the engine has just given, and what the cache has
        found = ask(model)
        expected = found.copy()
        found += 1
        np.testing.assert_array_equal(ask(model), expected)


@pytest.mark.filterwarnings("ignore:tiny does not say that its vectors may be cut")
def test_the_rest_of_a_wide_vector_is_not_kept_with_one_that_is_cut(model: Model) -> None:
    chunk = next(model.embed_iter(["cat", "the"], dimensions=3, normalize=False, chunk_size=2))
    assert chunk.results.base is None
