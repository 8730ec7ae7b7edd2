"""Which artifacts may replace a served one, and errors that name the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bei.artifact import compatibility
from bei.artifact.compatibility import check_room, check_swap
from bei.artifact.manifest import Adapters, Artifact, Manifest, OutputInfo
from bei.artifact.sides import Routes
from bei.artifact.store import save
from bei.errors import SwapRefusedError
from tests.support.artifacts import save_artifact, tiny_tokenizer


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return save_artifact(tmp_path_factory.mktemp("artifacts") / "tiny")


@pytest.fixture(scope="module")
def manifest(embedder: Artifact) -> Manifest:
    return embedder.manifest


def changed(manifest: Manifest, **fields: Any) -> Manifest:
    """``manifest`` with these fields; those of a struct in it as a dict."""
    return msgspec.structs.replace(
        manifest,
        **{
            name: msgspec.structs.replace(getattr(manifest, name), **value)
            if isinstance(value, dict) and isinstance(getattr(manifest, name), msgspec.Struct)
            else value
            for name, value in fields.items()
        },
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "int8"},
        {"target": "tensorrt"},
        {"max_seq_len": 8, "max_num_tokens": 32},
        {"bei_version": "1.0.0"},
        {"tasks": ["embed", "embed_sparse"]},
        {"embedding": {"int8_largest": 1.0 + 1 / 127}},
        {"embedding": {"similarity": "dot"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_another_build_of_the_same_model_is_taken(manifest: Manifest, fields: dict[str, Any]) -> None:
    check_swap(manifest, changed(manifest, **fields), vectors_may_change=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": {"sha256": "1" * 64}}, "another checkpoint"),
        ({"spec": {"adapter": "none"}}, "another attention or adapter"),
        ({"spec": {"attention": "causal"}}, "another attention or adapter"),
        ({"adapters": Adapters(names=["one"], tasks=[], is_required=False)}, "another attention or adapter"),
        ({"embedding": {"pooling": "cls"}}, "another pooling"),
        ({"embedding": {"normalize": False}}, "another pooling"),
        ({"outputs": [OutputInfo(name="embedding", dimension=4)]}, "other outputs"),
        ({"prompts": {"query": "q: "}}, "other prompts"),
        ({"routes": Routes(default="document", absent=["query"])}, "other prompts, roles or routes"),
        ({"embedding": {"int8_largest": 1.01}}, "steps of int8 vectors"),
        ({"embedding": {"int8_largest": None}}, "steps of int8 vectors"),
    ],
)
def test_vectors_that_do_not_go_with_those_before_are_refused_unless_the_operator_says_so(
    manifest: Manifest, fields: dict[str, Any], message: str
) -> None:
    new = changed(manifest, **fields)
    with pytest.raises(SwapRefusedError, match=rf"{message}.*with those that clients have stored.*--swap-vectors"):
        check_swap(manifest, new, vectors_may_change=False)
    check_swap(manifest, new, vectors_may_change=True)


def test_other_weights_of_a_model_without_vectors_are_taken(manifest: Manifest) -> None:
    classifier = changed(manifest, tasks=["classify"], embedding=None)
    check_swap(classifier, changed(classifier, source={"sha256": "1" * 64}), vectors_may_change=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "other"}, r"another name \(other\) than"),
        ({"tasks": ["embed"]}, r"fewer tasks \(not rerank\)"),
        ({"tasks": ["embed", "rerank"]}, r"another first task \(embed\)"),
        ({"name": "other", "tasks": ["embed"]}, r"another name \(other\) and fewer tasks"),
    ],
)
def test_another_model_is_refused_whatever_the_settings(
    manifest: Manifest, fields: dict[str, Any], message: str
) -> None:
    served = changed(manifest, tasks=["rerank", "embed"])
    new = changed(served, **fields)
    for vectors_may_change in (False, True):
        with pytest.raises(SwapRefusedError, match=f"{message}.*restart the server"):
            check_swap(served, new, vectors_may_change=vectors_may_change)


def test_another_tokenizer_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    other = save_artifact(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(other.path / "tokenizer.json"))
    new = save(other.path, other.manifest, other.certificate).manifest
    with pytest.raises(SwapRefusedError, match="another tokenizer"):
        check_swap(manifest, new, vectors_may_change=True)


def test_an_engine_that_does_not_fit_beside_the_other_one_is_refused_before_it_is_loaded(
    embedder: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (embedder.engine_dir / "fake.bin").stat().st_size
    for available in (None, size):
        monkeypatch.setattr(compatibility, "available_bytes", lambda available=available: available)
        check_room(embedder)
    monkeypatch.setattr(compatibility, "available_bytes", lambda: size - 1)
    with pytest.raises(SwapRefusedError, match="Two engines are in memory during a swap"):
        check_room(embedder)


def test_an_adapter_that_is_no_longer_there_is_refused_of_any_model(manifest: Manifest) -> None:
    served, new = (
        changed(manifest, adapters=Adapters(names=names, tasks=[], is_required=False)) for names in (["a", "b"], ["b"])
    )
    with pytest.raises(SwapRefusedError, match=r"fewer adapters \(not a\)"):
        check_swap(served, new, vectors_may_change=True)
