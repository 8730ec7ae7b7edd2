"""Sizes of recorded steps, the choice for a batch, and failures of recording."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import runtime
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.manifest import PlanProfile
from bei.core import FeatureTable, PackedBatch
from bei.engine.grid_windows import Windows
from bei.engine.packing import FEATURE_SLOTS, Sizes, graph_inputs, image_features
from bei.engine.tensorrt.cuda_graphs import CapturedStep, cheapest, cheapest_sizes, planned_sizes
from tests.bei.engine.tensorrt.rig import GRAPHS_MB, LATENCY, MAX_SEQ_LEN, Rig, batch_of

LATENCY_PROFILE = PlanProfile(name="latency", tokens=(1, 64, 544), sequences=(1, 1, 8), longest=(1, 64, 544))
_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) <= 500)


def steps_of(sizes: list[Sizes]) -> list[CapturedStep]:
    return [CapturedStep(each, None, None) for each in sizes]


def test_planned_steps_are_few_and_the_small_ones_come_first() -> None:
    planned = planned_sizes(LATENCY_PROFILE, 512)
    assert planned[0] == Sizes(16, 1, 16)
    assert len(planned) <= 18
    assert {sizes.sequences for sizes in planned} == {1, 8}
    assert len(set(planned)) == len(planned)
    work = [sizes.tokens + sizes.sequences * sizes.longest for sizes in planned]
    assert work == sorted(work)
    assert all(sizes.longest <= sizes.tokens <= sizes.sequences * sizes.longest for sizes in planned)


@given(lengths=_lengths, inputs=st.sampled_from([["pad_index"], ["cu_query_lens", "cu_key_lens"]]))
def test_a_batch_gets_the_cheapest_step_that_holds_it(lengths: list[int], inputs: list[str]) -> None:
    batch = batch_of(lengths)
    chosen = cheapest(steps_of(planned_sizes(LATENCY_PROFILE, 512)), batch, inputs)
    holding = [sizes for sizes in planned_sizes(LATENCY_PROFILE, 512) if sizes.holds(batch, inputs)]
    if not holding:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.sizes == holding[0]
    tensors = graph_inputs(batch, ["input_ids", "pad_index", "seq_lens", *inputs], chosen.sizes)
    assert tensors["input_ids"].shape == (chosen.sizes.tokens,)
    assert tensors["pad_index"].shape == (chosen.sizes.sequences, chosen.sizes.longest)


def test_sizes_leave_room_for_a_filler_token_of_each_filler_sequence() -> None:
    assert Sizes(16, 4, 16).holds(batch_of([13]))
    assert not Sizes(16, 4, 16).holds(batch_of([14]))
    assert not Sizes(64, 4, 16).holds(batch_of([17]))
    assert not Sizes(64, 1, 16).holds(batch_of([8, 8]))
    with pytest.raises(ValueError, match="does not fit"):
        graph_inputs(batch_of([17]), ["input_ids"], Sizes(16, 1, 16))


@given(_lengths)
def test_inputs_of_given_sizes_are_those_of_the_batch_with_more_filler(lengths: list[int]) -> None:
    batch, names = batch_of(lengths), ["input_ids", "seq_lens", "slot_mask", "position_ids"]
    wide = graph_inputs(batch, names, Sizes(600, 20, 320))
    narrow = graph_inputs(batch, names)
    tokens, sequences = batch.num_tokens, batch.batch_size
    for name, rows in (("input_ids", tokens), ("position_ids", tokens), ("seq_lens", sequences)):
        np.testing.assert_array_equal(wide[name][:rows], narrow[name][:rows])
    np.testing.assert_array_equal(
        wide["slot_mask"][:sequences].sum(axis=1), narrow["slot_mask"][:sequences].sum(axis=1)
    )
    assert wide["seq_lens"][sequences:].tolist() == [1] * (20 - sequences)


def captured(rig: Rig, megabytes: int) -> int:
    """The number of steps that are recorded within this memory, on both streams."""
    with rig.engine(cuda_graphs=megabytes, warm=True) as engine:
        count = len(rig.device.executables)
        for lengths in ([3], [5, 6, 7], [60]):
            rig.check(engine, batch_of(lengths))
    return count


def test_steps_are_recorded_within_the_memory_for_them(rig: Rig) -> None:
    assert captured(rig, 0) == 0
    assert captured(rig, 5) == 6  # of 1 MB each: two streams, so three steps
    assert captured(rig, GRAPHS_MB) == 2 * len(planned_sizes(LATENCY, MAX_SEQ_LEN))


def test_a_full_device_ends_the_recording_and_not_the_engine(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with rig.engine(cuda_graphs=GRAPHS_MB) as engine:
        rig.library.contexts_left = 3
        engine.warmup()
        assert "after 1 CUDA graphs no more are recorded" in caplog.text
        for lengths in ([3], [5, 6, 7], [60], [64] * 4):
            rig.check(engine, batch_of(lengths))


@pytest.mark.parametrize("function", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_step_that_cannot_be_recorded_runs_unrecorded(
    function: str, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.device.fail(function, runtime.cudaError_t.cudaErrorStreamCaptureUnsupported, times=10_000)
    with rig.engine(cuda_graphs=GRAPHS_MB, warm=True) as engine:
        assert rig.device.executables == {}
        assert f"after 0 CUDA graphs no more are recorded: CUDA failed in {function}" in caplog.text
        for lengths in ([3], [60], [64] * 4):
            rig.check(engine, batch_of(lengths))


@pytest.mark.parametrize(
    "method", ["infer_shapes", "execute_async_v3", "create_execution_context", "set_device_memory"]
)
def test_an_exception_of_the_bindings_ends_the_recording_and_not_the_engine(
    method: str, rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig.engine(num_streams=1, cuda_graphs=GRAPHS_MB) as engine:

        def asked(name: str) -> None:
            """Raise in a context that is made to record."""
            if name == method and (len(rig.library.contexts) > 2 or method == "create_execution_context"):
                raise RuntimeError("a new context does not work")

        with monkeypatch.context() as patch:
            patch.setattr(rig.library, "asked", asked)
            engine.warmup()
        assert "after 0 CUDA graphs no more are recorded: TensorRT" in caplog.text
        assert "a new context does not work" in caplog.text
        caplog.clear()
        for lengths in ([3], [60], [64] * 4):
            rig.check(engine, batch_of(lengths))


def test_a_recorded_step_that_answers_otherwise_is_not_used(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.library.spoils_recorded = True
    with rig.engine(num_streams=1, cuda_graphs=GRAPHS_MB, warm=True) as engine:
        assert "longest=16) gives other results than the same step without it" in caplog.text
        assert rig.device.executables == {}
        launched = rig.device.calls["cudaGraphLaunch"]
        rig.check(engine, batch_of([3]))
        assert rig.device.calls["cudaGraphLaunch"] == launched


def test_a_batch_of_one_token_fits_the_first_step() -> None:
    batch = PackedBatch(np.zeros(1, np.int32), np.array([0, 1], np.int32))
    step = cheapest(steps_of(planned_sizes(LATENCY, MAX_SEQ_LEN)), batch, [])
    assert step is not None
    assert step.sizes == Sizes(16, 1, 16)


def test_steps_with_rows_of_images_or_windows_are_not_captured() -> None:
    names = [FEATURE_SLOTS, image_features(4)]
    steps = steps_of(planned_sizes(LATENCY_PROFILE, 512, names))
    table = FeatureTable(np.ones((3, 4), np.float32), np.zeros(14, np.int32), np.array([[1, 1, 3]], np.int32))
    batch = batch_of([9, 5])
    assert cheapest(steps, batch, names) is not None
    assert cheapest(steps, batch._replace(features=table), names) is None
    assert cheapest_sizes([step.sizes for step in steps], batch._replace(features=table), names) is None
    assert planned_sizes(LATENCY_PROFILE, 512, [Windows(2, 2).pad_index]) == []
