"""``bei serve`` that counts operations of the interpreter between SIGUSR1 and SIGUSR2: for ``benchmarks.operations``.

    python -m counted serve ARTIFACT... [flags of bei serve]

Counts go to the file that the variable COUNTED names: of the event loop's thread and the engines', by function, how
often it was called and how many operations it ran. It imports nothing of bei, so that other checkouts can be counted.
It is run from a folder of its own: modules here have names of Python's own.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any

LOOP, ENGINE = "event loop", "engine"

_calls: dict[str, Counter[CodeType]] = {LOOP: Counter(), ENGINE: Counter()}
_operations: dict[str, Counter[CodeType]] = {LOOP: Counter(), ENGINE: Counter()}
_is_counting = False


def _tracer(thread: str) -> Any:
    """A function for ``sys.settrace`` in a thread of this kind."""
    calls, operations = _calls[thread], _operations[thread]

    def operation(frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode" and _is_counting:
            operations[frame.f_code] += 1
        return operation

    def call(frame: FrameType, _: str, __: object) -> Any:
        if not _is_counting:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        calls[frame.f_code] += 1
        return operation

    return call


def _in_new_thread(*_: object) -> None:
    is_engine = threading.current_thread().name.startswith("bei-engine")
    sys.settrace(_tracer(ENGINE) if is_engine else None)


def _begin(*_: object) -> None:
    global _is_counting
    _is_counting = True
    sys.settrace(_tracer(LOOP))


def _end(*_: object) -> None:
    global _is_counting
    _is_counting = False
    sys.settrace(None)
    found = {
        thread: [[_name(code), _calls[thread][code], count] for code, count in operations.most_common()]
        for thread, operations in _operations.items()
    }
    path = os.environ["COUNTED"]
    with open(f"{path}.part", "w") as file:
        json.dump(found, file)
    os.replace(f"{path}.part", path)


def _name(code: CodeType) -> str:
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {code.co_name}"


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)
    threading.settrace(_in_new_thread)
    runpy.run_module("bei", run_name="__main__", alter_sys=True)
