"""Sockets between processes that leave no file."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from bei.errors import ConfigError
from bei.multiprocess.transport.connect import SocketEndpoint, path_of
from tests.bei.multiprocess.chain import nothing_left


def test_an_endpoint_has_no_file_and_is_reached_by_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with nothing_left():
        endpoint = SocketEndpoint()
        assert os.listdir(tmp_path) == []
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path_of(endpoint.address)))  # before anybody accepts
            client.sendall(b"x")
            accepted, _ = endpoint.listener.accept()
            with accepted:
                assert accepted.recv(1) == b"x"
        endpoint.close()


def test_without_a_folder_for_temporary_files_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        SocketEndpoint()
