"""The listening socket. A server's life with signals is in tests/e2e/."""

from __future__ import annotations

import socket

import pytest

from bei.errors import ConfigError
from bei.server.run import _bind


def test_port_0_lets_the_system_choose() -> None:
    with _bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_a_bound_socket_refuses_until_the_server_listens() -> None:
    with _bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_a_taken_port_names_host_port_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port} .*choose another --host or --port"):
            _bind("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 0), ("127.0.0.1", 65536)])
def test_an_address_that_cannot_be_had_is_a_configuration_error(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="choose another --host or --port"):
        _bind(host, port)
