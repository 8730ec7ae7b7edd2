"""Stubs of TensorRT and TensorRT-RTX: what is in them, what mypy finds with them, what is said where they cannot be."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.tensorrt_stubs import StubError, generation, stub_of
from tests.tensorrt_stubs import __main__ as command
from tests.tensorrt_stubs.checking import ROOT, check, users

# What the package's docstring shows, as it should be written.
GOOD = """
from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule, TensorRTRTXModule


def build(trt: TensorRTModule, logger: TensorRTModule.ILogger) -> bytes:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file("model.onnx"):
        raise ValueError([parser.get_error(index).desc() for index in range(parser.num_errors)])
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        profile.set_shape(network.get_input(index).name, (1,), [64], (512,))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ValueError(trt.__version__)
    return bytes(plan)


def run(context: TensorRTModule.IExecutionContext, engine: TensorRTModule.ICudaEngine, stream: int) -> tuple[int, ...]:
    context.execute_async_v3(stream_handle=stream)
    return tuple(engine.get_tensor_shape("embeddings"))


class Monitor:
    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...


def limit(config: TensorRTModule.IBuilderConfig) -> None:
    cast("TensorRTRTXModule.IBuilderConfig", config).num_compute_capabilities = 1
"""
# A line -> what mypy says of it. Each of them is right but for one thing.
BAD = {
    "builder.create_netwrok(0)": '"Builder" has no attribute "create_netwrok"',
    "config.set_flag(trt.BuilderFlag.FP16)": 'type[BuilderFlag]" has no attribute "FP16"',
    "config.set_flag(trt.TensorIOMode.INPUT)": 'has incompatible type "TensorIOMode"; expected "BuilderFlag"',
    "config.builder_optimization_level = '3'": 'has type "str", variable has type "SupportsInt"',
    "context.execute_async_v3(stream=1)": 'Unexpected keyword argument "stream"',
    "context.execute_async_v2([1], 1)": '"IExecutionContext" has no attribute "execute_async_v2"',
    "context.set_input_shape('a', 3)": 'No overload variant of "set_input_shape" of "IExecutionContext"',
    "bytes(builder.build_serialized_network(network, config))": '"IHostMemory | None"',
    "trt.Bilder(logger)": 'has no attribute "Bilder"',
}
HEAD = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule
def wrong(
    trt: TensorRTModule,
    logger: TensorRTModule.ILogger,
    builder: TensorRTModule.Builder,
    network: TensorRTModule.INetworkDefinition,
    config: TensorRTModule.IBuilderConfig,
    context: TensorRTModule.IExecutionContext,
) -> None:
"""


@pytest.fixture(scope="module")
def stubs() -> Path:
    try:
        return stub_of("tensorrt").parent.parent
    except StubError as error:
        pytest.skip(str(error))


def test_mypy_accepts_what_is_right_and_finds_what_is_wrong(stubs: Path, tmp_path: Path) -> None:
    """With each of the libraries. One test, because a run of mypy takes seconds."""
    good, bad = tmp_path / "good_snippet.py", tmp_path / "bad_snippet.py"
    good.write_text(GOOD)
    bad.write_text(HEAD + "".join(f"    {line}\n" for line in BAD))
    found = check(stubs, [good, bad], tmp_path, tmp_path / "cache")
    assert [line for line in found if bad.name not in line] == []
    for library in ("TensorRT", "TensorRT-RTX"):
        for number, (line, message) in enumerate(BAD.items(), HEAD.count("\n") + 1):
            own = [each for each in found if each.startswith(f"{library}: {bad}:{number}: error")]
            assert any(message in each for each in own), (library, line, own)


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_a_stub_has_declarations_only_and_the_values_of_enums(stubs: Path, library: str) -> None:
    text = stub_of(library).read_text()
    assert "::" not in text  # C++
    assert "NVIDIA" not in text  # documentation
    tree = ast.parse(text)
    flags = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BuilderFlag")
    members = [ast.unparse(node) for node in flags.body if isinstance(node, ast.AnnAssign)]
    assert "TF32: typing.ClassVar[typing.Annotated[BuilderFlag, 6]]" in members


def test_rtx_is_as_the_module_that_runs_here(stubs: Path) -> None:
    """Every public name of the real module is in its stub, and no other."""
    rtx = pytest.importorskip("tensorrt_rtx_bindings")
    tree = ast.parse(stub_of("tensorrt_rtx").read_text())
    names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    names |= {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
    real = {name for name in vars(rtx) if not name.startswith("_")} | {"__version__"}
    # What its __init__.py has of its own, and leaves.
    python_only = {"common_enter", "common_exit", "attr", "value"}
    python_only |= {name for name in real if isinstance(getattr(rtx, name), ModuleType)}
    assert names == real - python_only


def test_files_that_use_the_types_are_found() -> None:
    """By their imports, not by the words: this file has them in a text."""
    assert Path(__file__) not in users()
    assert all(path.is_relative_to(ROOT) for path in users())


def test_the_command_says_what_is_wrong_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stubs: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(command, "check", lambda *arguments: said)
    monkeypatch.setattr(sys, "argv", ["tests.tensorrt_stubs", "--mypy", str(tmp_path / "one.py")])
    assert command.main() == 0
    assert capsys.readouterr().out == f"no error: {tmp_path}/one.py\n"
    said.append("TensorRT: one.py:1: error")
    assert command.main() == 1
    assert capsys.readouterr().err == "TensorRT: one.py:1: error\n"


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, stubs: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StubError, match=r"^The stubs of TensorRT need a C compiler, and there is no cc here: .*\.$"):
        generation.generate(tmp_path)


@pytest.mark.parametrize(
    ("module", "name"),
    [("pybind11_stubgen", "pybind11-stubgen"), ("tensorrt_bindings", "tensorrt_cu13_bindings")],
)
def test_without_a_package_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == module else real(asked))
    with pytest.raises(StubError, match=rf"^{name} is not installed: pip install 'bei\[trt-ci\]'\.$"):
        generation.generate(tmp_path)


def test_a_failing_import_is_quoted_in_one_line(monkeypatch: pytest.MonkeyPatch, stubs: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(generation, "_FUNCTIONS", ("createInferBuilder_INTERNAL",))
    with pytest.raises(StubError, match=r"^The stub of tensorrt_bindings was not made: ImportError: .* symbol"):
        generation.generate(tmp_path)
