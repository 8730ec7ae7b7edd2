"""The engine's calls of PyTorch on a GPU, with a stand-in of ``torch.cuda`` that has PyTorch's own signatures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bei.artifact.manifest import CUDA_WEIGHTS
from bei.engine.cuda.device import TorchDevice
from bei.engine.cuda.engine import CudaEngine, CudaOptions
from bei.errors import EngineDeadError, EngineError
from tests.bei.engine.cuda.simulated import MATRIX, batch_of, check, manifest_in
from tests.bei.engine.cuda.torch_standin import TOTAL_BYTES, StandIn


def opened(gpu: StandIn, folder: Path, weight_bytes: int = 1000, **options: int) -> CudaEngine:
    manifest = manifest_in(folder, weight_bytes)
    device: Any = TorchDevice(gpu.torch, "A test")
    return CudaEngine(folder / "artifact" / "engine", manifest, CudaOptions(**options), device=device)


@pytest.fixture
def gpu() -> StandIn:
    return StandIn()


@pytest.fixture
def engine(gpu: StandIn, tmp_path: Path) -> Iterator[CudaEngine]:
    with closing(opened(gpu, tmp_path)) as engine:
        yield engine


def test_it_says_which_gpu_it_is_and_loads_for_one_thread(gpu: StandIn, engine: CudaEngine) -> None:
    assert engine.info.device == "NVIDIA H200 (SM90)"
    assert gpu.log == [("load", "model", True, 1, 0), ("weights", False, True, True)]


def test_weights_are_copied_to_the_gpu_from_their_file_and_freed_with_the_engine(gpu: StandIn, tmp_path: Path) -> None:
    with closing(opened(gpu, tmp_path)):
        ((name, weight),) = gpu.weights.items()
        assert name == "matrix"
        np.testing.assert_array_equal(weight.numpy(), MATRIX)
    assert weight.untyped_storage().nbytes() == 0  # though PyTorch still has the tensor


def test_a_weight_that_the_file_lacks_is_named(gpu: StandIn, tmp_path: Path) -> None:
    """PyTorch's loader warns, and the package would crash the process."""
    manifest = manifest_in(tmp_path)
    folder = tmp_path / "artifact" / "engine"
    save_file({"another": MATRIX}, folder / CUDA_WEIGHTS)
    device: Any = TorchDevice(gpu.torch, "A test")
    with pytest.raises(EngineError, match=r"reads 1 weights that are not in .*model\.safetensors \(matrix\): build"):
        CudaEngine(folder, manifest, CudaOptions(), device=device)
    (folder / CUDA_WEIGHTS).write_bytes(b"no header")
    with pytest.raises(EngineError, match=r"weights in .*model\.safetensors cannot be read .*Copy the artifact anew"):
        CudaEngine(folder, manifest, CudaOptions(), device=device)


def test_a_step_is_copied_from_pinned_memory_on_its_stream_and_waited_for_asleep(
    gpu: StandIn, engine: CudaEngine
) -> None:
    gpu.log.clear()
    with gpu.copies():
        check(engine, batch_of([30, 5]))
    _, stream, *_ = gpu.log[0]
    assert gpu.log == [
        ("copy", stream, "pinned", "device", "goes on"),
        ("launch", stream, False),
        ("copy", stream, "device", "pinned", "goes on"),
        ("copy", stream, "device", "pinned", "goes on"),
        ("wait", stream, "asleep"),
    ]


def test_recorded_steps_share_their_streams_memory_and_are_one_launch(gpu: StandIn, engine: CudaEngine) -> None:
    engine.warmup()
    recorded = [entry for entry in gpu.log if entry[0] == "record"]
    assert len(recorded) == 2 * 17  # streams, sizes
    assert len({(stream, pool) for _, stream, pool, _ in recorded}) == 2
    assert {mode for *_, mode in recorded} == {"thread_local"}
    gpu.log.clear()
    for seed in range(2):
        check(engine, batch_of([12, 3], seed))
    kinds = [kind for kind, *_ in gpu.log]
    assert kinds == ["replay", "wait"] * 2


def test_recording_ends_where_its_own_memory_is_used_up(gpu: StandIn, tmp_path: Path) -> None:
    """PyTorch gives the memory of earlier steps back meanwhile: the device has more free memory than before."""
    gpu.graph_bytes = 30_000_000
    with closing(opened(gpu, tmp_path, cuda_graphs=100)) as engine:
        engine.warmup()
    assert sum(kind == "record" for kind, *_ in gpu.log) == 4  # two streams: 60 MB, then 120


def test_recording_waits_for_the_steps_of_other_models_once_at_most(gpu: StandIn, engine: CudaEngine) -> None:
    """Emptying PyTorch's cache waits for all streams."""
    engine.warmup()
    kinds = [kind for kind, *_ in gpu.log]
    assert kinds.count("empty cache") == 1
    assert kinds.index("empty cache") < kinds.index("record")


def test_a_recording_that_fails_is_ended(gpu: StandIn, tmp_path: Path) -> None:
    with closing(opened(gpu, tmp_path)) as engine:
        gpu.fails_while_recording = True
        engine.warmup()
        gpu.fails_while_recording = False
        engine.warmup()
        check(engine, batch_of([12]))
    assert gpu.log[-3][0] == "replay"


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (torch.OutOfMemoryError("no room"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("run_func_(...) API call failed at model_container_runner.cpp, line 145"), True),
    ],
    ids=["its class", "its text", "the allocator's count"],
)
def test_out_of_memory_is_known_and_the_step_is_computed_in_parts(
    error: RuntimeError, counts: bool, gpu: StandIn, engine: CudaEngine
) -> None:
    gpu.most_tokens, gpu.error_of, gpu.counts_ooms = 300, lambda: error, counts
    check(engine, batch_of([250, 120, 90]))


def test_an_error_that_is_none_of_memory_is_not_answered_by_parts(gpu: StandIn, engine: CudaEngine) -> None:
    gpu.most_tokens, gpu.error_of = 300, lambda: RuntimeError("an illegal instruction")
    with pytest.raises(EngineError, match=r"3 sequences and 460 tokens: an illegal instruction"):
        engine.run(batch_of([250, 120, 90]))
    gpu.lost = RuntimeError("CUDA error: an illegal memory access was encountered\nframes")
    with pytest.raises(EngineDeadError, match=r"illegal memory access was encountered\): restart the server"):
        engine.run(batch_of([250, 120, 90]))


def test_the_allocator_which_has_the_weights_too_is_held_to_the_limit(gpu: StandIn, tmp_path: Path) -> None:
    with closing(opened(gpu, tmp_path, memory=500)) as engine:
        assert gpu.fraction == 500_000_000 / TOTAL_BYTES
        check(engine, batch_of([30, 5]))
    assert gpu.log[-1] == ("empty cache",)
    with pytest.raises(EngineError, match=r"need 1,000,001 bytes.*gpu_megabytes gives 1,000,000"):
        opened(gpu, tmp_path / "heavy", weight_bytes=1_000_001, memory=1)
