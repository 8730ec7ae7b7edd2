"""Results as JSON, with the machine and the versions: results/NAME.json, or in the folder BENCHMARK_RESULTS."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from bei import __version__
from bei.engine.openvino import cpu_capabilities
from bei.utils.cpu_count import usable_cores

COMMITTED = Path(__file__).parents[1] / "results"
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", COMMITTED))
_PACKAGES = ("openvino", "bei-kernels-cpu", "torch", "transformers", "tokenizers", "numpy", "uvicorn", "fastapi")


def write(name: str, results: Mapping[str, Any]) -> None:
    """Write the JSON, and print ``results`` as the last lines of the output (``benchmarks.compare`` reads them)."""
    RESULTS.mkdir(exist_ok=True)
    content = {"benchmark": name, "machine": _machine(), "versions": _versions(), "results": results}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def recorded(name: str) -> dict[str, Any]:
    """The results of the last run, wherever it was."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_bytes())["results"]
    return found


def kept(name: str) -> dict[str, Any]:
    """The results of earlier runs on such a machine, to which a run adds. None of another's: a file names one."""
    path = RESULTS / f"{name}.json"
    is_of_here = path.is_file() and json.loads(path.read_bytes())["machine"] == _machine()
    return recorded(name) if is_of_here else {}


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor()),
        "computes in": cpu_capabilities(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }


def _versions() -> dict[str, str]:
    found = {"bei": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
