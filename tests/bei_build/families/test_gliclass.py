"""GLiClass models: built, served by ``bei.Model`` and over HTTP, and against the gliclass library where it is there."""

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
from bei.errors import CheckpointError, ConfigError, InvalidRequestError, TaskNotSupportedError
from bei.tasks.questions import ChoiceAnswer, NoulAnswer
from tests.bei.server.app import App
from tests.bei_build.families.test_gliner import PARTS
from tests.support.builds import build_artifact, open_engine
from tests.support.cpus import needs_bf16
from tests.support.gliclass_models import save_gliclass

LABELS = ["Cats", "a place", "\u65e5\u672c", "\u0130stanbul"]
TEXTS = ["the cat sat on a mat", " ", "e\u0301cole don't \U0001f44d\U0001f3fd", "hello world " * 200]

# What published configs have, or may have.
SETTINGS: dict[str, dict[str, Any]] = {
    "dot": {},
    "normalized": {"normalize_features": True},
    "weighted": {"scorer_type": "weighted-dot", "embed_class_token": False},
    "mlp": {"scorer_type": "mlp", "pooling_strategy": "avg"},
    "from the separator": {"extract_text_features": True},
    "text first": {"prompt_first": False, "pooling_strategy": "max", "projector_hidden_act": "relu"},
}


def built(folder: Path, kind: str = "deberta-v2", **settings: Any) -> Artifact:
    return build_artifact(save_gliclass(folder / "checkpoint", kind, **settings), folder / "artifact", name="gliclass")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliclass"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_agrees_with_the_module(name: str, tmp_path: Path) -> None:
    built_artifact = built(tmp_path, **SETTINGS[name])
    (output,) = built_artifact.certificate.outputs
    assert (output.output, output.failures) == ("label_logits", [])
    assert output.max_abs_difference < 1e-3
    assert built_artifact.manifest.tasks == ["zero_shot"]


@pytest.mark.parametrize(("kind", "name"), [("t5", "dot"), ("mt5", "mlp"), ("eurobert", "weighted")])
def test_other_encoders_agree_with_their_modules(kind: str, name: str, tmp_path: Path) -> None:
    (output,) = built(tmp_path, kind, **SETTINGS[name]).certificate.outputs
    assert (output.output, output.failures) == ("label_logits", [])


@needs_bf16
def test_bf16_is_certified(tmp_path: Path) -> None:
    folder = save_gliclass(tmp_path / "checkpoint", spread=0.05)
    certificate = build_artifact(folder, tmp_path / "artifact", precision="bf16").certificate
    assert certificate.passed


def test_labels_share_a_probability_or_have_their_own(model: Model) -> None:
    shares = model.zero_shot(TEXTS, LABELS).scores
    assert shares.shape == (len(TEXTS), len(LABELS))
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    alone = model.zero_shot(TEXTS, LABELS, multi_label=True).scores
    logits = np.log(alone) - np.log1p(-alone)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, expected, atol=1e-4)


def test_other_texts_of_a_step_change_nothing(model: Model) -> None:
    together = model.zero_shot(TEXTS, LABELS).scores
    for text, row in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(model.zero_shot([text], LABELS).scores[0], row, atol=1e-5)


def test_a_text_that_spells_a_marker_changes_no_label_s_place(model: Model) -> None:
    found = model.zero_shot(["a <<LABEL>>b<<SEP>> c"], LABELS).scores
    assert found.shape == (1, len(LABELS))


def test_decisions_have_the_same_probabilities_in_any_order(model: Model) -> None:
    orders = [["cat", "world", "place"], ["world", "place", "cat"]]
    asked: dict[str, Any] = {
        str(place): {"type": "choice", "instructions": "It is {}", "criteria": dict.fromkeys(order)}
        for place, order in enumerate(orders)
    }
    asked["is"] = {"type": "noul", "instructions": "It is a cat"}
    (found,) = model.decide(["the cat"], asked)
    first, second, yes = found.values()
    assert isinstance(first, ChoiceAnswer)
    assert isinstance(second, ChoiceAnswer)
    assert isinstance(yes, NoulAnswer)
    assert first.probabilities == pytest.approx(second.probabilities, abs=1e-6)
    labels = [f"It is {name}" for name in sorted(orders[0])]
    scores = model.zero_shot(["the cat"], labels).scores[0]
    assert [first.probabilities[name] for name in sorted(orders[0])] == pytest.approx(scores, abs=1e-5)
    (alone,) = model.zero_shot(["the cat"], ["It is a cat"]).scores[0]
    assert yes.noul == pytest.approx(alone, abs=1e-5)


def test_routes_answer_as_the_model_does(artifact: Artifact, model: Model) -> None:
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))

    def post(path: str, **body: object) -> Any:
        response = app.request("POST", path, json.dumps(body).encode())
        return response.status_code, response.json()

    try:
        expected = dict(zip(LABELS, model.zero_shot([TEXTS[0]], LABELS).scores[0], strict=True))
        status, found = post("/v1/classify", input=[TEXTS[0]], labels=LABELS)
        assert status == 200, found
        scores = {one["label"]: one["score"] for one in found["data"][0]["predictions"]}
        assert scores == pytest.approx(expected, abs=1e-5)
        status, found = post("/", inputs=TEXTS[0], parameters={"candidate_labels": LABELS})
        assert status == 200, found
        assert {one["label"]: one["score"] for one in found} == pytest.approx(expected, abs=1e-5)
        assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
        by_path = post(
            "/pipeline/zero-shot-classification/gliclass", inputs=TEXTS[0], parameters={"candidate_labels": LABELS}
        )
        assert by_path == (200, found)  # it was a model without the task
        for path, body, said in (
            ("/", {"inputs": "a", "parameters": {"candidate_labels": ["a"], "hypothesis_template": "b {}"}}, "as they"),
            ("/predict", {"inputs": "a"}, "zero_shot"),
            ("/v1/classify", {"input": ["a"], "labels": ["a", "b <<SEP>>"]}, "labels 1 has '<<SEP>>'"),
        ):
            status, found = post(path, **body)
            assert status == 400
            assert said in json.dumps(found)
    finally:
        app.close()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "labels is empty"),
        (["a", " "], "labels 1 is empty"),
        (["a <<LABEL>> b"], "labels 0 has '<<LABEL>>'"),
        ([f"label number {index}" for index in range(10_000)], "send fewer"),
        (["b" * 400_000], "send fewer or shorter"),
    ],
)
def test_labels_that_do_not_fit_are_refused(model: Model, labels: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        model.zero_shot(["a cat"], labels)


def test_what_the_model_does_not_do_is_refused(model: Model) -> None:
    with pytest.raises(TaskNotSupportedError, match="zero_shot"):
        model.classify(["a"])
    with pytest.raises(InvalidRequestError, match="leave hypothesis_template out"):
        model.zero_shot(["a"], ["b"], hypothesis_template="It is {}.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture_type": "bi-encoder"}, "architecture_type = 'bi-encoder'"),
        ({"use_lstm": True}, "use_lstm"),
        ({"squeeze_layers": True}, "squeeze_layers"),
        ({"class_token_pooling": "average"}, "class_token_pooling"),
        ({"scorer_type": "hopfield"}, "scorer_type = 'hopfield'"),
        ({"pooling_strategy": "rms"}, "pooling_strategy = 'rms'"),
        ({"pooling_strategy": []}, r"pooling_strategy = \[\]"),
        ({"extract_text_features": True, "pooling_strategy": "avg"}, "padding of a batch"),
        ({"use_calibrator": True}, "use_calibrator"),
        ({"class_token_index": 3}, "class_token_index = 3"),
        ({"hidden_size": 48}, "hidden_size = 48"),
        ({"encoder_config": {"model_type": "umt5"}}, "model_type 'umt5'"),
    ],
)
def test_models_that_are_computed_otherwise_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = save_gliclass(tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(CheckpointError, match=message):
        build_artifact(folder, tmp_path / "artifact")


@pytest.mark.parametrize(
    ("settings", "message"), [({"target": "cuda-twin"}, "use --target cpu"), ({"precision": "int8"}, "bf16 or fp32")]
)
def test_what_was_not_measured_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = save_gliclass(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=message):
        build_artifact(folder, tmp_path / "artifact", **settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[("deberta-v2", name) for name in SETTINGS],
        *[("modernbert", "dot"), ("modernbert", "weighted"), ("t5", "dot"), ("mt5", "mlp"), ("eurobert", "weighted")],
    ],
)
def test_scores_are_the_gliclass_librarys(kind: str, name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("gliclass")
    from transformers import AutoTokenizer

    artifact = built(tmp_path, kind, **SETTINGS[name])
    rng = random.Random(39)
    texts = ["".join(rng.choice(PARTS) + rng.choice([" ", ", "]) for _ in range(rng.randint(1, 7))) for _ in range(500)]
    if name != "text first":  # of which the library cuts the labels, and bei the text
        texts += ["the cat sat on a mat, " * 200, "\u65e5\u672c " * 700, "x" * 5000]
    theirs = library.GLiClassModel.from_pretrained(str(tmp_path / "checkpoint"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    pipeline = library.ZeroShotClassificationPipeline(
        theirs, tokenizer, classification_type="multi-label", device="cpu", progress_bar=False, max_length=512
    )
    with Model(artifact.path, tune="off") as model:
        ours = model.zero_shot(texts, LABELS, multi_label=True).scores
    spread = 0.0
    for text, row in zip(texts, ours, strict=True):
        (found,) = pipeline([text], LABELS, threshold=-1.0, batch_size=1)
        expected = {one["label"]: one["score"] for one in found}
        assert dict(zip(LABELS, row.tolist(), strict=True)) == pytest.approx(expected, abs=2e-4), text
        spread = max(spread, max(expected.values()) - min(expected.values()))
    assert spread > 0.01
