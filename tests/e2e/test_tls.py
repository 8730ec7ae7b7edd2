"""TLS with real clients, with and without certificates of their own; certificates that change; what does not start."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from bei.artifact.manifest import Artifact
from tests.e2e.operated import TEXT, Operate, Operated, context, curl
from tests.e2e.process import DEADLINE_S
from tests.e2e.test_bad_start import fails
from tests.support.artifacts import save_artifact
from tests.support.tls_certificates import Pair, make_authority, make_certificate, openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, authority: Pair) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name, authority) for name in ("first", "second", "client")}


@pytest.fixture
def pair(tmp_path: Path, made: dict[str, Pair]) -> Pair:
    """The server's files, which a test may replace."""
    found = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
    shutil.copy(made["first"].cert, found.cert)
    shutil.copy(made["first"].key, found.key)
    return found


def flags(pair: Pair, *more: object) -> list[object]:
    return ["--tls-cert", pair.cert, "--tls-key", pair.key, *more]


def port_of(server: Operated) -> int:
    return int(server.url.rsplit(":", 1)[1])


def subject(server: Operated, authority: Pair) -> str:
    """Of the certificate that new connections get."""
    wire = socket.create_connection(("127.0.0.1", port_of(server)), DEADLINE_S)
    with context(authority.cert).wrap_socket(wire, server_hostname="localhost") as tls:
        return str(tls.getpeercert())


def test_httpx_openai_s_client_curl_and_openssl_ask_over_tls(operate: Operate, pair: Pair, authority: Pair) -> None:
    server = operate(*flags(pair), verify=authority.cert)
    assert server.url.startswith("https://127.0.0.1:")
    assert server.ask().status_code == 200
    http = openai.DefaultHttpxClient(verify=context(authority.cert), timeout=DEADLINE_S)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=http, max_retries=0) as client:
        assert len(client.embeddings.create(model="tiny", input=[TEXT] * 100).data) == 100
    for version, is_good in (("-tls1_3", True), ("-tls1_2", True), ("-tls1_1", False)):
        found = shutil.which("openssl")
        assert found is not None
        command = [
            found,
            "s_client",
            "-connect",
            f"127.0.0.1:{port_of(server)}",
            "-CAfile",
            str(authority.cert),
            version,
        ]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, input="", timeout=DEADLINE_S)
        assert ("Verify return code: 0 (ok)" in ended.stdout and ended.returncode == 0) == is_good, version
    shown = curl("--cacert", authority.cert, "-d", json.dumps({"input": TEXT}), f"{server.url}/v1/embeddings")
    assert json.loads(shown)["data"][0]["embedding"]


def test_clients_without_tls_or_without_the_authority_get_nothing(
    operate: Operate, pair: Pair, authority: Pair
) -> None:
    server = operate(*flags(pair), verify=authority.cert)
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/health", timeout=DEADLINE_S)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health", timeout=DEADLINE_S)
    assert server.ask().status_code == 200


def test_only_clients_with_a_certificate_of_the_authority_are_served(
    operate: Operate, pair: Pair, authority: Pair, made: dict[str, Pair], tmp_path: Path
) -> None:
    own = made["client"].cert, made["client"].key
    server = operate(*flags(pair, "--tls-client-ca", authority.cert), verify=authority.cert, cert=own)
    assert server.ask().status_code == 200
    stranger = make_certificate(tmp_path, "stranger", make_authority(tmp_path, "elsewhere"))
    for cert in (None, (str(stranger.cert), str(stranger.key))):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=context(authority.cert, cert), timeout=DEADLINE_S)
    assert server.ask().status_code == 200


def test_large_bodies_and_answers_pass_and_refusals_arrive(operate: Operate, pair: Pair, authority: Pair) -> None:
    server = operate(*flags(pair, "--payload-limit", 3_000_000, "--max-headers", 20), verify=authority.cert)
    with server.client() as client:
        response = client.post(
            "/v1/embeddings", json={"input": [f"{number} {'word ' * 20}" for number in range(10_000)]}
        )
        assert len(response.json()["data"]) == 10_000
        refused = client.post("/v1/embeddings", content=b" " * 6_000_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "payload_too_large")
    with server.client({f"x-{number}": "1" for number in range(30)}) as client:
        refused = client.get("/health")
        assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")


def test_who_does_not_finish_the_handshake_or_the_headers_is_cut_off(
    operate: Operate, pair: Pair, authority: Pair
) -> None:
    server = operate(*flags(pair, "--header-timeout", 4), verify=authority.cert)
    address = ("127.0.0.1", port_of(server))
    with socket.create_connection(address, DEADLINE_S) as silent, socket.create_connection(address, DEADLINE_S) as wire:
        with context(authority.cert).wrap_socket(wire, server_hostname="localhost") as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nhost: ")
            assert server.ask().status_code == 200  # meanwhile
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        assert silent.recv(1) == b""


def test_a_drain_ends_though_clients_keep_connections(operate: Operate, pair: Pair, authority: Pair) -> None:
    server = operate(*flags(pair), verify=authority.cert)
    with socket.create_connection(("127.0.0.1", port_of(server))), server.client() as client:
        assert client.get("/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_a_new_certificate_is_for_new_connections_and_ends_no_old_one(
    operate: Operate, pair: Pair, authority: Pair, made: dict[str, Pair]
) -> None:
    server = operate(*flags(pair), verify=authority.cert)
    with server.client() as kept_open:
        assert kept_open.get("/health").status_code == 200
        shutil.copy(made["second"].cert, pair.cert)
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("ERROR the certificate stays as it was.*tls_key")  # its key is not there yet
        assert "first" in subject(server, authority)
        shutil.copy(made["second"].key, pair.key)
        server.send_signal(signal.SIGHUP)
        server.wait_for_log("the certificate was read anew")
        assert "second" in subject(server, authority)
        assert kept_open.get("/health").status_code == 200
        assert server.ask().status_code == 200


def test_certificates_change_under_load_and_no_connection_fails(
    operate: Operate, pair: Pair, authority: Pair, made: dict[str, Pair]
) -> None:
    server = operate(*flags(pair), verify=authority.cert)
    is_over = threading.Event()

    def ask() -> set[int]:
        statuses = {server.ask().status_code}  # a connection each time
        while not is_over.is_set():
            statuses.add(server.ask().status_code)
        return statuses

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask) for _ in range(3)]
        try:
            for name in ("second", "first") * 4:
                shutil.copy(made[name].cert, pair.cert)
                shutil.copy(made[name].key, pair.key)
                server.send_signal(signal.SIGHUP)
                server.wait_for_log("the certificate was read anew")
                assert name in subject(server, authority)
        finally:
            is_over.set()
        assert [one.result(DEADLINE_S) for one in asked] == [{200}] * 3


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "fake")


def test_files_that_cannot_be_used_are_one_line_at_the_start(
    artifact: Artifact, env: Mapping[str, str], tmp_path: Path, pair: Pair, made: dict[str, Pair]
) -> None:
    start = ["serve", artifact.path, "--port", "0"]
    assert "tls_cert and tls_key belong together" in fails([*start, "--tls-cert", pair.cert], env, tmp_path)
    other = Pair(pair.cert, made["second"].key)
    assert "does not belong to tls_cert" in fails([*start, *flags(other)], env, tmp_path)
    missing = Pair(tmp_path / "nowhere.pem", pair.key)
    assert "nowhere.pem cannot be read: No such file" in fails([*start, *flags(missing)], env, tmp_path)
    encrypted = Pair(pair.cert, tmp_path / "encrypted.pem")
    openssl("pkey", "-in", pair.key, "-aes256", "-passout", "pass:x", "-out", encrypted.key)
    assert "is encrypted: store it without" in fails([*start, *flags(encrypted)], env, tmp_path)


def test_a_certificate_that_has_expired_is_served_with_a_warning(
    operate: Operate, tmp_path: Path, authority: Pair
) -> None:
    request, pair = tmp_path / "old.csr", Pair(tmp_path / "old.crt", tmp_path / "old.key")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", *ec, "-subj", "/CN=localhost", "-keyout", pair.key, "-out", request)
    openssl("x509", "-req", "-in", request, "-signkey", pair.key, "-days", "-1", "-out", pair.cert)
    trusting = ssl.create_default_context(cafile=str(authority.cert))
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

    class Blind(Operated):
        def transport(self) -> httpx.HTTPTransport:
            return httpx.HTTPTransport(verify=trusting)

    server = operate(*flags(pair), kind=Blind)
    assert server.ask().status_code == 200
    assert any("WARNING tls_cert" in line and "has expired on" in line for line in server.log)
