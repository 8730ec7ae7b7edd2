"""The GPU memory limit of a process, over all its engines.

PyTorch's allocator, which has the weights too, is limited to a fraction of the device. It does not count CUDA's own
context.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from bei.errors import EngineError


class Budget:
    """The weights of a process's engines, and the limit for all memory together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak keys: an owner that failed to open is dropped automatically.
        self._weights: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def hold(self, torch: Any, owner: object, weight_bytes: int, most: int | None) -> None:
        """Account for an owner that will load ``weight_bytes``; ``most``: the new limit for all owners, None: the last
        one.

        Raises EngineError if the weights exceed the limit.
        """
        with self._lock:
            needed = sum(self._weights.values()) + weight_bytes
            if most is not None and needed >= most:
                raise EngineError(
                    f"The weights need {needed:,} bytes, those of the process's other models included, and "
                    f"gpu_megabytes gives {most:,}: raise it, or build for a smaller precision."
                )
            self._weights[owner] = weight_bytes
            if most is not None:
                _, total = torch.cuda.mem_get_info()
                torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))

    def drop(self, owner: object) -> None:
        """Stop accounting for ``owner``."""
        with self._lock:
            self._weights.pop(owner, None)


PROCESS = Budget()
