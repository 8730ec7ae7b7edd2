"""What the behaviour of a served model is asked through: the engine itself, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import httpx
import numpy as np
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding, Engine, Float32Array, PackedBatch, rows_of_sequences

# A text, or a pair of them.
Input: TypeAlias = "str | tuple[str, str]"

_BATCH = 8


class Client(Protocol):
    """Texts and pairs in, numbers out. Scores are raw; ``classify`` gives each label's share."""

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Unit vectors, [n, E]."""

    def embed_tokens(self, texts: Sequence[str]) -> list[Float32Array]:
        """Unit vectors of every text's tokens, [tokens, D] each."""

    def score(self, pairs: Sequence[Input]) -> Float32Array:
        """One score each, before any sigmoid."""

    def classify(self, inputs: Sequence[Input]) -> list[dict[str, float]]:
        """The score of every label."""


class EngineClient:
    """An artifact's engine and tokenizer, without a server."""

    def __init__(self, artifact: Artifact, engine: Engine) -> None:
        self._engine = engine
        self._classification = artifact.manifest.classification
        self._tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
        self._tokenizer.enable_truncation(artifact.manifest.max_seq_len)

    def encode(self, inputs: Sequence[Input]) -> list[Encoding]:
        """Tokenized as the server does it."""
        encodings = []
        for each in inputs:
            encoded = self._tokenizer.encode(each) if isinstance(each, str) else self._tokenizer.encode(*each)
            types = np.array(encoded.type_ids, np.int32) if any(encoded.type_ids) else None
            encodings.append(Encoding(np.array(encoded.ids, np.int32), types))
        return encodings

    def rows(self, inputs: Sequence[Input], output: str) -> list[Float32Array]:
        """The engine's answers: [width], or [tokens, width] of an output per token. Neighbours share batches."""
        rows, encodings = list[Float32Array](), self.encode(inputs)
        for start in range(0, len(encodings), _BATCH):
            batch = PackedBatch.from_encodings(encodings[start : start + _BATCH])
            outputs = self._engine.run(batch)
            rows += rows_of_sequences(outputs[output], batch, per_token=output in self._engine.info.per_token)
        return rows

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Unit vectors, [n, E]."""
        return unit(np.stack(self.rows(texts, "embedding")))

    def embed_tokens(self, texts: Sequence[str]) -> list[Float32Array]:
        """Unit vectors of every text's tokens, [tokens, D] each."""
        return [unit(rows) for rows in self.rows(texts, "token_embedding")]

    def score(self, pairs: Sequence[Input]) -> Float32Array:
        """One score each, before any sigmoid."""
        return np.stack(self.rows(pairs, "logits"))[:, 0]

    def classify(self, inputs: Sequence[Input]) -> list[dict[str, float]]:
        """The score of every label."""
        assert self._classification is not None
        assert self._classification.function == "softmax"
        labels = self._classification.labels
        return [dict(zip(labels, softmax(row).tolist(), strict=True)) for row in self.rows(inputs, "logits")]


class HTTPClient:
    """A served artifact, through the routes of text-embeddings-inference."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _post(self, route: str, **body: Any) -> Any:
        response = httpx.post(f"{self._url}{route}", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def _in_batches(self, route: str, inputs: Sequence[Any], **body: Any) -> list[Any]:
        """The server takes so many inputs a request; none of these models needs to see more at once."""
        starts = range(0, len(inputs), _BATCH)
        return [row for at in starts for row in self._post(route, inputs=inputs[at : at + _BATCH], **body)]

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Unit vectors, [n, E]."""
        return np.array(self._in_batches("/embed", list(texts)), np.float32)

    def embed_tokens(self, texts: Sequence[str]) -> list[Float32Array]:
        """Unit vectors of every text's tokens, [tokens, D] each."""
        return [np.array(rows, np.float32) for rows in self._in_batches("/embed_all", list(texts))]

    def score(self, pairs: Sequence[Input]) -> Float32Array:
        """One score each, before any sigmoid."""
        answers = self._in_batches("/predict", _as_lists(pairs), raw_scores=True)
        return np.array([answer[0]["score"] for answer in answers], np.float32)

    def classify(self, inputs: Sequence[Input]) -> list[dict[str, float]]:
        """The score of every label."""
        answers = self._in_batches("/predict", _as_lists(inputs))
        return [{entry["label"]: entry["score"] for entry in answer} for answer in answers]


def _as_lists(inputs: Sequence[Input]) -> list[list[str]]:
    return [[each] if isinstance(each, str) else list(each) for each in inputs]


def unit(rows: Float32Array) -> Float32Array:
    """Rows at unit length."""
    scaled: Float32Array = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled


def softmax(row: Float32Array) -> Float32Array:
    """Shares that add up to one."""
    powers = np.exp(row - row.max())
    shares: Float32Array = powers / powers.sum()
    return shares
