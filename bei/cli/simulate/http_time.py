"""Server time outside the engine: reading requests, tokenizing texts, writing answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Number of texts that are tokenized and queued together (bei.tokenizer.pool.CHUNK).
CHUNK = 32


@dataclass(frozen=True)
class HttpTime:
    """Seconds that a request, and each of its texts, takes before the queue.

    Texts are queued in chunks as they are tokenized; requests do not wait for each other. ``shared_cores``: cores that
    the front end shares with a CPU engine: its work delays the next step by the time it takes on all of them. 0: the
    engine's device is separate.
    """

    request_s: float = 0.0
    text_s: float = 0.0
    shared_cores: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.request_s < float("inf") and 0 <= self.text_s < float("inf")) or self.shared_cores < 0:
            raise ValueError(f"no times of a front: {self}")

    def chunks(self, num_texts: int) -> Iterator[tuple[float, slice]]:
        """For each chunk, the seconds after the request's arrival at which it is queued, and its texts."""
        for start in range(0, num_texts, CHUNK):
            stop = min(start + CHUNK, num_texts)
            yield self.request_s + stop * self.text_s, slice(start, stop)

    def engine_s(self, num_texts: int) -> float:
        """The delay of the engine by a request."""
        return (self.request_s + num_texts * self.text_s) / self.shared_cores if self.shared_cores else 0.0
