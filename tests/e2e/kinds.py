"""A tiny random model of each kind, and what they are asked: for tests of routes and of clients."""

from __future__ import annotations

from typing import Any

from tests.support.zoo import CASES, Case

TEXTS = ["The cat sat on the mat.", "hello", "Grüße, 世界! \N{GRINNING FACE}", "a " * 40, "x" * 99]
QUERY = "Where did the cat sit?"
LABELS = ["sad", "calm", "glad"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TOLERANCE = 2e-4


def case(architecture: str, **settings: Any) -> Case:
    """The plain BERT case of the zoo under another head."""
    plain = next(case for case in CASES if case.architecture == "BertModel")
    return Case("BERT", architecture, {**plain.settings, **settings})


def labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


MODELS = {
    "embedder": case("BertModel"),
    "classifier": case("BertForSequenceClassification", **labels(*LABELS)),
    "reranker": case("BertForSequenceClassification", num_labels=1),
    "ner": case("BertForTokenClassification", **labels(*TAGS)),
    "splade": case("BertForMaskedLM"),
}
