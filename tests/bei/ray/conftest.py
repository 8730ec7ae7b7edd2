"""A namespace of the network for clusters."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Ray Serve kills a proxy that is not ready in 5 s, and gives up then: on a busy machine it starts later.
_PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
_ENVIRONMENT = {**_PATIENCE, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}

Scenario = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def scenario() -> Iterator[Scenario]:
    """``scenario(module, name, *paths)``: what a scenario of ``tests.bei.ray.cluster`` or ``replicas`` has printed."""
    pytest.importorskip("ray", reason="needs the extra scale")
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for a network namespace")
    name = f"bei-{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    inside = ["ip", "netns", "exec", name]
    subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)

    def run(module: str, wanted: str, *given: Path) -> dict[str, Any]:
        command = [*inside, sys.executable, "-m", f"tests.bei.ray.{module}", wanted, *map(str, given)]
        environment = {**os.environ, **_ENVIRONMENT}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    yield run
    subprocess.run(["ip", "netns", "delete", name], check=True)
