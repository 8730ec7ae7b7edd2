"""Images that are decoded and wait for the engine, bounded by their bytes: a file of a hundred bytes may be megabytes
of pixels, and threads decode them faster than an engine reads them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.port import Item

# Of a model, from when an image is decoded until it is answered: 45 images of 1,800 tokens of Qwen3-VL, 1,700 of CLIP.
MOST_PIXEL_BYTES = 1 << 28
_LOOK_AGAIN_S = 0.1  # whether the request that waits for room is cancelled


# An image's levels in memory: which object, its bytes, and its patches.
_Levels: TypeAlias = "tuple[int, int, int]"


class PixelMemory:
    """The bytes of a model's images that wait; of one that several inputs have, as pairs have a query's, once. Safe in
    threads."""

    def __init__(self, most_bytes: int = MOST_PIXEL_BYTES) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._held: dict[int, dict[int, list[_Levels]]] = {}  # by request and place
        self._times = Counter[_Levels]()
        self.num_bytes = self.num_images = self.num_patches = 0

    @property
    def has_room(self) -> bool:
        return self.num_bytes < self._most_bytes

    def wait(self, has_room: Callable[[], bool], is_cancelled: Callable[[], bool]) -> None:
        """Return when ``has_room``, or ``is_cancelled``. Blocks."""
        with self._changed:
            while not (has_room() or is_cancelled()):
                self._changed.wait(_LOOK_AGAIN_S)

    def keep(self, request_id: int, items: Seq[Item]) -> None:
        """Count the images among ``items``, until they are released."""
        found = {
            place: levels for place, one in items if (levels := [(id(own), own.nbytes, len(own)) for own in one.levels])
        }
        if found:
            with self._changed:
                held = self._held.setdefault(request_id, {})
                for place, levels in found.items():
                    self._drop(held.get(place, ()))
                    held[place] = levels
                    self._count({one for one in levels if not self._times[one]}, 1)
                    self._times.update(levels)

    def release(self, request_id: int, places: Seq[int] | None = None) -> None:
        """Those at ``places`` of a request, or all of it, are answered, or never will be."""
        with self._changed:
            if (held := self._held.get(request_id)) is None:
                return
            for place in [*held] if places is None else places:
                self._drop(held.pop(place, ()))
            if not held:
                del self._held[request_id]
            self._changed.notify_all()

    def _drop(self, levels: Seq[_Levels]) -> None:
        self._times.subtract(levels)
        gone = {one for one in levels if not self._times[one]}
        for one in gone:
            del self._times[one]
        self._count(gone, -1)

    def _count(self, images: Set[_Levels], times: int) -> None:
        self.num_images += times * len(images)
        self.num_bytes += times * sum(one[1] for one in images)
        self.num_patches += times * sum(one[2] for one in images)
