"""Retrievers whose queries are looked up: what is built and refused. Files are those of the public repositories;
vectors are compared with ``inference_free``, which shares nothing with the builder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from bei.artifact.manifest import TOKEN_WEIGHTS, Artifact
from bei.artifact.sides import Role, Routes
from bei.artifact.token_weights import write_token_weights
from bei.core import Encoding, Float32Array, PackedBatch
from bei.errors import BeiError, CheckpointError, ConfigError, TokenizerError, VerificationError, WeightsError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint, source_of
from tests.support.builds import build_artifact, running
from tests.support.checkpoints import MAX_TOKENS, change_json, read_tensors, write_json, write_tensors
from tests.support.inference_free import POOLING, PUBLIC, TABLE, encode_documents, save_inference_free
from tests.support.reading import read, refused

TEXTS = ["the cat sat on a mat", "Hello, World!", "a " * 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_inference_free(tmp_path_factory.mktemp("checkpoints") / "free")


@pytest.fixture(scope="module")
def artifact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(folder, tmp_path_factory.mktemp("artifacts") / "free")


def of_route(folder: Path, route: str) -> Checkpoint:
    return read_checkpoint(locate(str(folder)), route=route)


def test_the_checkpoint_has_the_files_of_the_public_repository(folder: Path) -> None:
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in PUBLIC} == PUBLIC


def test_the_table_is_a_file_of_the_artifact_and_documents_are_the_engines(folder: Path, artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert manifest.tasks == ["embed_sparse"]
    assert manifest.routes == Routes(default="document", absent=[])
    assert manifest.roles == {
        "query": Role(max_tokens=MAX_TOKENS, expansion=None, skip_ids=[], table=True),
        "document": Role(max_tokens=None, expansion=None, skip_ids=[]),
    }
    assert TOKEN_WEIGHTS in {info.path for info in manifest.files}
    table = np.load(artifact.path / TOKEN_WEIGHTS)
    np.testing.assert_array_equal(table, read_tensors(folder / TABLE)["weight"].numpy())
    checkpoint = read(folder)
    checkpoint.tokenizer.enable_truncation(MAX_TOKENS)
    encodings = [Encoding(np.array(checkpoint.tokenizer.encode(text).ids, np.int32)) for text in TEXTS]
    with running(artifact) as engine:
        rows = engine.run(PackedBatch.from_encodings(encodings))["sparse"]
    np.testing.assert_allclose(rows, encode_documents(folder, TEXTS), atol=2e-4)


def test_entries_behind_the_tokenizers_weigh_nothing(tmp_path: Path) -> None:
    """A padded embedding table: vectors of both sides have one width."""
    folder = save_inference_free(tmp_path)
    weights = read_tensors(folder / TABLE)["weight"]
    tensors = read_tensors(folder)
    for name in ("distilbert.embeddings.word_embeddings.weight", "vocab_projector.bias"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:5]])
    write_tensors(folder, tensors)
    change_json(folder / "config.json", vocab_size=len(weights) + 5)
    table = read(folder).token_weights
    assert table is not None
    np.testing.assert_array_equal(table, [*weights.numpy(), 0, 0, 0, 0, 0])


def test_the_source_covers_the_table(folder: Path, tmp_path: Path) -> None:
    changed = save_inference_free(tmp_path)
    assert source_of(read(changed)).sha256 == source_of(read(folder)).sha256
    weights = read_tensors(changed / TABLE)["weight"]
    write_tensors(changed / TABLE, {"weight": weights + 1})
    assert source_of(read(changed)).sha256 != source_of(read(folder)).sha256


def test_documents_may_be_looked_up_and_the_side_that_nobody_names_is_the_librarys(tmp_path: Path) -> None:
    folder = save_inference_free(tmp_path)
    structure = {"document": [TABLE], "query": ["", POOLING]}
    change_json(folder / "router_config.json", structure=structure, parameters={"allow_empty_key": True})
    checkpoint = read(folder)
    assert checkpoint.roles["document"].table
    assert not checkpoint.roles["query"].table
    assert checkpoint.files.routing is not None
    assert checkpoint.files.routing.default == "document"  # the first one
    change_json(folder / "router_config.json", parameters={"default_route": None, "allow_empty_key": False})
    routing = read(folder).files.routing
    assert routing is not None
    assert routing.default is None


def test_the_side_with_an_engine_can_be_had_alone(folder: Path, tmp_path: Path) -> None:
    manifest = build_artifact(folder, tmp_path / "artifact", route="document", verify=False).manifest
    assert TOKEN_WEIGHTS not in {info.path for info in manifest.files}
    assert manifest.roles == {}
    assert manifest.routes == Routes(default="document", absent=["query"])
    with pytest.raises(CheckpointError, match=r"asks for SparseStaticEmbedding; bei builds"):
        of_route(folder, "query")


# Refused.


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    def changed(folder: Path) -> object:
        return write_tensors(folder / TABLE, {"weight": change(read_tensors(folder / TABLE)["weight"])})

    return changed


def _path(folder: Path) -> object:
    return write_json(folder / TABLE / "config.json", {"path": "idf.json"})


def _no_weights(folder: Path) -> object:
    (folder / TABLE / "model.safetensors").unlink()
    return None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            _weights(lambda weight: weight[:-1]),
            CheckpointError,
            r"weights of shape \[90\], and the tokenizer 91 tokens",
        ),
        (_weights(lambda weight: weight[None]), CheckpointError, r"shape \[1, 91\]"),
        (_weights(lambda weight: weight / 0), CheckpointError, "NaN or Inf"),
        (_path, CheckpointError, r"reads its weights from a JSON file \(path\)"),
        (_no_weights, WeightsError, "has neither model.safetensors nor"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_name(
    change: Callable[[Path], object], error: type[BeiError], message: str, tmp_path: Path
) -> None:
    folder = save_inference_free(tmp_path)
    change(folder)
    refused(folder, error, message)


@pytest.mark.parametrize("choice", [{"task": "embed"}, {"pooling": "mean"}])
def test_the_other_side_is_built_sparse_or_not_at_all(choice: dict[str, str], folder: Path) -> None:
    refused(folder, ConfigError, r"One side of the checkpoint's Router is a table .* leave task, pooling", **choice)


def test_retrieval_cannot_be_asked_of_one_side(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--verify-retrieval asks the engine about both sides"):
        build_artifact(folder, tmp_path / "artifact", verify_retrieval=True)


def test_two_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = save_inference_free(tmp_path / "free")
    stored = json.loads((folder / TABLE / "tokenizer.json").read_text())
    write_json(
        folder / TABLE / "tokenizer.json", {**stored, "normalizer": {**stored["normalizer"], "lowercase": False}}
    )
    change_json(folder / TABLE / "tokenizer_config.json", do_lower_case=False)
    with pytest.raises(TokenizerError, match=rf"tokenizer in {TABLE} is not that of the other side \(they differ on"):
        build_artifact(folder, tmp_path / "artifact")


@pytest.mark.parametrize("change", [lambda table: table * 1.001, lambda table: np.roll(table, 1)])
def test_a_table_that_answers_otherwise_fails_the_build(
    change: Callable[[Float32Array], Float32Array], folder: Path, tmp_path: Path
) -> None:
    def spoilt(path: Path, weights: Float32Array) -> None:
        write_token_weights(path, change(weights).astype(np.float32))

    with (
        mock.patch("bei_build.pipeline.write_token_weights", spoilt),
        pytest.raises(VerificationError, match=rf"{TOKEN_WEIGHTS} gives other weights than {TABLE} for"),
    ):
        build_artifact(folder, tmp_path / "artifact")


def test_modules_behind_the_router_are_refused(tmp_path: Path) -> None:
    folder = save_inference_free(tmp_path)
    normalize = {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"}
    write_json(folder / "modules.json", [*json.loads((folder / "modules.json").read_text()), normalize])
    with pytest.raises(CheckpointError, match=r"asks for MLMTransformer -> SpladePooling -> Normalize; bei builds"):
        read(folder)
