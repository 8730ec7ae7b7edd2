"""From the bytes of a body to its request Struct. Unknown fields are ignored: clients and gateways add their own. Known
ones that are not honoured are refused (``refused_fields``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from bei.errors import BeiError, InvalidRequestError, MalformedRequestError
from bei.server.endpoint.decoder_errors import malformed
from bei.server.endpoint.lenient_json import read_again
from bei.server.endpoint.refused_fields import Refusal, refusal_of
from bei.utils.json_keys import key_twice
from bei.utils.threads import off_loop

RequestT = TypeVar("RequestT")

TokenId: TypeAlias = Annotated[int, Meta(ge=0)]

# What Windows' tools write in front of UTF-8: RFC 8259, section 8.1, lets it be ignored.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Larger bodies are parsed off the event loop: smaller ones take a millisecond at most.
INLINE_BODY_BYTES = 64_000

# Of a field with the client's own objects, which no model reads more of: a text of as many characters has 300,000
# tokens. Objects of 7 MB would be made, and written as text, while the event loop waits for the interpreter's lock.
_MOST_STRUCTURED_BYTES = 1_000_000

# Token ids are decoded in pieces of so many bytes: the decoder holds the interpreter's lock, for 165 ms where a body of
# 8 MB is nothing else. Texts of as many bytes take 10 to 60 ms, and cannot be cut as easily.
PIECE_BYTES = 256_000


class Read(NamedTuple):
    """A request, and the errors of inputs that could not be read, by their places: empty texts stand there."""

    request: Any
    unreadable: Mapping[int, BeiError]


async def read(parse: Callable[[bytes], Any], content: bytes, *, in_part: bool = False) -> Read:
    """``parse(content)``, of a long body off the event loop. ``in_part``: an answer to some of the inputs will do.

    Raises what ``parse`` raises, InvalidTextError.
    """
    if len(content) > INLINE_BODY_BYTES:
        return await off_loop(read_now, parse, content, in_part)
    return read_now(parse, content, in_part)


def read_now(parse: Callable[[bytes], Any], content: bytes, in_part: bool) -> Read:
    """``read`` in the current thread."""
    try:
        return Read(parse(content), {})
    except MalformedRequestError as error:
        return Read(*read_again(parse, content, error, in_part=in_part))


def parser(request: type[RequestT]) -> Callable[[bytes], RequestT]:
    """A function that decodes and validates bodies as ``request``. It raises InvalidRequestError, also for a field that
    is asked for and not honoured."""
    return partial(_decoded, msgspec.json.Decoder(request), refusal_of(request))


def packed_parser(request: type[RequestT]) -> Callable[[bytes], RequestT]:
    """As ``parser``, of bodies in MessagePack."""
    return partial(_decoded, msgspec.msgpack.Decoder(request), refusal_of(request), form="MessagePack")


def with_unique_keys(parse: Callable[[bytes], RequestT], *fields: str) -> Callable[[bytes], RequestT]:
    """``parse`` for bodies whose ``fields`` have objects with the client's own keys, of which each may stand once: the
    decoder would keep the last value. It raises InvalidRequestError, also for objects of more than a megabyte."""

    nothing = msgspec.Raw()
    decoder = msgspec.json.Decoder(msgspec.defstruct("Fields", [(field, msgspec.Raw, nothing) for field in fields]))

    def checked(body: bytes) -> RequestT:
        try:
            given = decoder.decode(body)
            for field in fields:
                if (content := bytes(getattr(given, field))).startswith((b"{", b"[")):
                    _check_keys(content, field)
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            parse(body)  # it says what is wrong, but for what it skips
            raise MalformedRequestError("The body is not valid JSON in UTF-8.") from error
        return parse(body)  # behind, so that only one copy is in memory

    return checked


def _check_keys(content: bytes, field: str) -> None:
    if len(content) > _MOST_STRUCTURED_BYTES:
        raise InvalidRequestError(
            f"{field} has {len(content)} bytes of JSON, the limit is {_MOST_STRUCTURED_BYTES}: send less, or one text.",
            field,
        )

    if (twice := key_twice(content)) is not None:
        raise InvalidRequestError(f"{field} has an object with the key {twice[:40]!r} twice: send each once.", field)


def parser_by_field(**requests: type[Any]) -> Callable[[bytes], Any]:
    """For a route with several dialects: the field that is there, of the names given, says which request it is.

    A field that is null is not there. Exactly one of them must be.
    """
    parsers = {field: parser(request) for field, request in requests.items()}
    names = ", ".join(parsers)

    def parse(body: bytes) -> Any:
        given = _decoded(_fields_decoder, None, body)
        found = [field for field in parsers if field in given and bytes(given[field]) != b"null"]
        if len(found) != 1:
            has = ", ".join(found) or "none of them"
            message = f"The request must have exactly one of the fields {names}; it has {has}."
            raise InvalidRequestError(message, next(iter(parsers)))
        return parsers[found[0]](body)

    return parse


def too_many_inputs(count: int, limit: int, param: str) -> InvalidRequestError:
    """The error of a request that has ``count`` inputs in ``param``."""
    return InvalidRequestError(f"The request has {count} inputs, the limit is {limit}: split it.", param)


def is_one_input(given: Seq[object]) -> bool:
    """True if ``given``, by its first element, is the token ids of one input and not a list of inputs."""
    return isinstance(given[0], int) if given else False


def check_inputs(given: Seq[object], max_inputs: int, param: str, mixed: str) -> None:
    """Raise InvalidRequestError for more than ``max_inputs`` inputs, or, as ``mixed``, for ids beside other inputs."""
    is_one = is_one_input(given)
    if not is_one and len(given) > max_inputs:
        raise too_many_inputs(len(given), max_inputs, param)
    if any(isinstance(value, int) is not is_one for value in given):
        raise InvalidRequestError(mixed, param)


def read_long_ids(
    content: bytes, field: str, max_inputs: int, parse: Callable[[bytes], RequestT]
) -> tuple[RequestT, list[list[int]]] | None:
    """What ``parse`` reads of a long body without the token ids in ``field``, and these, decoded in pieces. A list of
    ids is a list of one. None: all is ``parse``'s. Raises InvalidRequestError, also for more than ``max_inputs``."""
    found = long_id_lists(content, field, max_inputs) if len(content) > PIECE_BYTES else None
    if found is None:
        return None
    body = parse(found.rest)
    there = getattr(body, field)
    if (bytes(there) if isinstance(there, msgspec.Raw) else there) not in (_PLACEHOLDER, _PLACEHOLDER_TEXT):
        return None  # they stood deeper in the body
    if len(found.lists) > max_inputs:
        raise too_many_inputs(len(found.lists), max_inputs, field)
    return body, found.lists


class LongIdLists(NamedTuple):
    """Token ids of a long body, and ``rest``, the body with ``_PLACEHOLDER`` in their place."""

    lists: list[list[int]]
    rest: bytes


def long_id_lists(content: bytes, field: str, max_lists: int) -> LongIdLists | None:
    """The lists of token ids in ``field`` of a long body.

    Where there are more than ``max_lists`` the others are there, but empty: lists by the million, which are refused,
    would keep the garbage collector busy for seconds.

    None where the body is anything else than expected: all is then the ordinary decoder's, errors too. The
    field is the first of its name, which may also stand deeper in the body: the caller sees by the placeholder.
    """
    found = re.search(rb'"%s"\s*:\s*(?:(\[)\s*([\[0-9]))?' % field.encode(), content)
    if found is None or found[1] is None:
        return None
    read = _lists_from if found[2] == b"[" else _ids_from
    try:
        there = read(content, found.end(1), max_lists)
    except msgspec.DecodeError:
        return None
    if there is None:
        return None
    lists, stop = there
    return LongIdLists(lists, content[: found.start(1)] + _PLACEHOLDER + content[stop:])


def _ids_from(content: bytes, start: int, _: int) -> tuple[list[list[int]], int] | None:
    """The list of ids whose first one is at ``start``, and where it ends. None: it is no JSON."""
    ids: list[int] = []
    end = content.find(b"]", start)
    if end < 0:
        return None
    while True:
        stop = content.find(b",", start + PIECE_BYTES, end)
        piece = _ids_decoder.decode(b"[" + content[start : stop if stop >= 0 else end] + b"]")
        if not piece:  # behind a comma
            return None
        ids += piece
        if stop < 0:
            return [ids], end + 1
        start = stop + 1


def _lists_from(content: bytes, start: int, max_lists: int) -> tuple[list[list[int]], int] | None:
    """The lists of ids the first of which is at ``start``, and where they end. None: it is no JSON."""
    lists: list[list[int]] = []
    while True:
        stop = content.find(b"]", start + PIECE_BYTES) + 1 or len(content)
        end = _END_OF_LISTS.search(content, start, stop)
        stop = stop if end is None else end.start() + 1  # behind the last list
        if len(lists) <= max_lists:
            lists += _id_lists_decoder.decode(b"[" + content[start:stop] + b"]")
        else:
            lists += [_LEFT_OUT] * content.count(b"[", start, stop)
        behind = _BEHIND_LIST.match(content, stop)
        if behind is None:  # no JSON
            return None
        start = behind.end()
        if behind[1] == b"]":
            return lists, start


# In the place of lists that were taken out: no client sends such a text.
_PLACEHOLDER = b'"\\u0000token ids"'
_PLACEHOLDER_TEXT = "\0token ids"

_LEFT_OUT: list[int] = []

_END_OF_LISTS = re.compile(rb"\]\s*\]")
_BEHIND_LIST = re.compile(rb"\s*([,\]])")
_ids_decoder = msgspec.json.Decoder(list[TokenId])
_id_lists_decoder = msgspec.json.Decoder(list[list[TokenId]])
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _decoded(
    decoder: msgspec.json.Decoder[RequestT] | msgspec.msgpack.Decoder[RequestT],
    refusal: Refusal | None,
    body: bytes,
    form: str = "JSON in UTF-8",
) -> RequestT:
    try:
        found = decoder.decode(body)
    except msgspec.ValidationError as error:
        is_json = isinstance(decoder, msgspec.json.Decoder)
        raise malformed(error, decoder.type, _fields_in(body) if is_json else ()) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequestError(f"The body is not valid {form}: {error}.") from error
    except RecursionError as error:
        raise MalformedRequestError("The body is nested too deeply: send the fields of /openapi.json.") from error
    if refusal is not None:
        refusal.check(found)
    return found


def _fields_in(body: bytes) -> Iterable[str]:
    """The names of a body that is an object; none of another one."""
    try:
        return _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
