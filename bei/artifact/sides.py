"""The two sides of retrieval, queries and documents, and how a model reads each."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from bei.core import Expansion

Side: TypeAlias = Literal["query", "document"]

# Names of the two sides in APIs, and of prompts in model repositories.
SIDES: dict[Side, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query", "web_search_query", "s2p_query"),
    "document": ("document", "passage", "search_document", "retrieval.passage", "corpus", "text"),
}

# Other kinds of texts that requests may name: Cohere's of input_type, and the tasks of Jina's models. A model without
# prompts and adapters reads all alike.
_TASKS_OF_CODE = ("code", "nl2code", "code2code", "code2nl", "code2completion", "qa")
OTHER_KINDS = frozenset(
    (
        *("classification", "clustering", "separation", "text-matching", "none"),
        *(f"{task}.{side}" for task in _TASKS_OF_CODE for side in ("query", "passage")),
    )
)


class Role(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Encoding of one side, queries or documents; its prompt is among the manifest's prompts.

    ``max_tokens`` includes special tokens and prompt; None: the model's limit. ``skip_ids``: tokens whose vectors are
    left out of the answer. ``table``: the side's sparse vectors are looked up in the artifact's table of token weights,
    without special tokens and without the engine.
    """

    max_tokens: int | None
    expansion: Expansion | None
    skip_ids: list[int]
    table: bool = False


class Routes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The routes of a checkpoint whose Router sends texts to different lists of modules.

    ``default``: for requests that do not name a side; None: they are refused. ``absent``: names of texts that the
    artifact's modules do not read.
    """

    default: str | None
    absent: list[str]


def names_of(name: str) -> tuple[str, ...]:
    """All names of the side or route ``name``."""
    return next((names for side, names in SIDES.items() if side == name), (name,))
