"""``bei calibrate`` on built models: probabilities afterwards are the softmax of the logits by the temperature."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bei.artifact.store import load, recertify, save, sign
from bei.cli import calibrate as command
from bei.cli import main
from bei.cli.calibrate import calibrate
from bei.errors import ArtifactError, ArtifactManifestError, ArtifactSignatureError, BeiError, ConfigError
from bei.offline.model import Model
from bei.verification import verify as verification
from bei.verification.stored_answers import complete_certificate
from bei.verification.temperature import fitted_temperature, probabilities, reliability
from tests.e2e.kinds import case, labels
from tests.support.builds import build_artifact
from tests.support.keys import make_keys
from tests.support.zoo import save_case

NAMES = ["contradiction", "neutral", "entailment"]
OPTIONS = ["cat", "the world", "hello"]
QUESTION = {"type": "choice", "instructions": "It is {}!", "criteria": dict.fromkeys(OPTIONS)}
TEXTS = [f"the cat {word} {number}" for number in range(60) for word in ("hello", "world")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nli")
    save_case(folder / "checkpoint", case("BertForSequenceClassification", **labels(*NAMES)))
    return build_artifact(
        folder / "checkpoint", folder / "artifact", name="nli", reference="engine", keep_reference=True
    ).path


@pytest.fixture
def artifact(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "artifact"))


def written(folder: Path, logits: Any, names: list[str], temperature: float, seed: int = 3) -> Path:
    """Labelled texts, drawn as ``logits`` have it at ``temperature``."""
    random = np.random.default_rng(seed)
    shares = probabilities(np.asarray(logits, np.float64), temperature)
    drawn = [names[random.choice(len(names), p=row)] for row in shares]
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(TEXTS, drawn, strict=True)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def test_a_classifier_s_probabilities_have_the_temperature(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load(artifact).manifest
    with Model(artifact, tune="off") as model:
        logits = model.classify(TEXTS, raw_scores=True).scores
    data = written(tmp_path, logits, NAMES, 0.4)
    main.main(["calibrate", str(artifact), "--data", str(data)])
    assert "temperature" in capsys.readouterr().out
    after = load(artifact)
    temperature = after.manifest.temperature("classify")
    (record,) = after.certificate.probabilities or []
    assert 0.05 < temperature != 1.0
    assert (record.task, record.temperature, record.num_fitted, record.num_texts) == ("classify", temperature, 60, 60)
    assert after.manifest.digest != before.digest
    assert "Reliability of classify" in (artifact / "certificate.html").read_text()
    with Model(artifact, tune="off") as model:
        assert np.array_equal(model.classify(TEXTS, raw_scores=True).scores, logits)
        expected = probabilities(logits.astype(np.float64), temperature)
        np.testing.assert_allclose(model.classify(TEXTS).scores, expected, atol=1e-6)
    main.main(["inspect", str(artifact), "--certificate"])
    assert "Reliability after it" in capsys.readouterr().out
    main.main(["inspect", str(artifact)])
    assert f"{temperature:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("times", [1, 2])
def test_the_figures_are_of_texts_that_the_fit_has_not_seen_whatever_the_order_of_the_file(
    times: int, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels in turn, and each text twice, the second time beside the first."""
    random, seen = np.random.default_rng(0), dict[str, set[tuple[float, ...]]]()
    targets = np.arange(len(TEXTS)) % 2
    answers = random.normal(size=(len(TEXTS), 3))
    answers[np.arange(len(TEXTS)), np.where(random.random(len(TEXTS)) < 0.8, targets, 1 - targets)] += 2

    def fit(logits: Any, right: Any) -> float:
        assert set(right.tolist()) == {0, 1}
        seen["fit"] = {*map(tuple, logits.tolist())}
        return fitted_temperature(logits, right)

    def measure(logits: Any, right: Any, temperature: float) -> Any:
        assert set(right.tolist()) == {0, 1}
        seen["measured"] = {*map(tuple, logits.tolist())}
        return reliability(logits, right, temperature)

    monkeypatch.setattr(command, "fitted_temperature", fit)
    monkeypatch.setattr(command, "reliability", measure)
    monkeypatch.setattr(command, "_logits", lambda *_: answers.repeat(times, axis=0))
    lines = [json.dumps({"text": text, "label": NAMES[one]}) for text, one in zip(TEXTS, targets, strict=True)]
    (tmp_path / "data.jsonl").write_text("\n".join(line for line in lines for _ in range(times)))
    _, record = calibrate(artifact, tmp_path / "data.jsonl", None)
    assert (record.num_fitted, record.num_texts) == (60 * times, 60 * times)
    assert seen["fit"].isdisjoint(seen["measured"])
    data = tmp_path / "same.jsonl"
    data.write_text("\n".join([lines[0]] * 100))
    with pytest.raises(ConfigError, match="1 different texts, and must have 40 or more"):
        calibrate(artifact, data, None)


def test_decisions_have_a_temperature_of_their_own(artifact: Path, tmp_path: Path) -> None:
    with Model(artifact, tune="off") as model:
        labels_before = model.classify(TEXTS).scores
        rows = [[*one["q"].probabilities.values()] for one in model.decide(TEXTS, {"q": QUESTION})]  # type: ignore[union-attr]
    logits = np.log(np.array(rows))
    data = written(tmp_path, logits, OPTIONS, 0.1, seed=5)
    (tmp_path / "question.json").write_text(json.dumps(QUESTION))
    for _ in range(2):  # the second fit starts from the same scores
        main.main(["calibrate", str(artifact), "--data", str(data), "--question", str(tmp_path / "question.json")])
        temperature = load(artifact).manifest.temperature("decide")
        with Model(artifact, tune="off") as model:
            found = [[*one["q"].probabilities.values()] for one in model.decide(TEXTS, {"q": QUESTION})]  # type: ignore[union-attr]
            np.testing.assert_allclose(found, probabilities(logits, temperature), atol=1e-4)
            assert np.array_equal(model.classify(TEXTS).scores, labels_before)


def test_a_temperature_that_makes_other_texts_worse_is_not_written(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all of the fitted half have the likeliest label, the others another one."""
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": text, "label": NAMES[0]}) for text in TEXTS))
    labelled = command.read_labelled(data)
    fit, _ = command._halves(data, labelled)
    logits = np.tile([0.0, 1.0, -1.0], (len(TEXTS), 1))
    logits[fit[5:]] = [1.0, 0.0, -1.0]
    monkeypatch.setattr(command, "_logits", lambda *_: logits)
    before = (artifact / "manifest.json").read_bytes()
    with pytest.raises(ConfigError, match=r"of the 60 others worse .* stays as it is"):
        calibrate(artifact, data, None)
    assert (artifact / "manifest.json").read_bytes() == before


def test_a_key_that_stands_twice_in_a_question_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "question.json"
    path.write_text('{"type": "choice", "instructions": "a", "criteria": {"b": "c", "d": null, "b": null}}')
    with pytest.raises(ConfigError, match="has an object with the key 'b' twice"):
        command.read_question(path)


def test_what_does_not_fit_is_refused_and_changes_nothing(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (artifact / "manifest.json").read_bytes()
    data = tmp_path / "data.jsonl"
    line = json.dumps({"text": "a", "label": "neutral"})
    for content, said in (
        (line, "must have 40 or more"),
        (line + "\n{}", "line 2"),
        ("\n".join([line] * 39 + [line.replace("neutral", "sad")]), "'sad'"),
    ):
        data.write_text(content)
        with pytest.raises(SystemExit):
            main.main(["calibrate", str(artifact), "--data", str(data)])
        assert said in capsys.readouterr().err
    assert (artifact / "manifest.json").read_bytes() == before


def test_a_temperature_without_its_record_is_refused(artifact: Path, tmp_path: Path) -> None:
    with Model(artifact, tune="off") as model:
        data = written(tmp_path, model.classify(TEXTS, raw_scores=True).scores, NAMES, 0.4)
    main.main(["calibrate", str(artifact), "--data", str(data)])
    found = load(artifact)
    save(artifact, msgspec.structs.replace(found.manifest, temperatures={"classify": 2.0}), found.certificate)
    with pytest.raises(ArtifactManifestError, match="not those of the manifest"):
        load(artifact)


def test_a_model_without_shares_is_refused_by_name(tmp_path: Path) -> None:
    save_case(tmp_path / "checkpoint", case("BertForSequenceClassification", num_labels=1))
    path = build_artifact(tmp_path / "checkpoint", tmp_path / "artifact", reference="engine").path
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([json.dumps({"text": "a", "label": "b"})] * 40))
    with pytest.raises(BeiError, match="no shares of one whole"):
        calibrate(path, data, None)


def test_a_signed_artifact_is_not_changed(artifact: Path, tmp_path: Path) -> None:
    with Model(artifact, tune="off") as model:
        data = written(tmp_path, model.classify(TEXTS, raw_scores=True).scores, NAMES, 0.4)
    sign(load(artifact), make_keys(tmp_path).key)
    before = (artifact / "manifest.json").read_bytes()
    with pytest.raises(ArtifactSignatureError, match=r"delete signature\.json, calibrate, and sign again"):
        calibrate(artifact, data, None)
    assert (artifact / "manifest.json").read_bytes() == before


def test_an_artifact_that_is_not_verified_yet_is_not_calibrated(artifact: Path, tmp_path: Path) -> None:
    data = written(tmp_path, np.zeros((len(TEXTS), len(NAMES))), NAMES, 1.0)
    pending = msgspec.structs.replace(
        load(artifact).certificate, kind="pending", outputs=[], passed=False, device="", num_texts=0
    )
    recertify(load(artifact), pending)
    with pytest.raises(ConfigError, match="is not verified yet: run 'bei verify' first"):
        calibrate(artifact, data, None)


def test_verifying_again_keeps_the_temperature_and_its_record(artifact: Path, tmp_path: Path) -> None:
    with Model(artifact, tune="off") as model:
        data = written(tmp_path, model.classify(TEXTS, raw_scores=True).scores, NAMES, 0.4)
    calibrated, record = calibrate(artifact, data, None)
    main.main(["verify", str(artifact)])
    after = load(artifact)
    assert after.certificate.probabilities == [record]
    assert after.manifest.temperatures == calibrated.manifest.temperatures == {"classify": record.temperature}


@pytest.fixture
def data(artifact: Path, tmp_path: Path) -> Path:
    with Model(artifact, tune="off") as model:
        return written(tmp_path, model.classify(TEXTS, raw_scores=True).scores, NAMES, 0.4)


def test_what_is_calibrated_while_verify_asks_the_engine_stays(
    artifact: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, records = complete_certificate, []

    def slow(*arguments: Any) -> Any:
        records.append(calibrate(artifact, data, None)[1])
        return complete(*arguments)

    recertify(load(artifact), msgspec.structs.replace(load(artifact).certificate, device="another machine"))
    monkeypatch.setattr(verification, "complete_certificate", slow)
    main.main(["verify", str(artifact)])
    found = load(artifact)
    assert found.certificate.probabilities == records
    assert found.manifest.temperatures == {"classify": records[0].temperature}
    assert found.certificate.device != "another machine"


def test_what_others_write_while_calibrate_asks_the_engine_stays(
    artifact: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit for decisions, and a certificate."""
    logits, decided = command._logits, []
    asked = tmp_path / "question.json"
    asked.write_text(json.dumps(QUESTION))
    (tmp_path / "decided").mkdir()
    with Model(artifact, tune="off") as model:
        rows = [[*one["q"].probabilities.values()] for one in model.decide(TEXTS, {"q": QUESTION})]  # type: ignore[union-attr]
    of_decisions = written(tmp_path / "decided", np.log(np.array(rows)), OPTIONS, 0.1, seed=5)

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(command, "_logits", logits)
        decided.append(calibrate(artifact, of_decisions, asked)[1])
        recertify(load(artifact), msgspec.structs.replace(load(artifact).certificate, device="another machine"))
        return logits(*arguments)

    monkeypatch.setattr(command, "_logits", slow)
    _, record = calibrate(artifact, data, None)
    found = load(artifact)
    assert found.certificate.probabilities == [*decided, record]
    assert found.manifest.temperatures == {one.task: one.temperature for one in [*decided, record]}
    assert found.certificate.device == "another machine"


def test_what_is_signed_while_calibrate_asks_the_engine_is_not_changed(
    artifact: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = command._logits

    def slow(*arguments: Any) -> Any:
        sign(load(artifact), make_keys(tmp_path).key)
        return logits(*arguments)

    monkeypatch.setattr(command, "_logits", slow)
    with pytest.raises(ArtifactSignatureError, match="repeat this, and sign again"):
        calibrate(artifact, data, None)
    assert load(artifact).signed is not None


def test_what_was_changed_since_it_was_read_is_not_signed(artifact: Path, tmp_path: Path) -> None:
    before = load(artifact)
    recertify(before, msgspec.structs.replace(before.certificate, device="another machine"))
    with pytest.raises(ArtifactError, match="run 'bei sign' again"):
        sign(before, make_keys(tmp_path).key)
    assert load(artifact).signed is None
