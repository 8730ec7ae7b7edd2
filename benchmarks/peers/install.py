"""An environment a peer, with pinned versions, in the cache folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.servers import ROOT, revision
from benchmarks.peers.data import Environment, environment_folder, table

_RECORD = "installed.json"


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
    return record if is_current and record["packages"] == list(environment.packages) else None


def _make(environment: Environment) -> dict[str, Any]:
    folder = environment_folder(environment.name)
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    # Pins are of all packages: nothing is resolved, and bounds that a pin breaks (torch) do not matter.
    _run(*pip, "--no-deps", *environment.packages)
    if environment.checkout:
        _run(*pip, "--no-deps", str(ROOT), str(ROOT / "kernels"))
    _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "pip")
    record = {
        "packages": list(environment.packages),
        "commit": revision(ROOT) if environment.checkout else None,
        "versions": _versions(python),
        "megabytes": round(_bytes(folder) / 1e6),
    }
    (folder / _RECORD).write_text(json.dumps(record, indent=1))
    return record


def _versions(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = json.loads(_run(str(python), "-c", code))
    return dict(sorted(found.items()))


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
