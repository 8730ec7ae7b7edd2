"""Verification thresholds by precision, and remedies that apply."""

from __future__ import annotations

import msgspec
import pytest

from bei.artifact.certificate.record import Certificate, Thresholds
from bei.artifact.certificate.thresholds import min_cosine_of, remedies, thresholds_of
from tests.support.quality_certificates import agreement, certificate, quantization, retrieval


def test_thresholds_follow_from_the_means() -> None:
    assert thresholds_of(0.99) == Thresholds(mean=0.99, p1=0.9, min=0.5)
    assert thresholds_of(0.99999) == Thresholds(mean=0.99999, p1=0.9999, min=0.9995)
    assert thresholds_of(-1.0) == Thresholds(mean=-1.0, p1=-1.0, min=-1.0)
    assert thresholds_of(1.0) == Thresholds(mean=1.0, p1=1.0, min=1.0)
    assert thresholds_of(0.995, retrieval=True) == Thresholds(mean=0.995, p1=0.95, min=0.75, ndcg_loss=0.005)


@pytest.mark.parametrize(
    ("precision", "encoder", "decoder"),
    [
        ("fp32", 0.99999, 0.99999),
        ("bf16", 0.999, 0.999),
        ("fp16", 0.999, 0.999),
        ("int8", 0.995, 0.999),
        ("fp8", 0.995, 0.999),
    ],
)
def test_quantized_language_models_must_reach_more_than_encoders(
    precision: str, encoder: float, decoder: float
) -> None:
    assert min_cosine_of(precision, is_decoder=False) == encoder
    assert min_cosine_of(precision, is_decoder=True) == decoder


FAILED = agreement(failures=["mean cosine 0.5 below 0.9"])


@pytest.mark.parametrize(
    ("failed", "advice", "no_advice"),
    [
        (certificate(outputs=[FAILED], passed=False), ["higher precision", "--min-cosine"], ["calibrate", "retrieval"]),
        (
            certificate(outputs=[FAILED], passed=False, quantization=quantization()),
            ["calibrate on more texts", "--max-highprec-layers", "higher precision", "--min-cosine"],
            ["retrieval"],
        ),
        (
            certificate(retrieval=retrieval(failures=["nDCG@10 fell"]), passed=False),
            ["higher precision", "--no-verify-retrieval"],
            ["--min-cosine", "calibrate"],
        ),
    ],
    ids=["weights", "calibrated", "retrieval"],
)
def test_advice_applies_to_what_was_missed(failed: Certificate, advice: list[str], no_advice: list[str]) -> None:
    given = "; ".join(remedies(failed))
    assert all(words in given for words in [*advice, "--allow-below-threshold"])
    assert not any(words in given for words in no_advice)


def test_failures_are_named_by_output_and_by_figure() -> None:
    failed = certificate(
        outputs=[agreement(), msgspec.structs.replace(FAILED, output="token_embedding")],
        retrieval=retrieval(failures=["nDCG@10 fell"]),
        passed=False,
    )
    assert failed.failures == ["token_embedding: mean cosine 0.5 below 0.9", "retrieval: nDCG@10 fell"]
