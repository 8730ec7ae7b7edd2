"""What holds for the tests of the command line."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """``bei serve`` binds no port: others may have it."""
    monkeypatch.setattr("bei.server.http.listen.bind_tcp", lambda *_: socket.socket())
