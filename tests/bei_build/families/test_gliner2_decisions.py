"""Decisions by GLiNER2: each question is a classification of its own, as the gliner2 library scores it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Model
from bei.artifact.manifest import Artifact
from bei.cli.calibrate import calibrate
from bei.errors import InputTooLongError, InvalidRequestError
from bei.tasks.questions import ChoiceAnswer, NoulAnswer, ScoreAnswer
from tests.bei.server.app import App, check_error
from tests.bei_build.families.test_gliner import TEXT
from tests.bei_build.families.test_gliner2 import built
from tests.bei_build.families.test_gliner2_descriptions import texts_of
from tests.support.builds import build_artifact, open_engine
from tests.support.gliner2_models import save_gliner2

CRITERIA = {"dog": None, "cat": "an animal", "the mat": "a rug"}
QUESTIONS: dict[str, Any] = {
    "which": {"type": "choice", "instructions": "What sat there", "criteria": CRITERIA},
    "how": {"type": "score", "instructions": "How it is", "criteria": ["calm", "a bit loud", "loud"]},
    "is": {"type": "noul", "instructions": "It is a cat"},
    "both": {"type": "noul", "instructions": "It is", "criteria": {"true": "about a cat", "false": "of no cat"}},
}
# The same as classifications of a schema, where all labels are described, or none.
CLASSES: dict[str, Any] = {
    "how": {"task": "How it is", "labels": ["calm", "a bit loud", "loud"]},
    "is": {"task": "It is a cat", "labels": ["no", "yes"]},
    "both": {"task": "It is", "labels": {"no": "of no cat", "yes": "about a cat"}},
}
SHARES = {"multi_label": True, "class_act": "softmax", "cls_threshold": 0.0}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner2"), counting_layer="count_lstm_v2")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def shares_of(answer: Any) -> list[float]:
    """Of the options, choices by name."""
    if isinstance(answer, ChoiceAnswer):
        return [answer.probabilities[name] for name in sorted(answer.probabilities)]
    if isinstance(answer, ScoreAnswer):
        return list(answer.probabilities)
    assert isinstance(answer, NoulAnswer)
    return [1 - answer.noul, answer.noul]


@pytest.mark.parametrize("name", ["how", "is", "both"])
def test_a_question_is_a_classification_of_its_own(model: Model, name: str) -> None:
    texts = [TEXT, "cat", *texts_of(6)]
    found = model.decide(texts, QUESTIONS)
    expected = model.extract_schema(texts, classifications=[{**CLASSES[name], **SHARES}])
    for answers, one in zip(found, expected, strict=True):
        wanted = one.classifications[CLASSES[name]["task"]]
        assert isinstance(wanted, list)
        assert shares_of(answers[name]) == pytest.approx([each.score for each in wanted], abs=1e-5)


def test_questions_and_texts_of_one_request_do_not_change_each_other(model: Model) -> None:
    texts = [TEXT, "cat", "hello world " * 6]
    together = model.decide(texts, QUESTIONS)
    for text, answers in zip(texts, together, strict=True):
        for name, question in QUESTIONS.items():
            (alone,) = model.decide([text], {name: question})
            assert shares_of(alone[name]) == pytest.approx(shares_of(answers[name]), abs=1e-5)
    assert shares_of(together[0]["which"]) != pytest.approx(shares_of(together[1]["which"]), abs=1e-4)


def test_another_order_of_choices_has_the_same_probabilities(model: Model) -> None:
    turned = {**QUESTIONS["which"], "criteria": dict(reversed(CRITERIA.items()))}
    first, second = (model.decide([TEXT], {"q": one})[0]["q"] for one in (QUESTIONS["which"], turned))
    assert isinstance(first, ChoiceAnswer)
    assert isinstance(second, ChoiceAnswer)
    assert first.probabilities == pytest.approx(second.probabilities, abs=1e-6)
    assert len({*first.probabilities.values()}) == len(CRITERIA)


def test_what_an_option_means_is_read(model: Model) -> None:
    bare = {**QUESTIONS["which"], "criteria": dict.fromkeys(CRITERIA)}
    first, second = (model.decide([TEXT], {"q": one})[0]["q"] for one in (QUESTIONS["which"], bare))
    assert shares_of(first) != pytest.approx(shares_of(second), abs=5e-6)


def test_a_model_that_classifies_alone_decides_too(model: Model, tmp_path: Path) -> None:
    folder = save_gliner2(tmp_path / "checkpoint", counting_layer="count_lstm_v2")
    artifact = build_artifact(folder, tmp_path / "artifact", task="zero_shot", verify=False)
    with Model(artifact.path, tune="off") as alone:
        (found,), (expected,) = (each.decide([TEXT], QUESTIONS) for each in (alone, model))
    for name in QUESTIONS:
        assert shares_of(found[name]) == pytest.approx(shares_of(expected[name]), abs=1e-5)


def test_both_routes_answer_as_the_model_does(artifact: Artifact, model: Model) -> None:
    (expected,) = model.decide([TEXT], QUESTIONS)
    choices = [{"value": name, **({"description": said} if said else {})} for name, said in CRITERIA.items()]
    asked = [{"type": "choice", "instructions": "What sat there", "choices": choices}]
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        first = app.request("POST", "/v1/systemone", json.dumps({"state": TEXT, "questions": QUESTIONS}).encode())
        second = app.request("POST", "/v1/decisions", json.dumps({"input": TEXT, "questions": asked}).encode())
    finally:
        app.close()
    assert (first.status_code, second.status_code) == (200, 200), first.text + second.text
    which = expected["which"]
    assert isinstance(which, ChoiceAnswer)
    assert first.json()["answers"]["which"]["probabilities"] == pytest.approx(which.probabilities, abs=1e-5)
    assert first.json()["answers"]["both"]["noul"] == pytest.approx(shares_of(expected["both"])[1], abs=1e-5)
    (answer,) = second.json()["answers"]
    found = {one["value"]: one["probability"] for one in answer["probabilities"]}
    assert found == pytest.approx(which.probabilities, abs=1e-5)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"criteria": dict.fromkeys(map(str, range(10_000)))}, "has 10000 choices"),
    ({"criteria": {f"the label number {place}": None for place in range(255)}}, "send fewer or shorter"),
    ({"criteria": {"a": None, " ": None}}, "empty one among its choices"),
    ({"criteria": {"a [E] b": None, "c": None}}, r"questions 'q' 0 has '\[E\]'"),
    ({"criteria": {"a": "b [SEP_TEXT]", "c": None}}, r"description of 'a' in questions 'q' has '\[SEP_TEXT\]'"),
    ({"instructions": "[P]"}, r"name of questions 'q' has '\[P\]'"),
    ({"criteria": {"\u732b": None, "\u72ac": None}}, "have the same tokens"),
    ({"criteria": {"cat": "b" * 40_000, "a": None}}, "shorten labels and descriptions"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[message for _, message in WRONG])
def test_options_that_do_not_fit_are_refused(model: Model, fields: dict[str, Any], message: str) -> None:
    asked = {"other": QUESTIONS["is"], "q": {**QUESTIONS["which"], **fields}}
    with pytest.raises(InvalidRequestError, match=message):
        model.decide([TEXT], asked)
    assert model.decide([TEXT], {"is": QUESTIONS["is"]})  # nothing of the other question is left


def test_a_text_that_is_too_long_is_refused(artifact: Artifact, model: Model) -> None:
    with pytest.raises(InputTooLongError, match="A text with a question and its options"):
        model.decide(["hello world " * 400], QUESTIONS)
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        body = {"state": "hello world " * 400, "questions": QUESTIONS}
        check_error(app.request("POST", "/v1/systemone", json.dumps(body).encode()), 400, "tokens", param="input")
    finally:
        app.close()


def test_a_temperature_is_fitted(artifact: Artifact, tmp_path: Path) -> None:
    again = save_gliner2(tmp_path / "checkpoint", counting_layer="count_lstm_v2")
    copy = build_artifact(again, tmp_path / "artifact")
    question, data = tmp_path / "question.json", tmp_path / "data.jsonl"
    question.write_text(json.dumps(QUESTIONS["which"]))
    names = [*CRITERIA]
    lines = [{"text": f"the cat {place}", "label": names[place % 3]} for place in range(60)]
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, record = calibrate(copy.path, data, question)
    assert record.task == "decide"
    assert record.after.nll <= record.before.nll
    assert record.temperature > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize("counting", ["count_lstm", "count_lstm_v2"])
def test_probabilities_are_the_gliner2_librarys(tmp_path: Path, counting: str) -> None:
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path, counting_layer=counting)
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    texts = texts_of(500)
    with Model(artifact.path, tune="off") as model:
        found = model.decide(texts, QUESTIONS)
    spread = []
    for name, one in CLASSES.items():
        schema = library.Schema.from_dict({"classifications": [{**one, **SHARES}]})
        answers = theirs.batch_extract(texts, schema, include_confidence=True)
        for text, ours, answer in zip(texts, found, answers, strict=True):
            wanted = [each["confidence"] for each in answer[one["task"]]]
            assert shares_of(ours[name]) == pytest.approx(wanted, abs=2e-4), text
            spread.append(wanted[0])
    assert float(np.ptp(spread)) > 0.03
