"""OpenDecider-nano: built, asked by ``bei.Model`` and over HTTP, against torch, and its library where it is there."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Model
from bei.artifact.manifest import Artifact
from bei.errors import CheckpointError, InvalidRequestError
from tests.bei.server.app import App, check_error
from tests.bei_build.families.test_gliner2_decisions import shares_of
from tests.bei_build.families.test_gliner2_descriptions import texts_of
from tests.support.builds import build_artifact, open_engine
from tests.support.checkpoints import change_json
from tests.support.cpus import needs_bf16
from tests.support.opendecider_models import OpenDeciderReference, save_opendecider

QUESTIONS: dict[str, Any] = {
    "which": {
        "type": "choice",
        "instructions": "What sat <mask> there?",
        "criteria": {"dog": None, "cat": "an animal", "a": "a", "the mat": "a \u7d68\u6bef"},
    },
    "how": {"type": "score", "instructions": "How it is", "criteria": ["calm", "1", "loud <mask>", "\U0001f44d"]},
    "is": {"type": "noul", "instructions": "It is a cat"},
    "both": {"type": "noul", "instructions": "It is", "criteria": {"true": "about a cat", "false": "of no cat"}},
    "many": {"type": "choice", "instructions": "Which number?", "criteria": {str(place): None for place in range(78)}},
}
TEXT = "the cat sat on a mat"
TEXTS = [TEXT, "cat", "hello <mask> world</s>", "\u65e5\u672c\u8a9e [SEP] " * 9, *texts_of(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_opendecider(tmp_path_factory.mktemp("opendecider") / "checkpoint")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Artifact:
    return build_artifact(folder, folder.parent / "artifact", name="nano")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def test_the_engine_agrees_with_the_module(artifact: Artifact) -> None:
    (output,) = artifact.certificate.outputs
    assert (output.output, output.failures) == ("option_logits", [])
    assert output.max_abs_difference < 1e-3
    assert artifact.manifest.tasks == ["decide"]
    assert artifact.manifest.max_seq_len == 512  # of its own file, not its encoder's 2048


def test_probabilities_are_those_of_torch_though_texts_spell_special_tokens(model: Model, folder: Path) -> None:
    reference = OpenDeciderReference(folder)
    spread: dict[str, list[float]] = {name: [] for name in QUESTIONS}
    for text, answers in zip(TEXTS, model.decide(TEXTS, QUESTIONS), strict=True):
        for name, question in QUESTIONS.items():
            expected = reference.probabilities(text, question)
            assert shares_of(answers[name]) == pytest.approx(expected, abs=2e-4), (text, name)
            spread[name].append(max(expected) - min(expected))
    assert min(map(max, spread.values())) > 0.01  # of 78 options each has 0.013


@pytest.mark.slow
@needs_bf16
def test_bf16_is_within_its_bound(tmp_path: Path) -> None:
    folder = save_opendecider(tmp_path / "checkpoint", spread=0.05)
    artifact, reference = build_artifact(folder, tmp_path / "artifact", precision="bf16"), OpenDeciderReference(folder)
    assert artifact.certificate.passed
    with Model(artifact.path, tune="off") as model:
        found = model.decide(TEXTS, QUESTIONS)
    shares = [share for answers in found for name in QUESTIONS for share in shares_of(answers[name])]
    expected = [share for text in TEXTS for one in QUESTIONS.values() for share in reference.probabilities(text, one)]
    assert np.dot(shares, expected) / np.linalg.norm(shares) / np.linalg.norm(expected) >= 0.999


def test_another_order_of_choices_has_the_same_probabilities(model: Model) -> None:
    asked = QUESTIONS["which"]
    turned = {**asked, "criteria": dict(reversed(asked["criteria"].items()))}
    first, second = (model.decide([TEXT], {"q": one})[0]["q"] for one in (asked, turned))
    assert shares_of(first) == pytest.approx(shares_of(second), abs=1e-6)


def test_both_routes_answer_as_the_model_does(artifact: Artifact, model: Model) -> None:
    (expected,) = model.decide([TEXT], {"is": QUESTIONS["is"], "which": QUESTIONS["which"]})
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        body = {"state": TEXT, "questions": {name: QUESTIONS[name] for name in ("is", "which")}}
        answers = app.request("POST", "/v1/systemone", json.dumps(body).encode()).json()["answers"]
        asked = {"input": TEXT, "questions": [{"type": "predicate", "instructions": "It is a cat"}]}
        (predicate,) = app.request("POST", "/v1/decisions", json.dumps(asked).encode()).json()["answers"]
        long = {**body, "state": "cat " * 600}
        check_error(app.request("POST", "/v1/systemone", json.dumps(long).encode()), 400, "tokens")
    finally:
        app.close()
    yes = shares_of(expected["is"])[1]
    assert (answers["is"]["noul"], predicate["probability"]) == pytest.approx((yes, yes), abs=1e-5)
    shares = [answers["which"]["probabilities"][name] for name in sorted(QUESTIONS["which"]["criteria"])]
    assert shares == pytest.approx(shares_of(expected["which"]), abs=1e-5)


def test_nothing_is_cut(model: Model) -> None:
    for question, said in (
        ({"type": "noul", "instructions": "cat " * 600}, "shorten its instructions"),
        ({"type": "noul", "instructions": " "}, "has no instructions"),
        ({"type": "choice", "instructions": "a", "criteria": {"cat " * 600: None, "b": None}}, "shorten it"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            model.decide([TEXT], {"q": question})


def test_checkpoints_that_are_no_nano_are_refused(tmp_path: Path) -> None:
    folder = save_opendecider(tmp_path / "checkpoint")
    change_json(folder / "opendecider.json", max_len="all")
    with pytest.raises(CheckpointError, match="max_len = 'all'"):
        build_artifact(folder, tmp_path / "out")
    change_json(folder / "opendecider.json", max_len=512, kind="micro")
    with pytest.raises(CheckpointError, match=r"opendecider\.json is not of the kind 'nano'"):
        build_artifact(folder, tmp_path / "out")
    change_json(folder / "opendecider.json", kind="nano")
    change_json(folder / "config.json", model_type="bert")
    with pytest.raises(CheckpointError, match=r"bei builds OpenDecider-nano on modernbert"):
        build_artifact(folder, tmp_path / "out")
    (folder / "head.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"without head\.safetensors"):
        build_artifact(folder, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_probabilities_are_the_opendecider_librarys(folder: Path, model: Model) -> None:
    library = pytest.importorskip("opendecider")
    theirs = library.load(str(folder), device="cpu")
    rng, spread = random.Random(40), []
    texts = [*texts_of(500), *TEXTS, json.dumps({"a": ["\u65e5", 1]}, ensure_ascii=False)]
    asked = {name: dict(question) for name, question in QUESTIONS.items()}
    for question in asked.values():
        if question["type"] == "choice":  # the order in which bei shows them
            question["criteria"] = dict(
                sorted(question["criteria"].items(), key=lambda one: f"{one[0]}: {one[1]}" if one[1] else one[0])
            )
    for text, ours in zip(texts, model.decide(texts, QUESTIONS), strict=True):
        name = rng.choice([*asked])
        answer = theirs.system_one(text, {name: asked[name]})["answers"][name]
        shares = answer["probabilities"]
        names = ("false", "true") if "noul" in answer else sorted(shares) if "choice" in answer else shares
        expected = [shares[key] for key in names]
        assert shares_of(ours[name]) == pytest.approx(expected, abs=2e-4), (text, name)
        spread.append(expected[0])
    assert float(np.ptp(spread)) > 0.2
