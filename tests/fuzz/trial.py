"""A target of the fuzz, what an input must keep to, and the process that tries inputs.

Input ``index`` of a target is drawn from the seed and this number alone, so a finding is a command line.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeAlias

from bei.errors import BeiError

# Draws an input, and reads it. It may raise BeiError.
Trial: TypeAlias = Callable[[Random], None]
# Makes a trial in an empty folder that stays.
MakeTrial: TypeAlias = Callable[[Path], Trial]

# Of processor time for one input, on a busy machine.
LONGEST_S = 10.0
# What an input may make the process allocate, beside what it has after some inputs; and what all together may leave.
MOST_BYTES = 1 << 30
# Behind so many findings a target is left alone.
MOST_FINDINGS = 20
# The inputs before this is measured: libraries are loaded and caches filled by then.
NUM_FIRST = 100

LONGEST_MESSAGE = 2_000

_STATM = Path("/proc/self/statm")
_STATE = struct.Struct("qq")  # the input that is tried, and how many were refused


class Finding(NamedTuple):
    """Input ``number`` broke a rule: ``what`` it did, in a line, and more in ``detail``."""

    number: int
    what: str
    detail: str


def fault_of(error: BeiError) -> str | None:
    """A message may say what is wrong, in one line that a terminal can show, but not repeat an input."""
    message = str(error)
    if len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message)} characters"
    if not message.isprintable():
        return f"a message that cannot be printed: {message!a}"
    return None


class State:
    """What a process has done so far, in a file that its parent reads, however it ends."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(_STATE.pack(-1, 0))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _STATE.size)

    @property
    def index(self) -> int:
        return int(_STATE.unpack_from(self._memory)[0])

    @property
    def num_refused(self) -> int:
        return int(_STATE.unpack_from(self._memory)[1])

    def begin(self, index: int) -> None:
        _STATE.pack_into(self._memory, 0, index, self.num_refused)

    def refused(self) -> None:
        _STATE.pack_into(self._memory, 0, self.index, self.num_refused + 1)


def try_one(trial: Trial, seed: int, index: int) -> tuple[bool, Finding | None]:
    """Whether the input was refused, and what it did wrong."""
    started_s = time.process_time()
    was_refused, found = False, None
    try:
        trial(Random(f"{seed}:{index}"))
    except BeiError as error:
        was_refused = True
        if (fault := fault_of(error)) is not None:
            found = Finding(index, f"{type(error).__name__} with {fault}", traceback.format_exc())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever it is, it is a finding: panics of Rust are BaseExceptions
        found = Finding(index, f"{type(error).__name__}: {error}"[:300], traceback.format_exc())
    taken_s = time.process_time() - started_s
    if found is None and taken_s > LONGEST_S:
        found = Finding(index, f"{taken_s:.1f} s of processor time", "")
    return was_refused, found


def try_many(trial: Trial, seed: int, start: int, stop: int, state: State, report: Callable[[Finding], None]) -> None:
    """Inputs ``start`` to ``stop``, within the bound of memory. ``report`` gets what is found, ``MOST_FINDINGS``."""
    resident, num_found = None, 0
    for index in range(start, stop):
        if index == start + NUM_FIRST:
            resident = _bound_memory()
        state.begin(index)
        was_refused, found = try_one(trial, seed, index)
        if was_refused:
            state.refused()
        if found is not None:
            report(found)
            num_found += 1
        if num_found == MOST_FINDINGS:
            return
    if resident is not None and (grown := _pages(1) - resident) > MOST_BYTES:
        report(Finding(stop - 1, f"{grown:,} bytes more in memory after {stop - start} inputs", ""))


def _bound_memory() -> int:
    """No input may allocate more than ``MOST_BYTES``. Returns what is resident."""
    most = _pages(0) + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return _pages(1)


def _pages(column: int) -> int:
    """Bytes of this process: 0 all that is mapped, 1 what is resident."""
    return int(_STATM.read_text().split()[column]) * resource.getpagesize()


def quiet() -> None:
    """Nobody reads what libraries write. Findings have a channel of their own: standard output as it was."""
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
