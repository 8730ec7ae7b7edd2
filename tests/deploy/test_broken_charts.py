"""Each cross-check can fail: templates with a mistake that no schema finds are found by the check of that name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bei.errors import ConfigError
from tests.deploy.chart import rendered
from tests.deploy.cross_checks import CHECKS
from tests.deploy.files import CHART
from tests.deploy.matrix import CA, EMBED, PARTS, merged

SERVER_LABEL = "app.kubernetes.io/component: server"
JOB = {"embed": EMBED, "models": ["org/model"]}
HPA, KEDA = PARTS["scale"]["hpa"], PARTS["scale"]["keda"]
MONITOR = {"metrics": {"monitor": "pod", "tlsConfig": CA}}
MTLS = PARTS["tls"]["TLS with clients' certificates"]

# Check, template, what stands there, what is written instead, values.
MISTAKES: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("names", "service.yaml", 'name: {{ include "bei.fullname" . | quote }}', "name: 0bei", {}),
    ("selectors", "service.yaml", 'include "bei.serverLabels" .', 'include "bei.labels" .', {}),
    ("selectors", "_helpers.tpl", f"\n{SERVER_LABEL}", "", JOB),
    ("selectors", "poddisruptionbudget.yaml", 'include "bei.serverLabels" .', 'include "bei.labels" .', {}),
    ("selectors", "monitor.yaml", 'include "bei.serverLabels" .', 'include "bei.labels" .', MONITOR),
    ("ports", "service.yaml", 'targetPort: {{ include "bei.scheme" . }}', "targetPort: web", {}),
    ("ports", "deployment.yaml", "containerPort: 8000", "containerPort: 8080", {}),
    ("ports", "ingress.yaml", 'name: {{ include "bei.scheme" . }}', "name: web", {"ingress": {"enabled": True}}),
    ("ports", "monitor.yaml", '- port: {{ include "bei.scheme" . }}', "- port: metrics", MONITOR),
    ("ports", "networkpolicy.yaml", '- port: {{ include "bei.scheme" . }}', "- port: 80", PARTS["network"]["policy"]),
    (
        "ports",
        "_helpers.tpl",
        'scheme: {{ include "bei.scheme" .root | upper }}',
        "scheme: HTTP",
        {"tls": PARTS["tls"]["TLS"]["tls"]},
    ),
    ("environment", "_helpers.tpl", "- name: BEI_CACHE_MAX_SIZE", "- name: BEI_CACHE_SIZE", {}),
    ("environment", "_helpers.tpl", "- name: XDG_CACHE_HOME", "- name: BEI_HOST", {}),
    ("environment", "_helpers.tpl", "- name: HF_TOKEN", "- name: HUGGING_TOKEN", PARTS["artifacts"]["built"]),
    ("environment", "_helpers.tpl", "{{ toJson . }}", "{{ toString . }}", PARTS["settings"]["large numbers"]),
    ("probes", "deployment.yaml", '"path" "/health"', '"path" "/healthz"', {}),
    ("probes", "deployment.yaml", '"path" "/health"', '"path" "/ready"', {}),
    ("probes", "_helpers.tpl", "- name: X-Bei-Dialect", "- name: X-Dialect", {}),
    ("probes", "_helpers.tpl", "if .root.Values.tls.clientAuth", "if false", MTLS),
    ("probes", "_helpers.tpl", 'connect("/tmp/bei.sock")', 'connect("/run/bei.sock")', MTLS),
    ("probes", "deployment.yaml", "timeoutSeconds: 12", "timeoutSeconds: 1", {}),
    ("grace", "_helpers.tpl", '(include "bei.longestWait" .)', "0", PARTS["settings"]["long waits"]),
    ("grace", "_helpers.tpl", '"bulk_max_wait" 20', '"bulk_max_waits" 20', PARTS["settings"]["long waits"]),
    ("grace", "_helpers.tpl", "add .Values.preStopSeconds", "add 0", {"preStopSeconds": 300}),
    ("autoscaler", "deployment.yaml", 'if eq .Values.autoscaling.kind "none"', "if true", HPA),
    ("autoscaler", "horizontalpodautoscaler.yaml", "name: bei_drain_seconds", "name: bei_drain_second", HPA),
    ("autoscaler", "horizontalpodautoscaler.yaml", "lane: {{ $lane }}", "queue: {{ $lane }}", HPA),
    ("autoscaler", "scaledobject.yaml", "bei_drain_seconds", "bei_wait_seconds", KEDA),
    ("autoscaler", "scaledobject.yaml", 'lane="{{ $lane }}"', 'queue="{{ $lane }}"', KEDA),
    ("autoscaler", "scaledobject.yaml", '{{ include "bei.fullname" $ }}-[^-]+', "bei-[^-]+", KEDA),
    ("autoscaler", "scaledobject.yaml", "query: sum(max", "query: avg(max", KEDA),
    ("monitors", "monitor.yaml", "path: /metrics", "path: /metric", MONITOR),
    (
        "monitors",
        "monitor.yaml",
        "with .Values.metrics.credentials",
        "with .Values.metrics.none",
        merged(MONITOR, PARTS["keys"]["metrics too"]),
    ),
    (
        "monitors",
        "monitor.yaml",
        "if .Values.tls.secretName",
        "if false",
        merged(MONITOR, {"tls": {"secretName": "a"}}),
    ),
    ("security", "_helpers.tpl", "enableServiceLinks: false", "enableServiceLinks: true", {}),
    ("security", "_helpers.tpl", "runAsUser: 10001", "runAsUser: 0", {}),
    ("security", "_helpers.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", {}),
    ("security", "_helpers.tpl", "value: /cache/bei", "value: /home/bei/.cache", {}),
    ("security", "_helpers.tpl", "  mountPath: /tmp\n- name: cache", "  mountPath: /var/tmp\n- name: cache", {}),
    ("volumes", "_helpers.tpl", 'printf "/etc/bei/api-keys/%s"', 'printf "/etc/bei/keys/%s"', PARTS["keys"]["keys"]),
    ("volumes", "deployment.yaml", "mountPath: /etc/bei/tls", "mountPath: /etc/tls", PARTS["tls"]["TLS"]),
    (
        "volumes",
        "deployment.yaml",
        "- name: tls\n              mountPath",
        "- name: cert\n              mountPath",
        PARTS["tls"]["TLS"],
    ),
    ("volumes", "_helpers.tpl", 'printf "/etc/bei/signature/%s"', 'printf "/etc/bei/%s"', PARTS["keys"]["signed"]),
    ("cache", "_helpers.tpl", "(mul .Values.cache.gigabytes 4)", "(mul .Values.cache.gigabytes 8)", {}),
    (
        "cache",
        "_helpers.tpl",
        "  emptyDir:\n    sizeLimit: {{ .Values.cache.gigabytes }}G",
        "  persistentVolumeClaim: {claimName: cache}",
        {},
    ),
    ("job", "embed-job.yaml", "/{{ .shards }}", "/4", merged(JOB, {"embed": {"shards": 5}})),
    (
        "job",
        "embed-job.yaml",
        "min .parallelism .shards",
        "max .parallelism .shards",
        merged(JOB, {"embed": {"shards": 2}}),
    ),
    ("job", "embed-job.yaml", "- --shard", "- --shards", JOB),
    ("job", "_helpers.tpl", '"hang_timeout" -', '"hang" -', merged(JOB, {"settings": {"hang_timeout": 90}})),
    ("job", "embed-job.yaml", "- action: Ignore", "- action: FailJob", JOB),
    ("job", "embed-job.yaml", "completionMode: Indexed", "completionMode: NonIndexed", JOB),
    ("job", "embed-job.yaml", "restartPolicy: Never", "restartPolicy: OnFailure", JOB),
]


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """A copy of the chart."""
    return shutil.copytree(CHART, tmp_path / "bei")


@pytest.mark.parametrize(
    ("check", "name", "there", "instead", "values"),
    MISTAKES,
    ids=[f"{check}: {instead[:40] or 'nothing'}" for check, _, _, instead, _ in MISTAKES],
)
def test_a_mistake_in_a_template_is_found(
    chart: Path, check: str, name: str, there: str, instead: str, values: dict[str, Any]
) -> None:
    CHECKS[check](rendered(values))  # without the mistake
    template = chart / "templates" / name
    text = template.read_text("utf-8")
    assert there in text
    template.write_text(text.replace(there, instead), "utf-8")
    objects = rendered(values, chart=chart)
    with pytest.raises((AssertionError, KeyError, ValueError, ConfigError)):
        CHECKS[check](objects)


def test_every_check_is_seen_to_fail() -> None:
    assert {check for check, *_ in MISTAKES} == set(CHECKS)
