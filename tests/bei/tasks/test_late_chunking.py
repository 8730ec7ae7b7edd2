"""Late chunking over fake engines: which models it is refused for, and the means of chunks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.artifact.manifest import MANIFEST, Artifact, OutputInfo
from bei.artifact.store import load_manifest
from bei.core import Float32Array, Int32Array
from bei.engine.postprocess import means_of_chunks
from bei.errors import InvalidRequestError
from bei.tasks import embed, support
from tests.bei.tasks.test_embed import HeadEngine, answer_of, checked
from tests.support.artifacts import save_artifact, token_ids

WIDTH = 2
embed_chunks = checked(embed.embed_chunks, "embed")


def id_and_place(ids: Int32Array) -> Float32Array:
    return np.stack([ids, np.arange(1, len(ids) + 1)], axis=1).astype(np.float32)


def save_chunker(path: Path, *, is_unit: bool = False, **embedding: object) -> Artifact:
    """A model with mean pooling that gives its tokens' states too."""
    states = OutputInfo(name="token_embedding", dimension=WIDTH, per_token=True, unit_length=is_unit)
    outputs = [OutputInfo(name="embedding", dimension=WIDTH), states]
    return save_artifact(path, outputs=outputs, embedding={"normalize": False, **embedding})


def chunked(artifact: Artifact, chunks: list[str]) -> Any:
    engine = HeadEngine("token_embedding", WIDTH, id_and_place, per_token=True)
    return answer_of(artifact, engine, lambda service: embed_chunks(service, chunks, late_chunking=True))


@pytest.mark.parametrize("is_large", [False, True])
def test_a_chunk_is_the_mean_of_its_tokens_and_many_are_made_off_the_event_loop(
    is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    means = means_of_chunks

    def noted(*args: Any) -> Float32Array:
        threads.append(threading.current_thread())
        return means(*args)

    monkeypatch.setattr(embed, "means_of_chunks", noted)
    monkeypatch.setattr(support, "_MANY_NUMBERS", 0 if is_large else 1000)
    answer = chunked(save_chunker(tmp_path / "tiny", layers_follow_pooling=False), ["the cats", "hello"])
    states = id_and_place(np.array(token_ids("the cats hello"), np.int32))
    np.testing.assert_allclose(answer.vectors, [states[1:4].mean(axis=0), states[4]])
    assert [thread is threading.main_thread() for thread in threads] == [not is_large]


def test_means_of_chunks_are_those_of_their_states_chosen_one_by_one() -> None:
    generator = np.random.default_rng(0)
    states = generator.standard_normal((500, 32), np.float32) * 1000
    owner = np.concatenate([np.arange(40), np.sort(generator.integers(0, 40, 460))])  # in any order, none is empty
    owner[generator.integers(40, 500, 20)] = -1
    plain = np.stack([states[owner == index].mean(axis=0) for index in range(40)])
    found = means_of_chunks(states, owner, np.bincount(owner[owner >= 0]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plain, rtol=1e-6, atol=1e-3)


def refusal_of(artifact: Artifact) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        chunked(artifact, ["the cats", "hello"])
    assert caught.value.param == "late_chunking"
    return caught.value


def test_a_model_with_layers_behind_its_pooling_is_refused(tmp_path: Path) -> None:
    refusal = refusal_of(save_chunker(tmp_path / "tiny", layers_follow_pooling=True))
    assert "tiny has further layers behind it" in str(refusal)


def test_states_of_unit_length_are_not_averaged(tmp_path: Path) -> None:
    refusal = refusal_of(save_chunker(tmp_path / "tiny", is_unit=True, layers_follow_pooling=False))
    assert "does not give its tokens' states" in str(refusal)


def test_an_artifact_of_an_earlier_bei_is_read_and_is_to_be_built_again_for_late_chunking(tmp_path: Path) -> None:
    artifact = save_chunker(tmp_path / "tiny")
    assert b"layers_follow_pooling" not in (artifact.path / MANIFEST).read_bytes()
    assert load_manifest(artifact.path) == artifact.manifest
    assert "does not say whether layers follow its pooling: build it again" in str(refusal_of(artifact))
