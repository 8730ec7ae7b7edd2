"""``bei`` in a process of its own, with the time and the memory that it took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.process import BEI, DEADLINE_S

# A small process in between: what a child has had at most begins with what its parent has, which may be gigabytes here.
_BETWEEN = """
import json, os, sys
said = int(sys.argv[1])
os.set_inheritable(said, False)
child = os.fork()
if not child:
    os.execvp(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(child, 0)
figures = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]
os.write(said, json.dumps(figures).encode())
"""


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
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BETWEEN, str(writing), *BEI, *map(str, arguments)],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            user=user,
            group=user,
            extra_groups=None if user is None else (),
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        timer = threading.Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            with os.fdopen(reading, "rb") as said:
                returncode, cpu_s, peak_bytes = json.loads(said.read() or b"[-9, 0, 0]")
            process.wait()
        finally:
            timer.cancel()
    return Ended(
        returncode,
        out.read_text(encoding="utf-8", errors="replace"),
        err.read_text(encoding="utf-8", errors="replace"),
        time.monotonic() - started,
        cpu_s,
        peak_bytes,
    )
