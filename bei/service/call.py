"""One call of the service on its way: its answers come in pieces and in any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from bei.core import Encoding, Row
from bei.errors import BeiError, EngineDeadError, EngineError, InvalidRequestError
from bei.metrics.request_timing import CallTimes
from bei.service.admission import Ticket

# What is kept of a row.
Reduce: TypeAlias = Callable[[Row], Mapping[str, Any]]

NOT_YET = Encoding(np.zeros(0, np.int32))

# Errors that may be an input's own: of its text, and of what the engine makes of it.
_OF_AN_INPUT = (InvalidRequestError, EngineError)


class Call:
    """An answer for each input of a call, or one error. Safe in threads.

    ``in_part``: what is wrong with one input is the answer to it, and no error of the call. Exactly one call of
    ``record``, ``fail`` and ``fail_at`` returns True: then it is done.
    """

    def __init__(
        self, request_id: int, num_inputs: int, ticket: Ticket, reduce: Reduce | None = None, *, in_part: bool = False
    ) -> None:
        self.request_id = request_id
        self.reduce = reduce
        self.in_part = in_part
        self.errors: dict[int, BeiError] = {}
        self.ticket = ticket
        self.times: CallTimes | None = None
        self.encodings = [NOT_YET] * num_inputs
        self.rows: list[Row | None] = [None] * num_inputs
        self.error: BeiError | None = None
        self.is_done = False
        self.done = asyncio.get_running_loop().create_future()
        self._remaining = num_inputs
        self._lock = threading.Lock()

    def record(self, index: int, row: Row) -> bool:
        """Store the answer to input ``index``; True if it was the last one."""
        with self._lock:
            if self.is_done:
                return False
            self.rows[index] = row
            self._remaining -= 1
            self.is_done = self._remaining == 0
            return self.is_done

    def fail_at(self, index: int, error: BeiError) -> bool:
        """Answer input ``index`` with ``error``, or the whole call, where the error is not the input's own or the call
        is not answered in part; True if it is done by that."""
        if not self.in_part or not isinstance(error, _OF_AN_INPUT) or isinstance(error, EngineDeadError):
            return self.fail(error)
        with self._lock:
            if self.is_done:
                return False
            self.errors[index] = error
            self.encodings[index] = NOT_YET
            self._remaining -= 1
            self.is_done = self._remaining == 0
            return self.is_done

    def fail(self, error: BeiError) -> bool:
        """Answer the whole call with ``error``; False if it was done already."""
        with self._lock:
            if self.is_done:
                return False
            self.error = error
            self.is_done = True
            return True

    def cancel(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self.is_done = True
