"""The CUDA toolkit and the C++ compiler, which AOTInductor needs to build a package; serving it needs neither. And a
stub of the driver, for machines that have none."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bei.errors import CompileError

_PATIENCE_S = 120
_MOST_OF_REASON = 300  # characters of the compiler's message
# The headers of every package: cuda_fp8.h includes those of a part of the toolkit that has a package of its own.
_PROGRAM = """#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <cuda.h>
int initialized() { return cuInit(0); }
"""


def extensions() -> Any:
    """PyTorch's module that finds the toolkit, which would warn when it is imported where there is no GPU."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils import cpp_extension

    return cpp_extension


def cpp_compiler(torch: Any, purpose: str) -> str:
    """The compiler that AOTInductor calls. Raises CompileError."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise CompileError(
            f"{purpose} needs a C++ compiler for PyTorch {torch.__version__}, and there is no {name}: install g++, or "
            "set CXX to a compiler."
        )
    return found


def check_cuda_toolkit(torch: Any, purpose: str) -> None:
    """Compile and link a library of four lines against CUDA, as AOTInductor does with a package. Raises CompileError:
    the first error, and what to install."""
    cpp_extension = extensions()
    compiler = cpp_compiler(torch, purpose)
    version = torch.version.cuda
    remedy = (
        f"install NVIDIA's CUDA toolkit {version} (cuda-toolkit-{version.replace('.', '-')} in its package "
        "repositories), or set CUDA_HOME to where it is"
    )
    try:
        includes, libraries = cpp_extension.include_paths("cuda"), cpp_extension.library_paths("cuda")
    except OSError as error:  # there is no CUDA_HOME, no nvcc and no /usr/local/cuda
        raise CompileError(f"{purpose} needs a CUDA toolkit, and none is found: {remedy}.") from error
    if "CUDA_HOME" in os.environ:  # as AOTInductor does
        libraries += [str(Path(folder, "stubs")) for folder in libraries]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM)
        paths = [*(f"-I{path}" for path in includes), *(f"-L{path}" for path in libraries)]
        command = [compiler, "-shared", "-fPIC", str(source), *paths, "-lcuda", "-o", str(Path(folder, "program.so"))]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, errors="replace")
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{purpose}: {compiler} did not compile four lines in {_PATIENCE_S} s.") from error
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line or "cannot find" in line]
        reason = " ".join((errors or [result.stderr])[0].split())[:_MOST_OF_REASON]
        raise CompileError(f"{purpose} compiles C++ against CUDA, and that fails here ({reason}): {remedy}.")


@contextmanager
def driver_stub(torch: Any, purpose: str) -> Iterator[None]:
    """Within, linkers find a ``libcuda.so`` with all functions of ``cuda.h``, none of which does anything: the real one
    comes with the driver. Raises CompileError where there is no ``cuda.h``."""
    cpp_extension = extensions()
    header = Path(cpp_extension.CUDA_HOME or "", "include", "cuda.h")
    if cpp_extension.CUDA_HOME is None or not header.is_file():
        check_cuda_toolkit(torch, purpose)  # it says what to install
        yield
        return
    names = sorted(set(re.findall(r"^CUresult CUDAAPI (cu\w+)\(", header.read_text(), re.MULTILINE)))
    code = "".join(f'extern "C" int {name}() {{ return 1; }}\n' for name in names)
    with tempfile.TemporaryDirectory() as folder:
        command = [cpp_compiler(torch, purpose), "-shared", "-fPIC", "-x", "c++", "-", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, "-o", str(Path(folder, "libcuda.so"))], input=code, text=True, check=True)
        paths = os.pathsep.join(filter(None, [folder, os.environ.get("LIBRARY_PATH")]))
        with mock.patch.dict(os.environ, {"LIBRARY_PATH": paths}):
            yield
