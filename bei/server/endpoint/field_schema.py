"""JSON schema, for /openapi.json, of limits that handlers check.

The decoder does not look at it: a handler refuses with an error that says what to do, which the decoder's would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import Meta

# Stands in a schema where the server's own limit belongs.
MAX_INPUTS = "max_client_batch_size"

# A field that may be left out, and otherwise is null.
NULL: Mapping[str, Any] = {"type": "null"}

# Of a request as a whole; Structs have them as ``_limits``.
Limits: TypeAlias = tuple[Mapping[str, Any], ...]


def limits(**schema: Any) -> Meta:
    """Keywords of JSON schema for a field."""
    return Meta(extra_json_schema=schema)


def without(*fields: str) -> Meta:
    """Schema of a request that must not have ``fields``, unless they are null."""
    return limits(properties=dict.fromkeys(fields, NULL))


def one_of(values: Seq[object]) -> dict[str, Any]:
    """A field that may be left out, or null, or have one of ``values``."""
    return {"enum": [None, *values]}


def any_of(description: str, *alternatives: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a request whose fields are as one of ``alternatives`` says. A field that is left out fits each.

    Alternatives, and few of them, in place of ``not``: tools that make requests from the page multiply the alternatives
    of all limits, a ``not`` of two fields has four, and schemathesis gives up a request with seven such limits.
    """
    return {"description": description, "anyOf": [{"properties": {**fields}} for fields in alternatives]}


def exactly_one(*groups: Seq[str]) -> dict[str, Any]:
    """Schema of a request with all fields of one of ``groups``, and none of the others. Null is absent."""
    fields = dict.fromkeys(field for group in groups for field in group)
    there = {"not": NULL}
    texts = [" and ".join(f"`{field}`" for field in group) for group in groups]
    return {
        "description": f"Exactly one of {'; '.join(texts)}." if len(groups) > 1 else f"{texts[0]} must be there.",
        "oneOf": [
            {
                "required": [*group],
                "properties": {field: there if field in group else NULL for field in fields},
            }
            for group in groups
        ],
    }


limits_of_inputs = limits(minItems=1, maxItems=MAX_INPUTS)

Text: TypeAlias = Annotated[str, limits(minLength=1)]
Texts: TypeAlias = Annotated[list[Text], limits_of_inputs]
# Each is read together with another text, so it may be empty.
TextsOfPairs: TypeAlias = Annotated[list[str], limits_of_inputs]


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
