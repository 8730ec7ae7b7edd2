"""Listening sockets. A server's life with signals is in tests/e2e/."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from bei.errors import ConfigError
from bei.server.http.listen import UnixSocket, bind_tcp


def test_port_0_lets_the_system_choose() -> None:
    with bind_tcp("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_a_bound_socket_refuses_until_the_server_listens() -> None:
    with bind_tcp("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_a_taken_port_names_host_port_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port} .*choose another --host or --port"):
            bind_tcp("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 0), ("127.0.0.1", 65536)])
def test_an_address_that_cannot_be_had_is_a_configuration_error(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="choose another --host or --port"):
        bind_tcp(host, port)


# Unix sockets.


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Short enough for a socket wherever the tests' folder is."""
    monkeypatch.chdir(tmp_path)
    return "bei.sock"


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
        return True


@pytest.mark.parametrize("mode", ["600", "660", "666"])
def test_a_unix_socket_has_the_permissions_asked_for_and_is_gone_in_the_end(path: str, mode: str) -> None:
    uds = UnixSocket(path, mode)
    assert not os.path.exists(path)  # nothing is there while models are loaded
    umask = os.umask(0o022)
    os.umask(umask)
    with uds.listen():
        assert stat.S_IMODE(os.stat(path).st_mode) == int(mode, 8)
        assert connects(path)
    uds.remove()
    assert not os.path.exists(path)
    assert os.umask(umask) == umask  # of the process, as it was


def test_a_socket_that_a_killed_server_has_left_is_taken_over(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with UnixSocket(path, "660").listen():
        pass  # closed, not removed
    assert os.path.exists(path)
    with UnixSocket(path, "660").listen():
        assert connects(path)
    assert "no server listens there any more" in caplog.text


def test_a_socket_on_which_somebody_listens_is_left_alone(path: str) -> None:
    with UnixSocket(path, "660").listen():
        with pytest.raises(ConfigError, match="another server listens there"):
            UnixSocket(path, "660")
        assert connects(path)


def test_of_two_servers_that_start_together_the_slower_one_is_told(path: str) -> None:
    first, second = UnixSocket(path, "660"), UnixSocket(path, "660")
    with first.listen():
        with pytest.raises(ConfigError, match="another server listens there"):
            second.listen()
        second.remove()
        assert connects(path)


def test_a_server_does_not_remove_the_socket_of_its_successor(path: str) -> None:
    first = UnixSocket(path, "660")
    with first.listen():
        pass
    with UnixSocket(path, "660").listen() as successor:
        first.remove()
        assert successor.fileno() > 0
        assert connects(path)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_what_is_no_socket_is_never_removed(path: str, make: object) -> None:
    make(Path(path))  # type: ignore[operator]
    with pytest.raises(ConfigError, match="it exists and is not a socket"):
        UnixSocket(path, "660")
    assert os.path.exists(path)


@pytest.mark.parametrize(("wrong", "message"), [("nowhere/x", "no such folder"), ("x" * 120, "more than 107 bytes")])
def test_a_path_that_cannot_be_a_socket_is_a_configuration_error(path: str, wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*choose another --uds"):
        UnixSocket(wrong, "660")
