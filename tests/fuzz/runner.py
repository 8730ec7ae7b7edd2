"""Runs targets, each in a process of its own, which is started again behind an input that ends or stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.trial import MOST_FINDINGS, Finding, State

# Without a new input for so long, the process hangs: ten times what an input may take of a processor.
HANG_S = 100.0

_EVERY_S = 0.1


@dataclass
class Outcome:
    """What became of the inputs of one target."""

    target: str
    num_inputs: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        share = 100 * self.num_refused / max(1, self.num_inputs)
        return (
            f"{self.target:24} {self.num_inputs:9,} inputs {share:5.1f} % refused {self.seconds:8.1f} s "
            f"{len(self.findings):3} findings"
        )


def run(
    target: str, num_inputs: int, seed: int, *, hang_s: float = HANG_S, table: str = "tests.fuzz.targets"
) -> Outcome:
    """Try inputs of ``target``, of the module ``table``. Ends early where there are too many findings."""
    outcome = Outcome(target)
    began_s = time.monotonic()
    start = 0
    while start < num_inputs and len(outcome.findings) < MOST_FINDINGS:
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_in_memory()) as folder:
            state_file, log = Path(folder, "state"), Path(folder, "log")
            state = State(state_file)
            names = (table, target, seed, start, num_inputs, state_file, Path(folder, "scratch"))
            command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.child", *map(str, names)]
            with log.open("wb") as errors:
                child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
                try:
                    found = _watched(child, state, hang_s)
                    outcome.findings += found
                finally:
                    _end(child)
            outcome.num_refused += state.num_refused
            start = state.index + 1
            if child.returncode:
                tail = log.read_bytes()[-4_000:].decode(errors="replace")
                if state.index < 0:  # no input was tried
                    raise RuntimeError(f"{target} could not be begun:\n{tail}")
                if not found or found[-1].number != state.index:
                    outcome.findings.append(Finding(state.index, _ending(child.returncode), tail))
    outcome.num_inputs, outcome.seconds = start, time.monotonic() - began_s
    return outcome


def _watched(child: subprocess.Popen[bytes], state: State, hang_s: float) -> list[Finding]:
    """What ``child`` reports until it ends. One that hangs is killed."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    written, last, since_s = b"", state.index, time.monotonic()
    while child.poll() is None:
        time.sleep(_EVERY_S)
        written += child.stdout.read() or b""
        if state.index != last:
            last, since_s = state.index, time.monotonic()
        elif time.monotonic() - since_s > hang_s + (60.0 if last < 0 else 0.0):
            os.kill(child.pid, signal.SIGABRT)  # faulthandler writes where it stands
            child.wait(60)
            found = [*_findings(written), Finding(last, f"no end after {hang_s:g} s", "")]
            return found
    return [*_findings(written + (child.stdout.read() or b""))]


def _findings(written: bytes) -> Iterator[Finding]:
    for line in written.splitlines():
        yield Finding(*json.loads(line))


def _ending(code: int) -> str:
    return f"the process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _in_memory() -> str | None:
    """Where files are written by the million."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
