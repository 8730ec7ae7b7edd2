"""What is changed in a body that schemathesis has made, so that more of them reach a model.

A page says that a model's name is a text and a token id a number from 0 on; which there are, it does not.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import msgspec
import schemathesis

from tests.schemathesis.models import MODELS_VARIABLE, model_of

# Fewer than any tokenizer has.
_IDS = 20
_OF_NO_MODEL = ("/v1/files", "/v1/batches")


def map_body(context: Any, body: Any) -> Any:
    """In nine of ten bodies the name of a served model; whole numbers without a point; ids of the vocabulary.

    A schema cannot tell 3.0 from 3, and the server refuses it as it would 3.5.
    """
    body = _with_known_numbers(body)
    if isinstance(body, dict) and isinstance(body.get("instances"), list):  # Vertex AI's: each is a request
        instances = [{"inputs": "a", **one} if isinstance(one, dict) else one for one in body["instances"]]
        body = {**body, "instances": instances}
    chance = zlib.crc32(repr(body).encode("utf-8", "replace"))
    if context.operation.path.startswith(_OF_NO_MODEL):
        return body
    if not isinstance(body, dict) or not isinstance(body.get("model", ""), str) or chance % 10 == 0:
        return body
    if "{model}" in context.operation.path:  # NIM's, which the body may not contradict
        return {field: value for field, value in body.items() if field != "model"}
    return {**body, "model": model_of(context.operation.path, _names(), chance)}


def map_query(context: Any, query: Any) -> Any:
    """The same where a query names a model."""
    if isinstance(query, dict) and isinstance(query.get("model"), str):
        chance = zlib.crc32(query["model"].encode("utf-8", "replace"))
        return {**query, "model": model_of(context.operation.path, _names(), chance)}
    return query


def map_path_parameters(context: Any, found: Any) -> Any:
    """The same where the path does: of a served model that has what the path asks for."""
    if isinstance(found, dict) and found.get("model") in _names():
        chance = zlib.crc32(found["model"].encode())
        return {**found, "model": model_of(context.operation.path, [found["model"]], chance)}
    return found


def map_headers(context: Any, headers: Any) -> Any:
    """A quarter of the requests ask for MessagePack, where there are other headers too."""
    is_asked = isinstance(headers, dict) and zlib.crc32(repr(sorted(headers.items())).encode()) % 4 == 0
    return {**headers, "Accept": "application/msgpack"} if is_asked else headers


def from_msgpack(_: Any, response: Any) -> Any:
    """An answer as the page describes it."""
    return msgspec.msgpack.decode(response.content)


def _names() -> list[str]:
    names: list[str] = json.loads(os.environ[MODELS_VARIABLE])
    return names


def _with_known_numbers(node: Any, *, in_list: bool = False) -> Any:
    if isinstance(node, dict):
        return {key: _with_known_numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_known_numbers(value, in_list=True) for value in node]
    if isinstance(node, float) and node.is_integer():
        node = int(node)
    is_id = in_list and isinstance(node, int) and not isinstance(node, bool) and node > _IDS
    return node % _IDS if is_id else node


schemathesis.hook(map_body)
schemathesis.hook(map_query)
schemathesis.hook(map_path_parameters)
schemathesis.hook(map_headers)
schemathesis.deserializer("application/msgpack")(from_msgpack)
