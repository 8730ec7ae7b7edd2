"""What a process may take of the GPU's memory, over all its engines.

PyTorch's allocator can be held to a share of the device; what is beyond it is out of memory. It does not count the
weights of packages, which AOTInductor allocates by itself, so its share is what they leave; nor CUDA's own context.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from bei.errors import EngineError


class Budget:
    """The weights of the engines that a process has, and what all of it may take together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # An owner that could not be opened is forgotten with what refers to it.
        self._weights: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._most: int | None = None

    def hold(self, torch: Any, owner: object, weight_bytes: int, most: int | None) -> None:
        """``owner`` is about to load so many bytes; ``most`` is from now on what all may have, None: all there is.

        Raises EngineError where that does not hold the weights.
        """
        with self._lock:
            needed = sum(self._weights.values()) + weight_bytes
            if most is not None and needed >= most:
                raise EngineError(
                    f"The weights need {needed:,} bytes, those of the process's other models included, and "
                    f"gpu_megabytes gives {most:,}: raise it, or build for a smaller precision."
                )
            self._weights[owner], self._most = weight_bytes, most
            self._apply(torch)

    def drop(self, torch: Any, owner: object) -> None:
        """``owner`` has none any more."""
        with self._lock:
            if self._weights.pop(owner, None) is not None:
                self._apply(torch)

    def _apply(self, torch: Any) -> None:
        if self._most is not None:
            left, (_, total) = self._most - sum(self._weights.values()), torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))


PROCESS = Budget()
