"""Messages for tests of channels."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy.typing as npt


class Numbers(msgspec.Struct, array_like=True, tag=True):
    numbers: list[int]


class Part(msgspec.Struct, array_like=True, tag=True):
    number: int
    size: int


class Arrays(msgspec.Struct, array_like=True, tag=True):
    number: int
    arrays: list[npt.NDArray[Any]]


MESSAGES: Any = Part | Numbers | Arrays
