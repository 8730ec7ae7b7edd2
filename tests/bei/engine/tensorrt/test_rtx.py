"""TensorRT-RTX only: validity of plans before loading, and CUDA graphs that it captures itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.artifact.manifest import TENSORRT_PLAN
from bei.engine.nvidia import RTX_CAPABILITIES
from bei.engine.tensorrt.cuda_graphs import planned_sizes
from bei.errors import EngineError
from tests.bei.engine.tensorrt import contracts
from tests.bei.engine.tensorrt.device import Device
from tests.bei.engine.tensorrt.rig import LATENCY, MAX_SEQ_LEN, Graphs, Rig, batch_of


@pytest.fixture
def rtx(graphs: Graphs, tmp_path: Path) -> Rig:
    device = Device(name="NVIDIA L4", capability=89)
    return Rig(tmp_path, graphs, target="tensorrt-rtx", device=device, capabilities=["SM86", "SM89"])


def test_it_keeps_the_contract(rtx: Rig) -> None:
    contracts.answers_of_both_profiles(rtx)
    contracts.two_batches_in_flight(rtx)


def test_a_plan_that_cannot_run_here_is_refused_with_its_reasons(rtx: Rig) -> None:
    kinds = rtx.trt.EngineInvalidityDiagnostics
    rtx.library.validity = ("INVALID", int(kinds.OLD_CUDA_DRIVER) | int(kinds.UNSUPPORTED_CC))
    with pytest.raises(
        EngineError,
        match=r"cannot run here: unsupported cc; old cuda driver. To do: build it again .*; install a newer driver of",
    ):
        rtx.load()
    rtx.check_clean()


REMEDIES = {
    "VERSION_MISMATCH": "build it again with the TensorRT-RTX that is installed here",
    "UNSUPPORTED_CC": "build it again with --compute-capability of this machine's GPU",
    "OLD_CUDA_DRIVER": "install a newer driver",
    "OLD_CUDA_RUNTIME": "install a newer CUDA runtime",
    "INSUFFICIENT_GPU_MEMORY": "stop what else uses the GPU's memory",
    "MALFORMED_ENGINE": "copy the artifact anew",
    "CUDA_ERROR": "install the driver of NVIDIA again",
}


@pytest.mark.parametrize("kind", [*REMEDIES, None])
def test_each_reason_has_its_own_remedy(kind: str | None, rtx: Rig) -> None:
    kinds = rtx.trt.EngineInvalidityDiagnostics
    assert set(kinds.__members__) == set(REMEDIES)
    rtx.library.validity = ("INVALID", 0 if kind is None else int(kinds[kind]))
    with pytest.raises(EngineError) as raised:
        rtx.load()
    said, _, remedy = str(raised.value).partition(" To do: ")
    assert said.endswith(f"cannot run here: {kind.lower().replace('_', ' ')}." if kind else "it gives no reason.")
    assert remedy.startswith(REMEDIES[kind] if kind else "build it again for this machine's GPU.")
    assert ";" not in remedy


def test_it_runs_on_the_gpus_that_it_is_said_to_run_on(rtx: Rig) -> None:
    names = {name for name in rtx.trt.ComputeCapability.__members__ if name.startswith("SM")}
    assert names == {f"SM{capability}" for capability in RTX_CAPABILITIES}


@pytest.mark.parametrize("left", [3, 200])
def test_a_truncated_plan_is_told_from_others(left: int, rtx: Rig) -> None:
    (rtx.folder / TENSORRT_PLAN).write_bytes(rtx.plan[:left])
    with pytest.raises(EngineError, match=rf"model.plan ends too early, after {left} bytes: copy the artifact anew"):
        rtx.load()


def test_a_plan_that_is_slow_here_is_a_warning(rtx: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rtx.library.validity = ("SUBOPTIMAL", 0)
    with rtx.engine() as engine:
        assert "will not run as fast as it could here: it gives no reason" in caplog.text
        rtx.check(engine, batch_of([3]))


@pytest.mark.parametrize(
    ("megabytes", "strategies"),
    [(0, [["DISABLED", "NONE"]] * 2), (1, [["WHOLE_GRAPH_CAPTURE", "LAZY"], ["DISABLED", "NONE"]])],
)
def test_it_compiles_kernels_and_records_steps_for_the_narrow_profile_alone(
    megabytes: int, strategies: list[list[str]], rtx: Rig
) -> None:
    with rtx.engine(num_streams=1, cuda_graphs=megabytes, warm=True) as engine:
        assert [context._strategies() for context in rtx.library.contexts] == strategies
        assert engine.info.token_buckets == ((16, 32, 64) if megabytes else ())
        assert rtx.device.calls["cudaGraphLaunch"] == 0
        rtx.check(engine, batch_of([5, 6, 7]))


def test_what_it_records_has_few_shapes_and_all_are_met_before_it_serves(rtx: Rig) -> None:
    with rtx.engine(cuda_graphs=1, warm=True) as engine:
        met = set(rtx.library.shapes[0])
        assert len(met) == len(planned_sizes(LATENCY, MAX_SEQ_LEN))
        for seed, lengths in enumerate(([3], [5, 6, 7], [1, 1], [64], [36, 36], [2] * 4, [1] * 5, [64] * 4)):
            rtx.check(engine, batch_of(lengths, seed))
        assert rtx.library.shapes[0] == met
        assert len(rtx.library.shapes[1]) >= 3
