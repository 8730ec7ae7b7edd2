"""The figures that stand beside the cosines: histograms, rank correlations, labels. Faults: tests/bei_build."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bei.artifact.certificate.record import Agreement
from bei.artifact.certificate.thresholds import thresholds_of
from bei.artifact.manifest import Classification
from bei.core import Encoding, Float32Array
from bei.verification.comparison import HISTOGRAM_EDGES, OutputMeaning, ReferenceAnswers, compare
from bei.verification.engine_answers import EngineAnswers, HeldOut

NUM_TEXTS = 24
LABELS = Classification(labels=["a", "b", "c"], function="softmax")


def compared(
    output: str,
    actual: list[Float32Array],
    expected: list[Float32Array],
    meaning: OutputMeaning | None = None,
    least: float = -1.0,
) -> Agreement:
    questions = HeldOut(
        [f"text {index}" for index in range(len(actual))],
        [Encoding(np.zeros(1, np.int32))] * len(actual),
        "canary",
        Encoding(np.zeros(1, np.int32)),
    )
    answers = EngineAnswers("stub", {output: actual}, output, actual[0])
    reference = ReferenceAnswers("stub", False, {output: expected})
    return compare(answers, reference, questions, thresholds_of(least), meaning=meaning).outputs[0]


def random_rows(width: int, seed: int = 0, num_texts: int = NUM_TEXTS) -> list[Float32Array]:
    return list(np.random.default_rng(seed).standard_normal((num_texts, width)).astype(np.float32))


def at_cosine(cosine: float) -> Float32Array:
    return np.array([cosine, np.sqrt(1 - cosine**2), 0], np.float64).astype(np.float32)


@pytest.mark.parametrize(
    ("cosine", "place"),
    [(1.0, 0), (0.999995, 1), (0.99995, 3), (0.9995, 5), (0.995, 7), (0.95, 9), (0.5, 11), (0.0, 12), (-1.0, 12)],
)
def test_a_cosine_is_counted_where_it_lies(cosine: float, place: int) -> None:
    histogram = compared("embedding", [at_cosine(cosine)] * 3, [at_cosine(1.0)] * 3).histogram
    assert histogram.edges == list(HISTOGRAM_EDGES)
    assert histogram.counts == [3 if index == place else 0 for index in range(len(HISTOGRAM_EDGES) + 1)]


def test_all_rows_are_counted_and_answers_that_are_not_finite_are_farthest() -> None:
    expected = [rows.reshape(2, 4) for rows in random_rows(8)]
    actual = [rows.copy() for rows in expected]
    actual[3][0, 0] = np.nan
    row = compared("token_embedding", actual, expected)
    assert sum(row.histogram.counts) == 2 * NUM_TEXTS
    assert row.histogram.counts[-1] == 2  # both tokens of that text
    assert (row.worst_texts[0].text, row.worst_texts[0].cosine) == ("text 3", -1.0)


def test_the_ten_worst_texts_come_with_their_cosines() -> None:
    expected = [at_cosine(1.0)] * NUM_TEXTS
    cosines = [0.9 + index / 1000 for index in range(NUM_TEXTS)]
    worst = compared("embedding", [at_cosine(cosine) for cosine in reversed(cosines)], expected).worst_texts
    assert [one.cosine for one in worst] == pytest.approx(cosines[:10], abs=1e-6)
    assert [one.text for one in worst] == [f"text {NUM_TEXTS - 1 - index}" for index in range(10)]


def test_vectors_have_the_rank_correlation_of_their_similarities() -> None:
    expected = random_rows(16)
    assert compared("embedding", expected, expected).spearman == 1.0
    noise = random_rows(16, seed=1)
    nearly = compared("embedding", [row + 0.05 * other for row, other in zip(expected, noise, strict=True)], expected)
    unrelated = compared("embedding", noise, expected)
    assert nearly.spearman is not None
    assert unrelated.spearman is not None
    assert -0.3 < unrelated.spearman < 0.3 < 0.9 < nearly.spearman < 1.0
    # By hand: similarities of three vectors are in the opposite order.
    first = [np.array(row, np.float32) for row in ([1, 0], [1, 0.1], [0, 1])]
    turned = [first[0], first[2], first[1]]
    assert compared("embedding", turned, first).spearman == pytest.approx(-1.0)


def test_a_rerankers_scores_have_kendalls_tau_and_nothing_of_labels() -> None:
    expected = random_rows(1)
    meaning = OutputMeaning(ranks=True, classification=Classification(labels=["score"], function="sigmoid"))
    row = compared("logits", expected, expected, meaning)
    assert (row.kendall_tau, row.label_agreement, row.kl_divergence, row.spearman) == (1.0, None, None, None)
    assert compared("logits", [3 * rows + 1 for rows in expected], expected, meaning).kendall_tau == 1.0
    assert compared("logits", [-rows for rows in expected], expected, meaning).kendall_tau == -1.0
    swapped = sorted(expected, key=lambda rows: float(rows[0]))
    actual = [swapped[1], swapped[0], *swapped[2:]]
    pairs = NUM_TEXTS * (NUM_TEXTS - 1) / 2
    assert compared("logits", actual, swapped, meaning).kendall_tau == pytest.approx(1 - 2 / pairs, abs=1e-5)


@pytest.mark.parametrize("output", ["logits", "token_logits"])
def test_a_classifiers_scores_have_labels_and_divergence(output: str) -> None:
    shape = (-1,) if output == "logits" else (2, 3)
    expected = [rows.reshape(shape) for rows in random_rows(3 if output == "logits" else 6)]
    row = compared(output, expected, expected, OutputMeaning(classification=LABELS))
    assert (row.label_agreement, row.kl_divergence, row.kendall_tau, row.spearman) == (1.0, 0.0, None, None)
    shifted = [np.roll(rows, 1, axis=-1) for rows in expected]
    other = compared(output, shifted, expected, OutputMeaning(classification=LABELS))
    assert other.label_agreement == 0.0
    assert other.kl_divergence is not None
    assert other.kl_divergence > 0.1


def test_scores_whose_meaning_nobody_said_have_cosines_only() -> None:
    row = compared("logits", random_rows(3), random_rows(3))
    assert (row.label_agreement, row.kl_divergence, row.kendall_tau, row.spearman) == (None, None, None, None)


@pytest.mark.parametrize(
    "output", ["logits", "token_logits", "token_likelihood", "label_logits", "option_logits", "token_weights"]
)
def test_scores_that_are_all_off_by_a_factor_or_a_term_fail_though_their_order_is_right(output: str) -> None:
    shape = (4, -1) if output != "logits" else (-1,)
    expected = [(3 * rows).reshape(shape) for rows in random_rows(8)]
    for factor, term in ((1.5, 0), (1, 1), (-1, 0)):
        wrong = compared(output, [np.float32(factor) * rows + np.float32(term) for rows in expected], expected)
        assert wrong.cosine_mean < 0.99, (factor, term)
    rounded = compared(output, [np.float32(1.004) * rows + np.float32(0.01) for rows in expected], expected)
    assert rounded.cosine_mean > 0.9999
    one_text = [expected[0] + np.float32(3), *expected[1:]]
    assert compared(output, one_text, expected).cosine_min < 0.8


def test_small_scores_are_judged_by_what_becomes_of_their_probabilities_and_weights_by_their_size() -> None:
    expected: list[Float32Array] = [rows / np.float32(10) for rows in random_rows(1)]
    more: list[Float32Array] = [rows + np.float32(0.02) for rows in expected]
    assert compared("logits", more, expected, least=0.999).failures == []
    assert compared("token_weights", more, expected, least=0.999).failures != []


@pytest.mark.parametrize("output", ["embedding", "sparse", "token_embedding"])
def test_vectors_of_other_lengths_fail_where_they_are_answered_with_them(output: str) -> None:
    expected = [rows.reshape((2, 8) if output == "token_embedding" else -1) for rows in random_rows(16)]
    longer = [np.float32(1.2) * rows for rows in expected]
    as_answered = OutputMeaning(with_lengths=frozenset({output}))
    assert compared(output, longer, expected).cosine_mean == 1.0
    assert compared(output, longer, expected, as_answered).cosine_mean == pytest.approx(1 - 0.2**2 / 2, abs=1e-6)
    turned = [np.roll(rows, 1, axis=-1) for rows in expected]  # of the same lengths: both are the cosine
    both = [compared(output, turned, expected, meaning) for meaning in (None, as_answered)]
    assert both[0] == both[1]
    empty = [rows * 0 for rows in expected]
    assert compared(output, empty, empty, as_answered).cosine_mean == 1.0
    assert compared(output, expected, empty, as_answered).cosine_mean == -1.0


def test_spans_are_judged_by_scores_and_by_what_is_found_and_not_by_correlations() -> None:
    random = np.random.default_rng(0)
    expected = [random.normal(-6, 1, (9, 24)).astype(np.float32) for _ in range(NUM_TEXTS)]
    expected[0][0, :4] = 6
    noisy = [rows + random.normal(0, 0.3, rows.shape).astype(np.float32) for rows in expected]
    row = compared(
        "span_logits", noisy, expected, least=0.999
    )  # of what scores near 0, noise changes the order and nothing found
    assert row.cosine_mean < 0.99
    assert row.score_difference is not None
    assert row.score_difference < 0.01
    assert (row.span_agreement, row.failures) == (1.0, [])
    lost = [rows.copy() for rows in noisy]
    lost[0][0, 0] = -6
    missed = compared("span_logits", lost, expected, least=0.999)
    assert missed.span_agreement == 0.75
    assert missed.failures == ["share of equal spans 0.75000 below 0.99"]
    turned = [rows * 0 for rows in expected]
    failure = compared("span_logits", turned, expected, least=0.999).failures[0]
    assert re.match(r"99th percentile of the scores' differences 0\.(49|50)", failure)


def test_a_span_near_the_threshold_may_be_found_by_one_side_alone() -> None:
    expected = [np.full((2, 3), -8, np.float32) for _ in range(NUM_TEXTS)]
    expected[0][0], actual = [0.1, 3, 3], [rows.copy() for rows in expected]
    actual[0][0] = [-0.1, 3, 3]
    row = compared("span_logits", actual, expected, least=0.999)
    assert (row.span_agreement, row.failures) == (1.0, [])
