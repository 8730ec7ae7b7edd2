"""Texts of these tests, what the fake engine makes of them, and the threads of Models."""

from __future__ import annotations

import threading

from bei.core import Float32Array
from tests.support.artifacts import expected_vectors, token_ids

_WORDS = [f"{first}{second} cat" for first in "abcdefghij" for second in "klmnopqrst"]


def texts(count: int) -> list[str]:
    """Different ones, most of them of other lengths than their neighbours."""
    return [f"{_WORDS[i % 100]} {'the ' * (i % 7)}{_WORDS[i // 100 % 100]}" for i in range(count)]


def expected(given: list[str]) -> Float32Array:
    """Their vectors."""
    return expected_vectors([token_ids(text) for text in given])


def own_threads() -> list[str]:
    """Those that end with their Model."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("bei-") and not name.startswith("bei-offload")]
