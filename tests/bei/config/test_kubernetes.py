"""Injected variables of Kubernetes Services are told from settings by names and values together."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from bei.cli import main
from bei.config.kubernetes import injected
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.errors import ConfigError
from bei_build.config import BuildConfig
from tests.support.artifacts import save_artifact


def service(name: str, address: str = "10.0.0.1", port: int = 80, named: str = "HTTP") -> dict[str, str]:
    """The variables that the kubelet sets for a Service,
    https://kubernetes.io/docs/concepts/services-networking/service/."""
    host = f"[{address}]" if ":" in address else address
    link = f"tcp://{host}:{port}"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_{named}": str(port),
        f"{name}_PORT": link,
        f"{name}_PORT_{port}_TCP": link,
        f"{name}_PORT_{port}_TCP_PROTO": "tcp",
        f"{name}_PORT_{port}_TCP_PORT": str(port),
        f"{name}_PORT_{port}_TCP_ADDR": address,
    }


@pytest.mark.parametrize("name", ["BEI", "BEI_EMBED", "BEI_EMBED_2", "BEI_PORT", "BEI_HOST", "BEI_MAX_QUEUE_TOKENS"])
@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
@pytest.mark.parametrize("port", [80, 8000, 65535])
def test_a_service_of_any_name_is_passed_over_whole(name: str, address: str, port: int) -> None:
    env = service(name, address, port)
    assert injected(env)[name] == sorted(env)
    assert load(ServeConfig, {}, env=env) == ServeConfig()
    assert load(BuildConfig, {"model": "x"}, env=env) == BuildConfig(model="x")


def test_settings_beside_services_are_settings() -> None:
    env = {**service("BEI"), **service("BEI_EMBED", "10.0.0.2"), "BEI_HOST": "0.0.0.0", "BEI_MAX_HEADERS": "5"}
    assert load(ServeConfig, {}, env=env) == ServeConfig(host="0.0.0.0", max_headers=5)
    assert set(injected(env)) == {"BEI", "BEI_EMBED"}


def test_a_port_that_was_injected_is_never_the_port() -> None:
    """BEI_PORT is a setting of ours and a variable of a Service called bei."""
    assert load(ServeConfig, {}, env={"BEI_PORT": "tcp://10.0.0.1:80"}).port == ServeConfig().port
    assert load(ServeConfig, {}, env={"BEI_PORT": "80"}).port == 80
    assert load(ServeConfig, {"port": 1}, env=service("BEI")).port == 1
    assert load(ServeConfig, {}, env={**service("BEI"), "BEI_PORT": "8001"}).port == 8001


def test_docker_s_links_are_passed_over_too() -> None:
    """They have no SERVICE_HOST."""
    env = {name: value for name, value in service("BEI_EMBED").items() if "_SERVICE_" not in name}
    assert injected(env) == {"BEI_EMBED": sorted(env)}
    assert load(ServeConfig, {}, env=env) == ServeConfig()


def test_several_ports_and_protocols_belong_to_one_service() -> None:
    more = {
        "BEI_EMBED_SERVICE_PORT_METRICS": "9090",
        "BEI_EMBED_PORT_9090_UDP": "udp://10.0.0.1:9090",
        "BEI_EMBED_PORT_9090_UDP_PROTO": "udp",
        "BEI_EMBED_PORT_9090_UDP_PORT": "9090",
        "BEI_EMBED_PORT_9090_UDP_ADDR": "10.0.0.1",
    }
    assert injected({**service("BEI_EMBED"), **more}) == {"BEI_EMBED": sorted({**service("BEI_EMBED"), **more})}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BEI_EMBED_PORT", "8000"),
        ("BEI_EMBED_PORT", "tcp://embed:80"),
        ("BEI_EMBED_PORT", "tcp://10.0.0.1"),
        ("BEI_EMBED_PORT", "tcp://10.0.0.1:99999"),
        ("BEI_EMBED_PORT", "http://10.0.0.1:80"),
        ("BEI_EMBED_SERVICE_HOST", "embed.default"),
        ("BEI_EMBED_SERVICE_HOST", ""),
        ("BEI_EMBED_SERVICE_PORT", "80"),
        ("BEI_EMBED_SERVICE_PORT_HTTP", "80"),
        ("BEI_EMBED_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("BEI_EMBED_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("BEI_EMBED_PORT_80_TCP_PROTO", "tcp"),
        ("BEI_EMBED", "tcp://10.0.0.1:80"),
        ("BEI_EMBED_HOST", "10.0.0.1"),
        ("BEI_PROT", "1"),
    ],
)
def test_anything_else_that_is_unknown_is_refused(name: str, value: str) -> None:
    """Also what looks like a part of a Service, alone."""
    with pytest.raises(ConfigError, match=f"Unknown setting {name} in the environment"):
        load(ServeConfig, {}, env={name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BEI_EMBED_SERVICE_PORT", "http"),
        ("BEI_EMBED_SERVICE_PORT_HTTP", "0"),
        ("BEI_EMBED_PORT", "tcp://10.0.0.2:80"),
        ("BEI_EMBED_PORT_80_TCP", "tcp://10.0.0.1:81"),
        ("BEI_EMBED_PORT_80_TCP_PROTO", "udp"),
        ("BEI_EMBED_PORT_80_TCP_PORT", "81"),
        ("BEI_EMBED_PORT_80_TCP_ADDR", "10.0.0.2"),
        ("BEI_EMBED_MODEL", "x"),
        ("BEI_EMBED_PORT_80_TCP_KIND", "x"),
    ],
)
def test_a_variable_that_does_not_belong_to_its_service_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="Unknown setting"):
        load(ServeConfig, {}, env={**service("BEI_EMBED"), name: value})


def test_what_is_not_ours_is_nobody_s_business() -> None:
    assert injected({**service("BEIGNET"), **service("REDIS"), "PATH": "/bin"}) == {}


def test_serve_says_what_it_has_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("bei.server.http.listen.bind_tcp", lambda *_: socket.socket())
    monkeypatch.setattr("bei.server.run.run", lambda paths, config, _: served.append(config))
    for name, value in {**service("BEI"), **service("BEI_EMBED")}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        main.main(["serve", str(save_artifact(tmp_path / "artifact").path)])
    assert served[0].port == ServeConfig().port
    lines = [message for message in caplog.messages if "Kubernetes injected them" in message]
    assert len(lines) == 2
    assert "(BEI): BEI_PORT, BEI_PORT_80_TCP, " in lines[0]
    assert "(BEI_EMBED): BEI_EMBED_PORT, " in lines[1]
