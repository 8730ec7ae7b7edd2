"""All entries of the list, by chapter."""

from __future__ import annotations

from tests.hub_matrix.classifiers import ENTAILMENT, NAMED_ENTITIES, REWARDS, SAFETY, SENTIMENT_AND_TOPICS
from tests.hub_matrix.decoders import LANGUAGE_MODELS, QWEN_AND_LLAMA, REMOTE
from tests.hub_matrix.embedders import EMBEDDERS
from tests.hub_matrix.others import ENCODERS, FORMS
from tests.hub_matrix.rankers import RERANKERS, SPARSE_AND_LATE, STATIC
from tests.hub_matrix.structures import Entry

CHAPTERS: dict[str, tuple[Entry, ...]] = {
    "Encoders that embed": EMBEDDERS,
    "Language models that embed": QWEN_AND_LLAMA,
    "Rerankers": RERANKERS,
    "Sparse vectors and late interaction": SPARSE_AND_LATE,
    "Static embeddings": STATIC,
    "Sentiment and topics": SENTIMENT_AND_TOPICS,
    "Entailment and zero-shot": ENTAILMENT,
    "Safety": SAFETY,
    "Named entities": NAMED_ENTITIES,
    "Reward models": REWARDS,
    "Code of the repository's own": REMOTE,
    "Language models read as embedders": LANGUAGE_MODELS,
    "Encoders of other kinds": ENCODERS,
    "Other forms of weights, other kinds of models": FORMS,
}
ENTRIES: tuple[Entry, ...] = tuple(entry for entries in CHAPTERS.values() for entry in entries)
