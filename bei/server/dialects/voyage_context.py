"""Voyage AI's contextualized chunk embeddings: each document's chunks are embedded with all of it in view.

Voyage has models trained for that. Here the chunks are read as one document and cut afterwards (late chunking), so a
model must be one that can do it. Reference: docs.voyageai.com, "Contextualized Chunk Embeddings".
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from msgspec import UNSET

from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import EMBEDDER, NUM_TOKENS, TEXTS, Example, embedding_items
from bei.server.endpoint.field_schema import Text, limits, limits_of_inputs
from bei.server.endpoint.inference import Embedded, embedded
from bei.server.endpoint.parse import parser
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import Items, Reply, num_bytes_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered
from bei.server.endpoint.vector_encoding import VectorForm, dtype_of
from bei.server.routes.openai_embeddings import AROUND_BYTES, EmbeddingItem, TokensUsage, render
from bei.tasks.embed import EmbedTask

Chunks = Annotated[list[Text], limits(minItems=1)]


class Request(Tiered, kw_only=True):
    """``inputs``: the chunks of each document in their order, or a list of one text for each query."""

    inputs: Annotated[list[Chunks], limits_of_inputs]
    model: Model | None = None
    input_type: Literal["query", "document"] | None = None
    output_dimension: Dimensions | None = None
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = None
    encoding_format: Literal["base64"] | None = None
    enable_auto_chunking: Annotated[Refused, refused("send chunks", False)] = UNSET
    chunk_size: Annotated[Refused, refused("send chunks")] = UNSET
    chunk_overlap: Annotated[Refused, refused("send chunks")] = UNSET


class Document(TypedDict):
    """The chunks of a document."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    index: int


class Response(TypedDict):
    """In the order of the documents."""

    object: Literal["list"]
    data: list[Document]
    model: str
    usage: TokensUsage


async def embed_documents(body: Request, context: RequestContext) -> Reply:
    """Embed the chunks of documents, each with the whole document in view."""
    form = VectorForm(dtype_of(body.output_dtype or "float", "output_dtype"), body.encoding_format == "base64")
    service = context.able("embed", body.model)
    context.check_count(body.inputs, "inputs")
    for chunks in body.inputs:
        context.check_inputs(chunks, "inputs")
    context.check_count([chunk for chunks in body.inputs for chunk in chunks], "inputs")
    context.admit_whole(service, [" ".join(chunks) for chunks in body.inputs])
    found: list[Embedded] = []
    for chunks in body.inputs:
        task = EmbedTask(
            chunks,
            input_type=body.input_type,
            dimensions=body.output_dimension,
            late_chunking=True,
            param="inputs",
            dimensions_param="output_dimension",
        )
        found.append(await embedded(context, service, task, forms=[form], around_bytes=AROUND_BYTES))
    chunks_of = [render(one.answer, service.name, form)["data"] for one in found]
    documents = [{"object": "list", "data": data, "index": index} for index, data in enumerate(chunks_of)]
    num_bytes = sum(map(num_bytes_of, documents))
    context.check_answer(num_bytes)
    content = {
        "object": "list",
        "data": Items(len(documents), num_bytes, lambda start, stop: documents[start:stop]),
        "model": service.name,
        "usage": {"total_tokens": sum(one.answer.num_tokens for one in found)},
    }
    return Reply(content)


ROUTE: Route[Request] = Route(
    "/contextualizedembeddings",
    "Embed chunks in context (Voyage)",
    Request,
    Response,
    parser(Request),
    embed_documents,
    Example(
        {"inputs": [TEXTS], "input_type": "document"},
        {
            "object": "list",
            "data": [{"object": "list", "data": embedding_items(), "index": 0}],
            "model": EMBEDDER,
            "usage": {"total_tokens": NUM_TOKENS},
        },
    ),
)
