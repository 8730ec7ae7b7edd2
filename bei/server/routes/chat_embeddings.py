"""vLLM's chat form of ``POST /v1/embeddings``: images in ``messages`` in place of ``input``.

vLLM renders messages with the model's chat template as one prompt. Models with two towers have none: of them its
examples send one message of the user with the image alone, and texts as ``input``. Of models that read images and
texts together the message has all, in their order, and stands in the model's own turns. Nothing else is read here.

Reference: docs.vllm.ai, "Embeddings API"; github.com/vllm-project/vllm, ``vllm/entrypoints/pooling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta

from bei.errors import InvalidRequestError
from bei.image.source import ImageInput, MixedInput
from bei.server.endpoint.input_parts import InputPart, joined_parts
from bei.server.endpoint.parse import parser
from bei.server.endpoint.refused_fields import OfChats, ProcessorOptions, Refused, refused
from bei.server.endpoint.route import Route
from bei.server.routes.openai_embeddings import EmbeddingRequest, ParsedRequest

_ONE = {"minItems": 1, "maxItems": 1}
_PART = {"required": ["type"], "properties": {"type": {"enum": ["image_url", "text"]}}}


class ChatMessage(msgspec.Struct):
    """One message of the user, with an image: `{"type": "image_url", "image_url": {"url": "data:..."}}`, or (models
    that read both) images and texts: `{"type": "text", "text": ...}`."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ["user"]})]
    content: Annotated[str | list[InputPart], Meta(extra_json_schema={"type": "array", "items": _PART, "minItems": 1})]


Messages = Annotated[list[ChatMessage], Meta(extra_json_schema=_ONE)]


class ChatEmbeddingRequest(EmbeddingRequest, kw_only=True):
    """vLLM's, with an image as a message."""

    messages: Messages
    input: Annotated[Refused, refused("it stands beside messages; send one of them")] = UNSET  # type: ignore[assignment]
    add_generation_prompt: OfChats = UNSET
    continue_final_message: OfChats = UNSET
    chat_template: OfChats = UNSET
    chat_template_kwargs: OfChats = UNSET
    media_io_kwargs: ProcessorOptions = UNSET


_FIELD = b'"messages"'
_parse_fields = parser(Mapping[str, msgspec.Raw])  # type: ignore[type-abstract]
_parse_chat = parser(ChatEmbeddingRequest)


def with_chats(route: Route[ParsedRequest]) -> Route[ParsedRequest]:
    """``route``, which reads ``messages`` too."""

    def parse(content: bytes) -> ParsedRequest:
        # Nearly all requests have no such field: they are not read twice.
        if _FIELD not in content or bytes(_parse_fields(content).get("messages", msgspec.Raw(b"null"))) == b"null":
            return route.parse(content)
        body = _parse_chat(content)
        return ParsedRequest(body, [input_of(body.messages)])

    return replace(route, request=(route.request, ChatEmbeddingRequest), parse=parse)


def input_of(messages: Seq[ChatMessage]) -> ImageInput | MixedInput:
    """The only image of the only message, or all its parts. Raises InvalidRequestError."""
    if len(messages) == 1 and messages[0].role == "user" and not isinstance(messages[0].content, str):
        found = joined_parts(messages[0].content, "messages")
        if not isinstance(found, str):
            return found
    raise InvalidRequestError(
        "messages holds one message of the user with an image, as no chat template is applied: send texts alone as "
        "input, and images that are to have vectors of their own as a list in input.",
        "messages",
    )
