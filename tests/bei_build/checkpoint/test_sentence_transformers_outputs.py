"""Checkpoints with the modules of sentence-transformers: the outputs are what the modules compute in torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForMaskedLM

from bei.artifact.manifest import Artifact
from bei.core import Encoding, Float32Array, PackedBatch
from bei.errors import CheckpointError, MissingDependencyError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint, source_of
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import (
    HIDDEN,
    WEIGHTS,
    change_config,
    read_tensors,
    save_checkpoint,
    write_json,
    write_tensors,
)
from tests.support.zoo import CASES, save_case

LENGTHS = (5, 17, 2, 9, 30)
TOLERANCE = 1e-4


def linear(folder: Path, in_features: int, out_features: int, *, bias: bool = True, **config: Any) -> dict[str, Any]:
    """Save a Dense module; returns its tensors."""
    generator = torch.Generator().manual_seed(7 + in_features + out_features)
    tensors = {"linear.weight": torch.randn(out_features, in_features, generator=generator) / in_features**0.5}
    if bias:
        tensors["linear.bias"] = torch.randn(out_features, generator=generator)
    settings = {"in_features": in_features, "out_features": out_features, "bias": bias, **config}
    write_json(folder / "config.json", settings)
    save_file(tensors, folder / WEIGHTS)
    return tensors


def modules(folder: Path, *kinds: str) -> list[Path]:
    """Write modules.json; returns the modules' folders. Names are those of current files: full class paths."""
    paths = ["", *(f"{index}_{kind.rsplit('.', 1)[-1]}" for index, kind in enumerate(kinds) if index)]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(folder / "modules.json", entries)
    return [folder / path for path in paths]


def encodings(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[Encoding]:
    return random_encodings(lengths, vocab_size, seed=3)


def states(folder: Path, texts: Sequence[Encoding]) -> list[torch.Tensor]:
    """Last hidden states of each text on its own, from the HF class."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.from_numpy(text.input_ids.astype(np.int64))[None]).last_hidden_state[0] for text in texts]


def run(artifact: Artifact, texts: Sequence[Encoding]) -> Mapping[str, Float32Array]:
    with running(artifact) as engine:
        return engine.run(PackedBatch.from_encodings(texts))


def assert_rows(actual: Float32Array, expected: Sequence[torch.Tensor]) -> None:
    np.testing.assert_allclose(actual, torch.stack(list(expected)).numpy(), atol=TOLERANCE)


def assert_token_rows(actual: Float32Array, expected: Sequence[torch.Tensor]) -> None:
    np.testing.assert_allclose(actual, torch.cat(list(expected)).numpy(), atol=TOLERANCE)


def read(folder: Path, **choice: Any) -> Checkpoint:
    return read_checkpoint(locate(str(folder)), HeadChoice(**choice))


def vocab_size(folder: Path) -> int:
    return read(folder).spec.embeddings.vocab_size


# SPLADE.


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize(
    "transformer", ["sentence_transformers.sparse_encoder.models.MLMTransformer", "sentence_transformers.x.Transformer"]
)
def test_splade_pools_the_scores_of_the_vocabulary(
    strategy: str, activation: str, transformer: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "splade", task="ForMaskedLM")
    _, pooling = modules(folder, transformer, "sentence_transformers.sparse_encoder.models.SpladePooling")
    write_json(pooling / "config.json", {"pooling_strategy": strategy, "activation_function": activation})
    if not transformer.endswith("MLMTransformer"):
        write_json(folder / "sentence_bert_config.json", {"transformer_task": "fill-mask"})
    texts = encodings(vocab_size(folder))
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for text in texts:
        with torch.no_grad():
            scores = model(torch.from_numpy(text.input_ids.astype(np.int64))[None]).logits[0]
        scores = torch.log1p(torch.relu(scores))
        scores = torch.log1p(scores) if activation == "log1p_relu" else scores
        expected.append(scores.amax(0) if strategy == "max" else scores.sum(0))
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.tasks == ["embed_sparse"]
    assert_rows(run(artifact, texts)["sparse"], expected)


def test_splade_on_a_class_without_scores_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    _, pooling = modules(folder, "MLMTransformer", "SpladePooling")
    write_json(pooling / "config.json", {"pooling_strategy": "max"})
    with pytest.raises(CheckpointError, match=r"asks for SpladePooling, but the class .* correct its architectures"):
        read(folder)


def test_an_unknown_splade_pooling_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, task="ForMaskedLM")
    _, pooling = modules(folder, "MLMTransformer", "SpladePooling")
    write_json(pooling / "config.json", {"pooling_strategy": "mean"})
    with pytest.raises(CheckpointError, match="asks for mean pooling of relu; supported: max and sum"):
        read(folder)


# Tails.


def test_dense_layer_norm_and_normalize_follow_the_pooling(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "tail")
    kinds = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "Dense", "Normalize")
    paths = modules(folder, *kinds)
    write_json(paths[1] / "config.json", {"pooling_mode": "mean"})
    first = linear(paths[2], HIDDEN, 24, activation_function="torch.nn.modules.activation.Sigmoid")
    norm = {"norm.weight": torch.linspace(0.5, 2, 24), "norm.bias": torch.linspace(-1, 1, 24)}
    write_json(paths[3] / "config.json", {"dimension": 24})
    save_file(norm, paths[3] / WEIGHTS)
    last = linear(paths[6], 24, 8, bias=False, activation_function="torch.nn.modules.linear.Identity")
    texts = encodings(vocab_size(folder))
    functional = torch.nn.functional
    expected = []
    for token_states in states(folder, texts):
        row = torch.sigmoid(functional.linear(token_states.mean(0), first["linear.weight"], first["linear.bias"]))
        row = functional.normalize(functional.layer_norm(row, (24,), norm["norm.weight"], norm["norm.bias"]), dim=-1)
        expected.append(functional.linear(row, last["linear.weight"]))
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.embedding is not None
    assert artifact.manifest.embedding.normalize
    assert_rows(run(artifact, texts)["embedding"], expected)


@pytest.mark.parametrize("kind", ["Dense", "Normalize"])
def test_a_module_on_token_embeddings_behind_the_pooling_is_refused(kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    paths = modules(folder, "Transformer", "Pooling", kind)
    write_json(paths[1] / "config.json", {"pooling_mode": "mean"})
    config = {"in_features": HIDDEN, "out_features": HIDDEN, "module_input_name": "token_embeddings"}
    write_json(paths[2] / "config.json", config)
    with pytest.raises(CheckpointError, match=rf"2_{kind} \({kind}\) works on token_embeddings; supported here: sent"):
        read(folder)


def test_a_bidirectional_gemma_with_two_dense_layers_is_an_embedder(tmp_path: Path) -> None:
    """The layout of EmbeddingGemma."""
    case = next(case for case in CASES if case.name == "Gemma3TextModel-bidirectional")
    folder = save_case(tmp_path / "gemma", case)
    paths = modules(folder, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    write_json(paths[1] / "config.json", {"pooling_mode_mean_tokens": True, "include_prompt": True})
    identity = "torch.nn.modules.linear.Identity"
    first = linear(paths[2], HIDDEN, 64, bias=False, activation_function=identity)
    second = linear(paths[3], 64, HIDDEN, bias=False, activation_function=identity)
    texts = encodings(vocab_size(folder))
    expected = [
        second["linear.weight"] @ (first["linear.weight"] @ token_states.mean(0))
        for token_states in states(folder, texts)
    ]
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.embedding is not None
    assert (artifact.manifest.embedding.pooling, artifact.manifest.embedding.normalize) == ("mean", True)
    assert_rows(run(artifact, texts)["embedding"], expected)


# Late interaction.


@pytest.mark.parametrize(
    "kinds",
    [
        ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"),
        (
            "sentence_transformers.x.Transformer",
            "sentence_transformers.x.Dense",
            "sentence_transformers.x.multi_vector_mask.MultiVectorMask",
            "sentence_transformers.x.Normalize",
        ),
    ],
    ids=["PyLate", "sentence-transformers 6"],
)
def test_a_dense_layer_without_pooling_is_late_interaction(kinds: tuple[str, ...], tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "colbert")
    paths = modules(folder, *kinds)
    identity = "torch.nn.modules.linear.Identity"
    settings = {"module_input_name": "token_embeddings"} if len(kinds) > 2 else {"use_residual": False}
    dense = linear(paths[1], HIDDEN, 12, bias=False, activation_function=identity, **settings)
    texts = encodings(vocab_size(folder))
    expected = [token_states @ dense["linear.weight"].T for token_states in states(folder, texts)]
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    assert artifact.manifest.tasks == ["embed_tokens"]
    assert_token_rows(run(artifact, texts)["token_embedding"], expected)


def test_late_interaction_can_be_built_as_a_plain_embedder(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "colbert")
    linear(modules(folder, "Transformer", "Dense")[1], HIDDEN, 12)
    texts = encodings(vocab_size(folder))
    artifact = build_artifact(folder, tmp_path / "artifact", task="embed", pooling="cls")
    assert_rows(run(artifact, texts)["embedding"], [token_states[0] for token_states in states(folder, texts)])


def original_colbert(folder: Path, width: int) -> torch.Tensor:
    """Make ``folder`` the original ColBERT's layout; returns its projection."""
    save_checkpoint(folder)
    projection = torch.randn(width, HIDDEN, generator=torch.Generator().manual_seed(5)) / 6
    tensors = {f"bert.{name}": tensor for name, tensor in read_tensors(folder).items()}
    write_tensors(
        folder, {**tensors, "linear.weight": projection, "bert.embeddings.position_ids": torch.arange(48)[None]}
    )
    change_config(folder, architectures=["HF_ColBERT"])
    return projection


@pytest.mark.parametrize("width", [8, 96])
def test_the_original_colbert_is_as_wide_as_its_stored_projection(width: int, tmp_path: Path) -> None:
    folder = tmp_path / "colbert"
    projection = original_colbert(folder, width)
    texts = encodings(vocab_size(folder))
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert [(output.name, output.dimension) for output in artifact.manifest.outputs] == [("token_embedding", width)]
    assert_token_rows(run(artifact, texts)["token_embedding"], [rows @ projection.T for rows in states(folder, texts)])


def test_an_original_colbert_without_its_projection_is_refused(tmp_path: Path) -> None:
    original_colbert(tmp_path, 8)
    tensors = read_tensors(tmp_path)
    del tensors["linear.weight"]
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"Tensor linear\.weight is missing"):
        read(tmp_path)


def test_markers_of_queries_and_documents_are_prompts_of_one_token_each(tmp_path: Path) -> None:
    original_colbert(tmp_path, 8)
    tokenizer = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokenizer.replace('"##ed"', '"[unused1]"'))
    write_json(tmp_path / "artifact.metadata", {"query_token_id": "[unused1]", "doc_token_id": "[nowhere]", "dim": 8})
    checkpoint = read(tmp_path)
    assert checkpoint.files.prompts == {"query": "[unused1] ", "document": "[nowhere] "}
    assert checkpoint.tokenizer.encode("[unused1] the cat").tokens == ["[CLS]", "[unused1]", "the", "cat", "[SEP]"]
    assert "[nowhere]" not in checkpoint.tokenizer.get_vocab()


def test_pylates_prefixes_come_before_its_prompts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    linear(modules(tmp_path, "Transformer", "Dense")[1], HIDDEN, 12)
    config = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "prompts": {"query": "find: ", "other": "x"}}
    write_json(tmp_path / "config_sentence_transformers.json", {**config, "similarity_fn_name": "MaxSim"})
    files = read(tmp_path).files
    assert files.prompts == {"query": "[Q] find: ", "document": "[D] ", "other": "x"}
    assert (files.similarity, files.markers) == ("MaxSim", ("[Q] ", "[D] "))


# BGE-M3: three heads in one pass.


def bge_m3(folder: Path) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    save_checkpoint(folder, "xlm-roberta")
    paths = modules(folder, "Transformer", "Pooling", "Normalize")
    write_json(paths[1] / "config.json", {"pooling_mode_cls_token": True})
    with torch.random.fork_rng():
        torch.manual_seed(9)
        sparse, colbert = torch.nn.Linear(HIDDEN, 1), torch.nn.Linear(HIDDEN, 20)
    torch.save(sparse.state_dict(), folder / "sparse_linear.pt")
    torch.save(colbert.state_dict(), folder / "colbert_linear.pt")
    return sparse, colbert


def test_linear_layers_beside_the_weights_are_heads_of_the_same_pass(tmp_path: Path) -> None:
    folder = tmp_path / "m3"
    sparse, colbert = bge_m3(folder)
    texts = encodings(vocab_size(folder))
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.manifest.tasks == ["embed", "embed_sparse", "embed_tokens"]
    outputs = run(artifact, texts)
    rows = states(folder, texts)
    with torch.no_grad():
        assert_rows(outputs["embedding"], [token_states[0] for token_states in rows])
        assert_token_rows(outputs["token_weights"], [torch.relu(sparse(token_states)) for token_states in rows])
        assert_token_rows(outputs["token_embedding"], [colbert(token_states) for token_states in rows])


@pytest.mark.parametrize(
    ("task", "output"),
    [("embed", "embedding"), ("embed_sparse", "token_weights"), ("embed_tokens", "token_embedding")],
)
def test_a_named_task_builds_its_head_alone(task: str, output: str, tmp_path: Path) -> None:
    bge_m3(tmp_path)
    assert [head.output for head in read(tmp_path, task=task).spec.heads] == [output]


def test_without_torch_the_files_are_refused_and_the_dense_embedding_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bge_m3(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("transformers.configuration_utils.is_torch_available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"Reading colbert_linear\.pt.* needs the Python package 'torch'"):
        read(tmp_path)
    assert [head.output for head in read(tmp_path, task="embed").spec.heads] == ["embedding"]


def test_the_source_hash_covers_the_files_beside_the_weights(tmp_path: Path) -> None:
    bge_m3(tmp_path)
    write_json(tmp_path / "artifact.metadata", {})
    first = source_of(read(tmp_path)).sha256
    for name in ("sparse_linear.pt", "artifact.metadata"):
        before = (tmp_path / name).read_bytes()
        checkpoint = read(tmp_path)
        (tmp_path / name).write_bytes(before + b" ")
        assert source_of(checkpoint).sha256 != first, name
        (tmp_path / name).write_bytes(before)
    assert source_of(read(tmp_path)).sha256 == first


@pytest.mark.parametrize("content", [{}, {"weight": torch.ones(3)}, {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}])
def test_a_file_that_is_not_one_linear_layer_is_refused(content: dict[str, torch.Tensor], tmp_path: Path) -> None:
    bge_m3(tmp_path)
    torch.save(content, tmp_path / "colbert_linear.pt")
    with pytest.raises(CheckpointError, match=r"colbert_linear\.pt does not hold one linear layer"):
        read(tmp_path)
