"""The check of CUDA's headers and libraries before a build, with toolkits of a few lines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension

from bei.errors import CompileError
from bei_build.targets.cuda_toolkit import check_cuda_toolkit, cpp_compiler, driver_stub

TORCH = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda="13.0"))
HEADERS = {
    "cuda.h": '#define CUDAAPI\ntypedef int CUresult;\nextern "C" {\nCUresult CUDAAPI cuInit(unsigned int);\n}',
    "cuda_runtime.h": "",
    "cuda_fp8.h": "#include <nv/target>",
    "nv/target": "",
}
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit with a stub of the driver's library, as NVIDIA's on a machine without a driver."""
    home = tmp_path / "cuda"
    for name, text in HEADERS.items():
        (home / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "include" / name).write_text(f"{text}\n")
    stubs = home / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    command = ["g++", "-shared", "-x", "c++", "-", "-o", str(stubs / "libcuda.so")]
    subprocess.run(command, input='extern "C" int cuInit(unsigned int) { return 0; }', text=True, check=True)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(home))
    return home


@needs_gcc
def test_a_whole_toolkit_passes(toolkit: Path) -> None:
    check_cuda_toolkit(TORCH, "Building")


@needs_gcc
@pytest.mark.parametrize("missing", ["cuda.h", "nv/target", "libcuda.so"])
def test_what_a_toolkit_lacks_is_named_with_what_to_install(missing: str, toolkit: Path) -> None:
    (found,) = toolkit.rglob(missing)
    found.unlink()
    name = "lcuda" if missing == "libcuda.so" else missing
    with pytest.raises(CompileError, match=rf"^Building compiles C\+\+ against CUDA.*{name}.*install .* toolkit 13\.0"):
        check_cuda_toolkit(TORCH, "Building")


@needs_gcc
def test_a_stub_stands_for_the_driver_that_is_not_there(toolkit: Path) -> None:
    (driver,) = toolkit.rglob("libcuda.so")
    driver.unlink()
    with driver_stub(TORCH, "Building"):
        check_cuda_toolkit(TORCH, "Building")
    with pytest.raises(CompileError, match="lcuda"):
        check_cuda_toolkit(TORCH, "Building")
    next(toolkit.rglob("cuda.h")).unlink()
    with pytest.raises(CompileError, match=r"cuda\.h.*install"), driver_stub(TORCH, "Building"):
        pass


@needs_gcc
def test_without_a_toolkit_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(CompileError, match=r"none is found: install .*\(cuda-toolkit-13-0 .*or set CUDA_HOME"):
        check_cuda_toolkit(TORCH, "Building")


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match=r"no no-such-compiler: install g\+\+, or set CXX"):
        cpp_compiler(TORCH, "Building")
