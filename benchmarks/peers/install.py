"""An environment a peer, with pinned versions, in the cache folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bei.utils.cpu_count import usable_cores
from benchmarks.harness.servers import ROOT, revision
from benchmarks.peers.data import Environment, environment_folder, table

_RECORD = "installed.json"
_LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def install(names: Sequence[str]) -> int:
    """Make the environments ``names``, or all; one that is there with these pins is left alone. 1 if one failed."""
    environments = table().environments
    if unknown := [name for name in names if name not in environments]:
        raise SystemExit(f"no environment is called {', '.join(unknown)}: {', '.join(environments)}")
    failed = 0
    for environment in (environments[name] for name in names or environments):
        print(f"{environment.name:28}", end=" ", flush=True)
        try:
            record = installed(environment) or _make(environment)
            print(f"{record['megabytes']:,} MB, {len(record['versions'])} packages", flush=True)
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"not installed: {(error.stderr or str(error)).strip()[-600:]}", flush=True)
    return 1 if failed else 0


def installed(environment: Environment) -> dict[str, Any] | None:
    """The record of an environment: its size in MB of 10^6 bytes without pip, and versions; None where it is not there
    or was made of other pins, or of another commit where it has this checkout."""
    path = environment_folder(environment.name) / _RECORD
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_bytes())
    is_current = not environment.checkout or record.get("commit") == revision(ROOT)
    pins = (list(environment.packages), environment.llama_cpp)
    return record if is_current and (record["packages"], record.get("llama.cpp", "")) == pins else None


def _make(environment: Environment) -> dict[str, Any]:
    folder = environment_folder(environment.name)
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    # Pins are of all packages: nothing is resolved, and bounds that a pin breaks (torch) do not matter.
    if environment.packages:
        _run(*pip, "--no-deps", *environment.packages)
    if environment.checkout:
        _run(*pip, "--no-deps", str(ROOT), str(ROOT / "kernels"))
    if environment.llama_cpp:
        _compile_llama_cpp(environment.llama_cpp, python)
    _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "pip")
    record = {
        "packages": list(environment.packages),
        "commit": revision(ROOT) if environment.checkout else None,
        "llama.cpp": environment.llama_cpp,
        "versions": _versions(python) | _carried(environment.llama_cpp),
        "megabytes": round(_bytes(folder) / 1e6),
    }
    (folder / _RECORD).write_text(json.dumps(record, indent=1))
    return record


def _compile_llama_cpp(package: str, python: Path) -> None:
    """llama.cpp's server for this CPU, and its converter beside it, of the sources that ``package`` carries."""
    folder = python.parents[1]
    with tempfile.TemporaryDirectory() as scratch:
        download = [str(python), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run(*download, "--no-binary", ":all:", "--dest", scratch, package)
        (archive,) = Path(scratch).glob("*.tar.gz")
        shutil.unpack_archive(archive, scratch, filter="data")
        (source,) = Path(scratch).glob("*/vendor/llama.cpp")
        build = source / "build"
        _run("cmake", "-S", str(source), "-B", str(build), *_LLAMA_CPP_FLAGS)
        _run("cmake", "--build", str(build), "--target", "llama-server", "--parallel", str(usable_cores()))
        shutil.copy(build / "bin" / "llama-server", folder / "bin")
        for name in ("gguf-py", "conversion"):
            shutil.copytree(source / name, folder / "llama.cpp" / name)
        shutil.copy(source / "convert_hf_to_gguf.py", folder / "llama.cpp")


def _carried(package: str) -> dict[str, str]:
    return {f"llama.cpp of {name}": version for name, _, version in [package.partition("==")] if name}


def _versions(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = json.loads(_run(str(python), "-c", code))
    return dict(sorted(found.items()))


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
