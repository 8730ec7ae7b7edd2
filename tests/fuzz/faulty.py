"""Targets that break each rule at input 3 and are good otherwise: what the runner must find."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from bei.errors import ConfigError
from tests.fuzz.targets import Target
from tests.fuzz.trial import NUM_FIRST, Trial

BROKEN = 3


def _at(number: int, do: Callable[[], object]) -> Trial:
    """Does it at the input of this number, and refuses all others."""
    count = -1

    def trial(_: Random) -> None:
        nonlocal count
        count += 1
        if count == number:
            do()
        raise ConfigError("refused")

    return trial


class _SevereError(BaseException):
    """As PanicException, which Rust's code raises."""


def _severe() -> None:
    raise _SevereError("it broke off")


class _LoudError(ConfigError):
    def __str__(self) -> str:
        return "a\nb"


def _loud() -> None:
    raise _LoudError


def foreign(_: Path) -> Trial:
    return _at(BROKEN, lambda: 1 / 0)


def severe(_: Path) -> Trial:
    return _at(BROKEN, _severe)


def unprintable(_: Path) -> Trial:
    return _at(BROKEN, _loud)


def crash(_: Path) -> Trial:
    return _at(BROKEN, lambda: ctypes.string_at(0))


def leave(_: Path) -> Trial:
    return _at(BROKEN, lambda: os._exit(7))


def hang(_: Path) -> Trial:
    return _at(BROKEN, lambda: time.sleep(1_000))


def allocate(_: Path) -> Trial:
    return _at(NUM_FIRST + BROKEN, lambda: bytearray(1 << 31))


def good(_: Path) -> Trial:
    return _at(-1, lambda: None)


def unready(_: Path) -> Trial:
    raise RuntimeError("no seed")


TARGETS = {
    name: Target("faulty", name, 1)
    for name in ("foreign", "severe", "unprintable", "crash", "leave", "hang", "allocate", "good", "unready")
}
