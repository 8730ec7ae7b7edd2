"""Packages for GPUs that are not there, compiled, linked and loaded with PyTorch's build for CUDA; nothing is run.

python -m tests.cuda_packages [SHAPE ...] [--layers N] [--capability 90] [--checkpoint FOLDER]
    [--out FOLDER] [--record FILE]

The way of ``bei build --target cuda --compute-capability``, of which the first tier goes half. It needs g++, a CUDA
toolkit (``CUDA_HOME``) and an environment of its own (5 GB) with a known PyTorch for CUDA. With ``--checkpoint``
that model is built by ``bei build``, and then inspected, verified and served without a GPU. ``--record`` adds the facts
to a file of ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bei.utils.cpu_count import usable_cores
from bei_build.targets.cuda_elsewhere import Wanted, compile_apart
from bei_build.targets.cuda_toolkit import check_cuda_toolkit, driver_stub
from bei_build.torch_graph.fp8 import FP8Linear
from bei_build.torch_graph.pretended_gpu import CAPABILITIES, KNOWN_VERSIONS
from benchmarks.gpu.shapes import SHAPES, Shape, quantization_of, random_model

_PURPOSE = "Compiling packages"
_PROGRESS = re.compile(r": \d+%, .* left$")
_LARGE = 100_000  # bytes of files of an artifact that are named


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_packages")
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--capability", type=int, default=90, choices=CAPABILITIES)
    parser.add_argument("--checkpoint", type=Path, help="folder of a model, of which an artifact is built")
    parser.add_argument("--out", type=Path, help="folder that keeps the packages")
    parser.add_argument("--record", type=Path, help="JSON file to which the facts of each package are added")
    arguments = parser.parse_args()
    if torch.version.cuda is None or ".".join(torch.__version__.split(".")[:2]) not in KNOWN_VERSIONS:
        sys.exit(f"This needs PyTorch {' or '.join(KNOWN_VERSIONS)} for CUDA, and here is {torch.__version__}.")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch, driver_stub(torch, _PURPOSE):
        check_cuda_toolkit(torch, _PURPOSE)
        for name in arguments.shapes:
            shape = SHAPES[name]
            if arguments.layers:
                shape = replace(shape, sizes=replace(shape.sizes, layers=arguments.layers))
            path = (arguments.out or Path(scratch)) / f"{name.replace(' ', '-')}-sm{arguments.capability}.pt2"
            facts = _build(shape, arguments.capability, path) | _load(path, Path(scratch))
            print(json.dumps(facts, indent=2), flush=True)  # noqa: T201
            if arguments.record:
                _record("packages", f"{name}, {arguments.capability}", facts, arguments.record)
    if arguments.checkpoint:
        with tempfile.TemporaryDirectory() as scratch:
            facts = _commands(arguments.checkpoint, arguments.capability, Path(scratch, "artifact"))
        print(json.dumps(facts, indent=2))  # noqa: T201
        if arguments.record:
            _record("artifacts", f"{arguments.checkpoint.name}, {arguments.capability}", facts, arguments.record)


def _build(shape: Shape, capability: int, path: Path) -> dict[str, Any]:
    """Compile and link the package. Its size and cubins in bytes, and the weights that it reads."""
    spec, layer = shape.spec, replace(shape, sizes=replace(shape.sizes, layers=1))
    quantization = quantization_of(spec) if shape.is_fp8 else None
    # Which layers in FP8 there are is seen in a model of one layer.
    one = random_model(layer, torch.device("cpu"), torch.bfloat16, is_fp8=True) if shape.is_fp8 else None
    paths = [path for path, module in one.named_modules() if isinstance(module, FP8Linear)] if one else []
    one_scale = {
        path.replace("layers.0.", f"layers.{index}."): False for path in paths for index in range(len(spec.layers))
    }
    begin = time.monotonic()
    compiled = compile_apart(Wanted(spec, shape.max_seq_len, "bfloat16", quantization, one_scale, capability, path))
    seconds = time.monotonic() - begin
    return {
        "shape": shape.name,
        "capability": capability,
        "layers": len(spec.layers),
        "seconds": round(seconds),
        "bytes": path.stat().st_size,
        "weights read": len(compiled.weights),
        "cubins": _cubins(path),
    }


def _cubins(path: Path) -> dict[str, int]:
    """The size of each cubin in the package by the name of its kernel, which its table of symbols has."""
    found = {}
    with zipfile.ZipFile(path) as package, tempfile.TemporaryDirectory() as folder:
        for info in package.infolist():
            if not info.filename.endswith(".cubin"):
                continue
            listed = subprocess.run(
                ["readelf", "-W", "-s", package.extract(info, folder)], capture_output=True, text=True, check=True
            )
            (name,) = (
                line.split()[-1] for line in listed.stdout.splitlines() if " FUNC " in line and " UND " not in line
            )
            found[name] = info.file_size
    return found


def _load(path: Path, folder: Path) -> dict[str, Any]:
    """Load the package's library as the engine would, with every symbol resolved at once. What it needs of others."""
    with zipfile.ZipFile(path) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".so"))
        library = package.extract(name, folder)
    stub = next(Path(part, "libcuda.so") for part in os.environ["LIBRARY_PATH"].split(os.pathsep))
    ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, os.RTLD_NOW)
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    names = sorted(line.split()[-1].partition("@")[0] for line in symbols.stdout.splitlines())
    return {
        "library, bytes": Path(library).stat().st_size,
        "undefined symbols": len(names),
        "of PyTorch": [name for name in names if name.startswith("aoti_torch")],
        "of CUDA": [name for name in names if name.startswith("cu")],
    }


def _commands(checkpoint: Path, capability: int, artifact: Path) -> dict[str, Any]:
    """The way of an artifact on a machine without a GPU: what each command ended with, and what it said."""
    build = "build", str(checkpoint), "--target", "cuda", "--compute-capability", str(capability)
    begin = time.monotonic()
    facts: dict[str, Any] = {"build": _said(*build, "--out", str(artifact))}
    facts |= {"seconds": round(time.monotonic() - begin), "bytes": {}}
    for path in sorted(artifact.rglob("*")):
        if path.is_file() and path.stat().st_size > _LARGE:
            facts["bytes"][str(path.relative_to(artifact))] = path.stat().st_size
    for command in (("inspect",), ("verify",), ("serve", "--port", "0")):
        facts[command[0]] = _said(command[0], str(artifact), *command[1:])
    return facts


def _said(*arguments: str) -> dict[str, Any]:
    """The exit status of ``bei`` and the lines that it printed, without the folders of this machine."""
    result = subprocess.run([sys.executable, "-m", "bei", *arguments], capture_output=True, text=True, check=False)
    folders = {arguments[1]: Path(arguments[1]).name, arguments[-1]: Path(arguments[-1]).name}
    lines = (result.stdout + result.stderr).splitlines()
    for folder, name in folders.items():
        lines = [line.replace(folder, name).rstrip() for line in lines]
    return {"status": result.returncode, "lines": [line for line in lines if line and not _PROGRESS.search(line)]}


def _record(kind: str, name: str, facts: dict[str, Any], path: Path) -> None:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    versions = {package: version(package) for package in ("torch", "triton", "numpy")}
    known = json.loads(path.read_bytes())["results"] if path.is_file() else {}
    content = {
        "benchmark": path.stem,
        "machine": {"cpu": cpu.partition(": ")[2], "cores": usable_cores()},
        "versions": versions | {"CUDA of PyTorch": torch.version.cuda},
        "results": {**known, kind: known.get(kind, {}) | {name: facts}},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
