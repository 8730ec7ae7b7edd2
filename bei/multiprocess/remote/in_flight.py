"""What a port has been given and has not answered, so that another process can be given it. Not safe in threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from bei.port import Item, Submission


@dataclass(eq=False, slots=True)
class Given:
    """A submission, and how many processes have been given it."""

    submission: Submission
    num_tries: int = 0


class Unanswered:
    """The items of all requests without an answer."""

    def __init__(self) -> None:
        self._requests: dict[int, dict[int, tuple[Given, Item]]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, submission: Submission) -> Given:
        """All of its items."""
        given = Given(submission)
        items = self._requests.setdefault(submission.request_id, {}) if submission.items else {}
        for item in submission.items:
            items[item.place] = given, item
        return given

    def settle(self, request_id: int, place: int) -> bool:
        """It is answered; False if it was before, or is not wanted any more."""
        items = self._requests.get(request_id)
        if items is None or items.pop(place, None) is None:
            return False
        if not items:
            del self._requests[request_id]
        return True

    def forget(self, request_id: int) -> bool:
        """The request is cancelled; False if there is nothing of it."""
        return self._requests.pop(request_id, None) is not None

    def remaining(self) -> Iterator[Given]:
        """Every submission with items, and only those items, in the order in which they came."""
        for items in self._requests.values():
            by_given: dict[Given, list[Item]] = {}
            for given, item in items.values():
                by_given.setdefault(given, []).append(item)
            for given, rest in by_given.items():
                given.submission = msgspec.structs.replace(given.submission, items=rest)
                yield given
