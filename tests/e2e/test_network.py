"""Unix sockets, a prefix behind a proxy, pages of other origins, and ids of requests: real processes and clients."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e import wire
from tests.e2e.operated import BEARER, SECRET, TEXT, Operate, Operated, curl
from tests.e2e.process import DEADLINE_S, wait_until
from tests.e2e.test_bad_start import fails
from tests.support.artifacts import save_artifact


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Short enough for a socket."""
    folder = Path(f"/tmp/bei-{os.getpid()}-{os.urandom(4).hex()}")
    folder.mkdir()
    yield folder / "bei.sock"
    shutil.rmtree(folder)


# Unix sockets


def test_clients_ask_over_a_unix_socket_and_tcp_is_closed(operate: Operate, path: Path) -> None:
    server = operate("--uds", path, "--uds-mode", "600", uds=path)
    assert any(line.endswith(f"listening on unix:{path}") for line in server.log)
    assert not any("listening on http" in line for line in server.log)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert server.ask().status_code == 200
    assert len(server.ask(input=[TEXT] * 1000).json()["data"]) == 1000
    server.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert not path.exists()


def test_curl_asks_over_a_unix_socket(operate: Operate, path: Path) -> None:
    operate("--uds", path, uds=path)
    shown = curl("--unix-socket", path, "-d", json.dumps({"input": TEXT}), "http://bei/v1/embeddings")
    assert json.loads(shown)["object"] == "list"


def test_a_unix_socket_and_tcp_are_listened_on_together(operate: Operate, path: Path) -> None:
    server = operate("--uds", path, "--tcp", uds=path)
    (line,) = (line for line in server.log if "listening on http" in line)
    url = line.split("listening on ")[1]
    assert httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200
    assert server.ask().status_code == 200
    with socket.socket(socket.AF_UNIX) as half:
        half.connect(str(path))
        half.sendall(b"BROKEN\r\n\r\n")
        assert half.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_the_socket_of_a_killed_server_is_replaced_and_that_of_a_running_one_is_not(
    operate: Operate, path: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    first = operate("--uds", path, uds=path)
    artifact = save_artifact(tmp_path / "other")
    line = fails(["serve", artifact.path, "--uds", path], env, tmp_path)
    assert "another server listens there" in line
    assert first.ask().status_code == 200
    first.send_signal(signal.SIGKILL)
    first.wait_exit()
    assert path.exists()
    second = operate("--uds", path, uds=path)
    assert second.ask().status_code == 200
    assert any("no server listens there any more" in line for line in second.log)


def test_what_is_no_socket_is_left_alone(path: Path, env: Mapping[str, str], tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "other")
    path.write_text("important")
    assert "it exists and is not a socket" in fails(["serve", artifact.path, "--uds", path], env, tmp_path)
    assert path.read_text() == "important"


def test_keys_are_asked_for_over_a_unix_socket_too(operate: Operate, path: Path) -> None:
    server = operate("--uds", path, uds=path, variables={"BEI_API_KEYS": SECRET})
    assert [server.ask(headers).status_code for headers in ({}, BEARER)] == [401, 200]


# Prefix, origins


def test_clients_behind_a_proxy_find_routes_pages_and_redirects(operate: Operate) -> None:
    server = operate("--root-path", "/embed-api", "--cors-origins", "https://page.example")
    for base in (server.url, f"{server.url}/embed-api"):
        with openai.OpenAI(base_url=f"{base}/v1", api_key="x", timeout=DEADLINE_S, max_retries=0) as client:
            assert len(client.embeddings.create(model="tiny", input=TEXT).data) == 1
        page = httpx.get(f"{base}/openapi.json", timeout=DEADLINE_S).json()
        assert page["servers"] == [{"url": "/embed-api"}]
        assert '"/embed-api/openapi.json"' in httpx.get(f"{base}/docs", timeout=DEADLINE_S).text.replace("'", '"')
        headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        asked = httpx.options(f"{base}/v1/embeddings", headers=headers, timeout=DEADLINE_S)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, "https://page.example")
        answered = httpx.post(f"{base}/v1/embeddings", json={"input": TEXT}, headers=headers, timeout=DEADLINE_S)
        assert answered.headers["access-control-allow-origin"] == "https://page.example"


def test_settings_that_exclude_each_other_do_not_start(env: Mapping[str, str], tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "other")
    for flags, message in (
        (["--cors-origins", "*", "--cors-credentials"], "exclude each other"),
        (["--root-path", "/v1"], "begins as paths of routes do"),
        (["--no-tcp"], "leaves nothing to listen on"),
        (["--log-inputs"], "log_inputs is for the lines of access_log"),
    ):
        assert message in fails(["serve", artifact.path, *flags], env, tmp_path)


# Ids of requests


def answer_to(server: Operated, sent: bytes) -> wire.Answer:
    with wire.connect(server) as client:
        client.sendall(sent)
        return wire.read_answer(client)


def test_every_answer_has_the_request_s_id_however_early_it_is_refused(operate: Operate) -> None:
    server = operate("--max-headers", "10", "--payload-limit", "1000", "--header-timeout", "2", "--access-log")
    mine = "x-request-id: mine-1"
    many = [f"x-{number}: 1" for number in range(20)]
    for sent, status in (
        (wire.embed("a", mine), 200),
        (wire.head(0, mine, path="/no/such", method="GET"), 404),
        (wire.head(2, mine) + b"{}", 400),
        (wire.head(5000, mine) + b" " * 5000, 413),
        (wire.head(0, mine, *many), 431),
        (wire.head(0, mine, "x-half: 1")[:-4], 408),
        (wire.head(5, mine, "content-length: 7"), 400),
        (wire.head(0, mine, method="CONNECT", path="bei:80"), 405),
    ):
        answer = answer_to(server, sent)
        assert (answer.status, answer.headers["x-request-id"]) == (status, "mine-1")
    broken = answer_to(server, b"BROKEN\r\n\r\n")
    assert re.fullmatch("[0-9a-f]{32}", broken.headers["x-request-id"])
    wait_until(lambda: sum("request_id=mine-1" in line for line in server.log) == 8, "each is logged once")
    server.wait_for_log(f"request_id={broken.headers['x-request-id']}")
    with server.client({"X-Request-Id": f"{TEXT}\x7f"}) as client:  # neither in the answer nor in the log
        assert re.fullmatch("[0-9a-f]{32}", client.get("/health").headers["x-request-id"])
