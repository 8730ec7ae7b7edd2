"""Every value of values.yaml changes what is rendered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.chart import rendered
from tests.deploy.matrix import CA, DOWNLOAD, EMBED, Values, merged
from tests.deploy.test_chart import DEFAULTS

HPA = {"autoscaling": {"kind": "hpa"}}
KEDA = {"autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://prometheus:9090"}}}
MONITOR = {"metrics": {"monitor": "pod"}}
ENCRYPTED = {"tls": {"secretName": "a"}, "metrics": {"monitor": "pod", "tlsConfig": CA}}
INGRESS = {"ingress": {"enabled": True}}
JOB = {"embed": {**EMBED, "artifact": "org/model"}}
POLICY = {"networkPolicy": {"enabled": True}}

# Another value, and what has to be set for it to matter.
OTHERS: dict[str, tuple[Any, Values]] = {
    "nameOverride": ("other", {}),
    "fullnameOverride": ("other", {}),
    "image.repository": ("other", {}),
    "image.tag": ("2", {}),
    "image.digest": ("sha256:" + "a" * 64, {}),
    "image.pullPolicy": ("Always", {}),
    "image.pullSecrets": (["a"], {}),
    "server.enabled": (False, {}),
    "models": (["org/model"], {}),
    "artifacts": ({"download": DOWNLOAD}, {"models": ["/models/a"]}),
    "settings.log_format": ("text", {}),
    "extraEnv": ([{"name": "A", "value": "b"}], {}),
    "replicas": (5, {}),
    "autoscaling.kind": ("hpa", {}),
    "autoscaling.minReplicas": (3, HPA),
    "autoscaling.maxReplicas": (20, HPA),
    "autoscaling.waitSeconds.interactive": (2, HPA),
    "autoscaling.waitSeconds.bulk": (None, KEDA),
    "autoscaling.scaleDownSeconds": (60, KEDA),
    "autoscaling.keda.serverAddress": ("https://other", KEDA),
    "autoscaling.keda.pollingIntervalSeconds": (30, KEDA),
    "autoscaling.keda.authentication": ("a", KEDA),
    "resources.requests.cpu": (1, {}),
    "resources.requests.memory": ("1Gi", {}),
    "resources.limits.cpu": (8, {}),
    "resources.limits.memory": ("4Gi", {}),
    "gpu.count": (1, {}),
    "gpu.resourceName": ("nvidia.com/mig-1g.10gb", {"gpu": {"count": 1}}),
    "gpu.runtimeClassName": ("nvidia", {}),
    "cache.gigabytes": (20, {}),
    "cache.storageClassName": ("fast", {}),
    "startupMinutes": (5, {}),
    "preStopSeconds": (0, {}),
    "longestRequestSeconds": (600, {}),
    "updateStrategy.maxSurge": ("50%", {}),
    "updateStrategy.maxUnavailable": (1, {}),
    "podDisruptionBudget.enabled": (False, {}),
    "podDisruptionBudget.maxUnavailable": ("25%", {}),
    "service.type": ("NodePort", {}),
    "service.port": (8080, {}),
    "service.annotations": ({"a": "b"}, {}),
    "ingress.enabled": (True, {}),
    "ingress.className": ("nginx", INGRESS),
    "ingress.annotations": ({"a": "b"}, INGRESS),
    "ingress.host": ("a.example", INGRESS),
    "ingress.tlsSecretName": ("a", INGRESS),
    "apiKeys.secretName": ("a", {}),
    "apiKeys.key": ("other.yaml", {"apiKeys": {"secretName": "a"}}),
    "tls.secretName": ("a", {}),
    "tls.clientAuth": (True, {"tls": {"secretName": "a"}}),
    "signature.secretName": ("a", {"signature": {"keys": ["a.pem"]}}),
    "signature.keys": (["b.pem"], {"signature": {"secretName": "a", "keys": ["a.pem"]}}),
    "huggingFace.secretName": ("a", {}),
    "huggingFace.key": ("other", {"huggingFace": {"secretName": "a"}}),
    "metrics.monitor": ("pod", {}),
    "metrics.interval": ("60s", MONITOR),
    "metrics.labels": ({"a": "b"}, MONITOR),
    "metrics.credentials": ({"name": "a", "key": "b"}, MONITOR),
    "metrics.tlsConfig": ({"insecureSkipVerify": True}, ENCRYPTED),
    "metrics.dashboard.enabled": (True, {}),
    "metrics.dashboard.labels.grafana_dashboard": ("2", {"metrics": {"dashboard": {"enabled": True}}}),
    "networkPolicy.enabled": (True, {}),
    "networkPolicy.clients": ([{"namespaceSelector": {}}], POLICY),
    "networkPolicy.egress": ([{"ports": [{"port": 443}]}], POLICY),
    "serviceAccount.create": (False, {}),
    "serviceAccount.name": ("a", {}),
    "serviceAccount.annotations": ({"a": "b"}, {}),
    "embed.enabled": (True, {"embed": {**JOB["embed"], "enabled": False}}),
    "embed.artifact": ("other", JOB),
    "embed.input": (["s3://a/b"], JOB),
    "embed.output": ("s3://a/c", JOB),
    "embed.shards": (9, JOB),
    "embed.parallelism": (1, JOB),
    "embed.args": (["--text-column", "body"], JOB),
    "embed.claimName": ("other", JOB),
    "embed.retriesPerShard": (0, JOB),
    "embed.ttlSecondsAfterFinished": (0, JOB),
    "podAnnotations": ({"a": "b"}, {}),
    "podLabels": ({"a": "b"}, {}),
    "priorityClassName": ("high", {}),
    "nodeSelector": ({"a": "b"}, {}),
    "tolerations": ([{"operator": "Exists"}], {}),
    "affinity": ({"podAntiAffinity": {}}, {}),
    "extraVolumes": ([{"name": "a", "emptyDir": {}}], {}),
    "extraVolumeMounts": ([{"name": "a", "mountPath": "/a"}], {}),
}


def test_the_table_has_every_value() -> None:
    assert list(OTHERS) == list(DEFAULTS)


@pytest.mark.parametrize("path", OTHERS)
def test_a_value_changes_what_is_rendered(path: str) -> None:
    other, base = OTHERS[path]
    changed: Any = other
    for key in reversed(path.split(".")):
        changed = {key: changed}
    assert rendered(merged(base, changed)) != rendered(base)
