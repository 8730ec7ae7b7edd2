"""Packages for GPUs that are not there, compiled, linked and loaded with PyTorch's build for CUDA; nothing is run.

python -m tests.cuda_packages [SHAPE ...] [--layers N] [--capability 90] [--out FOLDER]

The way of ``bei build --target cuda --compute-capability``, of which the first tier goes half. It needs g++, a CUDA
toolkit (``CUDA_HOME``) and an environment of its own (5 GB) with a known PyTorch for CUDA.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

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
            _build(shape, arguments.capability, path)
            _load(path, Path(scratch))


def _build(shape: Shape, capability: int, path: Path) -> None:
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
    size, seconds = path.stat().st_size, time.monotonic() - begin
    print(f"{path.name}: {size:,} bytes, {len(spec.layers)} layers, {seconds:.0f} s")  # noqa: T201
    print(f"  reads {len(compiled.weights)} weights")  # noqa: T201
    with zipfile.ZipFile(path) as package:
        for info in package.infolist():
            if info.filename.endswith(".cubin"):
                print(f"  {info.filename.rpartition('/')[2]}: {info.file_size:,} bytes")  # noqa: T201


def _load(path: Path, folder: Path) -> None:
    """Load the package's library as the engine would, with every symbol resolved at once."""
    with zipfile.ZipFile(path) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".so"))
        library = package.extract(name, folder)
    stub = next(Path(part, "libcuda.so") for part in os.environ["LIBRARY_PATH"].split(os.pathsep))
    ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, os.RTLD_NOW)
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    called = sorted(line.split()[-1] for line in symbols.stdout.splitlines() if "aoti_torch_cuda" in line)
    print(f"  its library loads, with every symbol; of PyTorch's operators it calls {', '.join(called)}")  # noqa: T201


if __name__ == "__main__":
    main()
