"""Libraries that are not installed, and those that are and do not load: real packages in a folder on sys.path."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bei.artifact import signing_keys
from bei.artifact.signature import _holds
from bei.cli import main
from bei.config.settings import ServeConfig
from bei.engine import nvidia, pytorch
from bei.engine import openvino as openvino_engine
from bei.errors import BeiError, BrokenDependencyError, MissingDependencyError
from bei.server.telemetry.otel_settings import tracing_of
from bei.service.resolve import build_config_class
from bei.utils import libraries
from bei.utils.libraries import importing
from bei_build.checkpoint import locate as location
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.quantization import emulation, modelopt
from bei_build.targets import openvino as openvino_compiler
from bei_build.tokenizer import chat_template
from bei_build.weights import tensor_store
from tests.support.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[3]

MISSING_SYSTEM_LIBRARY = "raise OSError('libodd.so.1: cannot open\\nshared object file')"
# pybind11 turns Ctrl-C during the initialization of a module into an ImportError.
SWALLOWED_CTRL_C = """
try:
    raise KeyboardInterrupt
except KeyboardInterrupt as error:
    raise ImportError("initialization failed") from error
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a package on sys.path, in front of the real one, whose ``__init__`` holds some code."""

    def put(name: str, code: str) -> Path:
        folder = tmp_path / "site"
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(code)
        for loaded in [one for one in sys.modules if f"{one}.".startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.syspath_prepend(folder)
        return folder

    return put


def loaded() -> Any:
    return libraries.load("odd.part", "odd-python", "cpu", "A test")


# The mechanism.


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('undefined symbol: f')", "undefined symbol: f"),
        (MISSING_SYSTEM_LIBRARY, "libodd.so.1: cannot open shared object file"),
        ("import numpy; numpy.no_such_name", "module 'numpy' has no attribute 'no_such_name'"),
        ("import what_it_needs_in_turn", "No module named 'what_it_needs_in_turn'"),
        ("import odd.core_of_another_python", "No module named 'odd.core_of_another_python'"),
        ("raise RuntimeError", "RuntimeError"),
        ("try: 1/0\nexcept ZeroDivisionError as error: raise ImportError('odd') from error", "odd: division by zero"),
    ],
)
def test_a_library_that_does_not_load_is_not_called_missing(
    install: Callable[[str, str], Path], code: str, words: str
) -> None:
    install("odd", code)
    with pytest.raises(BrokenDependencyError) as caught:
        loaded()
    assert str(caught.value) == (
        f"A test needs the Python package 'odd-python', which is installed and cannot be loaded ({words}): mend that, "
        "or install it anew (pip uninstall odd-python, then pip install 'bei[cpu]')."
    )


@pytest.mark.parametrize("has_package", [False, True], ids=["nothing of it", "the package without the part"])
def test_one_that_is_not_installed_is(install: Callable[[str, str], Path], has_package: bool) -> None:
    if has_package:  # as cuda is there with any part of cuda-python
        install("odd", "")
    with pytest.raises(MissingDependencyError) as caught:
        loaded()
    assert str(caught.value) == "A test needs the Python package 'odd-python': pip install 'bei[cpu]'"


@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", SWALLOWED_CTRL_C])
def test_ctrl_c_while_a_library_loads_is_ctrl_c(install: Callable[[str, str], Path], code: str) -> None:
    install("odd", code)
    with pytest.raises(KeyboardInterrupt):
        loaded()


def test_an_error_of_ours_inside_stays_as_it_is() -> None:
    with pytest.raises(BeiError, match="ours"), libraries.importing("odd", "cpu", "A test"):
        raise BeiError("ours")


# Everywhere that a library is imported which need not be there.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


SITES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "openvino, building": ("openvino", lambda _: openvino_compiler._openvino()),
    "openvino, serving": ("openvino", lambda _: openvino_engine._openvino("A test")),
    "tensorrt": ("tensorrt", lambda _: nvidia.load_library("tensorrt", "A test")),
    "tensorrt_rtx": ("tensorrt_rtx", lambda _: nvidia.load_library("tensorrt-rtx", "A test")),
    "cuda": ("cuda", lambda _: nvidia.load_cuda("A test", "tensorrt")),
    "torch": ("torch", lambda _: pytorch.load_torch("A test")),
    "cryptography, keys": ("cryptography", lambda _: signing_keys._serialization("A test")),
    "cryptography, signatures": ("cryptography", lambda _: _holds(bytes(32), bytes(64), "")),
    "opentelemetry": ("opentelemetry", lambda _: tracing_of(ServeConfig(otlp_endpoint="http://h:1"), {})),
    "onnx": ("onnx", lambda _: build_config_class()),
    "ml_dtypes": ("ml_dtypes", lambda _: build_config_class()),
    "onnxruntime": ("onnxruntime", lambda _: emulation._onnxruntime()),
    "modelopt": ("modelopt", lambda _: modelopt._imported()),
    "jinja2": ("jinja2", lambda folder: chat_template._render(folder, "", [], {})),
    "transformers, a checkpoint": ("transformers", lambda folder: read_checkpoint(locate(str(folder)))),
    "transformers, a chat template": ("transformers", lambda folder: chat_template._render(folder, "", [], {})),
    "huggingface_hub": ("huggingface_hub", lambda _: location.locate("nobody/nothing", None)),
    "safetensors": ("safetensors", lambda folder: tensor_store.open_file(folder / "model.safetensors")),
    "torch, a pickle": ("torch", lambda folder: tensor_store.open_file(folder / "pytorch_model.bin")),
    "hdrh": ("hdrh", lambda _: main._parser("bench", ["bench"])),
}


@pytest.mark.parametrize(("library", "use"), SITES.values(), ids=SITES.keys())
def test_every_optional_library_says_its_own_error(
    install: Callable[[str, str], Path], checkpoint: Path, library: str, use: Callable[[Path], object]
) -> None:
    install(library, MISSING_SYSTEM_LIBRARY)
    with pytest.raises(BrokenDependencyError, match=r"cannot be loaded \(libodd\.so\.1: cannot open shared"):
        use(checkpoint)


@pytest.mark.parametrize(("library", "use"), SITES.values(), ids=SITES.keys())
def test_ctrl_c_meets_every_import(
    install: Callable[[str, str], Path], checkpoint: Path, library: str, use: Callable[[Path], object]
) -> None:
    install(library, SWALLOWED_CTRL_C)
    with pytest.raises(KeyboardInterrupt):
        use(checkpoint)


def test_nobody_else_tells_what_is_wrong_with_an_import() -> None:
    """``except ImportError`` would take one that is broken, or Ctrl-C, for one that is not installed."""
    sources = [*(ROOT / "bei").rglob("*.py"), *(ROOT / "build").rglob("*.py")]
    assert len(sources) > 300
    handlers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ExceptHandler)
        and node.type is not None
        and re.search(r"ImportError|ModuleNotFoundError", ast.unparse(node.type))
    ]
    assert handlers == []


def test_the_builder_s_configuration_imports_no_library_that_may_be_missing() -> None:
    optional = ["huggingface_hub", "jinja2", "ml_dtypes", "onnx", "safetensors", "transformers", "torch", "openvino"]
    code = f"import sys, bei_build.config; print(*sorted(set({optional}) & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.split() == []


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [(MISSING_SYSTEM_LIBRARY, 2, "cannot be loaded (libodd.so.1"), (SWALLOWED_CTRL_C, 130, "")],
)
def test_the_command_ends_with_it(
    install: Callable[[str, str], Path], checkpoint: Path, tmp_path: Path, code: str, exit_code: int, words: str
) -> None:
    path = os.pathsep.join((str(install("openvino", code)), str(ROOT), str(ROOT / "build")))
    ended = subprocess.run(
        [sys.executable, "-m", "bei", "build", str(checkpoint), "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == exit_code, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("attribute", ["__cause__", "__context__"])
def test_an_error_that_is_its_own_cause_ends(attribute: str) -> None:
    error = ImportError("broken")
    setattr(error, attribute, error)
    with pytest.raises(BrokenDependencyError, match="broken"), importing("thing", None, "Testing"):
        raise error
