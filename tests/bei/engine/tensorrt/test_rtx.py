"""What only TensorRT-RTX has: its opinion of a plan before it is loaded, and CUDA graphs that it records by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.artifact import TENSORRT_PLAN
from bei.errors import EngineError
from tests.bei.engine.tensorrt import contracts
from tests.bei.engine.tensorrt.rig import Graphs, Rig, batch_of


@pytest.fixture
def rtx(graphs: Graphs, tmp_path: Path) -> Rig:
    return Rig(tmp_path, graphs, target="tensorrt-rtx", capabilities=["SM89", "SM90"])


def test_it_keeps_the_contract(rtx: Rig) -> None:
    contracts.answers_of_both_profiles(rtx)
    contracts.two_batches_in_flight(rtx)


def test_a_plan_that_cannot_run_here_is_refused_with_its_reasons(rtx: Rig) -> None:
    kinds = rtx.trt.EngineInvalidityDiagnostics
    rtx.library.validity = ("INVALID", int(kinds.OLD_CUDA_DRIVER) | int(kinds.UNSUPPORTED_CC))
    with pytest.raises(EngineError, match=r"cannot run here: unsupported cc; old cuda driver. Build it again"):
        rtx.load()
    rtx.check_clean()


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


@pytest.mark.parametrize(("megabytes", "strategies"), [(0, [None, None]), (1, ["WHOLE_GRAPH_CAPTURE", None])])
def test_it_records_the_steps_of_the_narrow_profile_by_itself(
    megabytes: int, strategies: list[str | None], rtx: Rig
) -> None:
    with rtx.engine(num_streams=1, cuda_graphs=megabytes, warm=True) as engine:
        made = [context._graphs_strategy() for context in rtx.library.contexts]
        assert made == strategies
        assert engine.info.token_buckets == ()  # it records whatever shapes come
        assert rtx.device.calls["cudaGraphLaunch"] == 0
        rtx.check(engine, batch_of([5, 6, 7]))
