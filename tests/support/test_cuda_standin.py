"""The stand-in of cuda-python's runtime: it has the real types and signatures, and checks both sides of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cuda_standin import _facts, cuda_stand_in

runtime = pytest.importorskip("cuda.bindings.runtime")


@pytest.fixture
def copies() -> list[Any]:
    return []


@pytest.fixture
def cuda(copies: list[Any]) -> Any:
    return cuda_stand_in(
        {
            "cudaMalloc": lambda size: ("cudaSuccess", 4096) if size < 100 else ("cudaErrorMemoryAllocation",),
            "cudaMemcpyAsync": lambda *arguments: copies.append(arguments),
            "cudaMemGetInfo": lambda: (runtime.cudaError_t.cudaSuccess, 1, 2),
            "cudaEventQuery": lambda event: (0,),
            "cudaStreamCreate": lambda: ("cudaSuccess", 1, 2),
            "cudaFree": lambda address: "cudaSuccess",
        }
    )


def test_types_and_names_are_cudas(cuda: Any) -> None:
    assert cuda.cudaMemcpyKind is runtime.cudaMemcpyKind
    assert cuda.cudaStream_t is runtime.cudaStream_t
    assert inspect.signature(cuda.cudaMemcpyAsync) == inspect.signature(runtime.cudaMemcpyAsync)
    with pytest.raises(AttributeError):
        cuda.cudaMemcpyAsynch  # noqa: B018
    with pytest.raises(ValueError, match=r"cuda\.bindings\.runtime has no function cudaMallocs\.$"):
        cuda_stand_in({"cudaMallocs": lambda size: None})
    with pytest.raises(ValueError, match="no function cudaMemcpyKind"):
        cuda_stand_in({"cudaMemcpyKind": lambda: None})
    with pytest.raises(AssertionError, match="cudaFreeHost has no behaviour"):
        cuda.cudaFreeHost(1)


def test_results_are_tuples_of_a_status_and_values(cuda: Any, copies: list[Any]) -> None:
    ok = runtime.cudaError_t.cudaSuccess
    assert cuda.cudaMalloc(10) == (ok, 4096)
    assert cuda.cudaMalloc(size=100) == (runtime.cudaError_t.cudaErrorMemoryAllocation, None)
    assert cuda.cudaMemGetInfo() == (ok, 1, 2)
    to_device = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
    stream = cuda.cudaStream_t(7)
    assert cuda.cudaMemcpyAsync(1, 2, 8, to_device, stream=stream) == (ok,)
    assert copies == [(1, 2, 8, to_device, stream)]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            lambda cuda: cuda.cudaMemcpyAsync(1, 2, 8, cuda.cudaMemcpyKind.cudaMemcpyDefault),
            "missing a required .*stream",
        ),
        (lambda cuda: cuda.cudaMalloc(), "missing a required .*size"),
        (lambda cuda: cuda.cudaMalloc(bytes=8), "missing a required .*size"),
        (lambda cuda: cuda.cudaMalloc(8.0), "size is float 8.0, not size_t"),
        (lambda cuda: cuda.cudaMemcpyAsync(1, 2, 8, "HostToDevice", 0), "kind is str .*, not cudaMemcpyKind"),
        (lambda cuda: cuda.cudaMemcpyAsync("1", 2, 8, cuda.cudaMemcpyKind.cudaMemcpyDefault, 0), "dst is str"),
    ],
)
def test_a_wrong_call_is_a_type_error(cuda: Any, copies: list[Any], call: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        call(cuda)
    assert copies == []


def test_a_behaviour_that_answers_wrongly_is_at_fault(cuda: Any) -> None:
    with pytest.raises(AssertionError, match="cudaEventQuery gave the status int 0"):
        cuda.cudaEventQuery(1)
    with pytest.raises(AssertionError, match="cudaStreamCreate gave 2 values, CUDA's gives 1"):
        cuda.cudaStreamCreate()
    with pytest.raises(AssertionError, match="cudaFree gave str 'cudaSuccess', not a tuple"):
        cuda.cudaFree(1)


def test_the_number_of_values_is_the_real_ones() -> None:
    """Of the functions that only ask; they answer without a GPU, too, where CUDA's library can be loaded."""
    asked = ["cudaGetLastError", "cudaGetDeviceCount", "cudaGetDevice", "cudaRuntimeGetVersion", "cudaMemGetInfo"]
    asked += ["cudaDeviceGetStreamPriorityRange", "cudaDriverGetVersion", "cudaPeekAtLastError"]
    for name in asked:
        try:
            real = getattr(runtime, name)()
        except RuntimeError as error:  # cuda-python's own, where there is no libcuda
            pytest.skip(str(error))
        assert _facts(getattr(runtime, name))[2] == len(real) - 1, name
