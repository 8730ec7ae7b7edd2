"""``/predict_tokens``: BEI's named entity recognition, with the aggregations of transformers' pipeline.

``results`` is what BEI answers: the label and its probability, or, of single tokens with ``raw_scores``, the logits of
all labels. An aggregated entity has one label (PER, not B-PER), which is no column of the model's: it is alone always.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import Example
from bei.server.endpoint.field_schema import Text, limits, limits_of_inputs
from bei.server.endpoint.parse import parser
from bei.server.endpoint.render import Items, Reply, items_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import ScoreControls
from bei.tasks.entities import Aggregation, Entity
from bei.tasks.token_classification import TokenTask, classify_tokens

# What JSON takes, about: of a token without its scores, of a score beside its label, of the best label with its score.
_TOKEN_BYTES = 80
_SCORE_BYTES = 16
_LABEL_BYTES = 18


class PredictTokensRequest(ScoreControls, kw_only=True):
    """BEI's client writes every text as a list of one."""

    inputs: Text | Annotated[list[Text | Annotated[list[Text], limits(minItems=1, maxItems=1)]], limits_of_inputs]
    aggregation_strategy: Aggregation = "none"


class LabelledToken(TypedDict):
    """A token or an entity: what stands at ``start`` to ``end``, counted in characters, and its first token's id."""

    token: str
    token_id: int
    start: int
    end: int
    results: dict[str, float]


def texts_of(inputs: str | list[str | list[str]]) -> list[str]:
    """One text an input. Raises InvalidRequestError."""
    if isinstance(inputs, str):
        return [inputs]
    for index, value in enumerate(inputs):
        if not isinstance(value, str) and len(value) != 1:
            raise InvalidRequestError(
                f'inputs {index} is a list of {len(value)} texts: write each text as a list of one, [["a"], ["b"]].',
                "inputs",
            )
    return [value if isinstance(value, str) else value[0] for value in inputs]


async def predict_tokens(body: PredictTokensRequest, context: RequestContext) -> Reply:
    """Label the tokens of each text and, with `aggregation_strategy`, join them to entities, in the text's order."""
    service = context.able("classify_tokens", body.model)
    if isinstance(body.inputs, list):
        context.check_count(body.inputs, "inputs")  # before they are looked at
    texts = texts_of(body.inputs)
    context.check_inputs(texts, "inputs")
    aggregation, raw = body.aggregation_strategy, body.is_raw()
    classification = service.manifest.classification
    labels = classification.labels if classification and raw and aggregation == "none" else None
    token_bytes = _TOKEN_BYTES + (sum(len(label) + _SCORE_BYTES for label in labels) if labels else _LABEL_BYTES)
    # How many entities a text has is known when they are written: so many as it has tokens, at most.
    asked = TokenTask(texts, body.encoding_options(), aggregation=aggregation, raw=raw)
    answer = await classify_tokens(service, asked, ticket=context.admit(service, texts, bytes_per_token=token_bytes))

    def entities_of(index: int) -> Items:
        return items_of(answer.entities_of(index), token_bytes, lambda entity: render(entity, labels))

    num_bytes = answer.num_tokens * token_bytes
    return Reply(items_of(range(len(texts)), num_bytes // len(texts), entities_of), answer.truncated)


def render(entity: Entity, labels: list[str] | None) -> LabelledToken:
    """``labels``: those of the scores, where all are asked for."""
    best = {entity.label: entity.score}
    return {
        "token": entity.text,
        "token_id": entity.token_id,
        "start": entity.start,
        "end": entity.end,
        "results": dict(zip(labels, entity.scores, strict=True)) if labels else best,
    }


_TOKEN_EXAMPLE = {"token": "Ada Lovelace", "token_id": 15262, "start": 0, "end": 12, "results": {"PER": 0.9986}}
_EXAMPLE = Example(
    {"inputs": [["Ada Lovelace lived in London."]], "aggregation_strategy": "simple"},
    [
        [
            _TOKEN_EXAMPLE,
            {"token": "London", "token_id": 2414, "start": 22, "end": 28, "results": {"LOC": 0.9991}},
        ]
    ],
)

ROUTE = Route(
    "/predict_tokens",
    "Label tokens (BEI)",
    PredictTokensRequest,
    list[list[LabelledToken]],
    parser(PredictTokensRequest),
    predict_tokens,
    _EXAMPLE,
)
