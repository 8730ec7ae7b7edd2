"""Verification thresholds by precision, and remedies for an engine that misses them."""

from __future__ import annotations

from collections.abc import Iterator

from bei.artifact.certificate.record import Certificate, Thresholds

# Minimum mean cosine (for logits: correlation) of every output.
MIN_COSINES = {"fp32": 0.99999, "bf16": 0.999, "fp16": 0.999}
# Quantized precisions, for decoder models (language models) and for encoders. Measured: INT8 weights on MiniLM 0.9992
# (docs/decisions.md). FP8 was not measured on a GPU.
MIN_COSINES_OF_DECODERS = {"int8": 0.999, "fp8": 0.999}
MIN_COSINES_OF_ENCODERS = {"int8": 0.995, "fp8": 0.995}
# Mean cosine of encoders that a build tries to reach by keeping layers in high precision. Missing it fails nothing.
AIMS_OF_ENCODERS = {"int8": 0.999}
QUANTIZED = tuple(MIN_COSINES_OF_ENCODERS)
PRECISIONS = (*MIN_COSINES, *QUANTIZED)
# Those that a target's compiler builds in.
PRECISIONS_OF_TARGETS = {
    "cpu": ("fp32", "bf16", "int8"),
    **dict.fromkeys(("tensorrt", "tensorrt-rtx", "cuda", "cuda-twin"), ("bf16", "fp16", "fp32", "fp8")),
    "trtllm": ("bf16", "fp16", "fp8"),
}
# Maximum loss on the bundled retrieval set, as a share of the reference's nDCG@10.
MAX_NDCG_LOSS = 0.005

# Distances from 1 of the first percentile and of the lowest cosine, as multiples of the mean's (docs/decisions.md).
_P1_FACTOR = 10
_MIN_FACTOR = 50


def min_cosine_of(precision: str, *, is_decoder: bool) -> float:
    """The minimum mean cosine for an engine in ``precision``."""
    return (MIN_COSINES | (MIN_COSINES_OF_DECODERS if is_decoder else MIN_COSINES_OF_ENCODERS))[precision]


def thresholds_of(min_cosine: float, *, retrieval: bool = False) -> Thresholds:
    """The three thresholds for a mean of ``min_cosine``, and that of ``retrieval`` if it is measured."""
    lower = (max(-1.0, round(1 - factor * (1 - min_cosine), 6)) for factor in (_P1_FACTOR, _MIN_FACTOR))
    p1, lowest = lower
    return Thresholds(mean=min_cosine, p1=p1, min=lowest, ndcg_loss=MAX_NDCG_LOSS if retrieval else None)


def remedies(certificate: Certificate) -> list[str]:
    """Alternatives to a build whose ``certificate`` failed: those that apply, the most promising first."""
    return list(_remedies(certificate))


def _remedies(certificate: Certificate) -> Iterator[str]:
    if certificate.quantization is not None:
        yield "calibrate on more texts"
        yield "leave more layers unquantized (--max-highprec-layers)"
    yield "choose a higher precision"
    if any(row.failures for row in certificate.outputs):
        yield "lower --min-cosine"
    elif certificate.failures:
        yield "leave the retrieval out (--no-verify-retrieval)"
    yield "keep the engine with --allow-below-threshold"
