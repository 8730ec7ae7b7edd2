"""Runs ``extraction`` over the installed bindings, and writes what it gives."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.tensorrt_stubs.module_class import stub_of_module_classes

# Name in Python -> the package of its bindings and the distribution that has it.
BINDINGS = {
    "tensorrt": ("tensorrt_bindings", "tensorrt_cu13_bindings"),
    "tensorrt_rtx": ("tensorrt_rtx_bindings", "tensorrt_rtx_cu13_bindings"),
}
EXTRACTION = Path(__file__).with_name("extraction.py")
_INSTALL = "pip install 'bei[trt-ci]'"
_SECONDS = 120
# What the extension module of TensorRT needs to be imported: these functions, of libraries of these names.
_FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
_LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")


class StubError(Exception):
    """The stubs cannot be generated here; one line says what is missing."""


def generate(out: Path) -> None:
    """Write all stubs into the folder ``out``: see the package. Raises StubError."""
    stubs = {}
    for name in BINDINGS:
        stubs[name] = _generated(name)
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.pyi").write_text(stubs[name])
    (out / "tensorrt_module.pyi").write_text(stub_of_module_classes(stubs, generic="tensorrt"))


@cache
def stub_of(name: str) -> Path:
    """The stub of ``tensorrt`` or ``tensorrt_rtx``, generated once for all processes and runs of these versions.

    Raises StubError.
    """
    return generated_folder() / name / "__init__.pyi"


@cache
def generated_folder() -> Path:
    """What ``generate`` writes, in the temporary folder. Raises StubError."""
    folder = Path(tempfile.gettempdir()) / f"bei-tensorrt-stubs-{os.getuid()}-{_key()}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                generate(Path(scratch) / "stubs")
                (Path(scratch) / "stubs").rename(folder)
    return folder


def _key() -> str:
    """Another for other versions and for other code here."""
    parts = [f"{sys.version_info}", _version("pybind11-stubgen")]
    parts += [_version(distribution) for _, distribution in BINDINGS.values()]
    parts += [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise StubError(f"{distribution} is not installed: {_INSTALL}.") from error


def _generated(name: str) -> str:
    package, distribution = BINDINGS[name]
    for module, wheel in (("pybind11_stubgen", "pybind11-stubgen"), (package, distribution)):
        if importlib.util.find_spec(module) is None:
            raise StubError(f"{wheel} is not installed: {_INSTALL}.")
    with tempfile.TemporaryDirectory() as scratch:
        environment = dict(os.environ)
        if name == "tensorrt":
            _build_libraries(Path(scratch))
            environment["LD_LIBRARY_PATH"] = f"{scratch}:{environment.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        return _output([sys.executable, str(EXTRACTION), package], environment, f"The stub of {package}")


def _build_libraries(folder: Path) -> None:
    """Libraries whose functions return null: enough to import the bindings, which then can make nothing."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise StubError("The stubs of TensorRT need a C compiler, and there is no cc here: apt-get install gcc.")
    source = folder / "null.c"
    source.write_text("".join(f"void *{function}(void) {{ return 0; }}\n" for function in _FUNCTIONS))
    built = folder / _LIBRARIES[0]
    command = [compiler, "-shared", "-fPIC", "-o", str(built), str(source)]
    _output(command, dict(os.environ), "A library without content")
    for library in _LIBRARIES[1:]:
        shutil.copy(built, folder / library)


def _output(command: list[str], environment: dict[str, str], what: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise StubError(f"{what} was not made: {lines[-1]}")
    return done.stdout
