"""Voyage AI's multimodal embeddings: each input is a text, in one part or several, an image, or both in their order.

Voyage's own models read texts and images in one input; models with two towers do not, and such inputs are refused.
Reference: docs.voyageai.com, "Multimodal Embeddings"; the client ``voyageai``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Literal, TypedDict, cast

from bei.image.source import ImageInput
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import NUM_TOKENS, TEXTS, Example
from bei.server.endpoint.field_schema import limits_of_inputs
from bei.server.endpoint.inference import embedded
from bei.server.endpoint.input_parts import JoinedInput, joined_parts
from bei.server.endpoint.parse import parser
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered
from bei.server.endpoint.vector_encoding import VectorForm, dtype_of
from bei.server.routes.openai_embeddings import ANSWER_EXAMPLE, AROUND_BYTES, EmbeddingItem, render
from bei.service.call import ModelInput
from bei.tasks.embed import EmbedTask
from bei.tokenizer.encoder import EncodingOptions


class Request(Tiered, kw_only=True):
    """``input_type`` null: the model's default prompt."""

    inputs: Annotated[list[JoinedInput], limits_of_inputs]
    model: Model | None = None
    input_type: Literal["query", "document"] | None = None
    truncation: bool | None = None
    output_dimension: Dimensions | None = None
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = None
    output_encoding: Literal["base64"] | None = None


class PixelUsage(TypedDict):
    """``image_pixels``: of images as the model reads them. ``video_pixels``: 0, as clients read it and videos are not.
    ``total_tokens``: of texts, and the patches of images."""

    text_tokens: int
    image_pixels: int
    video_pixels: int
    total_tokens: int


class Response(TypedDict):
    """In the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: PixelUsage


async def embed_multimodal(body: Request, context: RequestContext) -> Reply:
    """Embed texts and images, in their order."""
    context.check_count(body.inputs, "inputs")  # before they are looked at
    inputs = [joined_parts(one.content, "inputs") for one in body.inputs]
    form = VectorForm(dtype_of(body.output_dtype or "float", "output_dtype"), body.output_encoding == "base64")
    service = context.able("embed", body.model)
    asked = EmbedTask(
        cast("Seq[ModelInput]", inputs),  # which ``check_task`` makes of them
        EncodingOptions(truncate=body.truncation is not False),
        input_type=body.input_type,
        dimensions=body.output_dimension,
        param="inputs",
        dimensions_param="output_dimension",
    )
    found = await embedded(context, service, asked, forms=[form], around_bytes=AROUND_BYTES)
    images = [index for index, value in enumerate(inputs) if isinstance(value, ImageInput)]
    tower, lengths, beside = service.manifest.image_tower, found.answer.lengths, found.dense.image_tokens
    pixels = 0
    if tower is not None:
        around = tower.sequence.num_tokens(0) if tower.sequence else 0
        pixels = sum(tower.num_pixels(lengths[index]) for index in images)
        pixels += sum(tower.num_pixels(count + around) for count in beside.values())
    num_of_images = sum(lengths[index] for index in images) + sum(beside.values())
    usage: PixelUsage = {
        "text_tokens": found.answer.num_tokens - num_of_images,
        "image_pixels": pixels,
        "video_pixels": 0,
        "total_tokens": found.answer.num_tokens,
    }
    return found.reply({**render(found.answer, service.name, form), "usage": usage})


ROUTE: Route[Request] = Route(
    "/multimodalembeddings",
    "Embed texts and images (Voyage)",
    Request,
    Response,
    parser(Request),
    embed_multimodal,
    Example(
        {"inputs": [{"content": [{"type": "text", "text": text}]} for text in TEXTS], "input_type": "document"},
        {
            **ANSWER_EXAMPLE,
            "usage": {"text_tokens": NUM_TOKENS, "image_pixels": 0, "video_pixels": 0, "total_tokens": NUM_TOKENS},
        },
    ),
    has_report=True,
)
