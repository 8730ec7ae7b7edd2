"""Artifacts and fake engines of every kind of model, and what those engines answer."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from bei.artifact.certificate.canary import canary_row
from bei.artifact.label_layouts import Extraction
from bei.artifact.manifest import Artifact, Classification, OutputInfo
from bei.artifact.sides import Role
from bei.core import EngineInfo, Expansion, Float32Array, Int32Array, Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from bei.engine.words import LABEL
from tests.bei.server.app import App
from tests.support.artifacts import CANARY_TEXT, LIMITS, VOCAB_SIZE, save_artifact, tiny_tokenizer

LABELS = ["sad", "calm", "glad"]
TAGS = ["O", "B-PER", "I-PER"]
TOKEN_DIMENSION = 4
MAX_WIDTH = 2

# Name of the model -> tasks, outputs with their widths, labels.
KINDS: dict[str, tuple[list[str], dict[str, int], list[str] | None]] = {
    "embedder": (["embed"], {"embedding": 8}, None),
    "classifier": (["classify"], {"logits": len(LABELS)}, LABELS),
    "reranker": (["rerank", "classify"], {"logits": 1}, ["LABEL_0"]),
    "ner": (["classify_tokens"], {"token_logits": len(TAGS)}, TAGS),
    "splade": (["embed_sparse"], {"sparse": VOCAB_SIZE}, None),
    "colbert": (["embed_tokens"], {"token_embedding": TOKEN_DIMENSION}, None),
    "spans": (["extract"], {"span_logits": MAX_WIDTH}, None),
}
MARK = tiny_tokenizer().get_vocab()["!"]
# Of "colbert": queries are filled up to eight tokens with "!", whose vectors documents lose.
ROLES: dict[Literal["query", "document"], Role] = {
    "query": Role(max_tokens=10, expansion=Expansion(MARK, 8, attended=False), skip_ids=[]),
    "document": Role(max_tokens=5, expansion=None, skip_ids=[MARK]),
}
PER_TOKEN = frozenset({"token_logits", "token_embedding", "span_logits"})
PROMPTS = {"query": "query: ", "cats": "the cats "}


def fake_output(name: str, ids: Int32Array, types: Int32Array, width: int) -> Float32Array:
    """What the engine of a kind answers for one sequence: float32 [width] or, per token, [tokens, width]."""
    columns = np.arange(width)
    if name in PER_TOKEN:
        if name == "span_logits":  # a row is as wide as its labels need
            columns = np.arange(width * max(1, int((types % 4 == LABEL).sum())))
        rows = (ids[:, None] * (columns + 2) % 9) / 2 - 2 + (name == "token_embedding") * 3
    elif name == "sparse":
        rows = np.bincount(ids, minlength=width) / 2 - 0.25
    else:
        rows = (int(ids.sum()) + 5 * int(types.sum()) + 3 * columns) % 11 / 4 - 1
    return np.asarray(rows, np.float32)


class KindEngine(FakeEngine):
    """A FakeEngine whose only output is ``fake_output``."""

    def __init__(self, outputs: dict[str, int], limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        self.info = EngineInfo("fake", "fp32", "none", limits, outputs, PER_TOKEN & set(outputs))
        ((self._name, self._width),) = outputs.items()

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Answer at once and remember the batch."""
        self.batches.append(batch)
        types = np.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
        bounds = list(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True))
        rows = [
            fake_output(self._name, batch.input_ids[start:end], types[start:end], self._width) for start, end in bounds
        ]
        return {self._name: np.concatenate(rows) if self._name in PER_TOKEN else np.stack(rows)}


def expected_output(name: str, text: str | tuple[str, str], width: int, prompt: str = "") -> Float32Array:
    """What the engine of a kind answers for a text or a pair."""
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(LIMITS.max_seq_len)
    encoded = tokenizer.encode(prompt + text) if isinstance(text, str) else tokenizer.encode(*text)
    return fake_output(name, np.array(encoded.ids, np.int32), np.array(encoded.type_ids, np.int32), width)


def save_kind(path: Path, kind: str, **fields: Any) -> tuple[Artifact, FakeEngine]:
    """An artifact of ``kind``, called so, and its engine, which answers the canary as the certificate has it."""
    tasks, widths, labels = KINDS[kind]
    outputs = [
        OutputInfo(name=name, dimension=width, per_token=name in PER_TOKEN, unit_length=kind == "colbert")
        for name, width in widths.items()
    ]
    function: Literal["sigmoid", "softmax"] = "sigmoid" if kind == "reranker" else "softmax"
    manifest: dict[str, Any] = {
        "name": kind,
        "tasks": tasks,
        "outputs": outputs,
        "classification": Classification(labels=labels, function=function) if labels else None,
        "prompts": {} if labels else PROMPTS,
    }
    if kind == "spans":
        manifest["extraction"] = Extraction(
            label_id=MARK, separator_id=MARK, reads_marker=True, max_width=MAX_WIDTH, max_words=8
        )
    if kind == "colbert":
        manifest |= {"roles": ROLES, "prompts": {**PROMPTS, "document": ""}}
    if kind != "embedder":
        manifest["embedding"] = None
    if kind == "embedder":
        return save_artifact(path, **{**manifest, **fields}), FakeEngine(LIMITS)
    ((output, width),) = widths.items()
    canary = canary_row(expected_output(output, CANARY_TEXT, width), output).tolist()
    return save_artifact(path, **{"output": output, "canary": canary, **manifest, **fields}), KindEngine(widths)


def save_kinds(folder: Path) -> list[tuple[Artifact, FakeEngine]]:
    """One of every kind. The reranker is never ready: its engine answers something else than the certificate has."""
    return [save_kind(folder / kind, kind, **({"canary": [9.0]} if kind == "reranker" else {})) for kind in KINDS]


def post(app: App, path: str, **body: object) -> httpx.Response:
    """POST a body of these fields."""
    return app.request("POST", path, json.dumps(body).encode())


def answer(app: App, path: str, **body: object) -> Any:
    """The content of a good answer."""
    response = post(app, path, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def softmax(logits: Float32Array) -> Float32Array:
    """Plainly."""
    powers = np.exp(logits)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)
