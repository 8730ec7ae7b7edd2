"""From the bytes of a body to its request Struct. Unknown fields are ignored: clients and gateways add their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from bei.errors import InvalidRequestError

RequestT = TypeVar("RequestT")

TokenId: TypeAlias = Annotated[int, Meta(ge=0)]

# Token ids are decoded in pieces of so many bytes: the decoder holds the interpreter's lock, for 165 ms where a body of
# 8 MB is nothing else. Texts of as many bytes take 10 to 60 ms, and cannot be cut as easily.
_PIECE_BYTES = 256_000


def parser(request: type[RequestT]) -> Callable[[bytes], RequestT]:
    """A function that decodes and validates bodies as ``request``. It raises InvalidRequestError."""
    decoder = msgspec.json.Decoder(request)
    return lambda body: _decoded(decoder, body)


def parser_by_field(**requests: type[Any]) -> Callable[[bytes], Any]:
    """For a route with several dialects: the field that is there, of the names given, says which request it is.

    A field that is null is not there. Exactly one of them must be.
    """
    parsers = {field: parser(request) for field, request in requests.items()}
    names = ", ".join(parsers)

    def parse(body: bytes) -> Any:
        given = _decoded(_fields_decoder, body)
        found = [field for field in parsers if field in given and bytes(given[field]) != b"null"]
        if len(found) != 1:
            raise InvalidRequestError(
                f"The request must have exactly one of the fields {names}; it has {', '.join(found) or 'none of them'}."
            )
        return parsers[found[0]](body)

    return parse


def id_lists(raw: bytes) -> list[list[int]] | None:
    """``raw``, the JSON of a long list of lists of token ids, decoded in pieces. None where it is short or anything
    else; what is wrong with it is then the ordinary decoder's to say."""
    if len(raw) <= _PIECE_BYTES or raw[:2] != b"[[":
        return None
    lists: list[list[int]] = []
    start = 1
    try:
        while (stop := raw.find(b"]", start + _PIECE_BYTES)) >= 0:
            behind = raw[stop + 1 : stop + 9].lstrip()[:1]
            if behind != b",":
                break  # this was the last list
            lists += _id_lists_decoder.decode(b"[" + raw[start : stop + 1] + b"]")
            start = raw.index(b",", stop) + 1
        return lists + _id_lists_decoder.decode(b"[" + raw[start:])
    except msgspec.DecodeError:
        return None


_id_lists_decoder = msgspec.json.Decoder(list[list[TokenId]])
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _decoded(decoder: msgspec.json.Decoder[RequestT], body: bytes) -> RequestT:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        param = str(error).rpartition("$.")[2].rstrip("`").partition("[")[0] if "$." in str(error) else None
        raise InvalidRequestError(f"The request is not valid: {error}.", param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise InvalidRequestError("The body is nested too deeply: send the fields of /openapi.json.") from error
