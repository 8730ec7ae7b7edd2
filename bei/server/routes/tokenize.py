"""``/tokenize``: text-embeddings-inference's with ``inputs``, vLLM's with ``prompt``. No engine is asked."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import replace
from typing import Annotated, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from bei.core import Encoding
from bei.errors import EmptyInputError, InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import IDS, Example
from bei.server.endpoint.field_schema import Text, Texts, without
from bei.server.endpoint.parse import parser_by_field
from bei.server.endpoint.render import Items, Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Model
from bei.service.call import ModelRequest
from bei.service.service import InferenceService
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei.tokenizer.prompts import apply_prompt, prompt_of, role_of, with_role
from bei.utils.threads import off_loop

# What JSON takes, about: of one of TEI's tokens, of an id, of a token's name.
_TOKEN_BYTES = 80
_ID_BYTES = 6
_NAME_BYTES = 10

# The same of what token ids are decoded to: of a token's text, of what stands around the text.
_DECODED_BYTES = 10
_AROUND_BYTES = 3

# Of one text that is decoded: the tokenizer holds the interpreter's lock for 13 ms.
MOST_IDS = 65_536
# More token ids are looked at off the event loop: so many take 2 ms.
_MANY_IDS = 65_536


class InputsRequest(msgspec.Struct, kw_only=True):
    """TEI's."""

    inputs: Text | Texts
    model: Model | None = None
    add_special_tokens: bool = True
    prompt_name: Annotated[str | None, Meta(description="A prompt of the model's: see /v1/models.")] = None
    input_type: Annotated[str | None, Meta(description="query, document, or the name of a prompt.")] = None


class PromptRequest(msgspec.Struct, kw_only=True):
    """vLLM's, for one text."""

    prompt: Text
    model: Model | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class Token(TypedDict):
    """``start`` and ``stop`` count characters of the text (under ``/tei`` bytes) and its prompt; of special tokens they
    are null."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenCount(TypedDict):
    """vLLM's. ``token_strs`` where they are asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


async def tokenize(body: InputsRequest | PromptRequest, context: RequestContext, *, in_bytes: bool = False) -> Reply:
    """Tokens as the model would read them, but never cut.

    `inputs` (TEI) gives a list of tokens for each text, `prompt` (vLLM) ids and their number.
    """
    service = context.named(body.model)
    options = EncodingOptions(add_special_tokens=body.add_special_tokens, whole=True)
    if isinstance(body, PromptRequest):
        context.check_inputs([body.prompt], "prompt")
        names = bool(body.return_token_strs)
        ticket = context.admit(service, [body.prompt], bytes_per_token=_ID_BYTES + names * _NAME_BYTES, whole=True)
        (encoding,) = await service.encode(ModelRequest([body.prompt], options), ticket=ticket)
        return Reply(render_count(encoding, service.encoder, service.manifest.max_seq_len, names=names))
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    context.check_inputs(texts, "inputs")
    options = replace(options, with_spans=True)
    asked = (body.prompt_name, body.input_type)
    if asked == (None, None):
        texts = list(apply_prompt(service.default_prompt.text, texts))
    else:
        texts = list(apply_prompt(prompt_of(service.manifest, *asked), texts))
        options = with_role(options, role_of(service.manifest, *asked))
    ticket = context.admit(service, texts, bytes_per_token=_TOKEN_BYTES, whole=True)
    encodings = await service.encode(ModelRequest(texts, options), ticket=ticket)
    num_bytes = sum(encoding.num_tokens for encoding in encodings) * _TOKEN_BYTES

    def items(start: int, stop: int) -> list[Items]:
        pairs = zip(texts[start:stop], encodings[start:stop], strict=True)
        return [render_tokens(text, encoding, service.encoder, in_bytes=in_bytes) for text, encoding in pairs]

    return Reply(Items(len(texts), num_bytes, items))


async def tokenize_as_tei(body: InputsRequest | PromptRequest, context: RequestContext) -> Reply:
    """Tokens of each text, never cut. `start` and `stop` count bytes of UTF-8."""
    return await tokenize(body, context, in_bytes=True)


def render_tokens(text: str, encoding: Encoding, encoder: TextEncoder, *, in_bytes: bool = False) -> Items:
    """TEI's response for one text, Tokens. ``in_bytes``: their places are those of UTF-8."""
    spans = encoding.spans
    assert spans is not None  # they were asked for

    @functools.cache
    def places() -> npt.NDArray[np.int64]:
        """Of each character its first byte, and the end."""
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        lengths = 1 + sum((points > last).astype(np.int64) for last in (0x7F, 0x7FF, 0xFFFF))
        return np.concatenate([[0], np.cumsum(lengths)])

    def items(first: int, last: int) -> list[Token]:
        tokens: list[Token] = []
        arrays = (encoding.input_ids, spans.special, spans.offsets)
        for token_id, special, (start, stop) in zip(*(array[first:last].tolist() for array in arrays), strict=True):
            if special:
                name = encoder.token(token_id)
                tokens.append({"id": token_id, "text": name, "special": True, "start": None, "stop": None})
            else:
                part = text[start:stop]
                if in_bytes and not text.isascii():
                    start, stop = int(places()[start]), int(places()[stop])
                tokens.append({"id": token_id, "text": part, "special": False, "start": start, "stop": stop})
        return tokens

    return Items(encoding.num_tokens, encoding.num_tokens * _TOKEN_BYTES, items)


def render_count(encoding: Encoding, encoder: TextEncoder, max_seq_len: int, *, names: bool) -> dict[str, object]:
    """vLLM's response, a Count."""
    ids = encoding.input_ids

    def token_strs(start: int, stop: int) -> list[str]:
        return [encoder.token(token_id) for token_id in ids[start:stop].tolist()]

    return {
        "count": len(ids),
        "max_model_len": max_seq_len,
        "tokens": Items(len(ids), len(ids) * _ID_BYTES, lambda start, stop: ids[start:stop]),
        "token_strs": Items(len(ids), len(ids) * _NAME_BYTES, token_strs) if names else None,
    }


async def decoded(
    context: RequestContext,
    service: InferenceService,
    lists: Seq[Seq[int]],
    param: str,
    *,
    skip_special_tokens: bool,
    skip_unknown: bool = False,
) -> Items:
    """The text of each of ``lists``, token ids which the field ``param`` holds. Raises InvalidRequestError, also for an
    id that is no token, unless these are to be left out (``skip_unknown``): then the client is warned."""
    context.check_inputs(lists, param)
    num_bytes = sum(len(ids) * _DECODED_BYTES + _AROUND_BYTES for ids in lists)
    context.check_answer(num_bytes)
    context.admit(service, [[0]] * len(lists))  # no work for the engine
    known = service.encoder.known_ids
    is_large = sum(map(len, lists)) > _MANY_IDS
    unknown = await off_loop(_unknown_id, lists, known, param) if is_large else _unknown_id(lists, known, param)
    if unknown is not None:
        index, token_id = unknown
        if not skip_unknown:
            raise InvalidRequestError(f"This model's tokenizer has no token {token_id}.", param)
        context.warn(f"{param} {index}: this model's tokenizer has no token {token_id}, which was left out")
        lists = [[token_id for token_id in ids if token_id in known] for ids in lists]

    def texts(start: int, stop: int) -> list[str]:
        return [service.encoder.decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists[start:stop]]

    return Items(len(lists), num_bytes, texts)


def too_many_ids(count: int, what: str, param: str) -> InvalidRequestError:
    """The error of ``what``, which has more token ids than a text may have."""
    return InvalidRequestError(f"{what} has {count} token ids, the limit is {MOST_IDS}: send it in parts.", param)


def _unknown_id(lists: Seq[Seq[int]], known: Set[int], param: str) -> tuple[int, int] | None:
    """The first list with an id that is no token, and the least such id. Raises InvalidRequestError for a list that is
    empty or too long."""
    found = None
    for index, ids in enumerate(lists):
        if not ids:
            raise EmptyInputError(f"{param} {index} is empty: leave it out.", param)
        if len(ids) > MOST_IDS:
            raise too_many_ids(len(ids), f"{param} {index}", param)
        if found is None and (unknown := set(ids) - known):
            found = index, min(unknown)
    return found


_INPUTS_EXAMPLE = Example(
    {"inputs": "hello world"},
    [
        [
            {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": 7592, "text": "hello", "special": False, "start": 0, "stop": 5},
            {"id": 2088, "text": "world", "special": False, "start": 6, "stop": 11},
            {"id": 102, "text": "[SEP]", "special": True, "start": None, "stop": None},
        ]
    ],
)
# What vLLM's clients ask and get.
PROMPT_EXAMPLE = Example(
    {"prompt": "hello world", "return_token_strs": True},
    {"count": 4, "max_model_len": 256, "tokens": IDS, "token_strs": ["[CLS]", "hello", "world", "[SEP]"]},
)

ROUTE = Route(
    "/tokenize",
    "Tokenize (TEI, vLLM)",
    (Annotated[InputsRequest, without("prompt")], Annotated[PromptRequest, without("inputs")]),
    (list[list[Token]], TokenCount),
    parser_by_field(inputs=InputsRequest, prompt=PromptRequest),
    tokenize,
    _INPUTS_EXAMPLE,
    runs_engine=False,
)
