"""A server with the environment that the chart renders: what the probes and Prometheus ask is answered."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from bei.artifact.manifest import Artifact
from tests.deploy.chart import Object, rendered
from tests.deploy.cross_checks import container_of, environment, of_kind, probes_of
from tests.deploy.matrix import CA, KEYS, merged
from tests.e2e.conftest import checkpoint, env, home, tiny
from tests.e2e.process import BEI, DEADLINE_S, Server
from tests.support.tls_certificates import make_authority, make_certificate

__all__ = ["checkpoint", "env", "home", "tiny"]

KEY = "0123456789abcdef0123456789abcdef"
KEDA = {"autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://prometheus:9090"}}}
MONITOR = {"metrics": {"monitor": "pod", "tlsConfig": CA, "credentials": {"name": "keys", "key": "prometheus"}}}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "another dialect": {"settings": {"dialect": "tei"}},
    "keys": {"apiKeys": KEYS, "settings": {"metrics_need_key": True}},
    "TLS": {"tls": {"secretName": "tls"}},
    "clients' certificates": {"tls": {"secretName": "tls", "clientAuth": True}, "settings": {"dialect": "oip"}},
}
PLACES = ("/cache", "/etc/bei", "/tmp/bei.sock")


class Rendered(Server):
    """Found by the probes, as a kubelet would."""

    def wait_until_up(self) -> None:
        """Return when it listens, and set ``url``."""
        line = self.wait_for_log(r"listening on .*https?://")
        self.url = re.findall(r"https?://[\d.]+:\d+", line)[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for the root of the container: the Secrets are there."""
    folder = tmp_path_factory.mktemp("root")
    for name in ("etc/bei/tls", "etc/bei/api-keys", "cache", "tmp"):
        (folder / name).mkdir(parents=True)
    authority = make_authority(folder)
    made = make_certificate(folder, "server", authority)
    made.cert.rename(folder / "etc/bei/tls/tls.crt")
    made.key.rename(folder / "etc/bei/tls/tls.key")
    authority.cert.rename(folder / "etc/bei/tls/ca.crt")
    (folder / "etc/bei/api-keys/api-keys.yaml").write_text(f"prometheus: {{key: {KEY}}}\n")
    return folder


def inside(text: str, root: Path) -> str:
    """``text`` with places below ``root``."""
    for place in PLACES:
        text = re.sub(rf"(?<![\w/]){place}", f"{root}{place}", text)
    return text


@pytest.fixture(params=VALUES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(merged(MONITOR, KEDA, VALUES[request.param]))


@pytest.fixture
def server(objects: list[Object], root: Path, tiny: Artifact, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    (deployment,) = of_kind(objects, "Deployment")
    given = {name: inside(value, root) for name, value in environment(deployment).items()}
    given |= {"BEI_HOST": "127.0.0.1", "BEI_PORT": "0", "BEI_MODELS": str(tiny.path)}
    with Rendered([*BEI, *container_of(deployment)["args"]], {**env, **given}, home) as started:
        yield started
    assert started.wait_exit() == 0


def client(root: Path) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(root / "etc/bei/tls/ca.crt"))
    context.load_cert_chain(root / "etc/bei/tls/tls.crt", root / "etc/bei/tls/tls.key")
    return httpx.Client(verify=context, timeout=DEADLINE_S)


def test_probes_and_prometheus_are_answered(server: Server, objects: list[Object], root: Path) -> None:
    (deployment,) = of_kind(objects, "Deployment")
    bodies = []
    with client(root) as http:
        for probe in probes_of(deployment):
            if "exec" in probe:
                _, *arguments = (inside(part, root) for part in probe["exec"]["command"])
                subprocess.run([sys.executable, *arguments], check=True, timeout=DEADLINE_S)
                continue
            asked = probe["httpGet"]
            headers = {one["name"]: one["value"] for one in asked["httpHeaders"]}
            assert server.url.startswith(asked["scheme"].lower())
            response = http.get(server.url + asked["path"], headers=headers)
            assert response.status_code == 200
            bodies.append(response.json())
        assert bodies in ([], [{"status": "ready"}, {"status": "ready"}, {"status": "alive"}])
        (monitor,) = of_kind(objects, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["authorization"]["credentials"]["name"] == "keys"
        text = http.get(server.url + endpoint["path"], headers={"Authorization": f"Bearer {KEY}"}).text
    (scaler,) = of_kind(objects, "ScaledObject")
    for trigger in scaler["spec"]["triggers"]:
        name, lane = re.findall(r'(bei_\w+){.*lane="(\w+)"', trigger["metadata"]["query"])[0]
        assert re.search(rf'^{name}{{.*lane="{lane}".*}} ', text, re.M)
