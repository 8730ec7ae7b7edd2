"""``bei calibrate``: fits the temperature of probabilities on labelled texts, and writes it into the artifact.

Half of the texts are left out of the fit: the certificate's figures are of those. The hashes of texts say which half,
so that a text that stands in the file twice is in one of them, and no order of the file (labels in turn) decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bei.artifact import store
from bei.artifact.certificate.reliability import CalibratedTask, ProbabilityCalibration
from bei.artifact.manifest import Artifact
from bei.artifact.signature import SIGNATURE
from bei.errors import ArtifactSignatureError, ConfigError, TaskNotSupportedError
from bei.offline.decision_scores import decision_scores
from bei.offline.model import Model
from bei.tasks.questions import AnyQuestion, AskedQuestion, question_of
from bei.utils.full_disk import naming_full_disk
from bei.utils.json_keys import key_twice
from bei.utils.untrusted_files import MOST_JSON_BYTES, UnfitError, read_bounded
from bei.verification.temperature import Float64Array, fitted_temperature, reliability

LEAST_TEXTS = 40
_MOST_BYTES = 1 << 28


class _Line(msgspec.Struct):
    """A text, or for classifiers of pairs two, and what is right."""

    text: str | tuple[str, str]
    label: str


_line_decoder = msgspec.json.Decoder(_Line)
_question_decoder: msgspec.json.Decoder[AnyQuestion] = msgspec.json.Decoder(AnyQuestion)


class Labelled(NamedTuple):
    """What a file holds."""

    texts: list[str | tuple[str, str]]
    labels: list[str]
    sha256: str


def calibrate(path: Path, data: Path, question_file: Path | None) -> tuple[Artifact, ProbabilityCalibration]:
    """Fit the artifact at ``path`` on the labelled texts of ``data``, for the model's own labels or, with
    ``question_file``, for decisions.

    Raises ConfigError, also where the texts left out are predicted worse with the temperature; TaskNotSupportedError,
    ArtifactError and its subclasses (ArtifactSignatureError for a signed artifact), InputTooLongError, EngineError,
    OSError.
    """
    labelled = read_labelled(data)
    asked = None if question_file is None else read_question(question_file)
    artifact = store.load(path)
    _check_changeable(artifact)
    task: CalibratedTask = "classify" if asked is None else "decide"
    names = _class_names(artifact) if asked is None else _option_names(asked)
    targets = _targets(labelled, names)
    with Model(path, tune="off") as model:
        logits = _logits(model, labelled, asked)
    fit, rest = _halves(data, labelled)
    temperature = fitted_temperature(logits[fit], targets[fit])
    record = ProbabilityCalibration(
        task=task,
        temperature=temperature,
        question="" if question_file is None else question_file.read_text("utf-8"),
        sha256=labelled.sha256,
        num_fitted=len(targets[fit]),
        num_texts=len(targets[rest]),
        accuracy=float((logits[rest].argmax(axis=1) == targets[rest]).mean()),
        before=reliability(logits[rest], targets[rest], 1.0),
        after=reliability(logits[rest], targets[rest], temperature),
    )
    if record.after.nll > record.before.nll:
        raise ConfigError(
            f"The temperature {temperature:.4f}, fitted on {record.num_fitted} texts, makes probabilities of the "
            f"{record.num_texts} others worse (negative log likelihood {record.before.nll:.4f} -> "
            f"{record.after.nll:.4f}), so {path} stays as it is: give more labelled texts, like those to be served."
        )
    with naming_full_disk(path):
        return store.add_calibration(artifact, record), record


def read_labelled(path: Path) -> Labelled:
    """Lines of ``{"text": ..., "label": ...}``. Raises ConfigError."""
    content = _content(path, _MOST_BYTES)
    texts, labels = [], []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                found = _line_decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ConfigError(f'{path}, line {number}: no {{"text": ..., "label": ...}} ({error}).') from error
            texts.append(found.text)
            labels.append(found.label)
    if len(texts) < LEAST_TEXTS:
        raise ConfigError(f"{path} has {len(texts)} labelled texts, and must have {LEAST_TEXTS} or more.")
    return Labelled(texts, labels, hashlib.sha256(content).hexdigest())


def _halves(path: Path, labelled: Labelled) -> tuple[list[int], list[int]]:
    """The places of the texts to fit on, and of the others. Raises ConfigError for too few different texts."""
    hashes = [hashlib.sha256(msgspec.json.encode(text)).digest() for text in labelled.texts]
    ordered = sorted(set(hashes))
    if len(ordered) < LEAST_TEXTS:
        raise ConfigError(f"{path} has {len(ordered)} different texts, and must have {LEAST_TEXTS} or more.")
    is_fitted = {digest: place % 2 == 0 for place, digest in enumerate(ordered)}
    fit = [place for place, digest in enumerate(hashes) if is_fitted[digest]]
    return fit, [place for place, digest in enumerate(hashes) if not is_fitted[digest]]


def read_question(path: Path) -> AskedQuestion:
    """A question as ``/v1/systemone`` has it. Raises ConfigError; InvalidRequestError for options that do not fit."""
    content = _content(path, MOST_JSON_BYTES)
    try:
        question, twice = _question_decoder.decode(content), key_twice(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no question as /v1/systemone takes it ({error}).") from error
    if twice is not None:
        raise ConfigError(f"{path} has an object with the key {twice[:40]!r} twice: keep one of them.")
    return question_of("question", question)


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        return read_bounded(path, most_bytes)
    except UnfitError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _check_changeable(artifact: Artifact) -> None:
    if artifact.signed is not None:
        raise ArtifactSignatureError(
            f"{artifact.path} is signed by {artifact.signed.key}, and its new manifest would not be: delete "
            f"{SIGNATURE}, calibrate, and sign again with 'bei sign'."
        )
    if artifact.certificate.kind == "pending":
        raise ConfigError(f"{artifact.path} is not verified yet: run 'bei verify' first.")


def _class_names(artifact: Artifact) -> list[str]:
    meaning = artifact.manifest.classification
    if "classify" not in artifact.manifest.tasks or meaning is None:
        raise TaskNotSupportedError(
            f"{artifact.manifest.name} has no labels of its own: give --question FILE.json, whose options it decides "
            "between."
        )
    if meaning.function != "softmax" or len(meaning.labels) < 2:
        raise TaskNotSupportedError(
            f"The scores of {artifact.manifest.name} are no shares of one whole ({meaning.function} of "
            f"{len(meaning.labels)} labels): a temperature is that of a softmax over two labels or more."
        )
    return meaning.labels


def _option_names(question: AskedQuestion) -> list[str]:
    names = [option.name or option.text for option in question.options]
    if len(names) < 2:
        raise ConfigError("The question has one option: give two or more.")
    return names


def _targets(labelled: Labelled, names: Sequence[str]) -> Any:
    places = {name: place for place, name in enumerate(names)}
    if len(places) < len(names):
        raise ConfigError("The model has a label twice, so that texts cannot name it.")
    for label in labelled.labels:
        if label not in places:
            raise ConfigError(f"No text may have the label {label[:40]!r}: there are {', '.join(names[:20])}.")
    return np.array([places[label] for label in labelled.labels], np.intp)


def _logits(model: Model, labelled: Labelled, question: AskedQuestion | None) -> Float64Array:
    if question is None:
        rows = model.classify(labelled.texts, raw_scores=True).scores
    else:
        if not all(isinstance(text, str) for text in labelled.texts):
            raise ConfigError("Decisions are about single texts: a line of the data has two.")
        rows = decision_scores(model, [str(text) for text in labelled.texts], question)
    return np.asarray(rows, np.float64)


def shown(artifact: Artifact, record: ProbabilityCalibration) -> str:
    """The fit in three lines."""
    before, after = record.before, record.after
    return (
        f"{artifact.manifest.name}: temperature {record.temperature:.4f} of {record.task}, fitted on "
        f"{record.num_fitted} texts\n"
        f"on {record.num_texts} others: expected calibration error {before.error:.4f} -> {after.error:.4f}, "
        f"negative log likelihood {before.nll:.4f} -> {after.nll:.4f}, accuracy {record.accuracy:.1%}\n"
        f"written into {artifact.path}; servers have it from their next start"
    )
