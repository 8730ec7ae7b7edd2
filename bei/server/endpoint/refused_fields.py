"""Fields that other servers honour and bei does not: requests declare them, and parsers refuse them by name.

A value that asks for what is done anyway is accepted, as clients send their defaults; any other is a 400 that names the
field. Fields that no answer depends on (``user``, ``priority``, ``request_id``) are ignored like unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Meta

from bei.errors import InvalidRequestError, MalformedRequestError
from bei.server.endpoint.field_schema import one_of

# A field's content, which may have megabytes, is not decoded.
Refused: TypeAlias = msgspec.Raw | msgspec.UnsetType

_RULE = "refused"
_MOST_BYTES = 100  # of a value that is accepted, with spaces
_SHOWN_CHARS = 40


class Rule(NamedTuple):
    """``accepted`` asks for what is done anyway; ``remedy`` says what can be sent instead."""

    accepted: tuple[object, ...]
    remedy: str


def refused(remedy: str, *accepted: object) -> Meta:
    """Of a field of the type ``Refused``: the rule for parsers, and the schema for /openapi.json."""
    return Meta(
        description=f"Refused: {remedy}.",
        extra_json_schema=one_of(accepted),
        extra={_RULE: Rule(accepted, remedy)},
    )


def refusal_of(request: Any) -> Refusal | None:
    """The check of requests of this type; None where it has no such fields."""
    rules = rules_of(request)
    return Refusal(rules) if rules else None


def rules_of(request: Any) -> Mapping[str, Rule]:
    """The rules of a request's fields, by name; of types that are no Structs none."""
    if not (isinstance(request, type) and issubclass(request, msgspec.Struct)):
        return {}
    return {
        field.name: meta.extra[_RULE]
        for field in msgspec.structs.fields(request)
        for meta in getattr(field.type, "__metadata__", ())
        if isinstance(meta, Meta) and meta.extra and _RULE in meta.extra
    }


class Refusal:
    """Checks the fields with ``rules``, at least one, of a request."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._given = attrgetter(*rules)
        self._nothing = UNSET if len(rules) == 1 else (UNSET,) * len(rules)

    def check(self, body: object) -> None:
        """Raise InvalidRequestError that names a field which asks for what is not done.

        Those that are accepted are unset: they would keep the whole content of the body.
        """
        if self._given(body) == self._nothing:
            return  # as of nearly all clients
        for name, rule in self._rules.items():
            given: Refused = getattr(body, name)
            if given is not UNSET:
                _check(name, bytes(given), rule)
                setattr(body, name, UNSET)


def _check(name: str, content: bytes, rule: Rule) -> None:
    shown = {b"{": "(an object)", b"[": "(a list)"}.get(content[:1])
    if len(content) <= _MOST_BYTES:
        try:
            value = msgspec.json.decode(content)
        except ValueError as error:  # msgspec's own, and UnicodeDecodeError
            raise MalformedRequestError(f"The body is not valid JSON in UTF-8: {error}.", name) from error
        if value is None or any(_is_same(value, same) for same in rule.accepted):
            return
        shown = shown if shown and value else str(value)
    if shown is None:
        shown = content[: 5 * _SHOWN_CHARS].decode(errors="ignore").lstrip('"')
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    raise InvalidRequestError(f"{name} {shown} is not supported here: {rule.remedy}.", name)


def _is_same(value: object, same: object) -> bool:
    """True if they are the same value of JSON, which has one kind of numbers."""
    return value == same and (type(value) is type(same) or {type(value), type(same)} == {int, float})


# vLLM's words. To pad to the longest of a batch changes nothing.
Padding: TypeAlias = Annotated[
    Refused, refused("leave it out; padding is the model's", "do_not_pad", "longest", False, True)
]
ProcessorOptions: TypeAlias = Annotated[Refused, refused("leave it out; images are read as built", False, {}, [])]

# Of requests that score pairs.
QueryLimit: TypeAlias = Annotated[Refused, refused("leave it out; the longer text is cut", -1, 0)]
PairTemplateOptions: TypeAlias = Annotated[
    Refused, refused("send instruction; the template is the artifact's", False, {}, [])
]

# Of vLLM's requests with messages.
OfChats: TypeAlias = Annotated[Refused, refused("leave it out; it is of chats", False, {}, [])]

# What vLLM's use_activation was before.
FormerActivation: TypeAlias = Annotated[Refused, refused("send use_activation", True)]
