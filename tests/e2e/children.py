"""Processes of a server as a test sees them: children, their state, what they leave behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

from tests.e2e.process import Server, wait_until


def children(server: Server) -> dict[str, psutil.Process]:
    """The processes of a server by their names."""
    found = {}
    for process in psutil.Process(server.pid).children():
        try:
            found[process.cmdline()[-1]] = process
        except (psutil.Error, IndexError):  # it has just ended
            continue
    return found


def vectors_of(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


def check_error(response: httpx.Response, status: int, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    assert "Traceback" not in response.text


def state(server: Server) -> tuple[int, int]:
    return server.get_status("/health"), server.get_status("/ready")


def wait_until_well(server: Server) -> None:
    """Front ends hear a moment later of what has come back."""
    wait_until(lambda: state(server) == (200, 200), "it is well again")


def stopped(server: Server) -> int:
    server.send_signal(signal.SIGTERM)
    return server.wait_exit()


def with_own_tmp(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """A folder for temporary files that is nobody else's."""
    (folder / "tmp").mkdir()
    return {**env, "TMPDIR": str(folder / "tmp")}


def left_behind(folder: Path) -> list[str]:
    """Files that a server could leave where nobody looks."""
    return [*os.listdir(folder / "tmp"), *(name for name in os.listdir("/dev/shm") if "bei" in name)]
