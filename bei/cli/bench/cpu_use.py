"""The machine that makes the load."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from bei.cli.bench.result import GeneratorMachine
from bei.utils.cpu_count import usable_cores

_PACKAGES = ("bei", "hdrhistogram", "httptools", "msgspec")


def machine_facts() -> GeneratorMachine:
    """No name and no address: results are passed on."""
    return GeneratorMachine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu(),
        cores=usable_cores(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name)) is not None},
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
