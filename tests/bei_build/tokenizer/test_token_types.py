"""Token types of a pair's second text, against transformers, which gives some models none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bei.core import Float32Array, PackedBatch
from bei.tokenizer.encoder import TextEncoder
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.tokenizer.artifact_tokenizer import drop_token_types
from tests.support.builds import build_artifact, running
from tests.support.checkpoints import save_checkpoint, wordpiece_tokenizer, write_json
from tests.support.reading import read

PAIRS = [("the cat", "sat on a mat"), ("hello?", "world")]
NAMES = ["input_ids", "attention_mask"]
WITHOUT: list[dict[str, Any]] = [
    {"model_input_names": NAMES},
    {"tokenizer_class": "DistilBertTokenizer"},
    # transformers 4 gives them, 5 does not.
    {"tokenizer_class": "PreTrainedTokenizerFast"},
    {"tokenizer_class": "TokenizersBackend"},
    {"tokenizer_class": "SomeTokenizerOfTheirs"},
]
WITH: list[dict[str, Any]] = [
    {},
    {"model_input_names": [*NAMES, "token_type_ids"], "tokenizer_class": "DistilBertTokenizer"},
    {"tokenizer_class": "BertTokenizer"},
]


def pair_model(folder: Path, **config: Any) -> Path:
    save_checkpoint(folder, task="ForSequenceClassification", num_labels=1)
    write_json(folder / "tokenizer_config.json", config)
    return folder


def library_scores(folder: Path) -> Float32Array:
    """Scores by sentence-transformers' CrossEncoder: the model gets all that its tokenizer returns."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [model(**tokenizer(*pair, return_tensors="pt")).logits[0].numpy() for pair in PAIRS]
    return np.stack(rows)


@pytest.mark.parametrize("names", [NAMES, [*NAMES, "token_type_ids"], None], ids=["without", "with", "unsaid"])
def test_scores_of_pairs_are_the_librarys(names: list[str] | None, tmp_path: Path) -> None:
    settings = {"model_input_names": names} if names else {}
    folder = pair_model(tmp_path / "pairs", tokenizer_class="TokenizersBackend", **settings)
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    encodings = TextEncoder(artifact.path / "tokenizer.json", 48).encode(PAIRS)
    with running(artifact) as engine:
        actual = engine.run(PackedBatch.from_encodings(encodings))["logits"]
    np.testing.assert_allclose(actual, library_scores(folder), atol=2e-4)


@pytest.mark.parametrize("config", WITHOUT)
def test_a_model_that_is_given_no_token_types_gets_none(config: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = read(pair_model(tmp_path, **config)).tokenizer
    for pair in PAIRS:
        actual, expected = tokenizer.encode(*pair), wordpiece_tokenizer().encode(*pair)
        assert actual.ids == expected.ids
        assert any(expected.type_ids)
        assert not any(actual.type_ids)
        assert tokenizer.encode(pair[0]).ids == wordpiece_tokenizer().encode(pair[0]).ids


@pytest.mark.parametrize("config", WITH)
def test_other_models_get_the_token_types_of_their_tokenizer(config: dict[str, Any], tmp_path: Path) -> None:
    pair = read(pair_model(tmp_path, **config)).tokenizer.encode("the cat", "mat")
    assert pair.type_ids == wordpiece_tokenizer().encode("the cat", "mat").type_ids


@pytest.mark.parametrize("config", WITHOUT[2:])
def test_the_token_types_of_the_file_can_be_asked_for(config: dict[str, Any], tmp_path: Path) -> None:
    location = locate(str(pair_model(tmp_path, **config)))
    pair = read_checkpoint(location, tokenizer_choice="file").tokenizer.encode("the cat", "mat")
    assert pair.type_ids == wordpiece_tokenizer().encode("the cat", "mat").type_ids


def test_pairs_without_a_template_lose_their_types_too() -> None:
    tokenizer = wordpiece_tokenizer()
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel()])
    before = tokenizer.encode("the cat", "a mat")
    drop_token_types(tokenizer)
    after = tokenizer.encode("the cat", "a mat")
    assert any(before.type_ids)
    assert not any(after.type_ids)
    assert after.ids == before.ids
