"""An exact cache of answers: rows by the token ids they were computed from, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet

from bei.core import Row
from bei.scheduler.queue import Identity

# What an entry costs beside its arrays: keys, dicts and array headers.
_OVERHEAD_BYTES = 600


class RowCache:
    """The least recently used rows leave first. Not safe in threads: managers lock.

    The key is what the engine sees: token ids, token types, key count, how many tokens are left out of means, and the
    adapter. So it covers text, prompt, truncation and side alike, and a cache belongs to one engine.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[Identity, Row] = OrderedDict()
        self.num_bytes = 0

    def get(self, identity: Identity, outputs: AbstractSet[str]) -> Row | None:
        """The row, if it is there with all of ``outputs``."""
        row = self._rows.get(identity)
        if row is None or not outputs <= row.keys():
            return None
        self._rows.move_to_end(identity)
        return row if len(row) == len(outputs) else {name: row[name] for name in outputs}

    def put(self, identity: Identity, row: Row) -> None:
        """Keep ``row`` beside what is known of the same input. What would fill more than a quarter is not."""
        former = self._rows.get(identity, {})
        row = {**former, **row}
        size = _size(identity, row)
        if size > self._max_bytes // 4:
            return
        if former:
            self.num_bytes -= _size(identity, former)
        # Copies: a view would keep the outputs of the whole batch.
        self._rows[identity] = {name: values if values.base is None else values.copy() for name, values in row.items()}
        self._rows.move_to_end(identity)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            oldest, dropped = self._rows.popitem(last=False)
            self.num_bytes -= _size(oldest, dropped)


def _size(identity: Identity, row: Row) -> int:
    ids, types, *_ = identity
    return _OVERHEAD_BYTES + len(ids) + len(types or b"") + sum(values.nbytes for values in row.values())
