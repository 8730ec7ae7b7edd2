"""The two sides of a retrieval, queries and documents, and how a model reads each."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from bei.core import Expansion

Side: TypeAlias = Literal["query", "document"]

# What clients call the two sides of a retrieval, and the names that repositories give their prompts.
SIDES: dict[Side, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query", "web_search_query", "s2p_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus", "text"),
}


class Role(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one side, queries or documents, is read; the side's prompt is among the prompts.

    ``max_tokens`` counts special tokens and prompt; None is what the model takes. ``skip_ids``: tokens that are read,
    but whose vectors are left out of the answer. ``table``: the side's sparse vectors hold the weight that a table, a
    file of the artifact, gives each of a text's tokens; nothing is put around a text, and the engine is not asked.
    """

    max_tokens: int | None
    expansion: Expansion | None
    skip_ids: list[int]
    table: bool = False


class Routes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a checkpoint whose Router has a text read by one of several lists of modules, its routes.

    ``default``: that of requests which do not say what their texts are; None: they are refused. ``absent``: names of
    texts that the artifact's modules do not read.
    """

    default: str | None
    absent: list[str]


def names_of(name: str) -> tuple[str, ...]:
    """What the side or route ``name`` is called."""
    return next((names for side, names in SIDES.items() if side == name), (name,))
