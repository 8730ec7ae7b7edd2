"""Texts of these tests, their vectors by the fake engine, and the threads of Models."""

from __future__ import annotations

import threading
from weakref import WeakSet

from bei.core import Float32Array
from tests.support.artifacts import expected_vectors, token_ids

_WORDS = [f"{first}{second} cat" for first in "abcdefghij" for second in "klmnopqrst"]


def texts(count: int) -> list[str]:
    """Distinct texts; most differ from their neighbours in length."""
    return [f"{_WORDS[i % 100]} {'the ' * (i % 7)}{_WORDS[i // 100 % 100]}" for i in range(count)]


def expected(given: list[str]) -> Float32Array:
    """The vectors that the fake engine computes."""
    return expected_vectors([token_ids(text) for text in given])


# Threads that ran when the test began: other tests' services may have left some.
former_threads: WeakSet[threading.Thread] = WeakSet()


def own_threads() -> list[str]:
    """Names of running threads of this test that end with their Model."""
    names = [thread.name for thread in threading.enumerate() if thread not in former_threads]
    return [name for name in names if name.startswith("bei-") and not name.startswith("bei-offload")]
