"""A certificate that catches errors: builds broken on purpose fail by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from bei.artifact import store
from bei.artifact.manifest import CERTIFICATE_PAGE, Manifest
from bei.core import Engine, EngineInfo, Float32Array, Outputs, PackedBatch
from bei.errors import VerificationError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.reference.held_out import Budget, encode, held_out_texts
from bei_build.reference.retrieval_set import RetrievalSet, bundled_set
from bei_build.targets.openvino import OpenVINOCompiler
from bei_build.verification import questions
from tests.support.builds import build_artifact, open_engine
from tests.support.checkpoints import save_checkpoint

Fault = Callable[[PackedBatch, dict[str, Float32Array]], None]


class Faulty:
    """An engine whose answers ``fault`` changes in place."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        self._engine = engine
        self._fault = fault

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        found = {name: rows.copy() for name, rows in self._engine.run(batch, outputs).items()}
        self._fault(batch, found)
        return found

    def warmup(self) -> None:
        self._engine.warmup()

    def close(self) -> None:
        self._engine.close()


def opening(fault: Fault) -> Callable[[Path, Manifest], Engine]:
    return lambda folder, manifest: Faulty(open_engine(folder, manifest), fault)


def test_an_output_other_than_the_first_fails_the_build_by_name(bert: Path, tmp_path: Path) -> None:
    def fault(batch: PackedBatch, found: dict[str, Float32Array]) -> None:
        found["token_embedding"] = np.roll(found["token_embedding"], 1, axis=0)

    with pytest.raises(VerificationError, match=r"^Verification failed: token_embedding: mean cosine") as info:
        build_artifact(bert, tmp_path / "a", opening(fault), token_embeddings=True)
    assert "embedding: mean" not in str(info.value).replace("token_embedding: mean", "")
    assert not (tmp_path / "a").exists()


def broken_text(bert: Path, index: int) -> Fault:
    """One held-out text gets the opposite vector."""
    checkpoint = read_checkpoint(locate(str(bert)))
    (bad,) = encode(checkpoint.tokenizer, [held_out_texts()[index]], checkpoint.spec, checkpoint.max_seq_len)

    def fault(batch: PackedBatch, found: dict[str, Float32Array]) -> None:
        for row, ids in enumerate(np.split(batch.input_ids, batch.cu_seqlens[1:-1])):
            if ids.tolist() == bad.input_ids.tolist():
                found["embedding"][row] *= -1

    return fault


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_one_text_of_all_fails_the_build_by_name(precision: str, bert: Path, tmp_path: Path) -> None:
    opened = opening(broken_text(bert, 47))
    with pytest.raises(VerificationError, match=r"embedding: .*min cosine -") as info:
        build_artifact(bert, tmp_path / "a", opened, all_texts=True, precision=precision)
    assert f"worst text: {held_out_texts()[47][:60]!r}" in str(info.value)


def test_what_failed_is_in_the_certificate_and_on_its_page_where_it_is_kept(bert: Path, tmp_path: Path) -> None:
    artifact = build_artifact(
        bert, tmp_path / "a", opening(broken_text(bert, 47)), all_texts=True, allow_below_threshold=True
    )
    (row,) = artifact.certificate.outputs
    assert row.worst_texts[0].text == held_out_texts()[47]
    assert row.worst_texts[0].cosine == -1.0
    assert row.worst_texts[1].cosine > 0.9999
    assert row.histogram.counts[-1] == 1
    assert sum(row.histogram.counts) == len(held_out_texts())
    page = (artifact.path / CERTIFICATE_PAGE).read_text()
    assert "Below threshold" in page
    assert "embedding: mean cosine" in page


@pytest.mark.parametrize("task", ["ForSequenceClassification", "Model"])
def test_scores_with_a_term_too_many_and_vectors_of_other_lengths_fail_the_build(task: str, tmp_path: Path) -> None:
    def fault(batch: PackedBatch, found: dict[str, Float32Array]) -> None:
        for name in found:
            found[name] = found[name] + np.float32(1) if name == "logits" else found[name] * np.float32(2)

    folder = save_checkpoint(tmp_path / "checkpoint", task=task, num_labels=1)
    scores = task != "Model"
    wanted: dict[str, Any] = {} if scores else {"normalize": False}
    with pytest.raises(VerificationError, match=r"^Verification failed: (logits|embedding): mean cosine"):
        build_artifact(folder, tmp_path / "a", opening(fault), **wanted)
    assert build_artifact(folder, tmp_path / "a", **wanted).certificate.passed
    if not scores:  # whose lengths nobody sees
        assert build_artifact(folder, tmp_path / "a", opening(fault), normalize=True).certificate.passed


def test_the_time_to_compile_is_none_of_the_budget_for_verifying(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, compiled = [0.0], OpenVINOCompiler.compile

    def slowly(*arguments: Any) -> Any:
        now[0] += 1000
        return compiled(*arguments)

    monkeypatch.setattr(OpenVINOCompiler, "compile", slowly)
    monkeypatch.setattr(questions, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    certificate = build_artifact(
        bert, tmp_path / "a", all_texts=True, max_batch_size=4, verify_budget=100.0
    ).certificate
    assert certificate.num_texts == certificate.num_held_out_texts == len(held_out_texts())


# Each document is its own query, so even random weights rank.
SELF = RetrievalSet(
    bundled_set().documents[:20], bundled_set().documents[:20], tuple({index: 2} for index in range(20))
)


def test_a_ranking_that_was_lost_fails_the_build_by_name(bert: Path, tmp_path: Path) -> None:
    """Held-out texts are exact; seven of twenty queries of the retrieval set get the opposite vector."""
    checkpoint = read_checkpoint(locate(str(bert)))
    encodings = encode(checkpoint.tokenizer, list(SELF.queries[3:10]), checkpoint.spec, checkpoint.max_seq_len)
    bad = [one.input_ids.tolist() for one in encodings]

    def fault(batch: PackedBatch, found: dict[str, Float32Array]) -> None:
        for row, ids in enumerate(np.split(batch.input_ids, batch.cu_seqlens[1:-1])):
            if ids.tolist() in bad:
                bad.remove(ids.tolist())  # the query comes before the document, which is the same text
                found["embedding"][row] *= -1

    with mock.patch.object(questions, "bundled_set", return_value=SELF):
        exact = build_artifact(bert, tmp_path / "exact", verify_retrieval=True).certificate
        assert exact.retrieval is not None
        assert (exact.retrieval.ndcg_engine, exact.retrieval.is_judged) == (1.0, True)
        with pytest.raises(VerificationError, match=r"^Verification failed: retrieval: nDCG@10 0\.6") as info:
            build_artifact(bert, tmp_path / "a", opening(fault), verify_retrieval=True)
    assert "at most 0.50% is allowed" in str(info.value)
    assert "--no-verify-retrieval" in str(info.value)
    assert "--min-cosine" not in str(info.value)


def test_the_texts_hash_is_theirs(bert: Path, tmp_path: Path) -> None:
    certificate = build_artifact(bert, tmp_path / "a", all_texts=True).certificate
    texts = "".join(text + "\n" for text in held_out_texts())
    assert certificate.texts_sha256 == hashlib.sha256(texts.encode()).hexdigest()
    assert certificate.reference_is_independent
    own = build_artifact(bert, tmp_path / "b", reference="engine").certificate
    assert not own.reference_is_independent
    assert store.load(tmp_path / "b").certificate == own
