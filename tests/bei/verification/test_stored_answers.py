"""A reference's answers survive the artifact, and an engine is judged by them where it runs."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from bei.artifact import store
from bei.artifact.certificate.record import Certificate, LayerSensitivity, QuantizationRecord
from bei.artifact.certificate.thresholds import thresholds_of
from bei.artifact.manifest import CERTIFICATE, MANIFEST, REFERENCE_DIR, Artifact, OutputInfo
from bei.core import Encoding, EngineInfo, Float32Array, Limits, Outputs, PackedBatch
from bei.errors import ArtifactHashMismatchError, ArtifactManifestError, ConfigError, VerificationError
from bei.verification.comparison import ReferenceAnswers
from bei.verification.engine_answers import HeldOut
from bei.verification.retrieval import RetrievalQuestions, RetrievalRanking, ndcgs
from bei.verification.stored_answers import (
    RetrievalReference,
    complete_certificate,
    may_be_served,
    store_reference_answers,
)
from tests.support.artifacts import save_artifact
from tests.support.quality_certificates import quantization

WIDTH = 6
LENGTHS = (3, 1, 7, 4, 2, 5, 6, 3, 2, 9, 4, 1)
OUTPUTS = [OutputInfo(name="embedding", dimension=WIDTH), OutputInfo(name="tokens", dimension=WIDTH, per_token=True)]


def vectors_of(encoding: Encoding) -> Float32Array:
    """A vector a token, [tokens, WIDTH], of everything that an encoding says."""
    types = encoding.token_type_ids if encoding.token_type_ids is not None else np.zeros(encoding.num_tokens)
    keys = encoding.num_tokens if encoding.num_keys is None else encoding.num_keys
    return np.stack(
        [
            np.random.default_rng([int(token), int(kind), keys, encoding.num_unpooled]).standard_normal(
                WIDTH, np.float32
            )
            for token, kind in zip(encoding.input_ids, types, strict=True)
        ]
    )


class Engine:
    """The reference itself, but for ``noise``."""

    def __init__(self, noise: float = 0.0) -> None:
        per_token = frozenset({"tokens"})
        widths = {"embedding": WIDTH, "tokens": WIDTH}
        self.info = EngineInfo("stub", "bf16", "a GPU (SM89)", Limits(32, 4, 16), widths, per_token)
        self._noise = noise

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        parts = []
        for row, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
            length = int(end - start)
            keys = length if batch.key_lens is None else int(batch.key_lens[row])
            unpooled = 0 if batch.unpooled_lens is None else int(batch.unpooled_lens[row])
            types = None if batch.token_type_ids is None else batch.token_type_ids[start:end]
            encoding = Encoding(
                batch.input_ids[start:end], types, num_keys=None if keys == length else keys, num_unpooled=unpooled
            )
            parts.append(vectors_of(encoding))
        noise = np.random.default_rng(0).standard_normal((batch.num_tokens, WIDTH)).astype(np.float32)
        tokens = np.concatenate(parts) + np.float32(self._noise) * noise
        return {"tokens": tokens, "embedding": tokens[batch.cu_seqlens[:-1]]}

    def warmup(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing to free."""


def questions(*, pairs: bool = False, partial: bool = False) -> HeldOut:
    rng = np.random.default_rng(1)
    encodings = [
        Encoding(rng.integers(0, 90, n).astype(np.int32), np.arange(n, dtype=np.int32) % 2 if pairs else None)
        for n in (*LENGTHS, 4)
    ]
    if partial:
        encodings = [e._replace(num_keys=1, num_unpooled=1) if e.num_tokens > 2 else e for e in encodings]
    *texts, canary = encodings
    return HeldOut([f"text {index}" for index in range(len(texts))], texts, "the canary", canary)


def pending(
    path: Path,
    asked: HeldOut,
    *,
    num_answered: int | None = None,
    allow_below_threshold: bool = False,
    quantization: QuantizationRecord | None = None,
    retrieval: RetrievalReference | None = None,
) -> Artifact:
    """An artifact as a build leaves it that could not run its engine."""
    saved = save_artifact(path, outputs=OUTPUTS)
    answered = [vectors_of(encoding) for encoding in asked.encodings[:num_answered]]
    reference = ReferenceAnswers(
        "the reference", False, {"embedding": [rows[0] for rows in answered], "tokens": answered}
    )
    certificate = store_reference_answers(
        path,
        reference,
        asked,
        vectors_of(asked.canary)[0],
        thresholds_of(0.999, retrieval=retrieval is not None),
        allow_below_threshold=allow_below_threshold,
        quantization=quantization,
        retrieval=retrieval,
    )
    (path / MANIFEST).unlink()
    return store.save(path, saved.manifest, certificate)


@pytest.mark.parametrize("settings", [{}, {"pairs": True}, {"partial": True}], ids=["plain", "pairs", "partial keys"])
def test_an_engine_that_answers_as_the_reference_passes(tmp_path: Path, settings: dict[str, bool]) -> None:
    artifact = store.load(pending(tmp_path / "a", questions(**settings)).path)
    assert (artifact.certificate.kind, artifact.manifest.verification) == ("pending", "pending")
    assert not artifact.certificate.passed
    assert artifact.certificate.verdict.startswith("PENDING")
    completed, is_good = complete_certificate(artifact, Engine())
    certificate = completed.certificate
    assert is_good
    assert certificate.passed
    assert (certificate.kind, certificate.reference, certificate.device) == (
        "reference",
        "the reference",
        "a GPU (SM89)",
    )
    assert (certificate.num_texts, certificate.num_held_out_texts) == (len(LENGTHS), len(LENGTHS))
    assert [row.output for row in certificate.outputs] == ["embedding", "tokens"]
    assert [row.cosine_min for row in certificate.outputs] == [1.0, 1.0]


@pytest.mark.parametrize("allowed", [False, True])
def test_an_engine_that_does_not_fails_unless_the_build_allowed_it(tmp_path: Path, allowed: bool) -> None:
    artifact = pending(tmp_path / "a", questions(), allow_below_threshold=allowed)
    completed, is_good = complete_certificate(artifact, Engine(noise=0.5))
    assert is_good == allowed
    assert not completed.certificate.passed
    assert all(row.failures for row in completed.certificate.outputs)


def test_texts_that_the_reference_had_no_time_for_are_not_counted(tmp_path: Path) -> None:
    completed, _ = complete_certificate(pending(tmp_path / "a", questions(), num_answered=10), Engine())
    assert (completed.certificate.num_texts, completed.certificate.num_held_out_texts) == (10, len(LENGTHS))
    assert completed.certificate.verdict == f"passed on 10 of {len(LENGTHS)} texts"


def test_a_completed_certificate_is_sealed_and_everything_else_stays(tmp_path: Path) -> None:
    artifact = pending(tmp_path / "a", questions())
    completed, _ = complete_certificate(artifact, Engine())
    assert store.load(artifact.path).without_files() == artifact, "completing writes nothing"
    sealed = store.recertify(artifact, completed.certificate)
    assert store.load(artifact.path).without_files() == sealed
    assert (sealed.manifest.verification, sealed.certificate) == ("reference", completed.certificate)
    kept = msgspec.structs.replace(
        sealed.manifest,
        files=artifact.manifest.files,
        verification="pending",
        digest=artifact.manifest.digest,
    )
    assert kept == artifact.manifest
    assert not list(artifact.path.glob("*.partial"))
    again, is_good = complete_certificate(sealed, Engine())  # on another device, say
    assert is_good
    assert again.certificate == completed.certificate


def test_a_certificate_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    artifact = pending(tmp_path / "a", questions())
    file = artifact.path / CERTIFICATE
    record = msgspec.json.decode(file.read_bytes(), type=Certificate)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, passed=True, kind="reference")))
    with pytest.raises(ArtifactHashMismatchError):
        store.load(artifact.path)


def test_an_artifact_without_answers_cannot_be_completed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps no answers of a reference"):
        complete_certificate(save_artifact(tmp_path / "a"), Engine())


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", b"{}"])
def test_answers_that_cannot_be_read_are_named(tmp_path: Path, damage: bytes) -> None:
    """Loading finds files that were changed; this is one that was written so."""
    artifact = pending(tmp_path / "a", questions())
    (artifact.path / REFERENCE_DIR / "answers.npz").write_bytes(damage)
    with pytest.raises(ArtifactManifestError, match="cannot be read"):
        complete_certificate(artifact, Engine())


@pytest.mark.parametrize("name", ["num_tokens", "num_keys", "num_unpooled", "input_ids", "rows.embedding"])
@pytest.mark.parametrize("array", [np.array(1), np.array(["a"] * 3), np.ones((2, 2), np.complex64)], ids=str)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, name: str, array: npt.NDArray[Any]) -> None:
    artifact = pending(tmp_path / "a", questions())
    path = artifact.path / REFERENCE_DIR / "answers.npz"
    with np.load(path) as stored:
        arrays = {**stored, name: array}
    np.savez(path, **arrays)
    with pytest.raises(ArtifactManifestError, match="cannot be read"):
        complete_certificate(artifact, Engine())


def test_an_archive_of_another_version_is_named(tmp_path: Path) -> None:
    artifact = pending(tmp_path / "a", questions())
    path = artifact.path / REFERENCE_DIR / "answers.npz"
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 6] = 255  # the version that is needed to extract
    path.write_bytes(content)
    with pytest.raises(ArtifactManifestError, match="cannot be read"):
        complete_certificate(artifact, Engine())


def test_a_reference_with_nan_is_not_kept(tmp_path: Path) -> None:
    asked = questions()
    rows = [vectors_of(encoding) for encoding in asked.encodings]
    rows[3][0, 0] = np.nan
    save_artifact(tmp_path / "a")
    with pytest.raises(VerificationError, match="itself gives NaN"):
        store_reference_answers(
            tmp_path / "a",
            ReferenceAnswers("the reference", False, {"tokens": rows}),
            asked,
            rows[0][0],
            thresholds_of(0.9),
            allow_below_threshold=False,
        )
    assert not (tmp_path / "a" / REFERENCE_DIR).exists()


def retrieval_reference() -> RetrievalReference:
    """Queries that are documents, which therefore come first; and what the stub engine makes of them."""
    rng = np.random.default_rng(5)
    documents = [Encoding(rng.integers(0, 90, n).astype(np.int32)) for n in (3, 5, 2, 4, 6, 1, 7, 3)]
    grades = [{0: 2}, {3: 1}, {5: 2}]
    ranking = RetrievalRanking(output="embedding", num_documents=len(documents), grades=grades, similarity="cosine")
    asked = RetrievalQuestions(ranking, [documents[0], documents[3], documents[5], *documents])
    return RetrievalReference(asked, ndcgs(asked, {"embedding": [vectors_of(one)[0] for one in asked.encodings]}))


def test_a_retrieval_is_ranked_where_the_engine_runs(tmp_path: Path) -> None:
    reference = retrieval_reference()
    assert reference.ndcgs == [1.0, 1.0, 1.0]
    artifact = store.load(pending(tmp_path / "a", questions(), retrieval=reference).path)
    assert artifact.certificate.retrieval is None
    good, is_good = complete_certificate(artifact, Engine())
    assert is_good
    assert good.certificate.retrieval is not None
    assert (good.certificate.retrieval.ndcg_engine, good.certificate.retrieval.loss) == (1.0, 0.0)
    assert good.certificate.verdict == f"passed on {len(LENGTHS)} texts"
    bad, is_good = complete_certificate(artifact, Engine(noise=3.0))
    assert not is_good
    assert [failure.split(":")[0] for failure in bad.certificate.failures] == ["embedding", "tokens", "retrieval"]


def test_a_retrieval_that_the_reference_had_no_time_for_is_named(tmp_path: Path) -> None:
    asked = questions()
    artifact = pending(tmp_path / "a", asked)
    record = artifact.path / REFERENCE_DIR / "reference.json"
    record.write_bytes(record.read_bytes().replace(b'"ndcg_loss": null', b'"ndcg_loss": 0.005'))
    completed, is_good = complete_certificate(artifact, Engine())
    assert is_good
    assert completed.certificate.retrieval is None
    assert completed.certificate.verdict == f"passed on {len(LENGTHS)} texts, retrieval not measured"


def test_how_the_engine_was_quantized_stays_in_the_certificate(tmp_path: Path) -> None:
    record = quantization(layers=[LayerSensitivity(layer="layers.0.mlp.up", error=0.03, is_high=True)])
    artifact = store.load(pending(tmp_path / "a", questions(), quantization=record).path)
    assert artifact.certificate.quantization == record
    completed, _ = complete_certificate(artifact, Engine())
    assert completed.certificate.quantization == record
    sealed = store.recertify(artifact, completed.certificate)
    again, _ = complete_certificate(sealed, Engine())
    assert again.certificate.quantization == record


def test_the_answers_that_were_verified_are_read_and_not_what_lies_there_now(tmp_path: Path) -> None:
    artifact = store.load(pending(tmp_path / "a", questions()).path)
    for file in [*(artifact.path / REFERENCE_DIR).iterdir()]:
        file.rename(file.with_name("former"))
        file.write_bytes(b"answers of somebody else")
    assert complete_certificate(artifact, Engine())[1]
    assert may_be_served(artifact) is False
