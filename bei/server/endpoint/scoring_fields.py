"""Fields of rerank and score routes that say how pairs are scored: by a reranker, a label, or vectors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Annotated, Protocol, TypeAlias, cast

from msgspec import Meta

from bei.errors import BeiError, TaskNotSupportedError
from bei.server.endpoint.context import RequestContext
from bei.service.admission import Ticket
from bei.service.call import ModelInput
from bei.service.model_service import ModelService
from bei.service.service import InferenceService
from bei.tasks.classify import Scores
from bei.tasks.compare import (
    TASK_OF,
    ComparedPair,
    CompareTask,
    ScoreMode,
    check_alone,
    compare,
    has_late_interaction,
)
from bei.tasks.rerank import RerankTask, rerank
from bei.tokenizer.encoder import EncodingOptions

_Weight = Annotated[float, Meta(ge=0)]

# Descriptions say which exclude each other: schemas of the requests have as many alternatives as they may.
Label: TypeAlias = Annotated[
    str, Meta(description="Of a classifier: the score is this label's. Not together with score_mode.")
]
Mode: TypeAlias = Annotated[
    ScoreMode, Meta(description="Of an embedder: by these vectors. Null: a model for late interaction by its tokens'.")
]
Weights: TypeAlias = Annotated[
    dict[str, _Weight], Meta(description="Of score_mode hybrid alone; null: one of each kind.")
]


class Scored(Protocol):
    """A request with these fields. Structs of different bases have them, so they are no base themselves."""

    model: str | None
    label: Label | None
    score_mode: Mode | None
    score_weights: Weights | None

    def encoding_options(self) -> EncodingOptions:
        """As ``Controls``."""


def scoring_task(body: Scored) -> str:
    """The task that a model needs to score as asked."""
    if body.score_mode is not None:
        return TASK_OF[body.score_mode]
    return "rerank" if body.label is None else "classify"


def scoring_model(body: Scored, context: RequestContext) -> InferenceService:
    """The model that scores as asked: without a mode or label a reranker, or a model for late interaction, whose mode
    ``body`` has from then on. Raises what ``Models.able`` raises."""
    try:
        return context.able(scoring_task(body), body.model)
    except TaskNotSupportedError:
        if body.score_mode is None and body.score_weights is None and body.label is None:
            with suppress(BeiError):
                service = context.able(TASK_OF["multi_vector"], body.model)
                if has_late_interaction(service.manifest):
                    body.score_mode = "multi_vector"
                    return service
        raise


async def pair_scores(
    body: Scored,
    service: ModelService,
    pairs: Seq[ComparedPair],
    ticket: Ticket,
    *,
    raw: bool,
    instruction: str | None = None,
) -> Scores:
    """The score of each pair, one column. Raises InvalidRequestError for fields that exclude each other, and for images
    where pairs are read together."""
    if body.score_mode is None and body.score_weights is None:
        given = cast("Seq[ModelInput]", pairs)
        task = RerankTask(given, body.encoding_options(), raw=raw, instruction=instruction, label=body.label)
        return await rerank(service, task, ticket=ticket)
    asked_raw = "use_activation" if getattr(body, "use_activation", None) is False else "raw_scores"
    check_alone(body.score_mode, {"label": body.label, asked_raw: raw or None, "instruction": instruction})
    inputs = cast("Seq[ModelInput]", pairs)
    asked = CompareTask(inputs, body.encoding_options(), mode=body.score_mode, weights=body.score_weights)
    return await compare(service, asked, ticket=ticket)
