"""Laya: built, asked by ``bei.Model`` and over HTTP, and against torch, and the laya library where it is there."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bei import Model
from bei.artifact.label_layouts import OptionMarkers
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.cli.calibrate import calibrate
from bei.core import Encoding
from bei.errors import CheckpointError, ConfigError, InputTooLongError, InvalidRequestError, WeightsError
from bei.tasks import decision_readings
from bei.tasks.questions import ChoiceAnswer
from bei.tokenizer.option_prompt import OptionPrompt
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.torch_graph.model import packed_model
from tests.bei.server.app import App, check_error
from tests.bei.server.routes.test_decide import is_on_a_loop
from tests.bei_build.families.test_gliner2_decisions import shares_of
from tests.bei_build.families.test_gliner2_descriptions import texts_of
from tests.bei_build.torch_graph.rig import of_the_graph, of_the_module
from tests.support.builds import build_artifact, open_engine
from tests.support.checkpoints import change_json, read_tensors
from tests.support.cpus import needs_bf16
from tests.support.laya_models import LayaReference, save_laya

CRITERIA: dict[str, Any] = {"dog": None, "cat": "an animal", "the mat": "a \u7d68\u6bef"}
QUESTIONS: dict[str, Any] = {
    "which": {"type": "choice", "instructions": "What sat there?", "criteria": CRITERIA},
    "how": {
        "type": "score",
        "instructions": "How it is",
        "criteria": ["calm", "e\u0301cole", "loud <mask>", "\U0001f44d"],
    },
    "two": {"type": "score", "instructions": "Of two", "criteria": ["calm", "loud"]},
    "is": {"type": "noul", "instructions": "It is a cat <mask>"},
    "both": {"type": "noul", "instructions": "It is", "criteria": {"true": "about a cat", "false": "of no cat"}},
    "one": {"type": "choice", "instructions": "What?", "criteria": {"a cat": None}},
    "many": {"type": "choice", "instructions": "Which number?", "criteria": {str(place): None for place in range(12)}},
}
TEXT = "the cat sat on a mat"
TEXTS = [TEXT, "cat", "hello <mask> world", "\u65e5\u672c\u8a9e [SEP] " * 9, *texts_of(12), "hello world " * 40]


def built(folder: Path, **settings: Any) -> Artifact:
    return build_artifact(save_laya(folder / "checkpoint", **settings), folder / "artifact", name="laya")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laya")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Artifact:
    return built(folder)


@pytest.fixture(scope="module")
def reference(artifact: Artifact, folder: Path) -> LayaReference:
    return LayaReference(folder / "checkpoint")


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def test_the_engine_agrees_with_the_module(artifact: Artifact) -> None:
    (output,) = artifact.certificate.outputs
    assert (output.output, output.failures) == ("option_logits", [])
    assert output.max_abs_difference < 1e-3
    assert artifact.manifest.tasks == ["decide"]
    assert artifact.manifest.max_seq_len == 512  # of its own code, not its encoder's 2048


def test_probabilities_are_those_of_torch(model: Model, reference: LayaReference) -> None:
    spread: dict[str, list[float]] = {name: [] for name in QUESTIONS}
    for text, answers in zip(TEXTS, model.decide(TEXTS, QUESTIONS), strict=True):
        for name, question in QUESTIONS.items():
            expected = reference.probabilities(text, question)
            assert shares_of(answers[name]) == pytest.approx(expected, abs=2e-4), (text, name)
            spread[name].append(max(expected) - min(expected))
    assert {name: round(max(found), 2) for name, found in spread.items() if max(found) < 0.05} == {"one": 0.0}


@pytest.mark.parametrize(("width", "head_layers"), [(128, 1), (64, 3)])
def test_other_shapes_have_the_probabilities_of_torch(width: int, head_layers: int, tmp_path: Path) -> None:
    artifact = built(tmp_path, width=width, head_layers=head_layers, spread=0.1)
    reference = LayaReference(tmp_path / "checkpoint")
    with Model(artifact.path, tune="off") as model:
        found = model.decide(TEXTS[:6], QUESTIONS)
    for text, answers in zip(TEXTS, found, strict=False):
        for name, question in QUESTIONS.items():
            assert shares_of(answers[name]) == pytest.approx(reference.probabilities(text, question), abs=2e-4), name


@needs_bf16
def test_bf16_is_within_its_bound(tmp_path: Path) -> None:
    folder = save_laya(tmp_path / "checkpoint", spread=0.05)
    artifact, reference = build_artifact(folder, tmp_path / "artifact", precision="bf16"), LayaReference(folder)
    assert artifact.certificate.passed
    with Model(artifact.path, tune="off") as model:
        found = model.decide(TEXTS, QUESTIONS)
    shares = [share for answers in found for name in QUESTIONS for share in shares_of(answers[name])]
    expected = [share for text in TEXTS for one in QUESTIONS.values() for share in reference.probabilities(text, one)]
    cosine = np.dot(shares, expected) / np.linalg.norm(shares) / np.linalg.norm(expected)
    assert cosine >= 0.999


def test_the_module_for_pytorch_equals_the_graph(artifact: Artifact, folder: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(locate(str(folder / "checkpoint")))
    rng = np.random.default_rng(39)
    encodings = [
        Encoding(rng.integers(0, 268, length, np.int32), np.full(length, kind, np.int32))
        for kind, length in enumerate([40, 7, 65])
    ]
    with checkpoint.weights() as weights:
        expected = of_the_graph(checkpoint.spec, weights.read, 128, encodings, tmp_path)
        actual = of_the_module(packed_model(checkpoint.spec, weights.read, 128), encodings)
    for ours, theirs in zip(actual["option_logits"], expected["option_logits"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_another_order_of_choices_has_the_same_probabilities_though_the_model_sees_an_order(
    model: Model, reference: LayaReference
) -> None:
    asked = QUESTIONS["which"]
    turned = {**asked, "criteria": dict(reversed(asked["criteria"].items()))}
    first, second = (model.decide([TEXT], {"q": one})[0]["q"] for one in (asked, turned))
    assert isinstance(first, ChoiceAnswer)
    assert isinstance(second, ChoiceAnswer)
    assert first.probabilities == pytest.approx(second.probabilities, abs=1e-6)
    options = ["cat: an animal", "dog", "the mat: a \u7d68\u6bef"]
    one, other = (reference.logits(TEXT, "choice", "What sat there?", order) for order in (options, options[::-1]))
    assert one != pytest.approx(other[::-1], abs=1e-3)


def test_questions_and_texts_of_one_request_do_not_change_each_other(model: Model) -> None:
    together = model.decide(TEXTS[:3], QUESTIONS)
    for text, answers in zip(TEXTS[:3], together, strict=True):
        for name, question in QUESTIONS.items():
            (alone,) = model.decide([text], {name: question})
            assert shares_of(alone[name]) == pytest.approx(shares_of(answers[name]), abs=1e-5)


@pytest.mark.parametrize("is_large", [False, True])
def test_prompts_of_many_options_are_written_off_the_event_loop(
    is_large: bool, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def noted(*args: Any) -> Any:
        found.append(is_on_a_loop())
        return OptionPrompt(*args)

    monkeypatch.setattr(decision_readings, "OptionPrompt", noted)
    monkeypatch.setattr(decision_readings, "_PER_OPTION", 100_000 if is_large else 0)
    model.decide([TEXT], {"is": QUESTIONS["is"]})
    assert any(found[-2:]) is not is_large  # the one that is counted, and the one that is read


# A request to /v1/systemone, and what the probabilities of ``LayaReference`` make of it.
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "laya_exchange.json").read_text())


def close(found: Any, expected: Any) -> bool:
    """True if they are the same, numbers within 2e-4."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], one) for key, one in expected.items())
    return bool(found == (pytest.approx(expected, abs=2e-4) if isinstance(expected, float) else expected))


def test_a_golden_exchange(artifact: Artifact) -> None:
    asked = GOLDEN["request"]["questions"]["which"]
    choices = [{"value": name, **({"description": said} if said else {})} for name, said in asked["criteria"].items()]
    questions = [{"type": "choice", "instructions": asked["instructions"], "choices": choices}]
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        found, again = (
            app.request("POST", path, json.dumps(GOLDEN["request"]).encode()) for path in ("/v1/systemone", "/")
        )
        other = app.request("POST", "/v1/decisions", json.dumps({"input": TEXT, "questions": questions}).encode())
    finally:
        app.close()
    assert close(found.json(), GOLDEN["response"]), found.text
    assert close(again.json(), GOLDEN["response"])
    (answer,) = other.json()["answers"]
    shares = {one["value"]: one["probability"] for one in answer["probabilities"]}
    assert close(shares, GOLDEN["response"]["answers"]["which"]["probabilities"])


def test_levels_of_decisions_are_read_by_their_labels_and_descriptions(
    artifact: Artifact, reference: LayaReference
) -> None:
    """Labels without descriptions were not read at all."""
    levels = [{"label": "calm"}, {"label": "loud", "description": "of a cat"}, {"label": "hello"}]
    question = {"type": "score", "instructions": "How it is", "levels": levels}
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        found = app.request("POST", "/v1/decisions", json.dumps({"input": TEXT, "questions": [question]}).encode())
    finally:
        app.close()
    (answer,) = found.json()["answers"]
    asked = {"type": "score", "instructions": "How it is", "criteria": ["calm", "loud: of a cat", "hello"]}
    shares = [one["probability"] for one in answer["probabilities"]]
    assert shares == pytest.approx(reference.probabilities(TEXT, asked), abs=2e-4)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"criteria": dict.fromkeys(map(str, range(256)))}, "has 256 choices"),
    ({"criteria": {f"the label number {place}": None for place in range(40)}}, "options of .* reads 176 of them"),
    ({"criteria": {"cat": "a long description " * 9, "a": None}}, "'cat: a long .* and the model reads 48"),
    ({"criteria": {"cat": "b" * 40_000, "a": None}}, "characters in its instructions or an option"),
    ({"instructions": " \n"}, "has no instructions, which the model reads"),
    ({"instructions": "why " * 60}, "has .* tokens, and beside its options the model reads"),
    ({"instructions": "why " * 9_000}, "characters in its instructions"),
    ({"criteria": {"a": None, " ": None}}, "empty one among its choices"),
    ({"criteria": {"a <mask>": None, "a  ": None}}, "have the same tokens"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[message for _, message in WRONG])
def test_options_that_do_not_fit_are_refused(model: Model, fields: dict[str, Any], message: str) -> None:
    asked = {"other": QUESTIONS["is"], "q": {**QUESTIONS["which"], **fields}}
    with pytest.raises(InvalidRequestError, match=message):
        model.decide([TEXT], asked)
    assert model.decide([TEXT], {"is": QUESTIONS["is"]})  # nothing of the other question is left


def test_options_that_leave_no_room_for_a_text_are_refused(tmp_path: Path) -> None:
    artifact = built(tmp_path, max_len=24)
    with Model(artifact.path, tune="off") as model, pytest.raises(InvalidRequestError, match="reads 24 with the text"):
        model.decide([TEXT], {"q": QUESTIONS["which"]})


def test_a_text_that_is_too_long_is_refused(artifact: Artifact, model: Model) -> None:
    text = "hello world " * 400
    with pytest.raises(InputTooLongError, match="A text with a question and its options"):
        model.decide([text], QUESTIONS)
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        body = json.dumps({"state": text, "questions": QUESTIONS}).encode()
        check_error(app.request("POST", "/v1/systemone", body), 400, "tokens", param="input")
    finally:
        app.close()


def test_longer_texts_are_read_where_a_build_says_so(folder: Path, reference: LayaReference, tmp_path: Path) -> None:
    artifact = build_artifact(folder / "checkpoint", tmp_path / "artifact", max_seq_len=2048)
    text = "hello world, the cat sat " * 40
    with Model(artifact.path, tune="off") as model:
        (found,) = model.decide([text], {"is": QUESTIONS["is"]})
    assert shares_of(found["is"]) == pytest.approx(reference.probabilities(text, QUESTIONS["is"]), abs=2e-4)


def test_a_temperature_is_fitted_beside_its_own(tmp_path: Path) -> None:
    copy = built(tmp_path)
    question, data = tmp_path / "question.json", tmp_path / "data.jsonl"
    question.write_text(json.dumps(QUESTIONS["which"]))
    texts = [f"the cat {place}" for place in range(80)]
    with Model(copy.path, tune="off") as model:
        answers = model.decide(texts, {"q": QUESTIONS["which"]})
    labels = [one["q"].choice for one in answers]  # type: ignore[union-attr]
    labels[::5] = ["dog"] * len(labels[::5])
    lines = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, record = calibrate(copy.path, data, question)
    assert record.task == "decide"
    assert 0 < record.temperature < 1
    assert record.after.nll < record.before.nll


CHECKPOINTS: list[tuple[str, dict[str, Any], str]] = [
    ("rl_agent_config.json", {"option_layout": "parallel"}, "option_layout = 'parallel'"),
    ("rl_agent_config.json", {"head_layers": 0}, "0 head_layers"),
    ("rl_agent_config.json", {"head_layers": 10**9}, "1000000000 head_layers"),
    ("rl_agent_config.json", {"head_layers": "2"}, "'2' head_layers"),
    ("rl_agent_config.json", {"max_len": -1}, "max_len = -1"),
    ("rl_agent_config.json", {"head_max_len": True}, "head_max_len = True"),
    ("rl_agent_config.json", {"temperature": [1, 2]}, "no list of 3 numbers as temperature"),
    ("rl_agent_config.json", {"temperature": [1, "2", 3]}, "the temperature '2' of score"),
    ("rl_agent_config.json", {"temperature_by_options": {"noul:2": [1]}}, r"the temperature \[1\] of noul:2"),
    ("encoder/config.json", {"model_type": "bert"}, "model_type = 'bert'; bei builds Laya on modernbert"),
    ("tokenizer/tokenizer_config.json", {"mask_token": None}, "no mask_token"),
]


@pytest.mark.parametrize(("file", "settings", "message"), CHECKPOINTS, ids=[message for _, _, message in CHECKPOINTS])
def test_checkpoints_that_are_computed_otherwise_are_refused(
    tmp_path: Path, file: str, settings: dict[str, Any], message: str
) -> None:
    folder = save_laya(tmp_path / "checkpoint")
    change_json(folder / file, **settings)
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "artifact")


def test_a_checkpoint_without_its_folders_or_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = save_laya(tmp_path / "checkpoint")
    tensors = read_tensors(folder)
    del tensors["head.layers.1.linear2.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"head\.layers\.1\.linear2\.bias"):
        build_artifact(folder, tmp_path / "artifact")
    (folder / "encoder" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"without encoder/config\.json"):
        build_artifact(folder, tmp_path / "artifact")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "cuda-twin"}, "scores options of requests, .* use --target cpu"),
        ({"precision": "int8"}, "scores options, .* use --precision bf16 or fp32"),
        ({"task": "decide"}, "Leave --task out for Laya"),
        ({"task": "embed"}, "leave task and pooling out"),
    ],
)
def test_what_was_not_measured_is_refused(folder: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_artifact(folder / "checkpoint", tmp_path / "artifact", **settings)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"marker_id": 268}, "are no such tokens"),
    ({"marker_id": 2}, "are no such tokens"),
    ({"marker_token": ""}, "a marker without a character"),
    ({"max_option_tokens": 0}, "max_option_tokens of option_markers is 0"),
    ({"temperatures": {"choice": 1.0, "noul": 1.0}}, "no temperature of score"),
    ({"temperatures": {"choice": 1.0, "noul": 1.0, "score": 0.0}}, "no number above 0"),
]


@pytest.mark.parametrize(("fields", "message"), FAULTS, ids=[str(fields) for fields, _ in FAULTS])
def test_a_manifest_that_no_build_writes_is_refused(artifact: Artifact, fields: dict[str, Any], message: str) -> None:
    assert manifest_fault(artifact.manifest) is None
    markers = artifact.manifest.option_markers
    assert isinstance(markers, OptionMarkers)
    wrong = msgspec.structs.replace(markers, **fields)
    found = manifest_fault(msgspec.structs.replace(artifact.manifest, option_markers=wrong))
    assert found is not None
    assert message in found
    without = msgspec.structs.replace(artifact.manifest, option_markers=msgspec.UNSET)
    assert "decide" in str(manifest_fault(without))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_probabilities_are_the_laya_librarys(artifact: Artifact, folder: Path) -> None:
    library = pytest.importorskip("laya.agent")
    theirs = library.Agent(str(folder / "checkpoint"), device="cpu")
    rng, spread = random.Random(39), []
    texts = [*texts_of(500), *TEXTS, json.dumps({"a": ["\u65e5", 1]}, ensure_ascii=False)]
    asked = {name: dict(question) for name, question in QUESTIONS.items()}
    for question in asked.values():
        if question["type"] == "choice":  # the order in which bei shows them
            question["criteria"] = dict(sorted(question["criteria"].items()))
    with Model(artifact.path, tune="off") as model:
        found = model.decide(texts, QUESTIONS)
    for text, ours in zip(texts, found, strict=True):
        name = rng.choice([*asked])
        answer = theirs.predict(text, {name: asked[name]})["answers"][name]
        shares = answer.get("probabilities") or {"0": 1 - answer["noul"], "1": answer["noul"]}
        expected = [shares[key] for key in sorted(shares)]
        assert shares_of(ours[name]) == pytest.approx(expected, abs=2e-4), (text, name)
        spread.append(expected[0])
    assert float(np.ptp(spread)) > 0.2
