"""The compiled engine against the reference, on held-out texts: the numbers of the certificate."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bei.artifact import Certificate
from bei.core import Encoding, Engine, Float32Array, PackedBatch
from bei.errors import VerificationError
from bei_build.spec import ModelSpec

# Mean cosine a build must reach. int8: measured 0.9993 on MiniLM (docs/decisions.md), with room for other models.
THRESHOLDS = {"fp32": 0.99999, "bf16": 0.999, "fp16": 0.999, "int8": 0.99}

CANARY_TEXT = "The quick brown fox jumps over the lazy dog."
_NUM_NEIGHBOURS = 10
_NUM_WORST = 3
_SIMILARITY_DIGITS = 5


class Reference(Protocol):
    """Something that embeds by other means than the engine under test."""

    name: str

    def embed(self, encodings: Sequence[Encoding]) -> Float32Array:
        """Vectors before the final normalization, float32 [n, E]."""


class EngineReference:
    """An FP32 engine as the reference where torch is not installed: one text at a time, so packing is still tested."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    def embed(self, encodings: Sequence[Encoding]) -> Float32Array:
        """Vectors before the final normalization, float32 [n, E]."""
        return np.concatenate([_run(self._engine, [encoding]) for encoding in encodings])


def held_out_texts() -> list[str]:
    """The texts of ``data/held_out.txt``, one a line; lines that start with # are comments."""
    text = (resources.files("bei_build") / "data" / "held_out.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def encode(tokenizer: Tokenizer, texts: Sequence[str], spec: ModelSpec, max_seq_len: int) -> list[Encoding]:
    """Tokenize ``texts`` as the server will: truncated with special tokens kept."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # a copy: truncation is state
    tokenizer.enable_truncation(max_seq_len)
    encodings = []
    for text in texts:
        encoding = tokenizer.encode(text)
        types = np.array(encoding.type_ids, np.int32) if spec.embeddings.type_vocab_size > 1 else None
        encodings.append(Encoding(np.array(encoding.ids, np.int32), types))
    return encodings


def certify(
    engine: Engine,
    reference: Reference,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    threshold: float,
) -> Certificate:
    """Run engine (packed batches of mixed lengths) and reference over the held-out texts and compare.

    Raises VerificationError only where the reference cannot be compared with; the caller judges ``passed``.
    """
    texts = held_out_texts()
    encodings = encode(tokenizer, texts, spec, engine.info.limits.max_seq_len)
    expected = reference.embed(encodings)
    if not np.isfinite(expected).all():
        raise VerificationError(
            f"The reference ({reference.name}) itself gives NaN or Inf: the checkpoint's weights are damaged. "
            "Download the checkpoint again."
        )
    actual = _run_in_batches(engine, encodings)
    # NaN and Inf have no place in a certificate: such a vector counts as the opposite of what it should be.
    actual = np.where(np.isfinite(actual).all(axis=1, keepdims=True), actual, -expected)
    # Rounded before anything is decided: the reference's last bits depend on torch's number of threads, and equal
    # builds must have equal certificates. In float64 the figures move by 1e-9 with them, far below the rounding.
    cosines = np.round((normalized(actual) * normalized(expected)).sum(axis=1), 6)
    worst = [texts[index] for index in np.argsort(cosines, kind="stable")[:_NUM_WORST]]
    canary = _run(engine, encode(tokenizer, [CANARY_TEXT], spec, engine.info.limits.max_seq_len))
    canary = np.nan_to_num(canary, posinf=0.0, neginf=0.0)
    mean = float(cosines.mean())
    return Certificate(
        reference=reference.name,
        num_texts=len(texts),
        cosine_mean=round(mean, 6),
        cosine_p1=round(float(np.percentile(cosines, 1)), 6),
        cosine_min=round(float(cosines.min()), 6),
        max_abs_difference=round(float(np.abs(normalized(actual) - normalized(expected)).max()), 5),
        neighbour_overlap=round(_neighbour_overlap(actual, expected), 4),
        worst_texts=worst,
        threshold=threshold,
        passed=bool(mean >= threshold),
        canary_text=CANARY_TEXT,
        canary_embedding=[round(float(value), 5) for value in normalized(canary)[0]],
    )


def normalized(vectors: Float32Array) -> npt.NDArray[np.float64]:
    """Rows at unit length, in float64."""
    wide = vectors.astype(np.float64)
    unit: npt.NDArray[np.float64] = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    return unit


def _run(engine: Engine, encodings: Sequence[Encoding]) -> Float32Array:
    return engine.run(PackedBatch.from_encodings(encodings))["embedding"]


def _run_in_batches(engine: Engine, encodings: Sequence[Encoding]) -> Float32Array:
    """In the given order, so that short and long texts share batches."""
    limits, rows, batch = engine.info.limits, [], list[Encoding]()
    for encoding in encodings:
        tokens = sum(member.num_tokens for member in batch)
        if batch and (tokens + encoding.num_tokens > limits.max_num_tokens or len(batch) == limits.max_batch_size):
            rows.append(_run(engine, batch))
            batch = []
        batch.append(encoding)
    rows.append(_run(engine, batch))
    return np.concatenate(rows)


def _neighbour_overlap(actual: Float32Array, expected: Float32Array) -> float:
    neighbours = []
    for vectors in (normalized(actual), normalized(expected)):
        similarity = (vectors @ vectors.T).round(_SIMILARITY_DIGITS)  # near ties go by position, not by noise
        np.fill_diagonal(similarity, -2.0)
        neighbours.append(np.argsort(-similarity, axis=1, kind="stable")[:, :_NUM_NEIGHBOURS])
    shared = [len(set(a) & set(b)) for a, b in zip(*neighbours, strict=True)]
    return float(np.mean(shared)) / min(_NUM_NEIGHBOURS, len(actual) - 1)
