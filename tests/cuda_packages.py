"""Packages for GPUs that are not there, compiled, linked and loaded with PyTorch's build for CUDA; nothing is run.

python -m tests.cuda_packages [SHAPE ...] [--layers N] [--capability 90] [--out FOLDER] [--record FILE]

The way of ``bei build --target cuda --compute-capability``, of which the first tier goes half. It needs g++, a CUDA
toolkit (``CUDA_HOME``) and an environment of its own (5 GB) with a known PyTorch for CUDA. ``--record`` adds the facts
to a file of ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_packages")
    parser.add_argument("shapes", nargs="*", default=["minilm"], metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--capability", type=int, default=90, choices=CAPABILITIES)
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
                _record(f"{name}, {arguments.capability}", facts, arguments.record)


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
    with zipfile.ZipFile(path) as package:
        cubins = {Path(info.filename).name: info.file_size for info in package.infolist() if ".cubin" in info.filename}
    return {
        "shape": shape.name,
        "capability": capability,
        "layers": len(spec.layers),
        "seconds": round(seconds),
        "bytes": path.stat().st_size,
        "weights read": len(compiled.weights),
        "cubins": cubins,
    }


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


def _record(name: str, facts: dict[str, Any], path: Path) -> None:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    versions = {package: version(package) for package in ("torch", "triton", "numpy")}
    known = json.loads(path.read_bytes())["results"] if path.is_file() else {"packages": {}}
    content = {
        "benchmark": path.stem,
        "machine": {"cpu": cpu.partition(": ")[2], "cores": usable_cores()},
        "versions": versions | {"CUDA of PyTorch": torch.version.cuda},
        "results": {**known, "packages": known["packages"] | {name: facts}},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
