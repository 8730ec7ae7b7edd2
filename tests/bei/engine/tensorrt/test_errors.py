"""Errors that keep an engine from loading or running: one line with the remedy."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cuda.bindings import runtime

from bei.artifact.manifest import TENSORRT_GRAPH, TENSORRT_PLAN, EngineRequirements, OutputInfo, Plan
from bei.engine.load import load_engine
from bei.errors import (
    ArtifactWrongDeviceError,
    ArtifactWrongVersionError,
    BeiError,
    ConfigError,
    DeviceNotFoundError,
    EngineDeadError,
    EngineError,
    MissingDependencyError,
)
from tests.bei.engine.tensorrt.device import Device
from tests.bei.engine.tensorrt.rig import GRAPHS_MB, LATENCY, THROUGHPUT, Graphs, Rig, batch_of
from tests.support.artifacts import save_artifact

OUT_OF_MEMORY = runtime.cudaError_t.cudaErrorMemoryAllocation
ILLEGAL_ADDRESS = runtime.cudaError_t.cudaErrorIllegalAddress


def error_of(act: Callable[[], object]) -> BaseException:
    """The error that ``act`` raises, without its frames."""
    try:
        act()
    except BeiError as error:
        return type(error)(str(error))
    raise AssertionError("nothing was raised")


def refused(rig: Rig, kind: type[BeiError], match: str) -> None:
    """Loading raises, in one line, and leaves nothing behind."""
    error = error_of(rig.load)
    assert re.search(match, str(error)), str(error)
    assert "\n" not in str(error)
    assert type(error) is kind
    rig.check_clean()


# Before a plan is read.


def test_another_gpu_is_named_with_the_remedy(graphs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, graphs, device=Device(name="NVIDIA L4", capability=89))
    refused(rig, ArtifactWrongDeviceError, r"compiled for SM90; .* NVIDIA L4 \(SM89\). Build it again on this machine")


def test_another_gpu_of_tensorrt_rtx_is_named_with_the_setting_to_build_with(graphs: Graphs, tmp_path: Path) -> None:
    device = Device(name="NVIDIA A10", capability=86)
    rig = Rig(tmp_path, graphs, target="tensorrt-rtx", device=device, capabilities=["SM89", "SM120"])
    refused(
        rig,
        ArtifactWrongDeviceError,
        r"compiled for SM89, SM120; .* NVIDIA A10 \(SM86\). Build it again with --compute-capability 86\.$",
    )


def test_a_gpu_that_tensorrt_rtx_never_runs_on_is_told_the_target_that_does(graphs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, graphs, target="tensorrt-rtx", capabilities=["SM89", "SM120"])
    refused(
        rig,
        ArtifactWrongDeviceError,
        r"H200 \(SM90\), on which TensorRT-RTX does not run. Build it again on this machine with --target tensorrt\.$",
    )


@pytest.mark.parametrize(("capability", "runs"), [(75, False), (80, True), (120, True)])
def test_hardware_compatible_plans_run_from_ampere_on(
    capability: int, runs: bool, graphs: Graphs, tmp_path: Path
) -> None:
    device = Device(name="another", capability=capability)
    rig = Rig(tmp_path, graphs, device=device, hardware_compatible=True)
    if runs:
        with rig.engine() as engine:
            rig.check(engine, batch_of([3]))
    else:
        refused(rig, ArtifactWrongDeviceError, "SM75")


def test_another_model_of_the_same_architecture_is_a_warning(
    graphs: Graphs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, graphs, device=Device(name="NVIDIA H100"))
    with rig.engine():
        assert "compiled on NVIDIA H200 and runs on NVIDIA H100" in caplog.text


def test_another_version_of_the_library_is_named(rig: Rig) -> None:
    rig.describe(compiler_version="11.1.0.1")
    refused(
        rig,
        ArtifactWrongVersionError,
        rf"compiled by TensorRT 11.1.0.1, {rig.version} is installed: .*install TensorRT 11.1.0.1",
    )


def test_an_old_driver_is_named(graphs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, graphs, device=Device(driver=12040))
    refused(rig, DeviceNotFoundError, r"needs a driver for CUDA 13.0, this machine's is for CUDA 12.4: install a newer")


def test_without_a_gpu_one_line_says_so(rig: Rig) -> None:
    rig.device.fail("cudaGetDeviceCount", runtime.cudaError_t.cudaErrorNoDevice)
    refused(rig, DeviceNotFoundError, r"Serving tiny \(target tensorrt\) needs an NVIDIA GPU. .*cudaErrorNoDevice")


def test_a_manifest_that_describes_no_plan_is_refused(rig: Rig) -> None:
    rig.describe(plan=None)
    refused(rig, EngineError, "does not describe its plan")


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_serving_on_a_machine_without_a_gpu_is_refused_in_one_line(target: str, tmp_path: Path) -> None:
    status, _ = runtime.cudaGetDeviceCount()
    if status.value == 0:
        pytest.skip("this machine has a GPU")
    artifact = save_artifact(tmp_path / "artifact", target=target, engine=requirements())
    with pytest.raises(
        DeviceNotFoundError, match=rf"^Serving tiny \(target {target}\) needs an NVIDIA GPU. CUDA "
    ) as raised:
        load_engine(artifact.engine_dir, artifact.manifest)
    assert "\n" not in str(raised.value)


def requirements() -> EngineRequirements:
    about = Plan(lowerings=[], fallbacks=[], profiles=[LATENCY, THROUGHPUT])
    return EngineRequirements(
        compiler="tensorrt", compiler_version="11.1", device="NVIDIA H200", capabilities=["SM90"], plan=about
    )


@pytest.mark.parametrize(
    ("module", "package"),
    [("cuda.bindings.runtime", "cuda-bindings"), ("tensorrt", "tensorrt")],
    ids=["cuda", "library"],
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, package: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if module == "tensorrt":
        monkeypatch.setattr("bei.engine.tensorrt.engine.load_cuda", lambda purpose, extra: rig.device.module())
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingDependencyError, match=rf"needs the Python package '{package}': pip install 'bei\[tensorrt\]'"
    ):
        load_engine(rig.folder, rig.manifest)
    rig.check_clean()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_threads": 4}, "engine_threads is for target cpu; this artifact is for tensorrt: leave it out"),
        ({"num_streams": 0}, "1 to 8 streams, not 0"),
        ({"num_streams": 9}, "1 to 8 streams, not 9"),
        ({"cuda_graphs": -1}, "cannot be -1 MB"),
    ],
)
def test_options_that_a_gpu_does_not_have_are_refused(options: dict[str, int], words: str, rig: Rig) -> None:
    with pytest.raises(ConfigError, match=words):
        load_engine(rig.folder, rig.manifest, options)


# The plan.


@pytest.mark.parametrize("left", [0, 3, 200, -1])
def test_a_truncated_plan_is_told_from_others(left: int, rig: Rig) -> None:
    (rig.folder / TENSORRT_PLAN).write_bytes(rig.plan[:left])
    refused(rig, EngineError, r"model.plan ends too early, after [\d,]+ bytes: copy the artifact anew")


def test_what_is_no_plan_is_refused_with_the_library_s_words(rig: Rig) -> None:
    (rig.folder / TENSORRT_PLAN).write_bytes(b"x" * 1000)
    refused(rig, EngineError, "could not load .*model.plan: Deserialization failed: magic tag does not match")


def test_a_plan_of_another_version_than_its_manifest_says_is_refused(rig: Rig) -> None:
    rig.library.version = "11.9"
    refused(rig, EngineError, "could not load .*Serialization assertion failed")


def test_a_plan_that_does_not_fit_into_the_gpu_is_refused(rig: Rig) -> None:
    rig.device.memory.limit = 1000
    refused(rig, EngineError, "GPU memory could not be allocated")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": (1, 32, 80)}, "profile latency takes tokens from 1 to 72, the manifest says 1 to 80"),
        ({"sequences": (2, 2, 4)}, "profile latency takes sequences from 1 to 4, the manifest says 2 to 4"),
        ({"longest": (1, 1, 64)}, "profile latency takes longest from 1 to 72, the manifest says 1 to 64"),
    ],
)
def test_profiles_that_are_not_the_manifest_s_are_refused(
    changes: dict[str, Any], words: str, graphs: Graphs, tmp_path: Path
) -> None:
    said = msgspec.structs.replace(LATENCY, **changes)
    rig = Rig(tmp_path, graphs, profiles=[said, THROUGHPUT], compiled_profiles=[LATENCY, THROUGHPUT])
    refused(rig, EngineError, words)


def test_another_number_of_profiles_is_refused(graphs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, graphs, profiles=[LATENCY, THROUGHPUT], compiled_profiles=[THROUGHPUT])
    refused(rig, EngineError, "has 1 profiles, the manifest names 2")


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([OutputInfo(name="logits", dimension=2)], "no output 'logits'"),
        (
            [OutputInfo(name="embedding", dimension=32)],
            r"'embedding' is FLOAT \[-1, 64\], .* rows of 32",
        ),
        ([], "outputs that the manifest does not name: embedding"),
    ],
)
def test_outputs_that_are_not_the_manifest_s_are_refused(outputs: list[OutputInfo], words: str, rig: Rig) -> None:
    rig.manifest = msgspec.structs.replace(rig.manifest, outputs=outputs)
    refused(rig, EngineError, words)


# Plans without weights.


def test_a_plan_without_weights_gets_those_of_the_graph_beside_it(graphs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, graphs, refit=True)
    with rig.engine() as engine:
        rig.check(engine, batch_of([5, 6, 7]))


def test_a_plan_without_weights_and_without_a_graph_is_refused(graphs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, graphs, refit=True)
    (rig.folder / TENSORRT_GRAPH).unlink()
    refused(rig, EngineError, "holds no weights, and .*model.onnx is missing")


def test_a_graph_that_cannot_be_read_is_refused_with_the_parser_s_words(graphs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, graphs, refit=True)
    (rig.folder / TENSORRT_GRAPH).write_bytes(b"no graph")
    refused(rig, EngineError, "could not take weights from .*model.onnx: DecodeError in the model")


def test_a_graph_of_another_model_is_refused_with_what_it_lacks(
    graphs: Graphs, many_outputs: Graphs, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, many_outputs, refit=True)
    for file in graphs.path.parent.iterdir():
        (rig.folder / (TENSORRT_GRAPH if file == graphs.path else file.name)).write_bytes(file.read_bytes())
    refused(rig, EngineError, "lacks 7 weights of the plan, constant.5 among them")


# Memory and mid-flight.


@pytest.mark.parametrize("function", ["cudaMalloc", "cudaHostAlloc"])
def test_no_memory_at_load_is_told_with_the_remedy(function: str, rig: Rig) -> None:
    rig.device.fail(function, OUT_OF_MEMORY, after=1)
    refused(rig, EngineError, "memory could not be had: .* Stop what else uses the device, .*--max-num-tokens")


@pytest.mark.parametrize("function", ["cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaStreamSynchronize"])
def test_whatever_fails_at_load_leaves_nothing(function: str, rig: Rig) -> None:
    rig.device.fail(function, runtime.cudaError_t.cudaErrorUnknown, after=1)
    refused(rig, EngineError, rf"CUDA failed in {function}: cudaErrorUnknown")


@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize", "cudaGraphLaunch"])
def test_a_call_that_fails_mid_flight_costs_its_batch_alone(function: str, rig: Rig) -> None:
    with rig.engine(num_streams=1, cuda_graphs=GRAPHS_MB, warm=True) as engine:
        rig.device.fail(function, OUT_OF_MEMORY)
        error = error_of(lambda: engine.run(batch_of([3])))
        assert type(error) is EngineError
        assert str(error).startswith(f"CUDA failed in {function}: cudaErrorMemoryAllocation")
        rig.check(engine, batch_of([3]))
        rig.check(engine, batch_of([64] * 4))


def test_a_gpu_that_another_process_has_for_itself_is_named_before_the_plan_is_read(rig: Rig) -> None:
    rig.device.fail("cudaSetDevice", runtime.cudaError_t.cudaErrorDevicesUnavailable)
    refused(rig, EngineError, "CUDA failed in cudaSetDevice: cudaErrorDevicesUnavailable")


@pytest.mark.parametrize(("method", "error"), [("infer_shapes", RuntimeError), ("execute_async_v3", TypeError)])
def test_an_exception_of_the_bindings_costs_its_batch_alone(method: str, error: type[Exception], rig: Rig) -> None:
    with rig.engine(num_streams=1) as engine:
        rig.library.exceptions[method] = [error]
        raised = error_of(lambda: engine.run(batch_of([3])))
        assert type(raised) is EngineError
        assert re.fullmatch(r"TensorRT did not (take|run) a step: shapes are not known", str(raised))
        rig.check(engine, batch_of([3]))


@pytest.mark.parametrize("method", ["create_execution_context", "set_device_memory"])
def test_an_exception_of_the_bindings_at_load_leaves_nothing(method: str, rig: Rig) -> None:
    rig.library.exceptions[method] = [RuntimeError]
    refused(rig, EngineError, "TensorRT made no execution context: shapes are not known$")


def test_after_an_error_of_a_kernel_the_engine_says_that_it_is_dead(rig: Rig) -> None:
    engine = rig.load()
    rig.device.fail("kernel", ILLEGAL_ADDRESS, is_sticky=True)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"GPU does not answer .*cudaErrorIllegalAddress.*restart the server"):
            engine.run(batch_of([3]))
    engine.close()  # nothing can be freed, and nothing is raised


def test_a_shape_beyond_all_profiles_is_refused_and_harms_nothing(rig: Rig) -> None:
    with rig.engine(num_streams=1) as engine:
        error = error_of(lambda: engine.run(batch_of([70] * 4)))
        assert str(error).startswith("No profile of the plan holds this batch (input_ids [288]")
        rig.check(engine, batch_of([3]))
