"""Certificates with made-up figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bei.artifact.certificate.record import (
    Agreement,
    Certificate,
    CosineHistogram,
    QuantizationRecord,
    RetrievalAgreement,
    Thresholds,
    WorstText,
)
from bei.engine.fake import DIMENSION
from bei.verification.comparison import HISTOGRAM_EDGES

WORST = [
    WorstText(text="<script>alert('worst')</script> & \"quoted\"", cosine=0.981234),
    WorstText(text="The second worst.", cosine=0.995),
]


def agreement(**fields: Any) -> Agreement:
    """One that passed; keyword arguments replace fields."""
    row = Agreement(
        output="embedding",
        cosine_mean=0.999123,
        cosine_p1=0.991,
        cosine_min=0.981234,
        histogram=CosineHistogram(edges=list(HISTOGRAM_EDGES), counts=[0, 1, 2, 10, 40, 30, 10, 6, 1, 1, 0, 0, 0]),
        max_abs_difference=0.0123,
        ranking_overlap=0.9871,
        spearman=0.99912,
        worst_texts=WORST,
        failures=[],
    )
    return msgspec.structs.replace(row, **fields)


def retrieval(*, failures: Sequence[str] = ()) -> RetrievalAgreement:
    """One that is judged, and has passed unless there are ``failures``."""
    return RetrievalAgreement(
        output="embedding",
        num_queries=60,
        num_documents=150,
        ndcg_chance=0.05,
        ndcg_reference=0.81234,
        ndcg_engine=0.80987,
        loss=0.00304,
        loss_error=0.0012,
        is_judged=True,
        failures=list(failures),
    )


def quantization(**fields: Any) -> QuantizationRecord:
    """One of FP8 whose every layer is in 8 bits; keyword arguments replace fields."""
    record = QuantizationRecord(
        format="fp8",
        method="max",
        calibration="Made-up texts.",
        num_texts=20,
        num_tokens=1234,
        texts_sha256="b" * 64,
        layers=[],
    )
    return msgspec.structs.replace(record, **fields)


def certificate(**fields: Any) -> Certificate:
    """One of a model with one output, which has passed; keyword arguments replace fields."""
    whole = Certificate(
        kind="reference",
        reference="transformers 5.0, FP32",
        reference_is_independent=True,
        device="a CPU",
        num_texts=101,
        num_held_out_texts=101,
        texts_sha256="a" * 64,
        thresholds=Thresholds(mean=0.995, p1=0.95, min=0.75),
        outputs=[agreement()],
        passed=True,
        canary_text="hello",
        canary_output="embedding",
        canary_row=[1.0, *[0.0] * (DIMENSION - 1)],
    )
    return msgspec.structs.replace(whole, **fields)
