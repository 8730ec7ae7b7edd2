"""Values of the chart: options of each part of it, combined so that every two options of two parts meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

Values = dict[str, Any]

KEYS = {"secretName": "keys"}
TLS = {"secretName": "123", "clientAuth": False}  # a name that YAML takes for a number, unless it is quoted
CA = {"ca": {"secret": {"name": "authority", "key": "ca.crt"}}, "serverName": "bei.search.svc"}
CLAIM = {"claimName": "models", "subPath": "v1"}
MODELS = ["/models/minilm", "/models/reranker"]
EMBED = {"enabled": True, "input": ["/data/in/*.parquet", "s3://a/b"], "output": "/data/out", "claimName": "corpus"}
DOWNLOAD = {"image": "curlimages/curl:8", "command": ["sh", "-c", "curl https://x | tar -x -C /models"], "size": "5Gi"}

# An option is a name and its values, by part.
PARTS: dict[str, dict[str, Values]] = {
    "scale": {
        "fixed": {"replicas": 3},
        "hpa": {"autoscaling": {"kind": "hpa", "waitSeconds": {"bulk": None}}},
        "keda": {"autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://prometheus:9090"}}},
        "keda with a key": {
            "autoscaling": {
                "kind": "keda",
                "waitSeconds": {"interactive": 0.25},
                "keda": {"serverAddress": "https://prometheus", "authentication": "prometheus"},
            }
        },
    },
    "monitor": {
        "none": {},
        "pods": {"metrics": {"monitor": "pod", "labels": {"release": "prometheus"}, "tlsConfig": CA}},
        "service": {
            "metrics": {"monitor": "service", "interval": "30s", "tlsConfig": CA, "dashboard": {"enabled": True}},
        },
    },
    "artifacts": {
        "in the image": {},
        "in a claim": {
            "artifacts": {"persistentVolumeClaim": {"claimName": "models", "subPath": "v1"}},
            "models": MODELS,
        },
        "as an image": {"artifacts": {"image": {"reference": "registry.example/minilm:1"}}, "models": MODELS[:1]},
        "fetched": {
            "artifacts": {"download": DOWNLOAD},
            "models": MODELS,
            "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]},
        },
        "built": {"models": ["org/model"], "huggingFace": {"secretName": "hub"}, "cache": {"gigabytes": 100}},
    },
    "tls": {
        "plain": {},
        "TLS": {"tls": TLS},
        "TLS with clients' certificates": {"tls": {"secretName": "tls", "clientAuth": True}},
    },
    "keys": {
        "none": {},
        "keys": {"apiKeys": KEYS},
        "metrics too": {
            "apiKeys": {"secretName": "keys", "key": "k.yaml"},
            "settings": {"metrics_need_key": True},
            "metrics": {"credentials": {"name": "keys", "key": "prometheus"}},
        },
        "signed": {"signature": {"secretName": "signers", "keys": ["a.pem", "b.pem"]}},
    },
    "device": {
        "cores": {"resources": {"requests": {"cpu": 0.5}, "limits": {"cpu": "500m"}}},
        "GPU": {"gpu": {"count": 1, "runtimeClassName": "nvidia"}},
        "GPUs": {"gpu": {"count": 4}, "tolerations": [{"key": "team", "operator": "Exists"}]},
    },
    "place": {
        "anywhere": {},
        "somewhere": {
            "nodeSelector": {"disk": "fast"},
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "cache": {"storageClassName": "fast"},
            "podLabels": {"team": "search"},
            "podAnnotations": {"a": "1"},
        },
        "with more": {
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
            "extraVolumes": [{"name": "certs", "configMap": {"name": "certs"}}],
            "extraVolumeMounts": [{"name": "certs", "mountPath": "/certs"}],
            "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]},
        },
    },
    "network": {
        "open": {},
        "policy": {"networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 443}]}]}},
        "ingress": {
            "ingress": {"enabled": True, "host": "*.example.com", "className": "nginx", "tlsSecretName": "host"},
            "settings": {"root_path": "/embeddings-api"},
        },
        "balancer": {
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "podDisruptionBudget": {"enabled": False},
        },
    },
    "settings": {
        "as they are": {},
        "large numbers": {"settings": {"max_queue_tokens": 40_000_000, "payload_limit": 10**8, "body_memory": 10**9}},
        "long waits": {"settings": {"bulk_max_wait": 120.5, "interactive_max_wait": 30, "hang_timeout": 0}},
        "those of an engine": {"settings": {"engine_threads": 4, "precision": "fp32", "gpu_megabytes": 900}},
        "lists and words": {"settings": {"cors_origins": ["https://a.example", "https://b.example"], "dialect": "tei"}},
    },
    "work": {
        "a server": {},
        "a Job too": {"embed": {**EMBED, "shards": 2, "parallelism": 8}, "models": MODELS[:1]},
        "a Job alone": {"server": {"enabled": False}, "embed": {**EMBED, "artifact": "org/model"}},
        "names": {"fullnameOverride": "embeddings", "serviceAccount": {"create": False, "name": "shared"}},
    },
}


def merged(*values: Values) -> Values:
    """As Helm does it: maps are merged, anything else is replaced."""
    result: Values = {}
    for one in values:
        for key, value in one.items():
            before = result.get(key)
            result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def _pairs(options: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
    places = enumerate(options)
    return {(one, first, other, second) for (one, first), (other, second) in itertools.combinations(places, 2)}


def combinations() -> Iterator[tuple[str, Values]]:
    """Names and values: few combinations in which any two options of two parts stand together once."""
    names = [tuple(options) for options in PARTS.values()]
    left = set().union(
        *(
            {(one, first, other, second) for first in names[one] for second in names[other]}
            for one, other in itertools.combinations(range(len(names)), 2)
        )
    )
    draw = random.Random(0)
    while left:
        candidates = [tuple(draw.choice(options) for options in names) for _ in range(200)]
        best = max(candidates, key=lambda options: len(_pairs(options) & left))
        if not _pairs(best) & left:
            continue
        left -= _pairs(best)
        values = [PARTS[part][option] for part, option in zip(PARTS, best, strict=True)]
        yield ", ".join(best), merged(*values)


CASES: dict[str, Values] = {"defaults": {}, **dict(combinations())}
