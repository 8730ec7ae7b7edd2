"""Renders the chart with Helm's Go library (PyPI: helm-python-sdk), without Helm's binary and without a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helm_python
import yaml
from helm_python import _native

from tests.deploy.files import CHART

RELEASE, NAMESPACE = "demo", "search"
OLDEST, NEWEST = "1.29", "1.37"

Object = dict[str, Any]


def rendered(
    values: dict[str, Any], kube_version: str = NEWEST, chart: Path = CHART, release: str = RELEASE
) -> list[Object]:
    """The objects that ``helm install`` would send. Raises helm_python.HelmError."""
    options = {"name": release, "namespace": NAMESPACE, "kube_version": f"v{kube_version}.0"}
    with helm_python.Chart.load(chart) as loaded:
        # Chart.render has no parameter for the version of Kubernetes.
        answer = _native.call_string("helm_render", loaded._raw(), json.dumps(values), json.dumps(options))
    texts = [text for name, text in json.loads(answer).items() if not name.endswith("NOTES.txt")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]
