"""The certificate's figures: correct engines pass, and every kind of fault shows in its figure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.artifact.certificate.record import Certificate
from bei.artifact.certificate.thresholds import (
    MIN_COSINES,
    MIN_COSINES_OF_DECODERS,
    MIN_COSINES_OF_ENCODERS,
    thresholds_of,
)
from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding, Engine, EngineInfo, Float32Array, Outputs, PackedBatch
from bei.errors import VerificationError
from bei.tokenizer.encoder import TextEncoder
from bei.verification.comparison import compare, normalized
from bei.verification.engine_answers import ask_canary, ask_engine
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.reference.held_out import (
    CANARY_TEXT,
    ENGINE_SHARE,
    Budget,
    Encode,
    EngineReference,
    Reference,
    ask_reference,
    encode,
    encode_pairs,
    held_out,
    held_out_texts,
    uncompared_certificate,
)
from bei_build.spec.model_spec import HeadSpec, ModelSpec, Output
from bei_build.spec.parts import DenseSpec
from tests.support.checkpoints import HIDDEN, save_checkpoint, wordpiece_tokenizer
from tests.support.stub_reference import (
    DIMENSION,
    LIMITS,
    Clock,
    Fault,
    SlowEngine,
    SlowReference,
    StubEngine,
    StubReference,
    token_vectors_of,
    vector_of,
)

ALL_MIN_COSINES = sorted(
    {*MIN_COSINES.values(), *MIN_COSINES_OF_DECODERS.values(), *MIN_COSINES_OF_ENCODERS.values(), 0.99}
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_checkpoint(locate(str(save_checkpoint(tmp_path_factory.mktemp("spec"))))).spec


@pytest.fixture
def tokenizer() -> Tokenizer:
    return wordpiece_tokenizer()


def encoding_with(tokenizer: Tokenizer, spec: ModelSpec) -> Encode:
    def encoded(texts: Sequence[tuple[str, ...]]) -> list[Encoding | None]:
        if texts and len(texts[0]) == 2:
            return [*encode_pairs(tokenizer, [(first, second) for first, second in texts], spec, LIMITS.max_seq_len)]
        return [*encode(tokenizer, [text for (text,) in texts], spec, LIMITS.max_seq_len)]

    return encoded


def certify(
    engine: Engine,
    reference: Reference,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    min_cosine: float,
    budget: Budget | None = None,
) -> Certificate:
    """Both sides of the verification, as in a build."""
    budget = budget or Budget()
    questions = held_out(encoding_with(tokenizer, spec), spec, engine.info.limits.max_seq_len)
    outputs = [head.output for head in spec.heads]
    answers = ask_engine(engine, questions, outputs, lambda: budget.is_used(ENGINE_SHARE))
    expected = ask_reference(reference, questions.encodings[: answers.num_texts], outputs, budget)
    return compare(answers, expected, questions, thresholds_of(min_cosine))


def certificate_of(fault: Fault, tokenizer: Tokenizer, spec: ModelSpec, threshold: float = 0.999) -> Certificate:
    return certify(StubEngine(fault), StubReference(), tokenizer, spec, threshold)


def test_an_exact_engine_has_perfect_figures(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = certificate_of(lambda rows: rows, tokenizer, spec)
    assert certificate.passed
    assert (
        certificate.outputs[0].cosine_mean,
        certificate.outputs[0].cosine_p1,
        certificate.outputs[0].cosine_min,
    ) == (1.0, 1.0, 1.0)
    assert (certificate.outputs[0].max_abs_difference, certificate.outputs[0].ranking_overlap) == (0.0, 1.0)
    assert (certificate.reference, certificate.thresholds) == ("stub", thresholds_of(0.999))
    assert certificate.num_texts == certificate.num_held_out_texts == len(held_out_texts())


def test_length_of_vectors_is_not_what_is_verified(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    assert certificate_of(lambda rows: rows * 7, tokenizer, spec).outputs[0].cosine_min == 1.0


def test_the_canary_is_the_engines_own_unit_vector(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = certificate_of(lambda rows: rows, tokenizer, spec)
    (canary,) = encode(tokenizer, [CANARY_TEXT], spec, LIMITS.max_seq_len)
    expected = normalized(vector_of(canary.input_ids)[None])[0]
    assert certificate.canary_text == CANARY_TEXT
    np.testing.assert_allclose(certificate.canary_row, expected, atol=1e-5)


def test_rows_in_the_wrong_order_fail(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = certificate_of(lambda rows: np.roll(rows, 1, axis=0), tokenizer, spec)
    assert not certificate.passed
    assert certificate.outputs[0].cosine_mean < 0.5
    assert certificate.outputs[0].ranking_overlap < 0.9
    assert certificate.outputs[0].max_abs_difference > 0.1


def test_noise_lowers_every_figure(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    noise = np.random.default_rng(0).standard_normal((LIMITS.max_batch_size, DIMENSION), np.float32)
    certificate = certificate_of(lambda rows: rows + noise[: len(rows)] * 0.3, tokenizer, spec)
    assert 0.9 < certificate.outputs[0].cosine_mean < 0.99
    assert (
        -1.0
        <= certificate.outputs[0].cosine_min
        <= certificate.outputs[0].cosine_p1
        < certificate.outputs[0].cosine_mean
    )
    assert 0.5 < certificate.outputs[0].ranking_overlap < 1.0
    assert not certificate.passed


def broken_at(index: int, tokenizer: Tokenizer, spec: ModelSpec) -> Fault:
    """Replaces the row of one held-out text by that of another, at cosine 0 or nearly."""
    bad, other = encode(tokenizer, [held_out_texts()[index], "the cat"], spec, LIMITS.max_seq_len)

    def fault(rows: Float32Array) -> Float32Array:
        is_bad = np.isclose(rows, vector_of(bad.input_ids)).all(axis=1, keepdims=True)
        return np.where(is_bad, vector_of(other.input_ids), rows)

    return fault


@pytest.mark.parametrize("min_cosine", ALL_MIN_COSINES)
def test_one_bad_text_of_all_is_named_and_fails(min_cosine: float, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Its share of the mean is one hundredth: a threshold of 0.99 for the mean, INT8's before, misses it."""
    certificate = certificate_of(broken_at(17, tokenizer, spec), tokenizer, spec, min_cosine)
    (row,) = certificate.outputs
    assert row.worst_texts[0].text == held_out_texts()[17]
    assert row.cosine_min < 0.5 < 0.98 < row.cosine_mean
    assert not certificate.passed
    assert any(failure.startswith("min cosine ") for failure in row.failures)


@pytest.mark.parametrize("min_cosine", ALL_MIN_COSINES)
def test_one_bad_text_of_a_classifier_fails_too(min_cosine: float, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    fault = broken_at(17, tokenizer, spec)
    engine, reference = StubEngine(fault, "logits"), StubReference(output="logits")
    certificate = certify(engine, reference, tokenizer, with_head(spec, "logits"), min_cosine)
    (row,) = certificate.outputs
    assert row.worst_texts[0].text == held_out_texts()[17]
    assert not certificate.passed
    assert any(failure.startswith("min cosine ") for failure in row.failures)


def test_the_shares_of_texts_have_the_correlation_as_their_mean(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    noise = np.random.default_rng(3).standard_normal((LIMITS.max_batch_size, 1), np.float32) * 0.2
    engine = StubEngine(lambda rows: rows[:, :1] + noise[: len(rows)], "logits")
    reference = StubReference(lambda rows: rows[:, :1], "logits")
    row = certify(engine, reference, tokenizer, with_head(spec, "logits", 1), -1.0).outputs[0]
    assert row.cosine_min < row.cosine_p1 < row.cosine_mean < 1.0


class TwoOutputs:
    """An engine and a reference with two outputs; ``faults`` by name."""

    name = "stub"
    is_own = False

    def __init__(self, **faults: Fault) -> None:
        self.info = EngineInfo("stub", "fp32", "none", LIMITS, {"embedding": DIMENSION, "token_embedding": DIMENSION})
        self.info = replace(self.info, per_token=frozenset({"token_embedding"}))
        self._engines = {
            name: StubEngine(faults.get(name, lambda rows: rows), name, per_token=name == "token_embedding")
            for name in self.info.outputs
        }

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        return {name: engine.run(batch)[name] for name, engine in self._engines.items()}

    def warmup(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing to free."""


def test_an_output_other_than_the_first_that_is_broken_fails_by_name(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    spec = replace(spec, heads=(*spec.heads, HeadSpec("token_embedding")))
    own = EngineReference(TwoOutputs(), "own")
    perfect = certify(TwoOutputs(), own, tokenizer, spec, 0.99999)
    assert (perfect.passed, perfect.kind, perfect.canary_output) == (True, "self-consistency", "embedding")
    assert [row.output for row in perfect.outputs] == ["embedding", "token_embedding"]
    shifted = TwoOutputs(token_embedding=lambda rows: np.roll(rows, 1, axis=0))
    broken = certify(shifted, own, tokenizer, spec, 0.9)
    assert not broken.passed
    assert [row.failures != [] for row in broken.outputs] == [False, True]


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
    assert certificate.outputs[0].cosine_min == -1.0
    assert msgspec.json.decode(msgspec.json.encode(certificate), type=Certificate) == certificate


def with_head(spec: ModelSpec, output: Output, width: int = DIMENSION, *, per_token: bool = False) -> ModelSpec:
    layers = (DenseSpec("head", HIDDEN, width),)
    head = HeadSpec(output, token_layers=layers) if per_token else HeadSpec(output, ("cls",), layers=layers)
    return replace(spec, heads=(head,))


def test_logits_are_compared_label_by_label(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """A bias common to all texts makes rows alike, whatever the engine answers."""
    spec, shared = with_head(spec, "logits"), np.float32(1000.0)
    reference = StubReference(lambda rows: rows + shared, "logits")
    exact = certify(StubEngine(lambda rows: rows + shared, "logits"), reference, tokenizer, spec, 0.999)
    assert (exact.canary_output, exact.passed, exact.outputs[0].ranking_overlap) == ("logits", True, 1.0)
    rotated = StubEngine(lambda rows: np.roll(rows, 1, axis=0) + shared, "logits")
    wrong = certify(rotated, reference, tokenizer, spec, 0.999)
    assert not wrong.passed
    assert wrong.outputs[0].cosine_mean < 0.5
    assert wrong.outputs[0].ranking_overlap < 0.9


def test_the_canary_of_logits_keeps_their_size(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    spec = with_head(spec, "logits")
    certificate = certify(StubEngine(output="logits"), StubReference(output="logits"), tokenizer, spec, 0.999)
    (canary,) = encode(tokenizer, [CANARY_TEXT], spec, LIMITS.max_seq_len)
    np.testing.assert_allclose(certificate.canary_row, vector_of(canary.input_ids), atol=1e-5)


def test_a_scorer_is_compared_on_pairs(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    engine = StubEngine(lambda rows: rows[:, :1], "logits")
    reference = StubReference(lambda rows: rows[:, :1], "logits")
    assert certify(engine, reference, tokenizer, with_head(spec, "logits", 1), 0.999).passed
    canary, *of_pairs = engine.batches
    for batch in of_pairs:
        assert batch.token_type_ids is not None
        assert all(types.any() for types in np.split(batch.token_type_ids, batch.cu_seqlens[1:-1]))
    assert canary.token_type_ids is not None
    assert not canary.token_type_ids.any()


def test_outputs_per_token_are_compared_token_by_token(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    spec = with_head(spec, "token_embedding", per_token=True)
    reference = StubReference(output="token_embedding", per_token=True)
    exact = certify(StubEngine(output="token_embedding", per_token=True), reference, tokenizer, spec, 0.999)
    (row,) = exact.outputs
    assert (row.output, exact.passed, row.cosine_min, row.max_abs_difference) == ("token_embedding", True, 1.0, 0)
    (canary,) = encode(tokenizer, [CANARY_TEXT], spec, LIMITS.max_seq_len)
    np.testing.assert_allclose(
        exact.canary_row, normalized(token_vectors_of(canary.input_ids)[:1])[0], atol=1e-5, err_msg="the first token's"
    )
    shifted = StubEngine(lambda rows: np.roll(rows, 1, axis=0), "token_embedding", per_token=True)
    assert not certify(shifted, reference, tokenizer, spec, 0.999).passed


def test_empty_sparse_vectors_agree_with_each_other_and_with_nothing_else(
    tokenizer: Tokenizer, spec: ModelSpec
) -> None:
    spec, empty = with_head(spec, "sparse"), np.float32(0.0)
    nothing = StubReference(lambda rows: rows * empty, "sparse")
    empty_too = StubEngine(lambda rows: rows * empty, "sparse")
    assert certify(empty_too, nothing, tokenizer, spec, 0.999).outputs[0].cosine_min == 1.0
    assert certify(StubEngine(output="sparse"), nothing, tokenizer, spec, 0.999).outputs[0].cosine_mean == 0.0


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
    assert exact.outputs[0].cosine_min < 1.0
    assert certify(quantized, StubReference(lambda rows: rows + noise[: len(rows)]), tokenizer, spec, 0.999) == exact
    perfect = certify(StubEngine(), StubReference(lambda rows: rows + noise[: len(rows)]), tokenizer, spec, 0.999)
    assert [one.text for one in perfect.outputs[0].worst_texts] == held_out_texts()[
        :10
    ]  # all are equally good: their order decides


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
    vectors = EngineReference(engine, "engine").run(encodings, ["embedding"])["embedding"]
    assert [batch.batch_size for batch in engine.batches] == [1] * 5
    np.testing.assert_array_equal(vectors, StubReference().run(encodings, ["embedding"])["embedding"])


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


def budgeted(
    tokenizer: Tokenizer, spec: ModelSpec, budget_s: float, engine_s: float, reference_s: float
) -> Certificate:
    clock = Clock()
    engine, reference = SlowEngine(clock, engine_s), SlowReference(clock, reference_s)
    return certify(engine, reference, tokenizer, spec, 0.999, Budget(budget_s, clock))


def test_a_budget_ends_the_reference_and_the_certificate_counts(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = budgeted(tokenizer, spec, 40.0, 0.0, 1.0)
    assert (certificate.num_texts, certificate.num_held_out_texts) == (40, len(held_out_texts()))
    assert certificate.passed
    assert certificate.verdict == f"passed on 40 of {len(held_out_texts())} texts"


def test_a_budget_ends_the_engine_halfway(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """The reference gets the texts that the engine has answered, and as much time."""
    certificate = budgeted(tokenizer, spec, 60.0, 1.0, 0.1)
    assert 30 <= certificate.num_texts < 30 + LIMITS.max_batch_size


@pytest.mark.parametrize(("engine_s", "reference_s"), [(0.0, 100.0), (100.0, 0.0), (100.0, 100.0)])
def test_a_budget_leaves_ten_texts(engine_s: float, reference_s: float, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    certificate = budgeted(tokenizer, spec, 1.0, engine_s, reference_s)
    assert 10 <= certificate.num_texts < 10 + LIMITS.max_batch_size
    assert certificate.outputs[0].ranking_overlap == 1.0


def test_a_budget_takes_the_first_texts(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """The worst text is the twentieth; a budget of fifteen misses it, one of thirty does not."""
    clock = Clock()
    fault = broken_at(20, tokenizer, spec)
    for budget_s, passed in ((15.0, True), (30.0, False)):
        reference = SlowReference(clock, 1.0)
        certificate = certify(StubEngine(fault), reference, tokenizer, spec, 0.999, Budget(budget_s, clock))
        assert (certificate.num_texts, certificate.passed) == (budget_s, passed)


def test_a_budget_that_is_not_used_up_changes_nothing(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    everything = certify(StubEngine(), StubReference(), tokenizer, spec, 0.999)
    assert budgeted(tokenizer, spec, 1000.0, 1.0, 1.0) == everything
    assert everything.verdict == f"passed on {len(held_out_texts())} texts"


def test_without_verification_the_certificate_has_the_canary_and_nothing_else(
    tokenizer: Tokenizer, spec: ModelSpec
) -> None:
    engine = StubEngine()
    questions = held_out(encoding_with(tokenizer, spec), spec, LIMITS.max_seq_len)
    certificate = uncompared_certificate(ask_canary(engine, questions, "embedding"), questions)
    assert [batch.batch_size for batch in engine.batches] == [1]
    assert (certificate.kind, certificate.passed, certificate.outputs, certificate.thresholds) == (
        "none",
        False,
        [],
        None,
    )
    assert (certificate.num_texts, certificate.num_held_out_texts) == (0, len(held_out_texts()))
    assert certificate.verdict == "NOT VERIFIED: built with --no-verify"
    verified = certify(StubEngine(), StubReference(), tokenizer, spec, 0.999)
    assert certificate.canary_row == verified.canary_row
    assert certificate.canary_output == verified.canary_output == "embedding"
    assert msgspec.json.decode(msgspec.json.encode(certificate), type=Certificate) == certificate


def test_an_engine_that_gives_nan_is_refused_without_verification_too(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    questions = held_out(encoding_with(tokenizer, spec), spec, LIMITS.max_seq_len)
    engine = StubEngine(lambda rows: rows * np.float32(np.nan))
    with pytest.raises(VerificationError, match="gives NaN or Inf for a short text"):
        uncompared_certificate(ask_canary(engine, questions, "embedding"), questions)
