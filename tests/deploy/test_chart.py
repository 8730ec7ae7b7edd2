"""The chart in all combinations of its values: strict schemas of Kubernetes, and what schemas cannot say."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from bei import __version__
from tests.deploy.chart import NEWEST, OLDEST, Object, rendered
from tests.deploy.cross_checks import CHECKS, container_of, environment, of_kind, pod_of
from tests.deploy.files import CHART, ROOT
from tests.deploy.matrix import CASES, EMBED, MODELS, PARTS, Values, merged

# Validated as what they are by tests/deploy/test_custom_resources.py.
CUSTOM = ("ScaledObject", "PodMonitor", "ServiceMonitor")

# Cases by their names, and versions. Images as volumes came later than the oldest.
RENDERINGS = [
    (name, version) for name in CASES for version in (OLDEST, NEWEST) if version == NEWEST or "as an image" not in name
]
EACH = pytest.mark.parametrize(
    ("name", "version"), RENDERINGS, ids=[f"{version}: {name}" for name, version in RENDERINGS]
)


@cache
def objects_of(name: str, version: str) -> list[Object]:
    return rendered(CASES[name], version)


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Any:
    """The package reads a file of megabytes for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def test_the_newest_schemas_are_used() -> None:
    assert kubernetes_validate.utils.major_minor(kubernetes_validate.latest_version()) == NEWEST


@EACH
def test_objects_fit_the_strict_schemas(name: str, version: str) -> None:
    kinds = set()
    for one in objects_of(name, version):
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, version, strict=True)
            kinds.add(one["kind"])
    assert kinds & {"Deployment", "Job"}


@pytest.mark.parametrize("check", CHECKS)
@EACH
def test_objects_fit_each_other_and_bei(name: str, version: str, check: str) -> None:
    CHECKS[check](objects_of(name, version))


def test_the_matrix_has_every_option() -> None:
    for options in PARTS.values():
        for option in options:
            assert any(option in name for name in CASES)
    kinds = {one["kind"] for name in CASES for one in objects_of(name, NEWEST)}
    assert kinds == {
        *("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject"),
        *("PodMonitor", "ServiceMonitor", "NetworkPolicy", "Ingress", "Job", "ConfigMap"),
    }


def test_lint_finds_nothing() -> None:
    report = helm_python.lint(CHART, strict=True, kube_version=f"v{NEWEST}.0")
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_the_dashboard_is_the_committed_one() -> None:
    (found,) = of_kind(rendered({"metrics": {"dashboard": {"enabled": True}}}), "ConfigMap")
    assert json.loads(found["data"]["bei.json"]) == json.loads(
        (ROOT / "dashboards" / "grafana.json").read_text("utf-8")
    )
    assert len(found["data"]["bei.json"]) < 900_000  # a ConfigMap holds a megabyte


def test_the_page_s_values_and_commands_render() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    values = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.S)[0])
    commands = [shlex.split(line) for line in page.replace("\\\n", "").splitlines() if line.startswith("helm ")]
    kinds = []
    for command in commands:
        given = [helm_python.parse_set_string(word) for flag, word in itertools.pairwise(command) if flag == "--set"]
        kinds.append({one["kind"] for one in rendered(merged(values, *given))})
    served = {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "ScaledObject", "PodMonitor"}
    assert kinds == [served, served, {"ServiceAccount", "Job"}]


def test_the_package_is_whole(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)
    helm_python.expand(tmp_path, archive)
    assert rendered(CASES[RENDERINGS[-1][0]], chart=tmp_path / "bei") == rendered(CASES[RENDERINGS[-1][0]])


@pytest.mark.parametrize("release", ["a", "search-bei", "x" * 53])
def test_names_of_any_release_are_short_enough(release: str) -> None:
    objects = rendered({"embed": EMBED, "models": MODELS, "metrics": {"dashboard": {"enabled": True}}}, release=release)
    for check in ("names", "selectors"):
        CHECKS[check](objects)


def test_the_chart_is_of_this_version() -> None:
    (server,) = of_kind(rendered({}), "Deployment")
    assert container_of(server)["image"] == f"bei:{__version__}"


# A part of the message, and values that it refuses.
REFUSED: dict[str, dict[str, Any]] = {
    "additional properties 'replica' not allowed": {"replica": 3},
    "additional properties 'max_wait' not allowed": {"settings": {"max_wait": 3}},
    "got string, want integer": {"replicas": "3"},
    "additional properties 'models' not allowed": {"settings": {"models": ["a"]}},
    "value must be one of 'text', 'json'": {"settings": {"log_format": "xml"}},
    "maximum: got 65,536": {"service": {"port": 65536}},
    "exclusiveMaximum": {"settings": {"bulk_share": 1}},
    "maxProperties: got 2": {"artifacts": {"persistentVolumeClaim": {"claimName": "a"}, "image": {"reference": "b"}}},
    "invalid propertyName 'app.kubernetes.io/name'": {"podLabels": {"app.kubernetes.io/name": "other"}},
    "invalid propertyName 'helm.sh/chart'": {"metrics": {"labels": {"helm.sh/chart": "other"}}},
    "/extraEnv/0/name": {"extraEnv": [{"name": "BEI_PORT", "value": "1"}]},
    "name those to serve in models": {"artifacts": {"persistentVolumeClaim": {"claimName": "a"}}},
    "tls.clientAuth needs tls.secretName": {"tls": {"clientAuth": True}},
    "signature.secretName needs signature.keys": {"signature": {"secretName": "a"}},
    "metrics_need_key needs apiKeys.secretName": {"settings": {"metrics_need_key": True}},
    "give Prometheus a key": {
        "settings": {"metrics_need_key": True},
        "apiKeys": {"secretName": "a"},
        "metrics": {"monitor": "pod"},
    },
    "how Prometheus verifies the server": {"tls": {"secretName": "a"}, "metrics": {"monitor": "service"}},
    "maxReplicas is less than": {"autoscaling": {"kind": "hpa", "minReplicas": 3, "maxReplicas": 2}},
    "waitSeconds.bulk is not below settings.bulk_max_wait": {
        "autoscaling": {"kind": "hpa"},
        "settings": {"bulk_max_wait": 10},
    },
    "waitSeconds has no lane": {"autoscaling": {"kind": "hpa", "waitSeconds": {"interactive": None, "bulk": None}}},
    "needs autoscaling.keda.serverAddress": {"autoscaling": {"kind": "keda"}},
    "allow it in networkPolicy.egress": merged(
        PARTS["artifacts"]["fetched"], {"networkPolicy": {"enabled": True, "egress": []}}
    ),
    "embed needs embed.input and embed.output": {"embed": {"enabled": True}},
    "embed needs embed.artifact, or models": {"embed": EMBED},
    "embed connects to a bucket": {"embed": EMBED, "models": MODELS, "networkPolicy": {"enabled": True}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_values_that_would_not_work_are_refused(message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered(REFUSED[message])
    assert message in str(refused.value)


def test_an_image_as_a_volume_needs_a_newer_kubernetes() -> None:
    with pytest.raises(helm_python.HelmError, match=r"needs Kubernetes 1\.33 or later"):
        rendered(PARTS["artifacts"]["as an image"], OLDEST)


def test_another_job_is_made_where_its_pods_would_be_others_and_only_there() -> None:
    """Of a Job that is there the template cannot change: helm upgrade would fail."""
    values = {"embed": EMBED, "models": MODELS}

    def job_with(other: Values) -> dict[str, Any]:
        (job,) = of_kind(rendered(merged(values, other)), "Job")
        return job

    before = job_with({})
    others: tuple[Values, ...] = ({"replicas": 9}, {"settings": {"root_path": "/a"}}, {"apiKeys": {"secretName": "a"}})
    assert all(job_with(other) == before for other in others)
    changes: list[Values] = [{"embed": {"shards": 5}}, {"settings": {"engine_threads": 2}}, {"models": ["org/other"]}]
    changes += [{"resources": {"limits": {"cpu": 9}}}, {"podLabels": {"a": "b"}}, {"extraEnv": [{"name": "A"}]}]
    found = [job_with(change) for change in changes]
    assert len({job["metadata"]["name"] for job in (before, *found)}) == 1 + len(changes)


def test_a_pod_of_the_job_has_one_gpu() -> None:
    """It is a process with one engine; the replicas of the server have a process for each GPU."""
    values = {"embed": EMBED, "models": MODELS, "gpu": {"count": 4}}
    limits = {
        workload["kind"]: container_of(workload)["resources"]["limits"]["nvidia.com/gpu"]
        for workload in of_kind(rendered(values), "Deployment", "Job")
    }
    assert limits == {"Deployment": 4, "Job": 1}


def test_large_numbers_are_written_out() -> None:
    (server,) = of_kind(rendered({"settings": {"max_queue_tokens": 40_000_000, "bulk_share": 0.05}}), "Deployment")
    env = environment(server)
    assert (env["BEI_MAX_QUEUE_TOKENS"], env["BEI_BULK_SHARE"]) == ("40000000", "0.05")


def test_several_gpus_have_an_engine_each() -> None:
    (server,) = of_kind(rendered({"gpu": {"count": 3}}), "Deployment")
    assert container_of(server)["resources"]["limits"]["nvidia.com/gpu"] == 3
    assert environment(server)["BEI_DEVICES"] == "0,1,2"
    assert {one["key"] for one in pod_of(server)["tolerations"]} == {"nvidia.com/gpu"}
    (server,) = of_kind(rendered({"gpu": {"count": 2}, "settings": {"devices": ["1"]}}), "Deployment")
    assert environment(server)["BEI_DEVICES"] == "1"


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Paths of the values that are no maps with content."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        found |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


DEFAULTS = leaves(yaml.safe_load((CHART / "values.yaml").read_text("utf-8")))


def test_the_chart_reads_its_own_defaults() -> None:
    with helm_python.Chart.load(CHART) as chart:
        assert leaves(chart.values) == DEFAULTS
