"""The stand-in over TensorRT's own stubs: a few facts, and that nothing in them goes unchecked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.standin import stand_in, unknown_annotations
from tests.support.standin.declarations import ClassDeclaration, read_stub
from tests.tensorrt_stubs import StubError, stub_of


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def module_of(library: str, behaviours: dict[str, Callable[..., Any]]) -> Any:
    try:
        return stand_in(stub_of(library), library, behaviours)
    except StubError as error:
        pytest.skip(str(error))


def test_tensorrt_11_has_no_precision_flags(library: str) -> None:
    trt = module_of(library, {})
    assert trt.BuilderFlag.TF32.value == 6
    assert not {"FP16", "BF16", "INT8", "FP8"} & set(trt.BuilderFlag.__members__)
    assert trt.__version__.split(".")[0] == {"tensorrt": "11", "tensorrt_rtx": "1"}[library]


def test_what_only_one_library_has() -> None:
    assert not hasattr(module_of("tensorrt", {}), "ComputeCapability")
    assert module_of("tensorrt_rtx", {}).ComputeCapability.SM89.value > 0


def test_tensorrts_calls_are_checked(library: str) -> None:
    streams: list[Any] = []

    class Context:
        def execute_async_v3(self, stream: int) -> bool:
            streams.append(stream)
            return True

        def set_input_shape(self, name: str, shape: Any) -> bool:
            return True

    class Engine:
        def create_execution_context(self, strategy: Any) -> Any:
            assert strategy is trt.ExecutionContextAllocationStrategy.STATIC
            return Context()

    class Runtime:
        def __init__(self, logger: Any) -> None: ...

        def deserialize_cuda_engine(self, plan: Any) -> Any:
            return Engine() if bytes(plan) == b"plan" else None

    class Stream:  # as cuda-python's cudaStream_t: an integer by int() alone
        def __int__(self) -> int:
            return 7

    trt = module_of(library, {"Runtime": Runtime, "ICudaEngine": Engine, "IExecutionContext": Context})

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

    runtime = trt.Runtime(Logger())
    assert runtime.deserialize_cuda_engine(b"other") is None
    context = runtime.deserialize_cuda_engine(b"plan").create_execution_context()
    assert isinstance(context, trt.IExecutionContext)
    assert context.execute_async_v3(5)
    assert context.execute_async_v3(stream_handle=Stream())
    assert streams[0] == 5
    assert context.set_input_shape("input_ids", (8,))
    wrong: list[Callable[[], Any]] = [
        lambda: context.execute_async_v3(stream=5),
        lambda: context.execute_async_v3(),
        lambda: context.execute_async_v3(5.0),
        lambda: context.set_input_shape(0, (8,)),
        lambda: context.set_input_shape("input_ids", 8),
        lambda: runtime.deserialize_cuda_engine("plan"),
        lambda: trt.Runtime(),
    ]
    for each in wrong:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            each()
    for removed in ("execute_async_v2", "execute_async"):
        with pytest.raises(AttributeError):
            getattr(context, removed)


def test_all_of_the_libraries_types_are_known(library: str) -> None:
    """Else a stand-in would take anything there."""
    trt = module_of(library, {})
    declared = read_stub(stub_of(library).read_text())
    annotations = vars(trt)["__stand_in__"].annotations

    def every(scope: ClassDeclaration) -> None:
        for inner in scope.classes.values():
            every(inner)
        for attribute in scope.attributes.values():
            annotations.accepts(attribute.read_as, object())
        for function in scope.functions.values():
            for signature in function.signatures:
                annotations.accepts(signature.return_annotation, object())
                for parameter in signature.parameters.values():
                    annotations.accepts(parameter.annotation, object())

    every(declared)
    assert unknown_annotations(trt) == ["numpy.ndarray"]  # of weights, which are refitted by other means
