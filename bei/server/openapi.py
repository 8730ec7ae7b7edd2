"""Descriptions of inference routes for /openapi.json, from the types of their bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from bei.server.errors import JSON
from bei.server.http import TRUNCATED_HEADER

_REF = "#/{name}"
_ERRORS = {
    "400": "The request is wrong, or no model here can do it; the message says how, or what they can do.",
    "404": "No served model has this name.",
    "413": "The body is too large, or the answer would be.",
    "429": "Too much is waiting; see Retry-After.",
    "500": "The engine failed on an input.",
    "503": "The server is shutting down.",
}
_TRUNCATED = {"schema": {"type": "string"}, "description": "Inputs that were cut: 0,4-7"}


def operation(request: Any, response: Any, error_body: Any) -> dict[str, Any]:
    """The parts of an operation that FastAPI cannot know of a route whose bodies are bytes to it.

    The bodies are types as msgspec reads them, or tuples of alternatives.
    """
    error = _content(error_body)
    answer = {
        "description": "In the order of the inputs, unless the route sorts.",
        "headers": {TRUNCATED_HEADER: _TRUNCATED},
        "content": _content(response),
    }
    errors = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    return {
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {"200": answer, **errors},
    }


def _content(body: Any) -> dict[str, Any]:
    forms = body if isinstance(body, tuple) else (body,)
    schemas, named = msgspec.json.schema_components(forms, ref_template=_REF)
    inlined = [_inlined(schema, named) for schema in schemas]
    return {JSON: {"schema": inlined[0] if len(inlined) == 1 else {"anyOf": inlined}}}


def _inlined(node: Any, named: dict[str, Any]) -> Any:
    """``node`` with every reference replaced by what it refers to: a page without names of ours that clash."""
    if isinstance(node, list):
        return [_inlined(value, named) for value in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(named[node["$ref"].rpartition("/")[2]], named)
    return {key: _inlined(value, named) for key, value in node.items()}
