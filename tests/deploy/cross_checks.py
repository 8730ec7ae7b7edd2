"""What a schema cannot say of rendered objects: that they fit each other, and that they fit bei.

A check is called with all objects of a release, and raises AssertionError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import promql_parser

from bei.cli import main
from bei.cli.embed.arguments import SETTINGS
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.utils.units import parsed_size
from tests.api_docs import page
from tests.support.scraped import scraped

Object = dict[str, Any]
Objects = list[Object]
Labels = dict[str, str]

SERVER = ("Deployment",)
WORKLOADS = ("Deployment", "Job")

# Variables beside BEI_*: of huggingface_hub (docs/reference.md), and of an Indexed Job.
OTHER_VARIABLES = frozenset(("HF_TOKEN", "XDG_CACHE_HOME", "JOB_COMPLETION_INDEX"))

# Labels that the Prometheus operator adds to what it scrapes.
OF_OPERATOR = frozenset(("namespace", "pod"))


def of_kind(objects: Objects, *kinds: str) -> Objects:
    """Those of ``kinds``."""
    return [one for one in objects if one["kind"] in kinds]


def pod_of(workload: Object) -> Object:
    """The specification of the workload's pods."""
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Object) -> Object:
    """The container that runs bei."""
    (container,) = pod_of(workload)["containers"]
    found: Object = container
    return found


def environment(workload: Object) -> dict[str, str]:
    """Variables with their values; of one that comes from elsewhere the place."""
    return {one["name"]: one.get("value", str(one.get("valueFrom"))) for one in container_of(workload)["env"]}


def config_of(server: Object) -> ServeConfig:
    """The settings that the server would have. Raises ConfigError."""
    return load(ServeConfig, {}, env=environment(server))


@cache
def gets() -> frozenset[str]:
    """Paths of routes that answer GET."""
    return frozenset(path for path, item in page()["paths"].items() if "get" in item)


@cache
def metrics() -> dict[str, set[str]]:
    """The names in a live /metrics, with their labels."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([\w:]+)(?:{(.*)})? ", scraped(), re.M):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def check_names(objects: Objects) -> None:
    """Names are unique, and short enough to be labels."""
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    for kind, name in names:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(name) <= 63, name
        assert kind != "Service" or not name[0].isdigit()


def check_selectors(objects: Objects) -> None:
    """What selects the server's pods selects these and no others."""
    servers = of_kind(objects, *SERVER)
    labels = [server["spec"]["template"]["metadata"]["labels"] for server in servers]
    others = [job["spec"]["template"]["metadata"]["labels"] for job in of_kind(objects, "Job")]
    for one in of_kind(objects, "Deployment", "PodDisruptionBudget", "PodMonitor"):
        check_selects(one["spec"]["selector"]["matchLabels"], labels, others, one)
    for one in of_kind(objects, "Service"):
        check_selects(one["spec"]["selector"], labels, others, one)
    for one in of_kind(objects, "ServiceMonitor"):
        services = [service["metadata"]["labels"] for service in of_kind(objects, "Service")]
        check_selects(one["spec"]["selector"]["matchLabels"], services, [], one)
    for one in of_kind(objects, "NetworkPolicy"):
        check_selects(one["spec"]["podSelector"]["matchLabels"], labels + others, [], one)
    for server, own in zip(servers, labels, strict=True):
        for constraint in pod_of(server)["topologySpreadConstraints"]:
            check_selects(constraint["labelSelector"]["matchLabels"], [own], others, server)


def check_selects(selector: Labels, labels: list[Labels], others: list[Labels], by: Object) -> None:
    """Fails unless ``selector`` fits all of ``labels`` and none of ``others``."""
    what = f"the selector of {by['kind']}"
    assert selector, what
    assert labels, what
    for one in labels:
        assert selector.items() <= one.items(), what
    for one in others:
        assert not selector.items() <= one.items(), f"{what} selects pods of the Job"


def check_ports(objects: Objects) -> None:
    """The server listens on the port of the container, and every other port leads there by its name."""
    for server in of_kind(objects, *SERVER):
        ((name, number),) = [(one["name"], one["containerPort"]) for one in container_of(server)["ports"]]
        assert number == config_of(server).port
        assert config_of(server).host == "0.0.0.0"
        assert (name == "https") == (config_of(server).tls_cert is not None)
        (service,) = of_kind(objects, "Service")
        ((port),) = service["spec"]["ports"]
        assert port["targetPort"] == name, "the Service's target"
        for one in of_kind(objects, "PodMonitor"):
            assert [(end["port"], end["scheme"]) for end in one["spec"]["podMetricsEndpoints"]] == [(name, name)]
        for one in of_kind(objects, "ServiceMonitor"):
            assert [(end["port"], end["scheme"]) for end in one["spec"]["endpoints"]] == [(port["name"], name)]
        for one in of_kind(objects, "NetworkPolicy"):
            assert [given["port"] for rule in one["spec"]["ingress"] for given in rule["ports"]] == [name]
        for one in of_kind(objects, "Ingress"):
            for backend in backends_of(one):
                assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
        for probe in probes_of(server):
            assert "httpGet" not in probe or (probe["httpGet"]["port"], probe["httpGet"]["scheme"]) == (
                name,
                name.upper(),
            )


def backends_of(ingress: Object) -> list[Object]:
    """The services behind its paths."""
    return [path["backend"]["service"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]


def check_environment(objects: Objects) -> None:
    """Variables are settings, with values that the server takes, and no variable is set twice."""
    for workload in of_kind(objects, *WORKLOADS):
        names = [one["name"] for one in container_of(workload)["env"]]
        assert len(set(names)) == len(names), names
        settings = {name.removeprefix("BEI_").lower() for name in names if name.startswith("BEI_")}
        assert settings <= {*ServeConfig.__dataclass_fields__}, settings
        assert {name for name in names if not name.startswith("BEI_")} <= OTHER_VARIABLES | {"HTTPS_PROXY"}
        config_of(workload)


def probes_of(server: Object) -> list[Object]:
    """Startup, readiness, liveness."""
    return [container_of(server)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]


def check_probes(objects: Objects) -> None:
    """Probes ask routes that there are, of bei's own dialect, by TLS where the server has it, and wait for a canary."""
    for server in of_kind(objects, *SERVER):
        paths = []
        for probe in probes_of(server):
            assert probe["timeoutSeconds"] >= 12  # a canary may take 10
            if "httpGet" in probe:
                paths.append(probe["httpGet"]["path"])
                assert probe["httpGet"]["httpHeaders"] == [{"name": "X-Bei-Dialect", "value": "bei"}]
                assert config_of(server).tls_client_ca is None, "the kubelet has no certificate"
            else:
                script = probe["exec"]["command"][-1]
                assert str(config_of(server).uds) in script
                assert '{"X-Bei-Dialect": "bei"}' in script
                paths += re.findall(r'"GET", "([^"]+)"', script)
        assert set(paths) <= gets(), paths
        assert paths == ["/ready", "/ready", "/health"]
        startup = container_of(server)["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 60


def check_grace(objects: Objects) -> None:
    """A pod that is removed has time for what it has accepted."""
    for server in of_kind(objects, *SERVER):
        hook = container_of(server).get("lifecycle", {}).get("preStop", {})
        pause_s = hook["sleep"]["seconds"] if "sleep" in hook else int(hook["exec"]["command"][1]) if hook else 0
        config = config_of(server)
        waits_s = max(config.interactive_max_wait, config.bulk_max_wait) + config.hang_timeout
        assert pod_of(server)["terminationGracePeriodSeconds"] > pause_s + math.ceil(waits_s)


def check_autoscaler(objects: Objects) -> None:
    """Replicas are fixed or scaled, not both; what scales them knows the Deployment, and metrics that there are."""
    scalers = of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    for server in of_kind(objects, *SERVER):
        assert ("replicas" in server["spec"]) == (not scalers), "replicas beside an autoscaler"
    for scaler in scalers:
        (server,) = of_kind(objects, *SERVER)
        assert scaler["spec"]["scaleTargetRef"]["name"] == server["metadata"]["name"]
        config = config_of(server)
        longest_s = {"interactive": config.interactive_max_wait, "bulk": config.bulk_max_wait}
        for lane, wait_s in targets_of(scaler):
            assert 0 < wait_s < longest_s[lane], "requests are refused before a replica is added"


def targets_of(scaler: Object) -> Iterator[tuple[str, float]]:
    """Lanes, and the wait of each at which replicas are added; of metrics that there are."""
    if scaler["kind"] == "HorizontalPodAutoscaler":
        assert scaler["spec"]["metrics"]
        for one in scaler["spec"]["metrics"]:
            metric, labels = one["pods"]["metric"]["name"], one["pods"]["metric"]["selector"]["matchLabels"]
            assert set(labels) <= metrics()[metric], labels
            yield labels["lane"], int(one["pods"]["target"]["averageValue"].removesuffix("m")) / 1000
        return
    assert scaler["spec"]["triggers"]
    for trigger in scaler["spec"]["triggers"]:
        assert trigger["metricType"] == "AverageValue"  # of a sum over pods
        query = trigger["metadata"]["query"]
        selectors = check_query(query)
        assert query.startswith("sum("), query
        (lane,) = [one.value for selector in selectors for one in selector.matchers.matchers if one.name == "lane"]
        (namespace,) = [one.value for one in selectors[0].matchers.matchers if one.name == "namespace"]
        assert namespace == "search"
        (pods,) = [one.value for one in selectors[0].matchers.matchers if one.name == "pod"]
        assert re.fullmatch(pods, f"{scaler['spec']['scaleTargetRef']['name']}-5d4f-x1z2")
        yield lane, float(trigger["metadata"]["threshold"])


def check_query(query: str) -> list[promql_parser.VectorSelector]:
    """Fails unless ``query`` is PromQL over metrics and labels of a server. Returns its selectors."""
    nodes: list[Any] = []
    promql_parser.walk(promql_parser.parse(query), nodes.append)
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    assert selectors, query
    for selector in selectors:
        assert selector.name in metrics(), f"no such metric: {selector.name}"
        names = {one.name for one in selector.matchers.matchers}
        assert names <= metrics()[selector.name] | OF_OPERATOR, names
    return selectors


def check_monitors(objects: Objects) -> None:
    """Prometheus asks a route that there is, with a key where it needs one."""
    for one in of_kind(objects, "PodMonitor", "ServiceMonitor"):
        (server,) = of_kind(objects, *SERVER)
        for end in one["spec"].get("podMetricsEndpoints", one["spec"].get("endpoints")):
            assert end["path"] in gets()
            assert "/metrics" in end["path"]
            assert ("authorization" in end) or not config_of(server).metrics_need_key
            assert ("tlsConfig" in end) == (config_of(server).tls_cert is not None)


def check_security(objects: Objects) -> None:
    """Pods run as a numbered user without privileges, and write only where a volume is."""
    for workload in of_kind(objects, *WORKLOADS):
        pod = pod_of(workload)
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
            assert "/tmp" in writable
        env, places = environment(workload), writable_of(workload)
        for name in ("BEI_CACHE_DIR", "XDG_CACHE_HOME"):
            assert any(env[name] == place or env[name].startswith(f"{place}/") for place in places), name


def writable_of(workload: Object) -> set[str]:
    """Folders in which bei may write."""
    return {one["mountPath"] for one in container_of(workload)["volumeMounts"] if not one.get("readOnly")}


def check_volumes(objects: Objects) -> None:
    """Volumes are mounted and mounts have volumes; files that settings name lie in one."""
    for workload in of_kind(objects, *WORKLOADS):
        pod = pod_of(workload)
        containers = (*pod["containers"], *pod.get("initContainers", ()))
        mounted = {one["name"] for container in containers for one in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        paths = [one["mountPath"] for one in container_of(workload)["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        config = config_of(workload)
        files = [config.tls_cert, config.tls_key, config.tls_client_ca, config.api_keys_file]
        for file in (*files, *(config.require_signature or ()), config.uds):
            assert file is None or any(file.startswith(f"{path}/") for path in paths), file


def check_cache(objects: Objects) -> None:
    """Each replica has a cache of its own, which is larger than what bei keeps in it."""
    for workload in of_kind(objects, *WORKLOADS):
        (volume,) = [one for one in pod_of(workload)["volumes"] if one["name"] == "cache"]
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"]
        else:
            size = volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
        assert 0 < parsed_size("cache", environment(workload)["BEI_CACHE_MAX_SIZE"]) < parsed_size("cache", size)


def check_job(objects: Objects) -> None:
    """Every shard is somebody's, by its index."""
    for job in of_kind(objects, "Job"):
        spec, arguments = job["spec"], container_of(job)["args"]
        assert spec["completionMode"] == "Indexed"
        assert arguments[0] == "embed"
        shard = arguments[arguments.index("--shard") + 1]
        assert shard == f"$(JOB_COMPLETION_INDEX)/{spec['completions']}"
        assert spec["parallelism"] <= spec["completions"]
        assert pod_of(job)["restartPolicy"] == "Never"  # backoffLimitPerIndex needs it
        assert "batch.kubernetes.io/job-completion-index" in environment(job)["JOB_COMPLETION_INDEX"]
        # A full disk and a bucket that does not answer have the exit code of wrong flags: all are tried again.
        assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore"]
        parsed = main._parser("embed").parse_args(["embed", *arguments[1:]])
        assert parsed.input == [
            word for word in arguments[arguments.index("--input") + 1 : arguments.index("--output")]
        ]
        config_of(job)
        for server in of_kind(objects, *SERVER):
            own, others = environment(job), environment(server)
            for name in sorted(SETTINGS):
                assert own.get(f"BEI_{name.upper()}") == others.get(f"BEI_{name.upper()}"), name


CHECKS: dict[str, Callable[[Objects], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        *(check_names, check_selectors, check_ports, check_environment, check_probes, check_grace, check_autoscaler),
        *(check_monitors, check_security, check_volumes, check_cache, check_job),
    )
}
