"""Decisions of built models: as transformers' zero-shot pipeline computes them, and by the logits of a reranker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from bei.errors import InvalidRequestError
from bei.offline.model import Model
from bei.tasks.questions import ChoiceAnswer, NoulAnswer, ScoreAnswer
from tests.e2e.kinds import case, labels
from tests.support.builds import build_artifact
from tests.support.zoo import save_case

TOLERANCE = 2e-4
TEXTS = ["the cats", "Hello, world!", "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f600", "a cat " * 3]
OPTIONS = ["cat", "the world", "\u4e16\u754c"]
QUESTIONS: dict[str, dict[str, Any]] = {
    "which": {"type": "choice", "instructions": "It is {}!", "criteria": dict.fromkeys(OPTIONS)},
    "how": {"type": "score", "instructions": "It is {}!", "criteria": OPTIONS},
    "is": {"type": "noul", "instructions": "It is a cat!"},
}


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Any]]:
    """A model of natural language inference, and transformers' pipeline of its checkpoint."""
    folder = tmp_path_factory.mktemp("nli")
    named = labels("contradiction", "neutral", "entailment")
    save_case(folder / "checkpoint", case("BertForSequenceClassification", **named))
    artifact = build_artifact(folder / "checkpoint", folder / "artifact", reference="engine")
    with Model(artifact.path, tune="off") as model:
        tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint", pad_token="[PAD]")
        yield model, pipeline("zero-shot-classification", str(folder / "checkpoint"), tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Path]]:
    folder = tmp_path_factory.mktemp("reranker")
    save_case(folder / "checkpoint", case("BertForSequenceClassification", num_labels=1))
    artifact = build_artifact(folder / "checkpoint", folder / "artifact", reference="engine")
    with Model(artifact.path, tune="off") as model:
        yield model, folder / "checkpoint"


def rows_of(answers: dict[str, Any]) -> dict[str, list[float]]:
    """The probabilities in the order of the options; of yes and no that of yes."""
    which, how, yes = (answers[name] for name in QUESTIONS)
    assert isinstance(which, ChoiceAnswer)
    assert isinstance(how, ScoreAnswer)
    assert isinstance(yes, NoulAnswer)
    assert which.choice == max(which.probabilities, key=which.probabilities.__getitem__)
    assert how.score == pytest.approx(sum(level * share for level, share in enumerate(how.probabilities)))
    return {"which": [which.probabilities[one] for one in OPTIONS], "how": [*how.probabilities], "is": [yes.noul]}


def test_decisions_are_what_the_zero_shot_pipeline_answers(nli: tuple[Model, Any]) -> None:
    model, zero_shot = nli
    for text, answers in zip(TEXTS, model.decide(TEXTS, QUESTIONS), strict=True):
        found = rows_of(answers)
        theirs = zero_shot(text, candidate_labels=OPTIONS, hypothesis_template="It is {}!")
        shares = dict(zip(theirs["labels"], theirs["scores"], strict=True))
        expected = [shares[option] for option in OPTIONS]
        np.testing.assert_allclose(found["which"], expected, atol=TOLERANCE)
        np.testing.assert_allclose(found["how"], expected, atol=TOLERANCE)
        alone = zero_shot(text, candidate_labels=["a cat"], hypothesis_template="It is {}!", multi_label=True)
        np.testing.assert_allclose(found["is"], alone["scores"], atol=TOLERANCE)
    assert max(expected) - min(expected) > 20 * TOLERANCE  # options of one probability would show nothing


@torch.no_grad()
def test_a_reranker_s_decisions_are_the_softmax_of_its_scores(reranker: tuple[Model, Path]) -> None:
    model, checkpoint = reranker
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, pad_token="[PAD]")
    reference = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()

    def scores(text: str, statements: list[str]) -> torch.Tensor:
        pairs = tokenizer(statements, [text] * len(statements), padding=True, return_tensors="pt")
        logits: torch.Tensor = reference(**pairs).logits[:, 0]
        return logits

    for text, answers in zip(TEXTS, model.decide(TEXTS, QUESTIONS), strict=True):
        found = rows_of(answers)
        expected = scores(text, [f"It is {option}!" for option in OPTIONS]).softmax(0).numpy()
        np.testing.assert_allclose(found["which"], expected, atol=TOLERANCE)
        np.testing.assert_allclose(found["how"], expected, atol=TOLERANCE)
        np.testing.assert_allclose(found["is"], scores(text, ["It is a cat!"]).sigmoid(), atol=TOLERANCE)
    assert expected.max() - expected.min() > 20 * TOLERANCE


def test_a_question_in_itself_or_of_half_characters_is_refused(reranker: tuple[Model, Path]) -> None:
    """They were a RecursionError and a UnicodeEncodeError."""
    itself: dict[str, Any] = {"type": "noul"}
    itself["instructions"] = itself
    for wrong in (itself, {"type": "noul", "instructions": "\ud800"}):
        with pytest.raises(InvalidRequestError, match="The question 'a' is not valid"):
            reranker[0].decide(["the cats"], {"a": wrong})


@pytest.mark.parametrize("wrong", [[{"type": "noul"}], {1: {"type": "noul", "instructions": "a cat"}}, "is it?", None])
def test_questions_without_names_are_refused(reranker: tuple[Model, Path], wrong: Any) -> None:
    """They were an AttributeError and a TypeError."""
    with pytest.raises(InvalidRequestError, match="questions must be a mapping from names"):
        reranker[0].decide(["the cats"], wrong)
