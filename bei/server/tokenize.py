"""``/tokenize``: text-embeddings-inference's with ``inputs``, vLLM's with ``prompt``. No engine is asked."""

from __future__ import annotations

from typing import Annotated, TypedDict

import msgspec
from msgspec import Meta

from bei.core import Encoding
from bei.server.controls import Model
from bei.server.endpoint import Call, Reply, Route
from bei.server.parsing import parser_by_field
from bei.tasks import in_role, prompt_of, prompted, role_of
from bei.tokenization import EncodingOptions, TextEncoder


class InputsRequest(msgspec.Struct, kw_only=True):
    """TEI's."""

    inputs: str | list[str]
    model: Model | None = None
    add_special_tokens: bool = True
    prompt_name: Annotated[str | None, Meta(description="A prompt of the model's: see /v1/models.")] = None
    input_type: Annotated[str | None, Meta(description="query, document, or the name of a prompt.")] = None


class PromptRequest(msgspec.Struct, kw_only=True):
    """vLLM's, for one text."""

    prompt: str
    model: Model | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class _Token(TypedDict):
    id: int
    text: str
    special: bool


class Token(_Token, total=False):
    """``start`` and ``stop`` count characters of the text, its prompt included; special tokens have none."""

    start: int
    stop: int


class Count(TypedDict):
    """vLLM's. ``token_strs`` where they are asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


async def tokenize(body: InputsRequest | PromptRequest, call: Call) -> Reply:
    """Tokens as the model would read them, but never cut.

    `inputs` (TEI) gives a list of tokens for each text, `prompt` (vLLM) ids and their number.
    """
    service = call.models.named(body.model)
    options = EncodingOptions(add_special_tokens=body.add_special_tokens, with_spans=True, whole=True)
    if isinstance(body, PromptRequest):
        call.check_inputs([body.prompt], "prompt")
        ticket = call.admit(service, [body.prompt])
        (encoding,) = await service.encode([body.prompt], ticket=ticket, options=options)
        names = bool(body.return_token_strs)
        return Reply(render_count(encoding, service.encoder, service.manifest.max_seq_len, names=names))
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    call.check_inputs(texts, "inputs")
    asked = (body.prompt_name, body.input_type)
    if asked != (None, None):
        texts = list(prompted(prompt_of(service.manifest, *asked), texts))
        options = in_role(options, role_of(service.manifest, *asked))
    encodings = await service.encode(texts, ticket=call.admit(service, texts), options=options)
    pairs = zip(texts, encodings, strict=True)
    return Reply([render_tokens(text, encoding, service.encoder) for text, encoding in pairs])


def render_tokens(text: str, encoding: Encoding, encoder: TextEncoder) -> list[Token]:
    """TEI's response for one text."""
    spans = encoding.spans
    assert spans is not None  # they were asked for
    tokens: list[Token] = []
    columns = zip(encoding.input_ids.tolist(), spans.special.tolist(), spans.offsets.tolist(), strict=True)
    for token_id, special, (start, stop) in columns:
        if special:
            tokens.append({"id": token_id, "text": encoder.token(token_id), "special": True})
        else:
            tokens.append({"id": token_id, "text": text[start:stop], "special": False, "start": start, "stop": stop})
    return tokens


def render_count(encoding: Encoding, encoder: TextEncoder, max_seq_len: int, *, names: bool) -> Count:
    """vLLM's response."""
    ids: list[int] = encoding.input_ids.tolist()
    token_strs = [encoder.token(token_id) for token_id in ids] if names else None
    return {"count": len(ids), "max_model_len": max_seq_len, "tokens": ids, "token_strs": token_strs}


ROUTE = Route(
    "/tokenize",
    "Tokenize (TEI, vLLM)",
    (InputsRequest, PromptRequest),
    (list[list[Token]], Count),
    parser_by_field(inputs=InputsRequest, prompt=PromptRequest),
    tokenize,
)
