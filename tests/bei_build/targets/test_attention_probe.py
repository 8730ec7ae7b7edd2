"""Probes for fused attention kernels: single layers with the real TensorRT-RTX, and misbehaving libraries."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bei_build.targets.attention_probe import FORMS, PRECISIONS, ProbedLayer, probe, probe_layers
from tests.bei_build.targets.rtx import needs_rtx

LAYER = ProbedLayer(89, "fp16", "padded", 64)


# TensorRT-RTX


@needs_rtx
def test_a_layer_with_a_kernel_is_built_and_one_without_is_not() -> None:
    layers = [
        LAYER,
        ProbedLayer(89, "fp16", "padded", 264),
        ProbedLayer(120, "bf16", "packed", 64),
        ProbedLayer(90, "bf16", "padded", 64),
    ]
    answers = list(probe_layers("tensorrt-rtx", layers))
    assert [answer.layer for answer in answers] == layers
    assert [answer.fused for answer in answers] == ["yes", "no", "no", "no"]
    assert [answer.reason for answer in answers] == [
        "",
        "the library has no fused kernel for it",
        "the library has no fused kernel for it",
        "the library builds nothing for SM90",
    ]


@needs_rtx
def test_heads_of_any_size_are_tried_as_the_graph_writes_them() -> None:
    import tensorrt_rtx_bindings as rtx

    assert probe(rtx, ProbedLayer(89, "fp16", "padded", 26)).fused == "yes"


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 120])
def test_padded_layers_of_usual_sizes_have_kernels_and_packed_ones_have_none(capability: int) -> None:
    layers = [
        ProbedLayer(capability, precision, form, head_size)
        for precision in PRECISIONS
        for form in FORMS
        for head_size in (32, 64, 80, 96, 128, 256)
    ]
    for answer in probe_layers("tensorrt-rtx", layers):
        layer = answer.layer
        without_type = {"fp8": capability < 89, "bf16": capability < 80, "fp16": False}[layer.precision]
        assert answer.fused == ("no" if layer.form == "packed" or layer.precision == "fp8" or without_type else "yes")
        if answer.fused == "no":
            assert ("compute in this type" in answer.reason) == without_type, answer


# Libraries that misbehave


def test_what_the_bindings_raise_is_unknown_and_quoted() -> None:
    def no_builder(logger: object) -> None:
        raise TypeError("pybind11::init():\n factory function returned nullptr")

    answer = probe(SimpleNamespace(ILogger=type("ILogger", (), {}), Builder=no_builder), LAYER)
    assert answer.fused == "unknown"
    assert answer.reason == "TypeError: pybind11::init(): factory function returned nullptr"


@needs_rtx
@pytest.mark.parametrize(
    ("log", "plan", "fused", "reason"),
    [
        ([], b"plan", "yes", ""),
        (["Error Code 2: OutOfMemory"], None, "unknown", "Error Code 2: OutOfMemory"),
        (["something went wrong"], b"plan", "unknown", "something went wrong"),
        ([], None, "unknown", "the library gave no plan and no reason"),
        (["the model contains HW-specific datatypes: b16."], None, "no", "does not compute in this type"),
        (["Attention operation was not supported by a dedicated kernel."], None, "no", "no fused kernel"),
    ],
    ids=["plan", "out of memory", "plan with an error", "nothing", "no type", "no kernel"],
)
def test_only_the_library_s_own_word_makes_a_no(log: list[str], plan: bytes | None, fused: str, reason: str) -> None:
    import tensorrt_rtx_bindings as rtx

    loggers: list[Any] = []

    def build(network: object, config: object) -> bytes | None:
        for line in log:
            loggers[0].log(rtx.ILogger.Severity.ERROR, line)
        return plan

    class Builder:
        def __init__(self, logger: Any) -> None:
            loggers.append(logger)
            self._builder = rtx.Builder(logger)
            self.build_serialized_network = build

        def __getattr__(self, name: str) -> Any:
            return getattr(self._builder, name)

    module = ModuleType("tensorrt")
    vars(module).update(vars(rtx), Builder=Builder)
    answer = probe(module, LAYER)
    assert answer.fused == fused
    assert reason in answer.reason


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A module ``tensorrt`` for processes that are started from here."""
    (folder / "tensorrt.py").write_text(f"import os, time\n__version__ = '11.4.0.106'\n{code}")
    monkeypatch.syspath_prepend(str(folder))


_DIES_AT_THE_SECOND = """
class ILogger: pass
layers = 0
def Builder(logger):
    global layers
    layers += 1
    if layers == 2:
        os.write(2, b"a line before\\nfree(): invalid pointer\\n")
        os.abort()
    raise RuntimeError(f"layer {layers}")
"""


def test_a_library_that_crashes_costs_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, _DIES_AT_THE_SECOND)
    answers = list(probe_layers("tensorrt", [LAYER] * 4))
    assert [answer.reason for answer in answers] == [
        "RuntimeError: layer 1",
        "the library's process ended with signal 6: free(): invalid pointer",
        "RuntimeError: layer 1",
        "the library's process ended with signal 6: free(): invalid pointer",
    ]


def test_a_library_that_always_crashes_is_tried_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "os.write(1, b'words on stdout'); os._exit(3)")
    answers = list(probe_layers("tensorrt", [LAYER] * 4))
    assert [answer.reason for answer in answers] == [
        *["the library's process ended with exit code 3: words on stdout"] * 2,
        *["not tried: the library's process ended twice without any answer"] * 2,
    ]
    assert {answer.fused for answer in answers} == {"unknown"}


def test_a_library_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "class ILogger: pass\ndef Builder(logger): time.sleep(600)")
    (answer,) = probe_layers("tensorrt", [LAYER], seconds=2)
    assert (answer.fused, answer.reason) == ("unknown", "the library gave no answer in 2 s")


def test_a_library_of_another_version_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "__version__ = '10.0.0.1'")
    (answer,) = probe_layers("tensorrt", [LAYER])
    assert "TensorRT 10.0.0.1 is installed, bei needs >=11.1,<12" in answer.reason
