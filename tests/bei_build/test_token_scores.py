"""Language models as rerankers: the scores of one or two tokens, against transformers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bei.core import Float32Array, PackedBatch
from bei.errors import CheckpointError, ConfigError, WeightsError
from tests.support.builds import build_artifact, random_encodings, running
from tests.support.checkpoints import change_config, read_tensors, write_json
from tests.support.reading import read, refused, saved, without


@pytest.mark.parametrize("tokens", [("t", "he"), ("he",)], ids=["two", "one"])
@pytest.mark.parametrize(
    "name", ["Qwen3ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "CohereForCausalLM"]
)
def test_tied_language_models_score_tokens_by_their_embeddings(
    name: str, tokens: tuple[str, ...], tmp_path: Path
) -> None:
    folder = saved(tmp_path / "tied", name)
    assert not any(tensor.startswith("lm_head") for tensor in read_tensors(folder))
    assert_scores_are_those_of_transformers(folder, tokens, tmp_path)


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "GraniteForCausalLM"]
)
def test_language_models_score_tokens_by_their_last_matrix(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "untied", name)
    assert "lm_head.weight" in read_tensors(folder)
    assert_scores_are_those_of_transformers(folder, ("t", "he"), tmp_path)


@pytest.mark.parametrize("tokens", [("t", "he"), ("he",)], ids=["two", "one"])
@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_the_soft_cap_of_a_language_model_bends_each_score(name: str, tokens: tuple[str, ...], tmp_path: Path) -> None:
    folder = saved(tmp_path / "capped", name)
    change_config(folder, final_logit_softcapping=0.5)
    capped = assert_scores_are_those_of_transformers(folder, tokens, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "final_logit_softcapping": None})  # left out it would be Gemma 2's 30
    assert np.abs(assert_scores_are_those_of_transformers(folder, tokens, tmp_path) - capped).min() > 0.02


def assert_scores_are_those_of_transformers(folder: Path, tokens: tuple[str, ...], tmp_path: Path) -> Float32Array:
    """Compare the scores for texts of two lengths."""
    checkpoint = read(folder, score_tokens=tokens)
    *no, yes = (checkpoint.tokenizer.token_to_id(token) for token in tokens)
    texts = random_encodings([4, 13], 50)
    artifact = build_artifact(folder, tmp_path / "artifact", score_tokens=tokens, verify=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()  # type: ignore[no-untyped-call]
    with running(artifact) as engine:
        rows = engine.run(PackedBatch.from_encodings(texts))["logits"]
    for row, text in zip(rows, texts, strict=True):
        with torch.no_grad():
            scores = model(torch.from_numpy(text.input_ids.astype(np.int64))[None]).logits[0, -1]
        np.testing.assert_allclose(row, [scores[yes] - scores[no].sum()], atol=1e-4)
    return rows


def test_a_language_model_that_is_not_tied_needs_its_last_matrix(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaForCausalLM")
    tokens: dict[str, Any] = {"score_tokens": ("t", "he")}
    read(tmp_path, **tokens).weights().close()
    without(tmp_path, "lm_head.")
    refused(tmp_path, WeightsError, r"^Tensor lm_head\.weight is missing\.", **tokens)
    read(tmp_path).weights().close()  # an embedder does not read it
    change_config(tmp_path, tie_word_embeddings=True)
    read(tmp_path, **tokens).weights().close()
    without(tmp_path, "model.embed_tokens.")
    refused(tmp_path, WeightsError, r"^Tensor lm_head\.weight is missing \(and 1 more\)", **tokens)


@pytest.mark.parametrize("cap", [0.0, -30.0, float("inf"), float("nan")])
def test_a_soft_cap_must_be_above_zero(cap: float, tmp_path: Path) -> None:
    folder = saved(tmp_path, "Gemma2ForCausalLM")
    change_config(folder, final_logit_softcapping=cap)
    message = rf"final_logit_softcapping = {cap}, which is no number above 0: set it to null"
    refused(folder, CheckpointError, message, score_tokens=("t", "he"))
    read(folder).weights().close()  # an embedder does not read it


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ("no", "he"),
            "'no' is not one token of the vocabulary. Name tokens as the vocabulary spells",
        ),
        (("hexx",), "'hexx' is not one token of the vocabulary"),
    ],
)
def test_score_tokens_must_be_tokens(tokens: tuple[str, ...], message: str, tmp_path: Path) -> None:
    refused(saved(tmp_path, "Qwen3ForCausalLM"), ConfigError, message, score_tokens=tokens)


def test_score_tokens_need_a_language_model(bert: Path) -> None:
    refused(bert, ConfigError, "bert has no scores of tokens. Leave score_tokens out", score_tokens=("no", "yes"))
