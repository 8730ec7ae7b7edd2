"""Labels of single tokens, and the entities that they are joined to."""

from __future__ import annotations

from dataclasses import replace

from bei.artifact.manifest import Classification
from bei.core import Encoding, Float32Array
from bei.engine.postprocess import apply_function
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.entities import Aggregation, Entity, entities_of
from bei.tasks.support import PartialResult, require


class TokenTask(ModelRequest, frozen=True, kw_only=True):
    """Texts. ``aggregation``: how tokens are joined to entities. ``raw``: logits instead of probabilities."""

    aggregation: Aggregation = "none"
    raw: bool = False


class TokenScores(PartialResult, frozen=True, kw_only=True):
    """``logits[i]`` float32 [tokens, labels] for text i of ``task``. Entities are made when they are wanted: they
    take a hundred times the logits' memory."""

    task: TokenTask
    encodings: list[Encoding]
    logits: list[Float32Array]
    classification: Classification

    def scores_of(self, index: int) -> Float32Array:
        """The scores of all tokens of input ``index``, special tokens included: probabilities, or logits if ``raw``."""
        logits = self.logits[index]
        return logits if self.task.raw else apply_function(logits, self.classification.function)

    def entities_of(self, index: int) -> list[Entity]:
        """The labelled spans (or, without aggregation, the tokens) of input ``index``."""
        scores, labels = self.scores_of(index), self.classification.labels
        text = str(self.task.inputs[index])
        return entities_of(text, self.encodings[index], scores, labels, self.task.aggregation)


async def classify_tokens(service: ModelService, task: TokenTask, *, ticket: Ticket) -> TokenScores:
    """Label the tokens of each text."""
    require(service, "classify_tokens")
    classification = service.manifest.classification
    assert classification is not None  # whatever has token logits has labels
    asked = ModelRequest(task.inputs, replace(task.options, with_spans=True))
    answer = await service.infer(asked, ticket=ticket, outputs={"token_logits"})
    return TokenScores(
        answer.lengths,
        answer.truncated,
        task=task,
        encodings=answer.encodings,
        logits=[row["token_logits"] for row in answer.rows],
        classification=classification,
    )
