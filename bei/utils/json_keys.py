"""Keys of JSON objects that stand twice: decoders keep the last value, and the writer may have meant the first."""

from __future__ import annotations

import json
from collections import Counter


def key_twice(content: str | bytes) -> str | None:
    """A key that stands twice in one object of ``content``; None: there is none. Raises ValueError for what is no JSON,
    RecursionError."""
    found: list[str] = []

    def check(pairs: list[tuple[str, object]]) -> None:
        if len(dict(pairs)) < len(pairs):
            uses = Counter(key for key, _ in pairs)
            found.append(next(key for key in uses if uses[key] > 1))

    json.loads(content, object_pairs_hook=check, parse_int=len, parse_float=len)  # Python bounds long numbers
    return found[0] if found else None
