"""The compiler of ``tensorrt`` and ``tensorrt-rtx``: its properties, the machine and its settings."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.cli.main import main
from bei.core import Encoding, Limits, PackedBatch
from bei.engine.grid_windows import Windows
from bei.engine.nvidia import Gpu
from bei.engine.packing import bucket, graph_inputs
from bei.errors import ConfigError, DeviceNotFoundError, LibraryVersionError, MissingDependencyError
from bei_build.config import BuildConfig
from bei_build.targets.base import Compiler, Numerics
from bei_build.targets.choose import compiler_for
from bei_build.targets.tensorrt import compiler as module
from bei_build.targets.tensorrt.plan import PlanSettings
from bei_build.targets.tensorrt.profiles import _sizes_of_windows, _with_filler, profiles_of
from tests.bei_build.targets.rtx import limits_of, needs_rtx
from tests.bei_build.targets.tiny import tiny_spec

L4 = Gpu("NVIDIA L4", 89, 24 << 30, 13000)
T4 = Gpu("Tesla T4", 75, 16 << 30, 13000)
H200 = Gpu("NVIDIA H200", 90, 141 << 30, 13000)
CAPABILITIES = ("NONE", "CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120", "SM121")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of either target that only lists its GPUs."""
    members = dict.fromkeys(CAPABILITIES)
    stand_in = SimpleNamespace(__version__="1.7.1", ComputeCapability=SimpleNamespace(__members__=members))
    monkeypatch.setattr(module, "load_library", lambda target, purpose: stand_in)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_gpu(cuda: object) -> Gpu:
        raise DeviceNotFoundError("CUDA finds no NVIDIA GPU on this machine.")

    monkeypatch.setattr(module, "load_cuda", lambda purpose, extra: None)
    monkeypatch.setattr(module, "current_gpu", current_gpu)


def with_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(module, "load_cuda", lambda purpose, extra: None)
    monkeypatch.setattr(module, "current_gpu", lambda cuda: gpu)


def of(target: str, **settings: Any) -> Compiler:
    return compiler_for(BuildConfig(model="tiny", target=target, **settings))


# GPUs.


@pytest.mark.usefixtures("library", "no_gpu")
def test_rtx_needs_no_gpu_where_it_is_told_which() -> None:
    compiler = of("tensorrt-rtx", compute_capability=("89", "120", "89"))
    compiler.check_able()
    assert compiler.machine() == ["1.7.1", "SM89", "SM120"]
    assert compiler.cannot_run() == "CUDA finds no NVIDIA GPU on this machine"


@pytest.mark.usefixtures("library", "no_gpu")
@pytest.mark.parametrize(
    ("target", "remedy"), [("tensorrt-rtx", "--compute-capability 89,120"), ("tensorrt", "--target tensorrt-rtx")]
)
def test_no_gpu_is_refused_with_what_to_do(target: str, remedy: str) -> None:
    with pytest.raises(DeviceNotFoundError, match=f"finds no NVIDIA GPU on this machine.*{remedy}"):
        of(target).check_able()


@pytest.mark.usefixtures("library", "no_gpu")
@pytest.mark.parametrize("asked", ["90", "8.9", "sm89", "1"])
def test_unknown_capabilities_are_refused_with_those_it_knows(asked: str) -> None:
    with pytest.raises(ConfigError, match=f"compute_capability '{asked}': .* compiles for 75, 80, 86, 89, 120, 121"):
        of("tensorrt-rtx", compute_capability=("89", asked)).check_able()


@needs_rtx
def test_the_library_knows_these_capabilities() -> None:
    import tensorrt_rtx_bindings

    assert tuple(tensorrt_rtx_bindings.ComputeCapability.__members__) == CAPABILITIES


@pytest.mark.usefixtures("library")
def test_this_machines_gpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, L4)
    for target, machine in (("tensorrt", ["1.7.1", "SM89", "NVIDIA L4"]), ("tensorrt-rtx", ["1.7.1", "SM89"])):
        compiler = of(target)
        compiler.check_able()
        assert compiler.machine() == machine
        assert compiler.cannot_run() is None


@pytest.mark.usefixtures("library")
def test_a_gpu_that_rtx_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, H200)
    with pytest.raises(ConfigError, match=r"'90': .* compiles for 75"):
        of("tensorrt-rtx").check_able()
    of("tensorrt").check_able()


@pytest.mark.usefixtures("library")
def test_a_plan_for_other_gpus_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, L4)
    assert of("tensorrt-rtx", compute_capability=("86", "89")).cannot_run() is None
    reason = of("tensorrt-rtx", compute_capability=("86", "120")).cannot_run()
    assert reason == "this machine's NVIDIA L4 is SM89, and the plan is for SM86, SM120"


@pytest.mark.usefixtures("library")
def test_without_cuda_python_a_plan_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    reason = of("tensorrt-rtx", compute_capability=("89",)).cannot_run()
    assert reason is not None
    assert "pip install 'bei[tensorrt-rtx]'" in reason
    with pytest.raises(MissingDependencyError, match=r"pip install 'bei\[tensorrt\]'"):
        of("tensorrt").check_able()


# Libraries.


@pytest.fixture(params=["tensorrt", "tensorrt-rtx"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """A target, and a function that installs a version of its library."""
    names = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}[request.param]

    def install(version: str | None) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)
        if version is not None:
            stand_in = ModuleType(names[0])
            stand_in.__version__ = version  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, names[0], stand_in)

    return request.param, install


def test_a_library_that_is_missing_is_named_with_its_extra(installed: tuple[str, Any]) -> None:
    target, install = installed
    install(None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'bei\[{target}\]'"):
        of(target).check_able()


def test_a_library_of_an_unknown_version_is_refused(installed: tuple[str, Any]) -> None:
    target, install = installed
    install("10.9.0" if target == "tensorrt" else "1.4.0")
    with pytest.raises(LibraryVersionError, match="is installed, bei needs >="):
        of(target).check_able()


def test_a_build_that_is_refused_is_one_line(installed: tuple[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    target, install = installed
    install(None)
    with pytest.raises(SystemExit) as stop:
        main(["build", "no/such-checkpoint", "--target", target])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"pip install 'bei[{target}]'" in message


# Precisions.


@pytest.mark.usefixtures("library", "no_gpu")
def test_precisions() -> None:
    compiler = of("tensorrt")
    assert compiler.resolve_precision("auto") == "bf16"  # the GPU is checked after it
    assert [compiler.resolve_precision(name) for name in compiler.precisions] == ["bf16", "fp16", "fp32", "fp8"]
    with pytest.raises(ConfigError, match="no precision 'int8'"):
        compiler.resolve_precision("int8")


@pytest.mark.usefixtures("library")
def test_a_gpu_without_bf16_gets_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, T4)
    for compiler in (of("tensorrt"), of("tensorrt-rtx"), of("tensorrt-rtx", compute_capability=("75", "89"))):
        assert compiler.resolve_precision("auto") == "fp16"
        assert compiler.resolve_precision("fp32") == "fp32"
        with pytest.raises(ConfigError, match=r"capability 7\.5 do not compute in bf16: build with --precision fp16"):
            compiler.resolve_precision("bf16")
    assert of("tensorrt-rtx", compute_capability=("80",)).resolve_precision("bf16") == "bf16"
    with pytest.raises(ConfigError, match=r"capability 8\.0 do not compute in fp8: build with --precision bf16"):
        of("tensorrt-rtx", compute_capability=("80", "89")).resolve_precision("fp8")


# Settings of one of the two targets.


@pytest.mark.parametrize("setting", [{"hardware_compatible": True}, {"strip_weights": True}, {"timing_cache": "x"}])
def test_settings_that_rtx_does_not_honour_are_refused(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} is a setting of target tensorrt, not of tensorrt-rtx"):
        BuildConfig(model="tiny", target="tensorrt-rtx", **setting)


def test_compute_capabilities_are_not_for_tensorrt() -> None:
    with pytest.raises(ConfigError, match="compute_capability is a setting of target tensorrt-rtx or cuda, not"):
        BuildConfig(model="tiny", target="tensorrt", compute_capability=("89",))


@pytest.mark.usefixtures("library")
def test_a_timing_cache_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, L4)
    refused = {
        tmp_path: "it is a directory",
        tmp_path / "no folder" / "cache": "must be a file in a folder that exists",
    }
    for path, reason in refused.items():
        with pytest.raises(ConfigError, match=rf"timing_cache .* {reason}"):
            of("tensorrt", timing_cache=str(path)).check_able()
    of("tensorrt", timing_cache=str(tmp_path / "cache")).check_able()


@pytest.mark.usefixtures("library")
def test_measured_kernels_are_kept_between_builds_unless_none_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, L4)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    asked: list[Path | None] = []

    def write_plan(trt: object, graph: object, lowerings: object, settings: PlanSettings, *_: object) -> list[str]:
        asked.append(settings.timing_cache)
        return []

    monkeypatch.setattr(module, "write_plan", write_plan)
    monkeypatch.setattr(module, "write_graph", lambda *_: None)
    given = tmp_path / "given"
    for compiler in (
        of("tensorrt"),
        of("tensorrt", timing_cache=str(given)),
        of("tensorrt-rtx", compute_capability=("89",)),
    ):
        compiler.compile(tiny_spec(), mock.Mock(), Numerics("bf16"), limits_of(64), tmp_path, lambda _: None)
    assert asked == [tmp_path / "home/.cache/bei/timing/tensorrt-1.7.1-NVIDIA-L4", given, None]


# Limits and profiles.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "limits", [limits_of(64), Limits(16384, 256, 512), Limits(8192, 8, 8192), Limits(10, 3, 9), Limits(1, 1, 1)]
)
def test_profiles_hold_every_batch_within_the_limits(limits: Limits, packed: bool) -> None:
    latency, throughput = profiles_of(limits, 512, 8, packed=packed)
    for profile in (latency, throughput):
        for least, usual, most in (profile.tokens, profile.sequences, profile.longest):
            assert 1 <= least <= usual <= most
    num_rows = bucket(limits.max_batch_size, min_step=1)
    num_fillers = num_rows - limits.max_batch_size if packed else 0
    assert throughput.tokens[2] >= bucket(limits.max_num_tokens + num_fillers)
    assert throughput.longest[2] >= bucket(limits.max_seq_len)
    assert throughput.sequences[2] >= num_rows
    assert latency.tokens[2] >= min(bucket(limits.max_num_tokens), 512)
    assert latency.longest[2] >= min(bucket(limits.max_seq_len), 512)
    assert latency.tokens[2] <= (544 if packed else 512), "packed, filler sequences own a token"
    assert latency.sequences[2] <= 8
    if not packed:  # tokens are padded to whole buckets, and towers that merge patches take no others
        assert all(size % 8 == 0 for profile in (latency, throughput) for size in profile.tokens)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6), block=st.integers(1, 2)
)
def test_profiles_hold_the_windows_of_images_of_all_sizes(sizes: list[tuple[int, int]], block: int) -> None:
    windows = Windows(3, block)
    grids = [(rows * block, columns * block) for rows, columns in sizes]
    encodings = [Encoding(np.zeros(rows * columns, np.int32)) for rows, columns in grids]
    batches = [PackedBatch.from_encodings(encodings)]
    batches.append(batches[0]._replace(grids=np.array(grids, np.int32)))
    for batch in batches:
        limits = Limits(batch.num_tokens, len(grids), batch.num_tokens)
        for profile in profiles_of(limits, batch.num_tokens, len(grids), packed=False):
            held = _sizes_of_windows(windows, profile)
            found = graph_inputs(batch, [windows.pad_index])[windows.pad_index].shape
            assert all(least <= size <= most for (least, _, most), size in zip(held.values(), found, strict=True))


def test_the_latency_profile_is_as_large_as_it_is_told() -> None:
    latency, _ = profiles_of(Limits(16384, 256, 512), 1024, 16, packed=False)
    assert (latency.tokens[2], latency.sequences[2], latency.longest[2]) == (1024, 16, 544)


@pytest.mark.parametrize(("tokens", "sequences"), [(500, 11), (4, 1), (513, 17), (1, 33)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_as_large_as_latency_settings_say_has_the_latency_profile(
    tokens: int, sequences: int, packed: bool
) -> None:
    """With any filler."""
    latency, _ = profiles_of(Limits(16384, 256, 512), tokens, sequences, packed=packed)
    rows = bucket(sequences, min_step=1)
    assert latency.tokens[2] >= bucket(tokens + (rows - sequences if packed else 0))
    assert latency.sequences[2] >= rows
    assert latency.longest[2] >= bucket(min(tokens, 512))


def test_room_for_filler_is_never_short() -> None:
    assert all(bucket(size) <= _with_filler(size) for size in range(1, 40_000))


def test_default_limits_bound_the_padded_view() -> None:
    compiler = of("tensorrt")
    assert compiler.default_limits(512) == Limits(16384, 256, 512)
    assert compiler.default_limits(8192) == Limits(16384, 32, 8192)
    assert compiler.default_limits(65536) == Limits(65536, 8, 65536)
