"""A report on each input of a request, for clients that send the header X-Bei-Report.

An input that is wrong, or that the engine fails on, then costs the others nothing: its vector is null, its entry of the
report says why, and the status is 200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from bei.server.endpoint.render import Items
from bei.server.http.errors import ErrorDetail, detail_of
from bei.tasks.support import PartialResult

_ENTRY_BYTES = 90
_ERROR_BYTES = 200


class InputReport(TypedDict):
    """``tokens``: those that the engine read, special tokens included. ``dropped_tokens``: how many more the input has;
    null where its tokenizer cannot count so long a text. ``error``: why it has no vector."""

    index: int
    tokens: int
    truncated: bool
    dropped_tokens: int | None
    error: ErrorDetail | None


def report_of(answer: PartialResult, dropped: Mapping[int, int | None]) -> Items:
    """An InputReport for each input. ``dropped``: of those that were cut, how many tokens."""

    def entry(index: int) -> InputReport:
        error = answer.errors.get(index)
        return {
            "index": index,
            "tokens": answer.lengths[index],
            "truncated": index in dropped,
            "dropped_tokens": dropped.get(index, 0),
            "error": None if error is None else detail_of(error),
        }

    count = len(answer.lengths)
    num_bytes = count * _ENTRY_BYTES + len(answer.errors) * _ERROR_BYTES
    return Items(count, num_bytes, lambda start, stop: [entry(index) for index in range(start, stop)])
