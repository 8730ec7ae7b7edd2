"""Requirements of an engine's use of CUDA and TensorRT, as functions of a rig that raise if one is violated.

Tests run each on the engine as it is, and on engines without the calls that it guards.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda.bindings import runtime

from bei.core import PackedBatch
from bei.engine.tensorrt.engine import TensorRTEngine
from bei.errors import EngineError
from tests.bei.engine.tensorrt.rig import GRAPHS_MB, Rig, batch_of

SMALL, LARGE = ([3], [5, 6, 7], [64], [1, 1, 1, 1]), ([30] * 8, [64] * 4, [1] * 16, [64, 3, 20, 20, 9])
_DEADLINE_S = 30.0


def answers_of_both_profiles(rig: Rig) -> None:
    """Consecutive batches of all sizes get the graph's outputs."""
    with rig.engine() as engine:
        for seed, lengths in enumerate([*SMALL, *LARGE, *reversed(SMALL)]):
            rig.check(engine, batch_of(lengths, seed))


def two_batches_in_flight(rig: Rig) -> None:
    """Two batches, both given to the device before any work is done, do not interfere."""
    with rig.engine() as engine:
        both_given = threading.Barrier(2, timeout=_DEADLINE_S)
        rig.device.before_wait = both_given.wait  # type: ignore[assignment]
        for first, second in ((SMALL[1], SMALL[2]), (LARGE[0], LARGE[1]), (SMALL[0], LARGE[3])):
            _side_by_side(rig, engine, both_given, [first, second])


def _side_by_side(rig: Rig, engine: TensorRTEngine, both_given: threading.Barrier, batches: list[list[int]]) -> None:
    def check(batch: PackedBatch) -> None:
        try:
            rig.check(engine, batch)
        except BaseException:
            both_given.abort()  # the other thread must not wait for ever
            raise

    with ThreadPoolExecutor(len(batches)) as threads:
        done = [threads.submit(check, batch_of(lengths, seed)) for seed, lengths in enumerate(batches, start=1)]
    errors = [error for error in (future.exception() for future in done) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])


def profile_of_a_batch(rig: Rig) -> None:
    """The narrow profile takes what fits, the wide one everything else."""
    with rig.engine(num_streams=1) as engine:
        for lengths, profile in (([3], 0), ([64], 0), ([36, 36], 0), ([64, 9], 1), ([1] * 5, 1), ([64] * 4, 1)):
            engine.run(batch_of(lengths))
            assert rig.library.steps[-1] == profile, lengths


def answers_are_the_caller_s(rig: Rig) -> None:
    """Later steps do not change an answer, and changes of an answer do not affect later steps."""
    with rig.engine(num_streams=1) as engine:
        batch = batch_of(SMALL[1])
        kept = engine.run(batch)["embedding"]
        before = kept.copy()
        engine.run(batch_of(LARGE[0], 5))
        np.testing.assert_array_equal(kept, before)
        kept[:] = 0
        rig.check(engine, batch)


def recorded_steps(rig: Rig) -> None:
    """Small batches are launched as recorded steps, others are not, and both are right in any order."""
    with rig.engine(num_streams=1, cuda_graphs=GRAPHS_MB, warm=True) as engine:
        launched = rig.device.calls["cudaGraphLaunch"]
        assert launched, "nothing was recorded"
        for seed, lengths in enumerate([*SMALL, *LARGE, *SMALL]):
            rig.check(engine, batch_of(lengths, seed))
        assert rig.device.calls["cudaGraphLaunch"] == launched + 2 * len(SMALL)


def a_refused_step_leaves_nothing(rig: Rig) -> None:
    """After a step that TensorRT refuses the stream still works; closing frees all memory while the error is alive."""
    with rig.engine(num_streams=1) as engine:
        rig.library.refusals.append("an error of TensorRT's")
        with pytest.raises(EngineError, match=r"did not run a step: an error of TensorRT's") as raised:
            engine.run(batch_of(SMALL[1]))
        rig.check(engine, batch_of(LARGE[0], 3))
    assert raised.tb is not None


def memory_is_allocated_once(rig: Rig) -> None:
    """Steps allocate nothing."""
    with rig.engine(warm=True) as engine:
        allocated = [rig.device.calls[name] for name in ("cudaMalloc", "cudaHostAlloc", "cudaEventCreateWithFlags")]
        for lengths in (*SMALL, *LARGE):
            engine.run(batch_of(lengths))
        names = ("cudaMalloc", "cudaHostAlloc", "cudaEventCreateWithFlags")
        assert [rig.device.calls[name] for name in names] == allocated


def a_failed_load_leaves_nothing(rig: Rig) -> None:
    """If memory runs out at the last stream, everything made before is released, in order."""
    rig.library.contexts_left = 3
    with pytest.raises(EngineError, match=r"no execution context: Cannot allocate persistent memory"):
        rig.load(num_streams=2)
    rig.check_clean()
    rig.library.contexts_left = None
    rig.device.fail("cudaMalloc", runtime.cudaError_t.cudaErrorMemoryAllocation, after=5)
    with pytest.raises(EngineError, match=r"bytes of GPU memory could not be had: .*cudaErrorMemoryAllocation"):
        rig.load(num_streams=2)
    rig.check_clean()


def closing_frees_everything(rig: Rig) -> None:
    """All recorded and allocated resources are released once, while the engine itself is still referred to."""
    engine = rig.load(2, GRAPHS_MB)
    engine.warmup()
    engine.close()
    engine.close()
    rig.check_clean()
    with pytest.raises(EngineError, match="closed"):
        engine.run(batch_of([3]))
