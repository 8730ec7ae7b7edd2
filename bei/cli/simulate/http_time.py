"""What a server does beside its engine: it reads requests, tokenizes texts and writes answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Texts that are tokenized, and go to the queue, together (bei.tokenization.CHUNK).
CHUNK = 32


@dataclass(frozen=True)
class HttpTime:
    """Seconds of a request and of each of its texts, before the queue.

    Texts go to the queue in chunks, as they are tokenized; requests do not wait for each other's. ``shared_cores``: the
    cores of a CPU engine, on which the front runs too: its work makes a step that starts later longer, by the time that
    it takes all of them. 0: the engine's device is its own.
    """

    request_s: float = 0.0
    text_s: float = 0.0
    shared_cores: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.request_s < float("inf") and 0 <= self.text_s < float("inf")) or self.shared_cores < 0:
            raise ValueError(f"no times of a front: {self}")

    def chunks(self, num_texts: int) -> Iterator[tuple[float, slice]]:
        """When which texts of a request are in the queue, in seconds after it came."""
        for start in range(0, num_texts, CHUNK):
            stop = min(start + CHUNK, num_texts)
            yield self.request_s + stop * self.text_s, slice(start, stop)

    def engine_s(self, num_texts: int) -> float:
        """How much longer the engine takes because of a request."""
        return (self.request_s + num_texts * self.text_s) / self.shared_cores if self.shared_cores else 0.0
