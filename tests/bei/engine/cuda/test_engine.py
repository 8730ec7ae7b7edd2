"""The logic of the engine of target cuda, on a simulated GPU whose streams do nothing until they are waited for."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bei.core import Limits
from bei.engine.cuda.engine import CudaEngine, CudaOptions
from bei.errors import ConfigError, EngineDeadError, EngineError
from tests.bei.engine.cuda.simulated import (
    LIMITS,
    Simulated,
    batch_of,
    check,
    engine_on,
    expected,
    manifest_in,
)
from tests.support.engines import DEADLINE_S


@pytest.fixture
def device() -> Simulated:
    return Simulated()


@pytest.fixture
def engine(device: Simulated, tmp_path: Path) -> Iterator[CudaEngine]:
    with closing(engine_on(device, tmp_path)) as engine:
        yield engine


@pytest.fixture
def warm(engine: CudaEngine, device: Simulated) -> CudaEngine:
    engine.warmup()
    device.computed.clear()
    device.replayed.clear()
    device.downloads.clear()
    return engine


def test_it_states_its_facts(engine: CudaEngine) -> None:
    info = engine.info
    assert (info.target, info.precision, info.device) == ("cuda", "fp32", "Simulated GPU (SM90)")
    assert info.limits == Limits(**LIMITS)
    assert (info.outputs, info.per_token) == ({"embedding": 4, "token_embedding": 2}, frozenset({"token_embedding"}))
    assert (info.num_streams, info.memory_bytes, info.is_replaceable) == (2, 1000, False)
    assert info.token_buckets == (24, 40, 72, 136, 264, 520, 1032)


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=16))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_sequence_gets_its_own_answer_recorded_or_not(warm: CudaEngine, lengths: list[int]) -> None:
    check(warm, batch_of(lengths, seed=sum(lengths)))


def test_only_what_is_asked_for_is_copied(warm: CudaEngine, device: Simulated) -> None:
    batch = batch_of([30] * 10)
    check(warm, batch, frozenset({"embedding"}))
    assert device.downloads == [(10, 4)]
    check(warm, batch, frozenset({"token_embedding"}))
    assert device.downloads[1:] == [(300, 2)]


def test_answers_are_the_callers_to_keep(warm: CudaEngine) -> None:
    first, second = batch_of([20, 5], seed=1), batch_of([20, 5], seed=2)
    answers = [warm.run(first), warm.run(second), warm.run(first)]
    for batch, answer in zip((first, second, first), answers, strict=True):
        np.testing.assert_array_equal(answer["embedding"], expected(batch)["embedding"])


def test_small_steps_are_replayed_and_large_ones_are_not(warm: CudaEngine, device: Simulated) -> None:
    check(warm, batch_of([12]))
    check(warm, batch_of([5, 6, 7]))
    check(warm, batch_of([7, 7, 6]))
    assert device.replayed == [(24, 2), (24, 8), (40, 8)]  # filler sequences own a token each: 20 and 5 are too many
    assert device.computed == []
    check(warm, batch_of([200] * 6))
    assert device.computed == [(1216, 6)]


def test_without_memory_for_graphs_no_step_is_recorded(device: Simulated, tmp_path: Path) -> None:
    with closing(engine_on(device, tmp_path, cuda_graphs=0)) as engine:
        engine.warmup()
        assert engine.info.token_buckets == ()
        check(engine, batch_of([12]))
    assert device.replayed == []


def test_recording_stops_where_its_memory_is_used_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    device = Simulated(graph_bytes=400_000)
    with closing(engine_on(device, tmp_path, cuda_graphs=1)) as engine:  # two streams: the second size is the last
        engine.warmup()
        check(engine, batch_of([12]))
        device.computed.clear()
        check(engine, batch_of([200, 200]))
    assert "memory for CUDA graphs is used up: 2 of 17 recorded" in caplog.text
    assert device.computed == [(400, 2)]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda device: setattr(device, "records_numbers", True), "gives other results"),
        (lambda device: setattr(device, "recording_error", RuntimeError("operation not permitted")), "not permitted"),
        (lambda device: setattr(device, "recording_error", RuntimeError("CUDA out of memory")), "out of memory"),
    ],
    ids=["numbers of the recording", "refused", "no memory"],
)
def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    break_it: Callable[[Simulated], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Simulated()
    break_it(device)
    with closing(engine_on(device, tmp_path)) as engine:
        engine.warmup()
        device.replayed.clear()
        check(engine, batch_of([12]))
    assert device.replayed == []
    assert "after 0 CUDA graphs no more are recorded" in caplog.text
    assert reason in caplog.text


def test_a_step_without_memory_is_split_until_it_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = Simulated(most_tokens=300)
    with closing(engine_on(device, tmp_path, cuda_graphs=0)) as engine:
        for seed in range(2):
            check(engine, batch_of([250, 3, 120, 120, 7, 90, 200, 1], seed))
    assert all(tokens <= 300 for tokens, _ in device.computed)
    assert caplog.text.count("it is computed in parts") == 1  # said once, not for every step
    assert "--max-num-tokens (CUDA out of memory. Tried to allocate" in caplog.text
    assert "C++" not in caplog.text


def test_a_sequence_that_does_not_fit_alone_is_an_error_and_costs_the_others_nothing(tmp_path: Path) -> None:
    device = Simulated(most_tokens=100)
    with closing(engine_on(device, tmp_path, cuda_graphs=0)) as engine:
        with pytest.raises(EngineError, match=r"no memory for a sequence of 200 tokens .*--max-seq-len"):
            engine.run(batch_of([5, 200]))
        check(engine, batch_of([5, 50]))


def test_a_full_step_that_does_not_fit_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    with closing(engine_on(Simulated(most_tokens=300), tmp_path)) as engine:
        engine.warmup()
        check(engine, batch_of([100] * 8))


def test_two_streams_have_work_at_the_same_time(engine: CudaEngine, device: Simulated) -> None:
    device.barrier = threading.Barrier(2)  # breaks, if the second step is not begun before the first is waited for
    batches = [batch_of([10, 20], seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda batch: check(engine, batch), batches))


def test_more_callers_than_streams_wait_and_get_their_own_answers(warm: CudaEngine) -> None:
    batches = [batch_of([1 + seed, 40], seed) for seed in range(24)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda batch: check(warm, batch), batches))


def test_a_step_that_fails_is_named_and_the_next_one_runs(engine: CudaEngine, device: Simulated) -> None:
    device.error = RuntimeError("a kernel is missing\nand a stack of C++ frames")
    with pytest.raises(EngineError, match=r"batch of 2 sequences and 30 tokens: a kernel is missing$"):
        engine.run(batch_of([10, 20]))
    check(engine, batch_of([10, 20]))


def test_a_device_that_is_lost_is_said_to_be(engine: CudaEngine, device: Simulated) -> None:
    device.error, device.lost = RuntimeError("illegal memory access"), "CUDA error: an illegal memory access"
    with pytest.raises(EngineDeadError, match=r"\(CUDA error: an illegal .*restart the server.*illegal memory access"):
        engine.run(batch_of([10]))


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    device = Simulated()
    device.free = 500
    with pytest.raises(EngineError, match=r"weights need 1,000 bytes, and 500 are free on Simulated GPU"):
        engine_on(device, tmp_path)


def test_a_package_that_cannot_be_loaded_is_an_engine_error(device: Simulated, tmp_path: Path) -> None:
    manifest = manifest_in(tmp_path)
    with pytest.raises(EngineError, match=r"could not load .*model-sm90\.pt2: no such package\. Copy the artifact"):
        CudaEngine(tmp_path / "elsewhere", manifest, CudaOptions(), device=device)
    assert device.held is None


def test_an_engine_is_held_to_the_memory_that_it_was_given(
    device: Simulated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(engine_on(device, tmp_path, memory=3, cuda_graphs=0)) as engine:
        held = device.held
        assert held == (1000, 3_000_000)
        device.most_tokens = 300  # as PyTorch's allocator says then
        check(engine, batch_of([250, 120]))
        assert "Raise gpu_megabytes, or build" in caplog.text
        device.most_tokens = 200
        with pytest.raises(EngineError, match=r"no memory for a sequence of 256 .*Raise gpu_megabytes, or build"):
            engine.run(batch_of([256]))
    assert device.held is None


def test_a_cpu_has_no_memory_of_a_gpu_to_bound(device: Simulated, tmp_path: Path) -> None:
    device.is_gpu = False
    with pytest.raises(ConfigError, match="gpu_megabytes limits a GPU's memory"):
        engine_on(device, tmp_path / "twin", memory=3)


def test_closing_frees_everything_and_refuses_what_comes_later(device: Simulated, tmp_path: Path) -> None:
    engine = engine_on(device, tmp_path)
    engine.warmup()
    assert device.num_live() > 0
    engine.close()
    gc.collect()
    assert (device.num_live(), device.is_released) == (0, True)
    with pytest.raises(EngineError, match="closed"):
        engine.run(batch_of([3]))
    engine.close()


def test_closing_waits_for_the_step_that_runs(device: Simulated, tmp_path: Path) -> None:
    engine = engine_on(device, tmp_path)
    device.barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(check, engine, batch_of([10]))
        while not device.computed:
            threading.Event().wait(0.001)
        closing_it = threads.submit(engine.close)
        assert not closing_it.done()
        device.barrier.wait(DEADLINE_S)
        running.result(DEADLINE_S)
        closing_it.result(DEADLINE_S)
    assert device.is_released


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_streams": 0}, "1 to 8 streams, not 0"),
        ({"num_streams": 9}, "1 to 8 streams, not 9"),
        ({"cuda_graphs": -1}, "cannot be -1 MB"),
        ({"memory": -1}, "cannot be -1 MB; 0 means all"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CudaOptions(**options)


def test_memory_for_staging_is_kept_between_steps(device: Simulated, tmp_path: Path) -> None:
    with closing(engine_on(device, tmp_path, num_streams=1, cuda_graphs=0)) as engine:
        counts = []
        for tokens in (250, 250, 100, 10, 250):
            engine.run(batch_of([tokens]))
            counts.append(len(device._memory))
    assert all(before == after for before, after in pairwise(counts))
