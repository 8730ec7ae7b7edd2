"""JSON schema, for /openapi.json, of limits that handlers check.

The decoder does not look at it: a handler refuses with an error that says what to do, which the decoder's would not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import Meta

# Stands in a schema where the server's own limit belongs.
MAX_INPUTS = "max_client_batch_size"

# Of a request as a whole; Structs have them as ``_limits``.
Limits: TypeAlias = tuple[Mapping[str, Any], ...]


def limits(**schema: Any) -> Meta:
    """Keywords of JSON schema for a field."""
    return Meta(extra_json_schema=schema)


def without(*fields: str) -> Meta:
    """Schema of a request that must not have ``fields``, unless they are null."""
    return limits(properties={field: {"type": "null"} for field in fields})


def one_of(values: Seq[object]) -> dict[str, Any]:
    """A field that may be left out, or null, or have one of ``values``."""
    return {"enum": [None, *values]}


def not_both(first: str, first_schema: Mapping[str, Any], second: str, second_schema: Mapping[str, Any]) -> Any:
    """Schema of a request in which two fields contradict each other where both are as their schemas say."""
    return {
        "description": f"`{first}` {_shown(first_schema)} and `{second}` contradict each other.",
        "not": {"required": [first, second], "properties": {first: first_schema, second: second_schema}},
    }


def _shown(schema: Mapping[str, Any]) -> str:
    return " or ".join(map(json.dumps, schema["enum"])) if "enum" in schema else f"as a {schema['type']}"


def exactly_one(*groups: Seq[str]) -> dict[str, Any]:
    """Schema of a request with all fields of one of ``groups``, and none of the others. Null is absent."""
    fields = dict.fromkeys(field for group in groups for field in group)
    there, missing = {"not": {"type": "null"}}, {"type": "null"}
    texts = [" and ".join(f"`{field}`" for field in group) for group in groups]
    return {
        "description": f"Exactly one of {'; '.join(texts)}." if len(groups) > 1 else f"{texts[0]} must be there.",
        "oneOf": [
            {
                "required": [*group],
                "properties": {field: there if field in group else missing for field in fields},
            }
            for group in groups
        ],
    }


limits_of_inputs = limits(minItems=1, maxItems=MAX_INPUTS)

Text: TypeAlias = Annotated[str, limits(minLength=1)]
Texts: TypeAlias = Annotated[list[Text], limits_of_inputs]


def limits_of(request: type[msgspec.Struct]) -> list[Any]:
    """Those of ``request`` as a whole, and of its bases."""
    return [limit for cls in request.__mro__ for limit in vars(cls).get("_limits", ())]


def structs_in(body: Any) -> Iterator[type[msgspec.Struct]]:
    """All Structs in the type of a body."""
    if isinstance(body, type) and issubclass(body, msgspec.Struct):
        yield body
        for field in msgspec.structs.fields(body):
            yield from structs_in(field.type)
    else:
        for part in get_args(body):
            yield from structs_in(part)
