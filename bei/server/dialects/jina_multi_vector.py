"""Jina's vectors for each token, of models for late interaction.

Reference: the requests of Jina's documents for jina-colbert-v2 and of Weaviate's examples, which read
``data[i].embeddings``; Jina's API description was not at hand.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypedDict

from msgspec import Meta

from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import NUM_TOKENS, TEXTS, VECTORS, Example
from bei.server.endpoint.field_schema import Text as NonEmptyText
from bei.server.endpoint.field_schema import limits_of_inputs
from bei.server.endpoint.inference import checked_task
from bei.server.endpoint.input_parts import InputPart
from bei.server.endpoint.parse import parser
from bei.server.endpoint.render import FLOAT_BYTES, Items, Reply, rows_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered
from bei.server.routes.openai_embeddings import Usage
from bei.tasks.embed import EmbedTask, embed_tokens
from bei.tokenizer.truncation import encoding_options

_AROUND_BYTES = 50  # of a text's vectors
_KEEP_THEIR_WIDTH = "Refused: these vectors keep their width, which may be named."

OneOrMany: TypeAlias = NonEmptyText | InputPart | Annotated[list[NonEmptyText | InputPart], limits_of_inputs]


class Request(Tiered, kw_only=True):
    """``input_type`` null: as the model reads texts of no side. Images are for models that read them among tokens."""

    input: OneOrMany
    model: Model | None = None
    input_type: Literal["query", "document"] | None = None
    embedding_type: Literal["float"] | None = None
    dimensions: Annotated[Dimensions | None, Meta(description=_KEEP_THEIR_WIDTH)] = None
    truncate: bool | None = False


class TokenVectors(TypedDict):
    """An input's vectors, one for each token that is kept."""

    object: Literal["embeddings"]
    index: int
    embeddings: list[list[float]]


class Response(TypedDict):
    """In the order of the texts."""

    model: str
    object: Literal["list"]
    usage: Usage
    data: list[TokenVectors]


async def embed(body: Request, context: RequestContext) -> Reply:
    """A vector for each token of each text or image, of the side that `input_type` names: queries are filled up,
    documents lose punctuation, as the model says."""
    service = context.able("embed_tokens", body.model)
    width = service.manifest.dimension("token_embedding") or 0
    if body.dimensions not in (None, width):
        message = f"{service.name} gives vectors of {width} dimensions, which keep their width: leave dimensions out."
        raise InvalidRequestError(message, "dimensions")
    given = body.input if isinstance(body.input, list) else [body.input]
    context.check_count(given, "input")
    inputs = [one if isinstance(one, str) else one.model_input("input") for one in given]
    asked = EmbedTask(inputs, encoding_options(bool(body.truncate)), input_type=body.input_type, param="input")
    checked = checked_task(context, service, asked, "embed_tokens")
    bytes_per_token = FLOAT_BYTES * width
    ticket = context.admit(service, checked.task.inputs, bytes_per_token=bytes_per_token, num_around=checked.num_around)
    answer = await embed_tokens(service, checked, ticket=ticket)
    vectors = answer.vectors

    def items(start: int, stop: int) -> list[dict[str, object]]:
        found = [(at, rows_of(vectors[at])) for at in range(start, stop)]
        return [{"object": "embeddings", "index": at, "embeddings": rows} for at, rows in found]

    num_bytes = len(inputs) * _AROUND_BYTES + answer.num_tokens * bytes_per_token
    content = {
        "model": service.name,
        "object": "list",
        "usage": {"total_tokens": answer.num_tokens, "prompt_tokens": answer.num_tokens},
        "data": Items(len(vectors), num_bytes, items),
    }
    return Reply(content, answer.truncated)


ROUTE: Route[Request] = Route(
    "/v1/multi-vector",
    "Embed every token (Jina)",
    Request,
    Response,
    parser(Request),
    embed,
    Example(
        {"input": TEXTS, "input_type": "document", "truncate": True},
        {
            "model": "colbert",
            "object": "list",
            "usage": {"total_tokens": NUM_TOKENS, "prompt_tokens": NUM_TOKENS},
            "data": [{"object": "embeddings", "index": at, "embeddings": VECTORS} for at in range(len(TEXTS))],
        },
    ),
)
