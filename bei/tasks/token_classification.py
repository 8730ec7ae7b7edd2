"""Labels of single tokens, and the entities that they are joined to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import msgspec

from bei.artifact.manifest import Classification
from bei.core import Encoding, Float32Array
from bei.engine.postprocess import apply_function
from bei.service.admission import Ticket
from bei.service.service import InferenceService
from bei.tasks.entities import Aggregation, Entity, entities_of
from bei.tasks.support import require
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions


class TokenScores(msgspec.Struct, frozen=True):
    """``logits[i]`` float32 [tokens, labels] for ``texts[i]``. Entities are made when they are wanted: they take a
    hundred times the logits' memory."""

    texts: Seq[str]
    encodings: list[Encoding]
    logits: list[Float32Array]
    classification: Classification
    aggregation: Aggregation
    raw: bool
    num_tokens: int
    truncated: list[int]

    def scores_of(self, index: int) -> Float32Array:
        """Of all tokens of input ``index``, special ones included: probabilities or, if they are ``raw``, logits."""
        logits = self.logits[index]
        return logits if self.raw else apply_function(logits, self.classification.function)

    def entities_of(self, index: int) -> list[Entity]:
        """The labelled spans (or, without aggregation, the tokens) of input ``index``."""
        scores, labels = self.scores_of(index), self.classification.labels
        return entities_of(self.texts[index], self.encodings[index], scores, labels, self.aggregation)


async def classify_tokens(
    service: InferenceService,
    texts: Seq[str],
    *,
    ticket: Ticket,
    aggregation: Aggregation = "none",
    raw: bool = False,
    options: EncodingOptions = AS_CONFIGURED,
) -> TokenScores:
    """Label the tokens of ``texts`` and join them to entities as ``aggregation`` says."""
    require(service, "classify_tokens")
    classification = service.manifest.classification
    assert classification is not None  # whatever has token logits has labels
    options = replace(options, with_spans=True)
    answer = await service.infer(texts, ticket=ticket, outputs={"token_logits"}, options=options)
    logits = [row["token_logits"] for row in answer.rows]
    num_tokens, truncated = answer.num_tokens, answer.truncated
    return TokenScores(texts, answer.encodings, logits, classification, aggregation, raw, num_tokens, truncated)
