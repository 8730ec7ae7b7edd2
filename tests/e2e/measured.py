"""``bei`` in a process of its own, with the time and the memory that it took."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.process import BEI, DEADLINE_S


@dataclass(frozen=True)
class Ended:
    """A command that has ended. ``cpu_s``: seconds of all cores; ``peak_bytes``: the most memory it had at once."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    cpu_s: float
    peak_bytes: int

    @property
    def said(self) -> str:
        """For messages of tests."""
        took = f"{self.seconds:.2f} s, {self.cpu_s:.2f} s of CPU, {self.peak_bytes / 1e6:.0f} MB"
        return f"exit code {self.returncode}, {took}\n{self.stderr}"


def run(arguments: Sequence[object], env: Mapping[str, str], cwd: Path, *, user: int | None = None) -> Ended:
    """A ``bei`` command to its end, as ``user`` (needs root) if one is given; killed after the deadline."""
    out, err = cwd / ".stdout", cwd / ".stderr"
    started = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [*BEI, *map(str, arguments)],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            user=user,
            group=user,
            extra_groups=None if user is None else (),
        )
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            timer.cancel()
    return Ended(
        process.returncode,
        out.read_text(encoding="utf-8", errors="replace"),
        err.read_text(encoding="utf-8", errors="replace"),
        time.monotonic() - started,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
    )
