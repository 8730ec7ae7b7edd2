"""Memory of a simulated device: real bytes of the host at addresses of their own, with bounds, kinds and lifetimes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

ALIGNMENT = 256
_FILL = 0xFF  # NaN of float32, -1 of int32: what nobody has written shows in answers

Kind = Literal["device", "pinned"]


class Violation(AssertionError):
    """The engine did what CUDA or TensorRT call undefined, or what its contract with them forbids."""


@dataclass
class Allocation:
    """``size`` bytes from ``address`` on. What was freed keeps its address, so that a use of it is found."""

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
        """Nobody may use it from now on, and whoever does reads nonsense."""
        self.bytes_at(self.address, self.size)[:] = _FILL
        self.is_freed = True


class Memory:
    """All allocations. ``limit``: bytes of device memory there are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0  # by what is no allocation: weights, recorded graphs
        self.allocations: list[Allocation] = []

    @property
    def used(self) -> int:
        """Bytes of the device that are taken."""
        return self.reserved + sum(block.size for block in self.live("device"))

    def live(self, kind: Kind | None = None) -> list[Allocation]:
        """What has not been freed."""
        return [block for block in self.allocations if not block.is_freed and kind in (None, block.kind)]

    def allocate(self, kind: Kind, size: int) -> Allocation | None:
        """None where the device is full."""
        if kind == "device" and self.used + size > self.limit:
            return None
        block = Allocation(kind, size)
        self.allocations.append(block)
        return block

    def view(self, address: int, size: int, kind: Kind, use: str) -> npt.NDArray[np.uint8]:
        """The bytes; Violation where they are not of one live allocation of ``kind``."""
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
