"""mypy with the libraries' own types, over the files that use them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.tensorrt_stubs.generation import BINDINGS
from tests.tensorrt_stubs.module_class import stub_of_module_classes

ROOT = Path(__file__).parent.parent.parent
_FOLDERS = ("bei", "build", "tests", "benchmarks")
_TITLES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}


def users() -> list[Path]:
    """Files of the repository that import from ``tensorrt_module``."""
    files = (path for folder in _FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in files if _uses(path.read_text())]


def _uses(text: str) -> bool:
    if "tensorrt_module" not in text:
        return False
    nodes = ast.walk(ast.parse(text))  # not the words in a docstring
    return any(isinstance(node, ast.ImportFrom) and node.module == "tensorrt_module" for node in nodes)


def check(stubs: Path, files: Sequence[Path], scratch: Path, cache: Path) -> list[str]:
    """mypy's lines about ``files`` with the generated ``stubs``, by each library; empty where there is no error.

    ``scratch``: a folder to write into; ``cache``: mypy's, of whatever run: what it knows of other files is used.
    """
    texts = {name: (stubs / name / "__init__.pyi").read_text() for name in BINDINGS}
    found = []
    for library in BINDINGS:
        modules = scratch / library
        modules.mkdir(parents=True, exist_ok=True)
        (modules / "tensorrt_module.pyi").write_text(stub_of_module_classes(texts, generic=library))
        found += [f"{_TITLES[library]}: {line}" for line in _errors(library, [modules, stubs], files, cache)]
    return found


def _errors(library: str, search: list[Path], files: Sequence[Path], cache: Path) -> list[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(cache)]
    command += ["--config-file", str(ROOT / "pyproject.toml")]
    if library != "tensorrt":  # a cast to what only this library has is one to itself here
        command += ["--no-warn-redundant-casts"]
    environment = {**os.environ, "MYPYPATH": ":".join(map(str, search))}
    done = subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode != 0 and not lines:
        lines = [f"mypy ended with exit code {done.returncode} and said nothing"]
    return lines if done.returncode != 0 else []
