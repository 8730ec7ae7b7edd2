"""A container of an image, run as a platform that trusts nobody runs it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.process import DEADLINE_S
from tests.image.tools import Tools

# Not the image's own user, and of no name in it.
USER = "12345:0"
CONFINED = (
    *("--user", USER, "--read-only", "--tmpfs", "/tmp", "--cap-drop", "all"),
    *("--security-opt", "no-new-privileges", "--network", "host"),
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Container:
    """``bei serve`` in a container of ``image``."""

    def __init__(self, tools: Tools, image: str) -> None:
        self._tools, self.port = tools, free_port()
        address = ("--env", "BEI_HOST=127.0.0.1", "--env", f"BEI_PORT={self.port}")
        # podman leaves the checks to systemd's timers; the command itself is run by the tests.
        started = tools.run("podman", "run", "--detach", "--no-healthcheck", *CONFINED, *address, image)
        self.id = started.stdout.strip()
        self.url = f"http://127.0.0.1:{self.port}"

    def execute(self, *command: str, env: dict[str, str] | None = None, code: int | None = 0) -> str:
        """What a command in the container writes."""
        variables = [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        return self._tools.run("podman", "exec", *variables, self.id, *command, code=code).stdout

    def log(self) -> str:
        done = self._tools.run("podman", "logs", self.id)
        return f"{done.stdout}{done.stderr}"

    def wait_until_up(self) -> float:
        """Return when it is ready; after how many seconds."""
        started_s = time.monotonic()
        while time.monotonic() < started_s + DEADLINE_S:
            try:
                if httpx.get(f"{self.url}/ready", timeout=DEADLINE_S).status_code == 200:
                    return time.monotonic() - started_s
            except httpx.TransportError:
                threading.Event().wait(0.2)
        raise AssertionError(f"not ready after {DEADLINE_S} s:\n{self.log()}")

    def embed(self, texts: list[str], **headers: str) -> httpx.Response:
        body = {"input": texts, "model": "all-MiniLM-L6-v2"}
        return httpx.post(f"{self.url}/v1/embeddings", json=body, headers=headers, timeout=DEADLINE_S)

    def terminate(self) -> None:
        self._tools.run("podman", "kill", "--signal", "TERM", self.id)

    def exit_code(self) -> int:
        """When it has ended."""
        return int(self._tools.run("podman", "wait", self.id, timeout_s=DEADLINE_S).stdout)

    def remove(self) -> None:
        self._tools.run("podman", "rm", "--force", "--time", "5", self.id)


@contextmanager
def serving(tools: Tools, image: str) -> Iterator[Container]:
    container = Container(tools, image)
    try:
        yield container
    finally:
        container.remove()


def bei(tools: Tools, image: str, *words: str, folder: Path | None = None, code: int = 0) -> str:
    """Run another command of ``bei`` to its end; what it writes to standard error. ``folder`` is /work in it."""
    mounts = ("--volume", f"{folder}:/work", "--workdir", "/work") if folder else ()
    return tools.run("podman", "run", "--rm", "--no-healthcheck", *CONFINED, *mounts, image, *words, code=code).stderr


def config_of(tools: Tools, image: str) -> dict[str, Any]:
    """The image's configuration: user, labels, health check."""
    (inspected,) = json.loads(tools.run("podman", "image", "inspect", image).stdout)
    return {"Healthcheck": inspected.get("Healthcheck"), **inspected["Config"]}
