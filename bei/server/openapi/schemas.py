"""JSON schemas of the types of bodies, with shared ones as components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from bei.server.endpoint.field_schema import MAX_INPUTS, limits_of, structs_in

_REF = "#/components/schemas/"


class Schemas:
    """Schemas of ``bodies``: types as msgspec reads them, or tuples of alternatives.

    ``components`` are those with names: of Structs and TypedDicts. Types of one name are told apart by their modules.
    """

    def __init__(self, bodies: Iterable[Any], max_inputs: int) -> None:
        self._types = [body for given in bodies for body in _alternatives(given)]
        structs = list({struct: None for body in self._types for struct in structs_in(body)})
        found, named = msgspec.json.schema_components([*self._types, *structs], ref_template=_REF + "{name}")
        for struct, reference in zip(structs, found[len(self._types) :], strict=True):
            limits = limits_of(struct)
            if limits:
                named[_name(reference)]["allOf"] = limits
        short = _short_names(named)
        self._max_inputs = max_inputs
        self._schemas = [self._settled(schema, short) for schema in found[: len(self._types)]]
        self.components: dict[str, Any] = {short[name]: self._settled(named[name], short) for name in named}

    def of(self, body: Any) -> Any:
        """The schema of a body that is among those given, or of alternatives that are."""
        schemas = [self._of_one(one) for one in _alternatives(body)]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _of_one(self, body: Any) -> Any:
        # Not a mapping: annotated types are not hashable where their schemas are dicts.
        return next(
            schema for one, schema in zip(self._types, self._schemas, strict=True) if one is body or one == body
        )

    def _settled(self, node: Any, short: Mapping[str, str]) -> Any:
        """``node`` with names of ours, the server's limit in its place, and whole numbers where bounds are whole."""
        if isinstance(node, (list, tuple)):
            return [self._settled(value, short) for value in node]
        if isinstance(node, float) and node.is_integer():
            return int(node)
        if not isinstance(node, dict):
            return node
        settled = {key: self._settled(value, short) for key, value in node.items()}
        if node.get("maxItems") == MAX_INPUTS:
            settled["maxItems"] = self._max_inputs
        if isinstance(node.get("$ref"), str):
            settled["$ref"] = _REF + short[_name(node)]
        return settled


def _alternatives(body: Any) -> tuple[Any, ...]:
    return body if isinstance(body, tuple) else (body,)


def _name(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).removeprefix(_REF)


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """``cohere.EmbedRequest`` for what msgspec calls ``bei.server.dialects.cohere.EmbedRequest``."""
    short = {name: ".".join(name.split(".")[-2:]) for name in names}
    assert len(set(short.values())) == len(short)
    return short
