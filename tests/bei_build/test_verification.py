"""The certificate's figures: what is perfect passes, and every kind of fault shows in the figure meant for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.artifact import TOKENIZER, Artifact, Certificate
from bei.core import Encoding, EngineInfo, Float32Array, Int32Array, Limits, Outputs, PackedBatch
from bei.errors import VerificationError
from bei.tokenization import TextEncoder
from bei_build.checkpoint import locate, read_checkpoint
from bei_build.spec import ModelSpec
from bei_build.verification import CANARY_TEXT, EngineReference, certify, encode, held_out_texts, normalized
from tests.checkpoints import save_checkpoint, wordpiece_tokenizer

LIMITS = Limits(max_num_tokens=128, max_batch_size=8, max_seq_len=32)
DIMENSION = 16
Fault = Callable[[Float32Array], Float32Array]


def vector_of(ids: Int32Array) -> Float32Array:
    """A random direction that depends on every id and its place."""
    seed = [position * 1000 + int(token) for position, token in enumerate(ids)]
    return np.random.default_rng(seed).standard_normal(DIMENSION, np.float32)


class StubEngine:
    """Answers ``vector_of`` each sequence, put through ``fault`` a batch at a time. Remembers its batches."""

    def __init__(self, fault: Fault = lambda rows: rows) -> None:
        self.info = EngineInfo("stub", "fp32", "none", LIMITS, {"embedding": DIMENSION})
        self.batches: list[PackedBatch] = []
        self._fault = fault

    def run(self, batch: PackedBatch) -> Outputs:
        self.batches.append(batch)
        bounds = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        return {"embedding": self._fault(np.stack([vector_of(batch.input_ids[start:end]) for start, end in bounds]))}

    def warmup(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing to free."""


class StubReference:
    name = "stub"

    def __init__(self, fault: Fault = lambda rows: rows) -> None:
        self._fault = fault

    def run(self, encodings: Sequence[Encoding], output: str) -> list[Float32Array]:
        assert output == "embedding"
        return list(self._fault(np.stack([vector_of(encoding.input_ids) for encoding in encodings])))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_checkpoint(locate(str(save_checkpoint(tmp_path_factory.mktemp("spec"))))).spec


@pytest.fixture
def tokenizer() -> Tokenizer:
    return wordpiece_tokenizer()


def certificate_of(fault: Fault, tokenizer: Tokenizer, spec: ModelSpec, threshold: float = 0.999) -> Certificate:
    return certify(StubEngine(fault), StubReference(), tokenizer, spec, threshold)


def test_an_exact_engine_has_perfect_figures(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = certificate_of(lambda rows: rows, tokenizer, spec)
    assert certificate.passed
    assert (certificate.cosine_mean, certificate.cosine_p1, certificate.cosine_min) == (1.0, 1.0, 1.0)
    assert (certificate.max_abs_difference, certificate.ranking_overlap) == (0.0, 1.0)
    assert (certificate.reference, certificate.threshold) == ("stub", 0.999)
    assert certificate.num_texts == len(held_out_texts())


def test_length_of_vectors_is_not_what_is_verified(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    assert certificate_of(lambda rows: rows * 7, tokenizer, spec).cosine_min == 1.0


def test_the_canary_is_the_engines_own_unit_vector(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = certificate_of(lambda rows: rows, tokenizer, spec)
    (canary,) = encode(tokenizer, [CANARY_TEXT], spec, LIMITS.max_seq_len)
    expected = normalized(vector_of(canary.input_ids)[None])[0]
    assert certificate.canary_text == CANARY_TEXT
    np.testing.assert_allclose(certificate.canary_row, expected, atol=1e-5)


def test_rows_in_the_wrong_order_fail(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = certificate_of(lambda rows: np.roll(rows, 1, axis=0), tokenizer, spec)
    assert not certificate.passed
    assert certificate.cosine_mean < 0.5
    assert certificate.ranking_overlap < 0.9
    assert certificate.max_abs_difference > 0.1


def test_noise_lowers_every_figure(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    noise = np.random.default_rng(0).standard_normal((LIMITS.max_batch_size, DIMENSION), np.float32)
    certificate = certificate_of(lambda rows: rows + noise[: len(rows)] * 0.3, tokenizer, spec)
    assert 0.9 < certificate.cosine_mean < 0.99
    assert -1.0 <= certificate.cosine_min <= certificate.cosine_p1 < certificate.cosine_mean
    assert 0.5 < certificate.ranking_overlap < 1.0
    assert not certificate.passed


def test_one_bad_text_is_named_and_lowers_the_minimum(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    text = held_out_texts()[17]
    (bad,) = encode(tokenizer, [text], spec, LIMITS.max_seq_len)

    def turn_one(rows: Float32Array) -> Float32Array:
        is_bad = np.isclose(rows, vector_of(bad.input_ids)).all(axis=1, keepdims=True)
        return np.where(is_bad, -rows, rows)

    certificate = certificate_of(turn_one, tokenizer, spec, threshold=0.9)
    assert certificate.worst_texts[0] == text
    assert certificate.cosine_min == -1.0
    assert certificate.cosine_mean > 0.97
    assert certificate.passed  # the threshold is for the mean


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_count_as_opposites_and_leave_a_readable_certificate(
    value: float, tokenizer: Tokenizer, spec: ModelSpec
) -> None:
    def damage_the_last_row(rows: Float32Array) -> Float32Array:
        rows = rows.copy()
        rows[-1, 3] = value
        return rows

    certificate = certificate_of(damage_the_last_row, tokenizer, spec)
    assert not certificate.passed
    assert certificate.cosine_min == -1.0
    assert msgspec.json.decode(msgspec.json.encode(certificate), type=Certificate) == certificate


def test_a_reference_that_is_not_finite_is_no_reference(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    reference = StubReference(lambda rows: rows * np.float32(np.nan))
    with pytest.raises(VerificationError, match="itself gives NaN or Inf: the checkpoint's weights are damaged"):
        certify(StubEngine(), reference, tokenizer, spec, 0.0)


@pytest.mark.parametrize(("threshold", "passed"), [(0.99, False), (-1.0, True)])
def test_the_threshold_decides(threshold: float, passed: bool, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = certificate_of(lambda rows: np.roll(rows, 1, axis=0), tokenizer, spec, threshold)
    assert certificate.passed is passed


def test_last_bits_of_the_reference_do_not_show(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    noise = np.random.default_rng(1).standard_normal((len(held_out_texts()), DIMENSION), np.float32) * np.float32(1e-7)
    quantized = StubEngine(lambda rows: rows.round(1))
    exact = certify(quantized, StubReference(), tokenizer, spec, 0.999)
    assert exact.cosine_min < 1.0
    assert certify(quantized, StubReference(lambda rows: rows + noise), tokenizer, spec, 0.999) == exact
    perfect = certify(StubEngine(), StubReference(lambda rows: rows + noise), tokenizer, spec, 0.999)
    assert perfect.worst_texts == held_out_texts()[:3]  # all are equally good: their order decides


def test_the_engine_is_run_in_mixed_batches_within_its_limits(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    engine = StubEngine()
    certify(engine, StubReference(), tokenizer, spec, 0.999)
    assert sum(batch.batch_size for batch in engine.batches) == len(held_out_texts()) + 1  # the canary
    for batch in engine.batches:
        assert batch.num_tokens <= LIMITS.max_num_tokens
        assert batch.batch_size <= LIMITS.max_batch_size
    lengths = [np.diff(batch.cu_seqlens) for batch in engine.batches]
    assert any(len(set(batch.tolist())) > 2 for batch in lengths)
    assert max(batch.max() for batch in lengths) == LIMITS.max_seq_len


def test_the_engine_reference_runs_one_text_at_a_time(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    engine = StubEngine(lambda rows: np.roll(rows, 1, axis=0))  # harmless alone
    encodings = encode(tokenizer, held_out_texts()[:5], spec, LIMITS.max_seq_len)
    vectors = EngineReference(engine, "engine").run(encodings, "embedding")
    assert [batch.batch_size for batch in engine.batches] == [1] * 5
    np.testing.assert_array_equal(vectors, StubReference().run(encodings, "embedding"))


def test_held_out_texts_are_many_different_and_of_all_lengths() -> None:
    texts = held_out_texts()
    assert len(texts) == len(set(texts)) >= 50
    assert not any(text.startswith("#") for text in texts)
    assert min(map(len, texts)) < 20 < 400 < max(map(len, texts))
    assert sum(not text.isascii() for text in texts) >= 5
    assert CANARY_TEXT not in texts


def test_texts_are_tokenized_as_the_server_does(bert_artifact: Artifact, spec: ModelSpec) -> None:
    path, max_seq_len = bert_artifact.path / TOKENIZER, bert_artifact.manifest.max_seq_len
    expected = TextEncoder(path, max_seq_len).encode(held_out_texts())
    actual = encode(Tokenizer.from_file(str(path)), held_out_texts(), spec, max_seq_len)
    assert any(encoding.truncated for encoding in expected)
    assert [encoding.input_ids.tolist() for encoding in actual] == [e.input_ids.tolist() for e in expected]


def test_tokenizing_leaves_the_tokenizer_as_it_was(tokenizer: Tokenizer, spec: ModelSpec, tmp_path: Path) -> None:
    before = tokenizer.to_str()
    encode(tokenizer, ["hello world"], spec, 2)
    assert tokenizer.to_str() == before
