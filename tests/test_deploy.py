"""Files below deploy/ fit bei, as far as they show it themselves. Another tier (tests/deploy) renders the chart."""

from __future__ import annotations

import json
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from bei import __version__
from bei.cli import main
from bei.config.settings import ServeConfig
from bei.config.sources import load
from tests.api_docs import page
from tests.deploy.files import CHART, COMPOSE, DEPLOY, ROOT, SCHEMA, TEMPLATES
from tests.deploy.settings_schema import OF_VALUES, settings_schema
from tests.support.scraped import scraped
from tests.test_docs import commands_of

DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
TEXT = "\n".join(path.read_text("utf-8") for path in TEMPLATES)
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
VALUES_SCHEMA: dict[str, Any] = json.loads(SCHEMA.read_text("utf-8"))
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
ROUTES = {path for path, item in page()["paths"].items() if "get" in item}


# The chart


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == __version__


def test_the_settings_of_the_schema_are_those_of_the_server() -> None:
    assert VALUES_SCHEMA["properties"]["settings"] == settings_schema(), "run python -m tests.deploy.settings_schema"
    assert {*settings_schema()["properties"]} | OF_VALUES == {*ServeConfig.__dataclass_fields__}


def unlike(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Keys that only one of both has."""
    properties = schema["properties"]
    for key in values.keys() ^ properties.keys() - {"global"}:
        yield f"{path}{key}"
    for key in values.keys() & properties.keys():
        if values[key] and isinstance(values[key], dict) and "properties" in properties[key]:
            yield from unlike(values[key], properties[key], f"{path}{key}.")


def test_the_schema_has_the_values_that_there_are() -> None:
    assert [*unlike({**VALUES, "settings": {}}, {**VALUES_SCHEMA, "properties": without_settings()})] == []


def without_settings() -> dict[str, Any]:
    return {**VALUES_SCHEMA["properties"], "settings": {"properties": {}}}


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """All schemas that name their properties."""
    if isinstance(schema, dict):
        if "properties" in schema and "type" in schema:
            yield schema
        for value in schema.values():
            yield from objects_in(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects_in(value)


def test_the_schema_refuses_unknown_keys_everywhere() -> None:
    found = [*objects_in(VALUES_SCHEMA)]
    assert len(found) > 20
    assert all(one["additionalProperties"] is False for one in found)


def test_templates_set_variables_that_are_settings() -> None:
    named = {name.lower() for name in re.findall(r"BEI_([A-Z_]+[A-Z])\b", TEXT)}
    assert named >= {"host", "port", "models", "cache_dir"}
    assert named <= {*ServeConfig.__dataclass_fields__}


def test_templates_know_the_defaults_of_settings() -> None:
    defaults = re.findall(r'dig "(\w+)" (\d+) ', TEXT)
    assert {name for name, _ in defaults} == {"interactive_max_wait", "bulk_max_wait", "hang_timeout"}
    for name, number in defaults:
        assert getattr(ServeConfig(), name) == int(number), name


def test_templates_ask_routes_and_metrics_that_there_are() -> None:
    assert set(re.findall(r'"path" "([^"]+)"', TEXT)) == {"/ready", "/health"} <= ROUTES
    assert set(re.findall(r"bei_\w+", TEXT)) == {"bei_drain_seconds"}
    assert re.search(r'^bei_drain_seconds{lane="interactive",model="\w+"} ', scraped(), re.M)


def test_keda_counts_the_pods_of_its_release_alone() -> None:
    (given,) = re.findall(r'pod=~"({{.*?}}[^"]+)"', TEXT)
    names = re.sub(r"{{.*}}", "bei", given)
    assert re.fullmatch(names, "bei-7d9f8b6c5-x2v4q")
    assert not re.fullmatch(names, "bei-eu-7d9f8b6c5-x2v4q")


def test_the_user_is_the_image_s() -> None:
    (uid,) = set(re.findall(r"--uid (\d+)", DOCKERFILE))
    assert set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", TEXT)) == {uid}
    assert SERVICES["bei"]["user"] == f"{uid}:{uid}"


class _Unix(socketserver.ThreadingUnixStreamServer):
    status = 200
    asked: list[tuple[str, str]]


@pytest.fixture
def unix(tmp_path: Path) -> Iterator[_Unix]:
    """An HTTP server on a unix socket, which notes what it is asked."""

    class Handler(BaseHTTPRequestHandler):
        server: _Unix

        def do_GET(self) -> None:
            self.server.asked.append((self.path, self.headers["X-Bei-Dialect"]))
            self.send_response(self.server.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def address_string(self) -> str:
            return ""

    server = _Unix(str(tmp_path / "bei.sock"), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_probe_by_a_unix_socket_asks_and_fails_as_it_should(unix: _Unix) -> None:
    """As no kubelet has a client's certificate. The script is run as it stands in the template."""
    block = TEXT.split("    - -c\n    - |\n")[1].split("{{- else -}}")[0]
    script = "\n".join(line.removeprefix(" " * 6) for line in block.splitlines())
    script = script.replace("{{ .path }}", "/ready").replace("/tmp/bei.sock", str(unix.server_address))

    def code() -> int:
        return subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True).returncode

    assert code() == 0
    unix.status = 503
    assert code() == 1
    assert unix.asked == [("/ready", "bei")] * 2


def test_the_job_has_flags_of_the_command() -> None:
    parser = commands_of(main._parser("embed"))["embed"]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {"--input", "--output", "--shard"} <= flags


# Compose


def grace_s(config: ServeConfig) -> float:
    return max(config.interactive_max_wait, config.bulk_max_wait) + config.hang_timeout


def test_compose_runs_bei_with_settings_and_within_its_image() -> None:
    bei = SERVICES["bei"]
    config = load(ServeConfig, {}, env=bei["environment"])
    assert bei["image"] == f"bei:{__version__}"
    assert (COMPOSE.parent / bei["build"] / "Dockerfile").samefile(ROOT / "Dockerfile")
    assert int(bei["stop_grace_period"].removesuffix("s")) > grace_s(config)
    (mapping,) = bei["ports"]
    assert mapping.endswith(f":{re.findall(r'BEI_PORT=([0-9]+)', DOCKERFILE)[0]}")
    (place,) = [volume.split(":")[1] for volume in bei["volumes"]]
    assert f"install -d -o bei -g bei {place}" in DOCKERFILE  # else the volume is root's
    assert bei["read_only"] is True
    assert bei["cap_drop"] == ["ALL"]
    assert "/tmp" in bei["tmpfs"]


def test_what_compose_refers_to_is_there() -> None:
    volumes = yaml.safe_load(COMPOSE.read_text("utf-8"))["volumes"]
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        for source, target, *_ in (volume.split(":") for volume in service["volumes"]):
            assert target.startswith("/")
            assert (DEPLOY / source).exists() if source.startswith(".") else source in volumes, source
    assert SERVICES["prometheus"]["depends_on"]["bei"]["condition"] == "service_healthy"
    assert "HEALTHCHECK" in DOCKERFILE
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def provisioned(target: str) -> Any:
    """The content of the file that Compose mounts on ``target``."""
    mounts = [volume.split(":") for service in SERVICES.values() for volume in service["volumes"]]
    (source,) = [mount[0] for mount in mounts if mount[1] == target]
    return yaml.safe_load((DEPLOY / source).read_text("utf-8"))


def test_prometheus_scrapes_bei() -> None:
    (scraping,) = provisioned("/etc/prometheus/prometheus.yml")["scrape_configs"]
    assert scraping["static_configs"] == [{"targets": ["bei:8000"]}]
    assert scraping["metrics_path"] in ROUTES


def test_grafana_has_the_dashboard_and_its_source() -> None:
    (source,) = provisioned("/etc/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (provider,) = provisioned("/etc/grafana/provisioning/dashboards/bei.yaml")["providers"]
    dashboard = provisioned(f"{provider['options']['path']}/bei.json")
    assert dashboard["uid"] == "bei"
    assert f"/d/{dashboard['uid']}" in COMPOSE.read_text("utf-8")
    (variable,) = [one for one in dashboard["templating"]["list"] if one["type"] == "datasource"]
    assert variable["query"] == source["type"]
    assert all(name.startswith("GF_") for name in SERVICES["grafana"]["environment"])


# KServe

RUNTIME: dict[str, Any] = yaml.safe_load((DEPLOY / "kserve" / "serving-runtime.yaml").read_text("utf-8"))
INFERENCE: dict[str, Any] = yaml.safe_load((DEPLOY / "kserve" / "inference-service.yaml").read_text("utf-8"))


def test_kserve_s_runtime_has_settings_ports_and_routes_that_there_are() -> None:
    (container,) = RUNTIME["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert container["image"] == f"bei:{__version__}"
    env = {one["name"]: one["value"] for one in container["env"]}
    config = load(ServeConfig, {}, env=env)
    assert set(env) - {"XDG_CACHE_HOME"} == {name for name in env if name.startswith("BEI_")}
    assert [port["containerPort"] for port in container["ports"]] == [config.port]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert [probe["path"] for probe in probes] == [*["/v2/health/ready"] * 2, "/v2/health/live"]
    for probe in probes:
        assert f"/{config.dialect}{probe['path']}" in ROUTES
        assert probe["port"] == config.port
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in RUNTIME["spec"]["volumes"]}
    assert config.cache_dir.startswith("/cache/")
    assert {"/tmp", "/cache"} == set(mounts)
    assert RUNTIME["metadata"]["annotations"]["prometheus.kserve.io/port"] == str(config.port)
    assert RUNTIME["metadata"]["annotations"]["prometheus.kserve.io/path"] in ROUTES


def test_kserve_s_service_is_of_the_runtime() -> None:
    model, predictor = INFERENCE["spec"]["predictor"]["model"], INFERENCE["spec"]["predictor"]
    formats = [{key: one[key] for key in ("name", "version")} for one in RUNTIME["spec"]["supportedModelFormats"]]
    assert model["modelFormat"] in formats
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    assert predictor["terminationGracePeriodSeconds"] > grace_s(ServeConfig())


# The page

PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")


def leaf(path: str) -> Any:
    found: Any = VALUES
    for key in path.split("."):
        found = found[key]
    return found


def test_the_page_names_values_that_there_are() -> None:
    table = PAGE.split("| value | |\n")[1].split("\n\n")[0]
    paths = re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)*)`", "\n".join(line.split(" | ")[0] for line in table.splitlines()))
    assert len(paths) > 20
    for path in paths:
        leaf(path)
    assert {path.split(".")[0] for path in paths} | {"nameOverride", "fullnameOverride"} >= set(VALUES)


def test_the_page_s_values_are_of_the_chart() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    for key, value in yaml.safe_load(example).items():
        assert key in VALUES
        allowed = VALUES_SCHEMA["properties"][key].get("properties")
        assert allowed is None or not isinstance(value, dict) or set(value) <= set(allowed), key
