"""A server as an operator starts it: with keys, TLS or a unix socket, and a log in which no secret may ever be."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.support.artifacts import save_artifact

SECRET = "s3cr3t-0123456789abcdef"
OTHER = "other-0123456789abcdef"
TEXT = "a private thought of a client"
_NEVER_LOGGED = (SECRET, OTHER, "s3cr3t", "private", "thought")

BEARER = {"Authorization": f"Bearer {SECRET}"}


class Operated(Server):
    """``verify``: the file of the authority that signed its certificate. ``uds``: ask over this socket."""

    def __init__(
        self,
        command: Sequence[object],
        env: Mapping[str, str],
        cwd: Path,
        *,
        verify: Path | None = None,
        cert: tuple[Path, Path] | None = None,
        uds: Path | None = None,
    ) -> None:
        super().__init__(command, env, cwd)
        self._verify = verify
        self._cert = cert
        self._uds = uds

    def __enter__(self) -> Operated:
        super().__enter__()
        return self

    def wait_until_up(self) -> None:
        """Over whichever way it listens on."""
        found = re.search(r"listening on ([^\s\"]+)", self.wait_for_log("listening on "))
        assert found is not None
        self.url = "http://bei" if self._uds is not None else found[1]
        wait_until(lambda: self.get_status("/health") == 200, "/health")

    def client(self, headers: Mapping[str, str] | None = None) -> httpx.Client:
        """As its clients have to be."""
        return httpx.Client(base_url=self.url, transport=self.transport(), timeout=DEADLINE_S, headers=headers)

    def transport(self) -> httpx.HTTPTransport:
        """The way to it: over the socket, or with the authority and the client's certificate."""
        if self._uds is not None:
            return httpx.HTTPTransport(uds=str(self._uds))
        if self._verify is None:
            return httpx.HTTPTransport()
        cert = None if self._cert is None else (str(self._cert[0]), str(self._cert[1]))
        return httpx.HTTPTransport(verify=context(self._verify, cert))

    def get_status(self, path: str) -> int:
        """As before."""
        try:
            with self.client() as client:
                return client.get(path).status_code
        except httpx.TransportError:
            return 0

    def ask(self, headers: Mapping[str, str] | None = None, **body: object) -> httpx.Response:
        """POST to the embeddings route, on a connection of its own."""
        with self.client(headers) as client:
            return client.post("/v1/embeddings", json=body or {"input": TEXT})


def context(authority: Path, cert: tuple[str, str] | None = None) -> ssl.SSLContext:
    """Of a client that trusts ``authority``."""
    found = ssl.create_default_context(cafile=str(authority))
    if cert is not None:
        found.load_cert_chain(*cert)
    return found


def curl(*arguments: object) -> str:
    """What the command prints; where it is not installed the rest of the test is skipped."""
    found = shutil.which("curl")
    if found is None:
        pytest.skip("the command curl is not installed")
    command = [found, "-sS", "-m", "30", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


Operate = Callable[..., Operated]


@pytest.fixture
def operate(tmp_path: Path, env: Mapping[str, str]) -> Iterator[Operate]:
    """``operate(*flags, variables={...}, **ways)``: a server of a fake model. In the end its log, whatever the test has
    done, must have neither keys nor texts. ``ways``: those of Operated."""
    artifact = save_artifact(tmp_path / "fake")
    servers: list[Operated] = []
    with ExitStack() as stack:

        def start(
            *flags: object,
            variables: Mapping[str, str] | None = None,
            kind: type[Operated] = Operated,
            **ways: Any,
        ) -> Operated:
            command = [sys.executable, "-m", "tests.e2e.gated_server", artifact.path, *flags]
            server = kind(command, {**env, **(variables or {})}, tmp_path, **ways)
            servers.append(stack.enter_context(server))
            server.say("open")
            shown = Path(f"/proc/{server.pid}/cmdline").read_text()  # what ps shows
            assert not any(secret in shown for secret in _NEVER_LOGGED)
            return server

        yield start
    for server in servers:
        assert server.log
        for line in server.log:
            assert not any(secret in line for secret in _NEVER_LOGGED), line
            assert "Traceback" not in line
