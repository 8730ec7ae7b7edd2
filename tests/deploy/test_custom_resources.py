"""Objects of KEDA and of the Prometheus operator fit the types that npm's kubernetes-models make of their CRDs.

TypeScript finds fields that there are not, wrong types, and fields that are missing; it knows no patterns. `npm install
--ignore-scripts` in tests/deploy/npm gets both. Node 20 or later.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import NEWEST, OLDEST, Object
from tests.deploy.test_chart import CUSTOM, RENDERINGS, objects_of

MODULES = Path(__file__).parent / "npm" / "node_modules"
DEADLINE_S = 300

pytestmark = pytest.mark.skipif(not MODULES.is_dir(), reason="the types are not there: npm install --ignore-scripts")

TYPES = {
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor",
}


def problems(folder: Path, objects: list[Object]) -> str:
    """What the compiler says of ``objects``."""
    (folder / "node_modules").symlink_to(MODULES)
    lines = [f'import type {{ I{kind} }} from "{module}";' for kind, module in TYPES.items()]
    lines += [f"export const o{index}: I{one['kind']} = {json.dumps(one)};" for index, one in enumerate(objects)]
    (folder / "objects.ts").write_text("\n".join(lines), "utf-8")
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    command = ["node", str(MODULES / "typescript" / "bin" / "tsc"), *options, "objects.ts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stderr == ""
    return done.stdout


def custom() -> list[Object]:
    """All of the matrix, each once."""
    found = {
        json.dumps(one): one
        for name, version in RENDERINGS
        for one in objects_of(name, version)
        if one["kind"] in CUSTOM
    }
    return [*found.values()]


def test_there_are_objects_of_every_kind_for_both_versions() -> None:
    assert shutil.which("node")
    assert {one["kind"] for one in custom()} == set(CUSTOM) == set(TYPES)
    assert {version for _, version in RENDERINGS} == {OLDEST, NEWEST}


def test_objects_fit_the_types_of_their_definitions(tmp_path: Path) -> None:
    assert problems(tmp_path, custom()) == ""


def example(kind: str) -> Any:
    return json.loads(json.dumps(next(one for one in custom() if one["kind"] == kind)))


def test_mistakes_are_found(tmp_path: Path) -> None:
    unknown, wrong, missing = example("PodMonitor"), example("ScaledObject"), example("ServiceMonitor")
    unknown["spec"]["podMetricsEndpoints"][0]["schema"] = "http"
    wrong["spec"]["triggers"][0]["metadata"]["threshold"] = 1
    del missing["spec"]["selector"]
    found = [problems(folder, [one]) for one, folder in zip((unknown, wrong, missing), folders(tmp_path), strict=True)]
    assert "does not exist in type 'IPodMetricsEndpoint'" in found[0]
    assert "Type 'number' is not assignable to type 'string'" in found[1]
    assert "is missing in type" in found[2]
    assert "IServiceMonitorSpec" in found[2]


def folders(folder: Path) -> list[Path]:
    made = [folder / name for name in "abc"]
    for one in made:
        one.mkdir()
    return made
