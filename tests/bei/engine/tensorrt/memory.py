"""Memory of a simulated device: host memory at simulated addresses, with bounds, kinds and lifetimes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

ALIGNMENT = 256
_FILL = 0xFF  # NaN of float32, -1 of int32: unwritten memory shows in outputs

Kind = Literal["device", "pinned"]


class Violation(AssertionError):
    """The engine did something that CUDA or TensorRT leave undefined or forbid."""


@dataclass
class Allocation:
    """``size`` bytes from ``address`` on. Freed allocations keep their addresses, so that later uses are detected."""

    kind: Kind
    size: int
    is_freed: bool = False
    _memory: ctypes.Array[ctypes.c_uint8] = field(init=False, repr=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self._memory = (ctypes.c_uint8 * (self.size + ALIGNMENT))()
        start = ctypes.addressof(self._memory)
        self.address = -(-start // ALIGNMENT) * ALIGNMENT
        self.bytes_at(self.address, self.size)[:] = _FILL

    def bytes_at(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        """A view of ``size`` bytes."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def free(self) -> None:
        """Free the memory; later reads give garbage."""
        self.bytes_at(self.address, self.size)[:] = _FILL
        self.is_freed = True


class Memory:
    """All allocations. ``limit``: bytes of device memory there are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0  # by weights and recorded graphs
        self.allocations: list[Allocation] = []

    @property
    def used(self) -> int:
        """Used bytes of the device."""
        return self.reserved + sum(block.size for block in self.live("device"))

    def live(self, kind: Kind | None = None) -> list[Allocation]:
        """Allocations that were not freed."""
        return [block for block in self.allocations if not block.is_freed and kind in (None, block.kind)]

    def allocate(self, kind: Kind, size: int) -> Allocation | None:
        """A new allocation; None: the device is full."""
        if kind == "device" and self.used + size > self.limit:
            return None
        block = Allocation(kind, size)
        self.allocations.append(block)
        return block

    def view(self, address: int, size: int, kind: Kind, use: str) -> npt.NDArray[np.uint8]:
        """The bytes; Violation unless they are in one live allocation of ``kind``."""
        for block in self.allocations:
            if block.address <= address < block.address + max(1, block.size):
                if block.is_freed:
                    raise Violation(f"{use}: its {block.kind} memory was freed")
                if block.kind != kind:
                    raise Violation(f"{use}: its memory is {block.kind}, not {kind}")
                if address + size > block.address + block.size:
                    raise Violation(f"{use}: {size} bytes at {address - block.address} of {block.size}")
                return block.bytes_at(address, size)
        raise Violation(f"{use}: no {kind} memory at this address (pageable memory of the host, or nobody's)")
