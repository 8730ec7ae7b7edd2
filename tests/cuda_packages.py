"""Packages for GPUs that are not there, compiled, linked and loaded with PyTorch's build for CUDA; nothing is run.

python -m tests.cuda_packages [SHAPE ...] [--layers N] [--capability 90] [--out FOLDER]

The whole way that ``tests.support.fake_gpu`` goes half of in the first tier. It needs g++ and an environment of its own
(5 GB): PyTorch 2.13 for CUDA, and ``nvidia-cuda-cccl`` and ``nvidia-cuda-crt`` of that CUDA's version. The packages
have no weights.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

from bei_build.torch_graph.model import PackedModel
from bei_build.torch_graph.parameters import TensorOptions, join_linear_layers
from benchmarks.gpu.shapes import SHAPES, Shape, quantization_of
from tests.support.fake_gpu import CAPABILITIES, WRITTEN_FOR, link


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_packages")
    parser.add_argument("shapes", nargs="*", default=["minilm"], metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--capability", type=int, default=90, choices=CAPABILITIES)
    parser.add_argument("--out", type=Path, help="folder that keeps the packages")
    arguments = parser.parse_args()
    if torch.version.cuda is None or not torch.__version__.startswith(WRITTEN_FOR):
        sys.exit(f"This needs PyTorch {WRITTEN_FOR}x for CUDA, and here is {torch.__version__}.")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        stub = _toolkit(Path(scratch))
        for name in arguments.shapes:
            shape = SHAPES[name]
            if arguments.layers:
                shape = replace(shape, sizes=replace(shape.sizes, layers=arguments.layers))
            path = (arguments.out or Path(scratch)) / f"{name.replace(' ', '-')}-sm{arguments.capability}.pt2"
            _build(shape, arguments.capability, path)
            _load(path, Path(scratch), stub)


def _toolkit(folder: Path) -> Path:
    """Point AOTInductor at CUDA's headers, and at a stub of the driver's library with all functions of ``cuda.h``."""
    if "CUDA_HOME" not in os.environ:
        major = str(torch.version.cuda).split(".")[0]
        os.environ["CUDA_HOME"] = str(Path(torch.__file__).parent.parent / "nvidia" / f"cu{major}")
    header = Path(os.environ["CUDA_HOME"], "include", "cuda.h").read_text()
    names = sorted(set(re.findall(r"^CUresult CUDAAPI (cu\w+)\(", header, re.MULTILINE)))
    code = "".join(f'extern "C" int {name}() {{ return 1; }}\n' for name in names)
    stub = folder / "libcuda.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-Wl,-soname,libcuda.so.1", "-o", str(stub)]
    subprocess.run(command, input=code, text=True, check=True)
    os.environ["LIBRARY_PATH"] = os.pathsep.join([str(folder), os.environ.get("LIBRARY_PATH", "")]).strip(os.pathsep)
    return stub


def _build(shape: Shape, capability: int, path: Path) -> None:
    spec = shape.spec

    def made() -> PackedModel:
        options = TensorOptions(torch.device("cuda", 0), torch.bfloat16)
        quantization = quantization_of(spec) if shape.is_fp8 else None
        model = PackedModel(spec, shape.max_seq_len, options, quantization=quantization)
        join_linear_layers(model)
        return model

    begin = time.monotonic()
    kernels = link(made, capability, path)
    size, seconds = path.stat().st_size, time.monotonic() - begin
    print(f"{path.name}: {size:,} bytes, {len(spec.layers)} layers, {seconds:.0f} s")  # noqa: T201
    for name, kernel in kernels.items():
        print(f"  {name}: {len(kernel.cubin):,} bytes")  # noqa: T201


def _load(path: Path, folder: Path, stub: Path) -> None:
    """Load the package's library as the engine would, with every symbol resolved at once."""
    with zipfile.ZipFile(path) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".so"))
        library = package.extract(name, folder)
    ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, os.RTLD_NOW)
    print("  its library loads, with every symbol")  # noqa: T201


if __name__ == "__main__":
    main()
