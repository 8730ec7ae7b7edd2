"""Stores a reference's answers in an artifact whose engine cannot run where it is built.

    reference/reference.json   the reference, the texts, the thresholds
    reference/answers.npz      token ids of the texts, and the rows

For the retrieval set, only the token ids and the reference's quality are stored: no more is compared. ``bei verify``,
or the first ``bei serve``, on a machine with the device runs the engine on the same texts and completes the certificate
without the checkpoint or torch. Arrays are read without pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bei.artifact.certificate.record import Certificate, QuantizationRecord, RetrievalAgreement, Thresholds
from bei.artifact.held_files import shown_path
from bei.artifact.manifest import REFERENCE_DIR, Artifact, Manifest
from bei.core import Encoding, Engine, Float32Array
from bei.errors import ArtifactManifestError, ConfigError, VerificationError
from bei.utils.share_done import Tell, untold
from bei.utils.untrusted_files import UnfitError, check_unpacked, read_bounded
from bei.verification.comparison import OutputMeaning, ReferenceAnswers, compare, kept_canary
from bei.verification.engine_answers import HeldOut, ask_engine
from bei.verification.retrieval import RetrievalQuestions, RetrievalRanking, agreement, ask_retrieval
from bei.verification.stored_form import ADAPTERS, check_encodings, check_ranking, check_rows

_RECORD = "reference.json"
_ANSWERS = "answers.npz"
_ROWS = "rows."
_RETRIEVAL = "retrieval."
# Limit for all arrays together. The held-out texts have 15,000 characters: 490 MB if each were a token of 8,192
# components.
_MOST_BYTES = 500_000_000
_ALL_KEYS = -1  # all tokens that are looked up


@dataclass(frozen=True)
class RetrievalReference:
    """The reference's quality: nDCG@10 for each query of ``questions``."""

    questions: RetrievalQuestions
    ndcgs: list[float]


class _RetrievalRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ranking: RetrievalRanking
    ndcgs: list[float]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``reference.json``. ``allow_below_threshold``: the build keeps an engine that fails."""

    name: str
    is_own: bool
    outputs: list[str]
    texts: list[str]
    canary_text: str
    thresholds: Thresholds
    allow_below_threshold: bool
    retrieval: _RetrievalRecord | None = None


_record_decoder = msgspec.json.Decoder(_Record)


def output_meaning(manifest: Manifest) -> OutputMeaning:
    """The meaning of a model's outputs."""
    is_unit = {one.name for one in manifest.outputs if one.unit_length or one.name == "token_projection"}
    if manifest.engine.unit_vectors or (manifest.embedding is not None and manifest.embedding.normalize):
        is_unit.add("embedding")
    pool = manifest.extraction.candidates if manifest.extraction else None
    return OutputMeaning(
        ranks="rerank" in manifest.tasks,
        classification=manifest.classification,
        with_lengths=frozenset({one.name for one in manifest.outputs} - is_unit),
        most_boundaries=pool.most_boundaries if pool else None,
    )


def store_reference_answers(
    root: Path,
    reference: ReferenceAnswers,
    questions: HeldOut,
    canary: Float32Array,
    thresholds: Thresholds,
    *,
    allow_below_threshold: bool,
    quantization: QuantizationRecord | None = None,
    retrieval: RetrievalReference | None = None,
) -> Certificate:
    """Write ``reference`` into the artifact under construction at ``root``; returns its pending certificate.

    ``canary``: the reference's row for the canary, of its first output. Raises VerificationError for NaN or Inf.
    """
    outputs = list(reference.rows)
    if not all(np.isfinite(rows).all() for name in outputs for rows in reference.rows[name]):
        raise VerificationError(
            f"The reference ({reference.name}) itself gives NaN or Inf: the checkpoint's weights are damaged. "
            "Download the checkpoint again."
        )
    folder = root / REFERENCE_DIR
    folder.mkdir()
    record = _Record(
        name=reference.name,
        is_own=reference.is_own,
        outputs=outputs,
        texts=questions.texts,
        canary_text=questions.canary_text,
        thresholds=thresholds,
        allow_below_threshold=allow_below_threshold,
        retrieval=_RetrievalRecord(ranking=retrieval.questions.ranking, ndcgs=retrieval.ndcgs) if retrieval else None,
    )
    (folder / _RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    rows: dict[str, Any] = {
        _ROWS + name: np.concatenate([np.atleast_2d(row) for row in reference.rows[name]]).astype(np.float32)
        for name in outputs
    }
    if retrieval is not None:
        flattened = _flattened(retrieval.questions.encodings)
        rows |= {_RETRIEVAL + name: array for name, array in flattened.items()}
    np.savez_compressed(folder / _ANSWERS, **_flattened([*questions.encodings, questions.canary]), **rows)
    return Certificate(
        kind="pending",
        reference=reference.name,
        reference_is_independent=not reference.is_own,
        device="",
        num_texts=0,
        num_held_out_texts=len(questions.texts),
        texts_sha256=questions.texts_sha256,
        thresholds=thresholds,
        outputs=[],
        quantization=quantization,
        passed=False,
        canary_text=questions.canary_text,
        canary_output=outputs[0],
        canary_row=kept_canary(canary, outputs[0]),
    )


def complete_certificate(artifact: Artifact, engine: Engine, tell: Tell = untold) -> tuple[Artifact, bool]:
    """Compare ``engine`` with the reference's answers in ``artifact``; returns the artifact with its completed
    certificate, and whether it may be served: it passed, or the build allowed engines below the thresholds.

    The artifact on disk is unchanged (see ``bei.artifact.store.recertify``). Raises ConfigError if it holds no answers,
    ArtifactManifestError, EngineError, VerificationError.
    """
    record, questions, reference, retrieval = _read(artifact)
    certificate = compare(
        ask_engine(engine, questions, record.outputs, tell=tell),
        reference,
        questions,
        record.thresholds,
        meaning=output_meaning(artifact.manifest),
        quantization=artifact.certificate.quantization,
        retrieval=_ranked(engine, retrieval, record.thresholds, tell) if retrieval else None,
    )
    certificate = _beside(certificate, artifact.certificate)
    completed = msgspec.structs.replace(artifact, certificate=certificate)
    return completed, certificate.passed or record.allow_below_threshold


def _beside(found: Certificate, kept: Certificate) -> Certificate:
    """``found``, the certificate of answers to texts, with all other rows of ``kept``."""
    found = msgspec.structs.replace(
        found, tokens=kept.tokens, probabilities=kept.probabilities, images=kept.images, labels=kept.labels
    )
    return msgspec.structs.replace(found, passed=found.passed and not found.failures)


def _ranked(engine: Engine, reference: RetrievalReference, thresholds: Thresholds, tell: Tell) -> RetrievalAgreement:
    rows = ask_retrieval(engine, reference.questions, lambda: False, tell)
    assert rows is not None  # run to the end
    return agreement(reference.questions, reference.ndcgs, rows, thresholds.ndcg_loss)


def check_stored(artifact: Artifact) -> None:
    """Raise ConfigError if ``artifact`` holds no reference answers."""
    if all(artifact.has_file(f"{REFERENCE_DIR}/{name}") for name in (_RECORD, _ANSWERS)):
        return
    was_verified = artifact.certificate.kind != "none"
    how = "its engine was verified when it was built" if was_verified else "it was built with --no-verify"
    can_keep = artifact.manifest.reads_texts and artifact.manifest.label_tower is None
    remedy = "; 'bei build --keep-reference' verifies anew and keeps them." if can_keep else "."
    raise ConfigError(
        f"{artifact.path} keeps no answers of a reference to compare with: {how}. 'bei inspect' shows the certificate"
        f"{remedy}"
    )


def may_be_served(artifact: Artifact) -> bool:
    """True if the certificate of ``artifact`` permits serving.

    An engine that failed at build time was kept on purpose; one that failed later was not.
    """
    if artifact.certificate.passed or not artifact.has_file(f"{REFERENCE_DIR}/{_RECORD}"):
        return True
    return _record_of(artifact).allow_below_threshold


def _record_of(artifact: Artifact) -> _Record:
    file = artifact.file(f"{REFERENCE_DIR}/{_RECORD}")
    try:
        return _record_decoder.decode(read_bounded(file))
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise ArtifactManifestError(
            f"{shown_path(file)} cannot be read ({error}). Build the artifact again."
        ) from error


def _read(artifact: Artifact) -> tuple[_Record, HeldOut, ReferenceAnswers, RetrievalReference | None]:
    check_stored(artifact)
    answers = artifact.file(f"{REFERENCE_DIR}/{_ANSWERS}")
    record = _record_of(artifact)
    per_token = {output.name for output in artifact.manifest.outputs if output.per_token}
    try:
        check_unpacked(answers, _MOST_BYTES)
        with answers.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
        *encodings, canary = _encodings(arrays, artifact.manifest)
        if len(encodings) != len(record.texts) or not record.outputs:
            raise UnfitError(f"it answers {len(encodings)} texts, and {_RECORD} has {len(record.texts)}")
        retrieval = _retrieval(record, arrays, artifact.manifest)
        rows = {}
        for name in record.outputs:
            found, is_per_token = arrays[_ROWS + name], name in per_token
            # A time budget may have left out the last texts.
            ends = np.cumsum([encoding.num_tokens if is_per_token else 1 for encoding in encodings]).tolist()
            check_rows(found, name, artifact.manifest, ends)
            parts = np.split(found, ends[: ends.index(len(found))])
            rows[name] = parts if is_per_token else [part[0] for part in parts]
    except Exception as error:  # zipfile, zlib and numpy raise nearly anything for files that are none, or do not fit
        raise ArtifactManifestError(
            f"{shown_path(answers)} cannot be read ({error}). Build the artifact again."
        ) from error
    questions = HeldOut(record.texts, encodings, record.canary_text, canary)
    return record, questions, ReferenceAnswers(record.name, record.is_own, rows), retrieval


def _retrieval(record: _Record, arrays: dict[str, Any], manifest: Manifest) -> RetrievalReference | None:
    if record.retrieval is None:
        return None
    own = {name[len(_RETRIEVAL) :]: array for name, array in arrays.items() if name.startswith(_RETRIEVAL)}
    ranking, ndcgs, encodings = record.retrieval.ranking, record.retrieval.ndcgs, _encodings(own, manifest)
    check_ranking(ranking, ndcgs, len(encodings), manifest)
    return RetrievalReference(RetrievalQuestions(ranking, encodings), ndcgs)


def _flattened(encodings: Sequence[Encoding]) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "input_ids": np.concatenate([encoding.input_ids for encoding in encodings]).astype(np.int32),
        "num_tokens": np.array([encoding.num_tokens for encoding in encodings], np.int32),
        "num_keys": np.array([_ALL_KEYS if e.num_keys is None else e.num_keys for e in encodings], np.int32),
        "num_unpooled": np.array([encoding.num_unpooled for encoding in encodings], np.int32),
    }
    if any(encoding.adapter for encoding in encodings):
        arrays[ADAPTERS] = np.array([encoding.adapter for encoding in encodings], np.int32)
    if encodings[0].token_type_ids is not None:
        arrays["token_type_ids"] = np.concatenate([encoding.token_type_ids for encoding in encodings]).astype(np.int32)
    return arrays


def _encodings(arrays: dict[str, Any], manifest: Manifest) -> list[Encoding]:
    check_encodings(arrays, manifest, _ALL_KEYS)
    ends = np.cumsum(arrays["num_tokens"])[:-1]
    types, count = arrays.get("token_type_ids"), len(arrays["num_tokens"])
    parts = zip(
        np.split(arrays["input_ids"], ends),
        [None] * count if types is None else np.split(types, ends),
        arrays["num_keys"].tolist(),
        arrays["num_unpooled"].tolist(),
        arrays.get(ADAPTERS, np.zeros(count, np.int32)).tolist(),
        strict=True,
    )
    return [
        Encoding(ids, kinds, False, None, None if num_keys == _ALL_KEYS else num_keys, num_unpooled, adapter)
        for ids, kinds, num_keys, num_unpooled, adapter in parts
    ]
