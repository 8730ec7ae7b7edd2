"""Repositories that hold a LoRA adapter and no model: built with their base, or refused with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.errors import CheckpointError, CheckpointNotFoundError
from bei_build.checkpoint.adapter_folder import with_base
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.weights.peft_adapter import CONFIG, WEIGHTS
from tests.bei_build.quantization.fp8 import quantize
from tests.bei_build.weights.test_peft_adapters import by_hand, rows_of, save_lora
from tests.support.builds import build_artifact, random_encodings
from tests.support.checkpoints import read_tensors, write_json, write_tensors
from tests.support.reading import saved


def save_repository(tmp_path: Path, **settings: Any) -> tuple[Path, Path]:
    """A base model, and an adapter's repository of it."""
    base = saved(tmp_path / "base", "BertModel")
    given = {"base_model_name_or_path": str(base), **settings}
    return base, save_lora(tmp_path / "repository", base, "BertModel", 1, **given)


def test_the_adapter_is_merged_into_the_base_that_it_names(tmp_path: Path) -> None:
    base, repository = save_repository(tmp_path)
    artifact = build_artifact(repository, tmp_path / "artifact", pooling="mean", normalize=False)
    manifest = artifact.manifest
    assert (manifest.name, manifest.source.model, manifest.spec.adapter) == ("repository", "repository", None)
    assert artifact.certificate.reference.startswith("transformers")
    texts = random_encodings((5, 17, 2), manifest.spec.vocab_size, seed=4)
    for row, text in zip(rows_of(artifact, texts), texts, strict=True):
        np.testing.assert_allclose(row, by_hand(base, repository, text), atol=2e-5, rtol=0)


def test_another_adapter_is_computed_beside_the_merged_one(tmp_path: Path) -> None:
    base, repository = save_repository(tmp_path)
    other = save_lora(tmp_path / "other", base, "BertModel", 2)
    asked: dict[str, Any] = {"lora": (f"other={other}",), "pooling": "mean", "normalize": False}
    artifact = build_artifact(repository, tmp_path / "artifact", **asked)
    (text,) = random_encodings((9,), artifact.manifest.spec.vocab_size, seed=4)
    plain, both = rows_of(artifact, [text, text._replace(adapter=1)])
    np.testing.assert_allclose(plain, by_hand(base, repository, text), atol=2e-5, rtol=0)
    assert np.abs(plain - both).max() > 0.05


def test_the_repositorys_own_modules_and_tokenizer_are_read(tmp_path: Path) -> None:
    base, repository = save_repository(tmp_path)
    kinds = ("Transformer", "Pooling")
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": "" if not at else "1_Pooling",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    write_json(repository / "modules.json", modules)
    (repository / "1_Pooling").mkdir()
    write_json(repository / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode": "max"})
    text = (base / "tokenizer.json").read_text()
    (repository / "tokenizer.json").write_text(text.replace('"hello"', '"hallo"'))
    (repository / "tokenizer_config.json").write_text((base / "tokenizer_config.json").read_text())
    checkpoint = read_checkpoint(locate(str(repository)))
    assert checkpoint.spec.heads[0].pooling == ("max",)
    assert checkpoint.tokenizer.token_to_id("hallo") == read_checkpoint(locate(str(base))).tokenizer.token_to_id(
        "hello"
    )


def test_the_base_s_sentencepiece_is_none_of_sentence_transformers_files(tmp_path: Path) -> None:
    base, repository = save_repository(tmp_path)
    write_json(repository / "modules.json", [])
    for name in ("sentencepiece.bpe.model", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (base / name).write_text("{}")
    location, _ = with_base(locate(str(repository)))
    linked = {path.name for path in location.folder.iterdir()}
    assert "sentencepiece.bpe.model" in linked
    assert not linked & {"sentence_bert_config.json", "config_sentence_transformers.json"}


def test_fp8_scales_of_the_base_stay_those_of_matrices_that_the_adapter_leaves_as_they_are(tmp_path: Path) -> None:
    base, repository = save_repository(tmp_path)
    kept = {name: tensor for name, tensor in read_tensors(repository, WEIGHTS).items() if ".query." in name}
    write_tensors(repository, kept, WEIGHTS)
    quantize(base)
    with read_checkpoint(locate(str(repository))).weights() as weights:
        for kind, is_kept in (("query", False), ("key", True), ("value", True)):
            name = f"layers.0.attention.{kind}.weight"
            assert (weights.row_scales(name) is not None) == is_kept
            assert (weights.input_scale(name) is not None) == is_kept


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"base_model_name_or_path": None},
            CheckpointError,
            "does not say of which model: build that model with --lora",
        ),
        (
            {"base_model_name_or_path": "./nowhere"},
            CheckpointNotFoundError,
            r"an adapter of \./nowhere\. .*--lora NAME=",
        ),
    ],
)
def test_what_is_missing_is_said(settings: dict[str, Any], error: type[Exception], said: str, tmp_path: Path) -> None:
    _, repository = save_repository(tmp_path, **settings)
    with pytest.raises(error, match=said):
        read_checkpoint(locate(str(repository)))


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    _, repository = save_repository(tmp_path)
    second = tmp_path / "second"
    second.mkdir()
    write_json(
        second / CONFIG, {**json.loads((repository / CONFIG).read_text()), "base_model_name_or_path": str(repository)}
    )
    with pytest.raises(CheckpointError, match="which holds one itself"):
        read_checkpoint(locate(str(second)))


def test_what_bei_does_not_compute_is_refused_by_name(tmp_path: Path) -> None:
    _, repository = save_repository(tmp_path)
    settings = json.loads((repository / CONFIG).read_text())
    write_json(repository / CONFIG, {**settings, "use_dora": True})
    with pytest.raises(CheckpointError, match="use_dora = true, which bei does not compute"):
        read_checkpoint(locate(str(repository)))


def test_an_adapter_beside_weights_is_refused(tmp_path: Path) -> None:
    base, repository = save_repository(tmp_path)
    write_tensors(repository, read_tensors(base))
    with pytest.raises(CheckpointError, match="beside the weights of a model"):
        read_checkpoint(locate(str(repository)))
