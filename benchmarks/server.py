"""A ``bei serve`` process for a benchmark, on a free loopback port."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(artifact: Path, *flags: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Port and process of a server that is ready; stopped by SIGTERM at the end."""
    port = free_port()
    command = [sys.executable, "-m", "bei", "serve", str(artifact), "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(port, process)
        yield port, process
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10):
                return
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the server did not become ready")
