"""Settings of sentence-transformers 6 that ask for other outputs, vectors or scores than bei gives are refused by name.

What the library does by them is in base/modules/transformer.py, sentence_transformer/model.py, sparse_encoder/model.py
and multi_vector_encoder/model.py of 6.2.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bei.errors import CheckpointError
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from tests.bei_build.checkpoint.test_sentence_transformers_outputs import modules
from tests.support.builds import open_engine
from tests.support.checkpoints import (
    HIDDEN,
    Dense,
    Normalize,
    add_modules,
    change_config,
    save_checkpoint,
    save_dense,
    write_json,
)
from tests.support.reading import read, refused, saved

STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
SCORES = {"method": "forward", "method_output_name": "logits"}
BASE = "sentence_transformers.base.modules"
MODEL = "config_sentence_transformers.json"


def pooled(folder: Path, **settings: Any) -> Path:
    add_modules(save_checkpoint(folder), ("mean",), (Normalize(),))
    write_json(folder / "sentence_bert_config.json", settings)
    return folder


def splade(folder: Path, **settings: Any) -> Path:
    save_checkpoint(folder, task="ForMaskedLM")
    _, pooling = modules(folder, f"{BASE}.transformer.Transformer", "sentence_transformers.x.SpladePooling")
    write_json(pooling / "config.json", {"pooling_strategy": "max", "activation_function": "relu"})
    write_json(folder / "sentence_bert_config.json", settings)
    return folder


def classifier(folder: Path, task: str = "ForSequenceClassification", **settings: Any) -> Path:
    save_checkpoint(folder, task=task)
    modules(folder, f"{BASE}.transformer.Transformer")
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "sequence-classification", **settings})
    return folder


def multi_vector(folder: Path, normalized: str | None = "token_embeddings", **settings: Any) -> Path:
    """A MultiVectorEncoder; ``normalized``: the feature that its Normalize reads, None without the module."""
    save_checkpoint(folder)
    kinds = [f"{BASE}.transformer.Transformer", f"{BASE}.dense.Dense", "sentence_transformers.x.MultiVectorMask"]
    dense, mask, *normalize = modules(folder, *kinds, *([f"{BASE}.normalize.Normalize"] if normalized else []))[1:]
    save_dense(dense, HIDDEN, Dense(8, "Identity", bias=False))
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    write_json(dense / "config.json", {**json.loads((dense / "config.json").read_text()), **names})
    write_json(mask / "config.json", {"skiplist_words": []})
    for path in normalize:
        write_json(path / "config.json", dict.fromkeys(names, normalized))
    write_json(folder / MODEL, {"model_type": "MultiVectorEncoder", "similarity_fn_name": "maxsim", **settings})
    return folder


def test_what_the_library_writes_for_each_kind_of_model_is_taken(tmp_path: Path) -> None:
    by_default: dict[str, Any] = {"modality_config": {"text": STATES}, "module_output_name": "token_embeddings"}
    assert read(pooled(tmp_path / "pooled", transformer_task="feature-extraction", **by_default)).files.pooling
    by_default["modality_config"] = {"text": {**STATES, "method_output_name": ["last_hidden_state"]}}
    assert read(pooled(tmp_path / "listed", **by_default)).files.pooling
    by_default["modality_config"] = {"text": SCORES}
    assert read(splade(tmp_path / "splade", transformer_task="fill-mask", **by_default)).files.sparse
    by_default["module_output_name"] = "scores"
    assert read(classifier(tmp_path / "classifier", **by_default)).spec.head("logits")
    assert read(multi_vector(tmp_path / "vectors")).files.normalize


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"modality_config": {"text": {**STATES, "method_output_name": ["hidden_states", -2]}}},
            r"takes \['hidden_states', -2\] of the method 'forward' for text .* bei takes last_hidden_state",
        ),
        ({"modality_config": {"text": SCORES}}, "takes 'logits' of the method 'forward' for text"),
        (
            {"modality_config": {"text": {"method": "get_text_features", "method_output_name": None}}},
            "takes None of the method 'get_text_features' for text",
        ),
        ({"modality_config": {"image": STATES}}, "modality_config for image alone"),
        ({"modality_config": {"text": 1}}, "text = 1: correct it"),
        (
            {"modality_config": {"text": STATES}, "module_output_name": "sentence_embedding"},
            "module_output_name 'sentence_embedding', and the modules behind it read token_embeddings",
        ),
        ({"transformer_task": "fill-mask"}, "transformer_task 'fill-mask', .* needs feature-extraction"),
        (
            {"max_seq_length": 40, "processor_kwargs": {"model_max_length": 20}},
            "max_seq_length = 40 and the tokenizer's model_max_length = 20, .* take one out",
        ),
    ],
)
def test_a_pooling_of_anything_but_the_last_states_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(pooled(tmp_path, **settings), CheckpointError, message)


@pytest.mark.parametrize(
    "settings", [{}, {"skiplist_words": [], "keep_only_token_ids": None}, {"skiplist_words": [","]}], ids=str
)
def test_tokens_that_a_mask_hides_from_a_pooling_are_not_pooled_silently(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path)
    kinds = [
        f"{BASE}.transformer.Transformer",
        "sentence_transformers.x.MultiVectorMask",
        "sentence_transformers.x.Pooling",
    ]
    _, mask, pooling = modules(tmp_path, *kinds)
    write_json(pooling / "config.json", {"embedding_dimension": HIDDEN, "pooling_mode": "mean"})
    write_json(mask / "config.json", settings)
    if settings.get("skiplist_words"):
        refused(tmp_path, CheckpointError, "has skiplist_words: the tokens that it hides")
    else:
        assert read(tmp_path).files.pooling == ("mean",)


def test_two_equal_lengths_are_taken(tmp_path: Path) -> None:
    settings = {"max_seq_length": 20, "processor_kwargs": {"model_max_length": 20}}
    assert read(pooled(tmp_path, **settings)).max_seq_len == 20


def test_a_length_of_the_files_that_is_not_reached_is_noted(tmp_path: Path) -> None:
    text = io.StringIO()
    folder = add_modules(saved(tmp_path / "long", "LlamaModel"))
    change_config(folder, max_position_embeddings=16)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64})
    config = BuildConfig(model=str(folder), out=str(tmp_path / "out"), precision="fp32")
    build(config, open_engine, Progress(Console(file=text, width=200)))
    assert "max_seq_length is 64; built for 16: bei cuts longer texts there" in text.getvalue()


def test_a_task_that_the_modules_cannot_use_is_refused(tmp_path: Path) -> None:
    message = "transformer_task 'feature-extraction', .* needs fill-mask"
    refused(splade(tmp_path / "splade", transformer_task="feature-extraction"), CheckpointError, message)
    message = "transformer_task 'feature-extraction', said or by default"
    refused(splade(tmp_path / "unsaid"), CheckpointError, message)
    folder = classifier(tmp_path / "classifier", module_output_name="logits", modality_config={"text": SCORES})
    refused(folder, CheckpointError, "module_output_name 'logits', .* read scores")
    folder = classifier(tmp_path / "base", "Model")
    refused(folder, CheckpointError, "class in config.json has no labels: correct its architectures")
    assert read(folder, task="embed").spec.head("embedding")


def test_vectors_that_the_library_cuts_are_refused(tmp_path: Path) -> None:
    dense, sparse = pooled(tmp_path / "dense"), splade(tmp_path / "sparse", transformer_task="fill-mask")
    write_json(dense / MODEL, {"model_type": "SentenceTransformer", "truncate_dim": 4})
    refused(dense, CheckpointError, "truncate_dim = 4, .* take truncate_dim out, and give dimensions in requests")
    write_json(dense / MODEL, {"model_type": "SentenceTransformer", "truncate_dim": HIDDEN, "max_active_dims": 3})
    assert read(dense).files.truncate_dim == HIDDEN
    write_json(sparse / MODEL, {"model_type": "SparseEncoder", "max_active_dims": 3})
    refused(sparse, CheckpointError, "max_active_dims = 3, .* give top_k in requests")


@pytest.mark.parametrize("normalized", [None, "sentence_embedding"])
def test_a_multi_vector_encoder_whose_vectors_are_not_of_unit_length_is_refused(
    normalized: str | None, tmp_path: Path
) -> None:
    folder = multi_vector(tmp_path, normalized)
    refused(folder, CheckpointError, "no Normalize of token_embeddings ends .* add the module")
    write_json(folder / MODEL, {"model_type": "ColBERT"})  # PyLate normalizes without the module
    assert read(folder).files.normalize


def test_the_mean_of_maxsim_is_refused(tmp_path: Path) -> None:
    folder = multi_vector(tmp_path, similarity_fn_name="meanmaxsim")
    refused(folder, CheckpointError, "similarity_fn_name 'meanmaxsim', .* set similarity_fn_name to maxsim")
