"""The system, installed packages and TensorRT's libraries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
from pathlib import Path

from bei.cli.doctor.guarded import Unknowns, reason_of
from bei.cli.doctor.report import LibraryFacts, Package, System
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.engine.nvidia import LIBRARIES, load_library
from bei.errors import MissingDependencyError
from bei.version import __version__

_PURPOSES = {
    "tokenizers": "serving",
    "openvino": "target cpu",
    "onnx": "building",
    "transformers": "building",
    "torch": "target cuda; building: verification against the HF model",
    "cuda-bindings": "GPU targets",
    "tensorrt-llm": "target trtllm",
}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:[^;]*?>=([\d.]+))?.*extra == ['\"]build['\"]")


def system_facts(unknowns: Unknowns) -> System:
    """Versions, limits, and the cache that bei serve would use."""
    cache = unknowns.ask("cache folder", lambda: Path(load(ServeConfig, {}).cache_dir).expanduser())
    there = _nearest_folder(cache) if cache else None
    return System(
        bei=__version__,
        python=platform.python_version(),
        system=unknowns.ask("system", _system_name) or platform.platform(),
        glibc=" ".join(platform.libc_ver()).strip() or "not glibc",
        open_files=unknowns.ask("limit of open files", resource.getrlimit, resource.RLIMIT_NOFILE),
        cache_dir=str(cache) if cache else None,
        cache_writable=os.access(there, os.W_OK | os.X_OK) if there else None,
        cache_free_bytes=unknowns.ask("room in the cache folder", lambda: shutil.disk_usage(there).free)
        if there
        else None,
    )


def _system_name() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, kernel {platform.release()}"


def _nearest_folder(path: Path) -> Path:
    """``path`` or what is there of the way to it."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def packages() -> list[Package]:
    """Installed versions, read without importing anything."""
    return [Package(name=name, version=installed_version(name), purpose=why) for name, why in _PURPOSES.items()]


def installed_version(name: str) -> str | None:
    """None where the distribution is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lacking_for_builds() -> list[str]:
    """What of the extra ``build``, as bei's own metadata lists it, is not installed or too old: "onnx>=1.17".

    Raises PackageNotFoundError where bei is not installed as a distribution.
    """
    lacking = []
    for requirement in importlib.metadata.requires("bei") or []:
        if found := _REQUIREMENT.match(requirement):
            name, least = found.groups()
            version = installed_version(name)
            if version is None or (least and _numbers(version) < _numbers(least)):
                lacking.append(f"{name}>={least}" if least else name)
    return lacking


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu and of 2.13.0rc1."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version.strip())[0].split("."))  # type: ignore[index]


def libraries() -> list[LibraryFacts]:
    """TensorRT and TensorRT-RTX, each loaded as build and serve load it."""
    return [_library(target) for target in LIBRARIES]


def _library(target: str) -> LibraryFacts:
    title = LIBRARIES[target].title
    try:
        version = str(load_library(target, f"Target {target}").__version__)
    except MissingDependencyError:
        return LibraryFacts(target=target, title=title, version=None, problem="not installed")
    except Exception as error:  # a broken installation may raise anything
        return LibraryFacts(target=target, title=title, version=None, problem=reason_of(error))
    return LibraryFacts(target=target, title=title, version=version, problem="")
