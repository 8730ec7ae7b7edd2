"""Values of ``--devices``, and their effect on engine processes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.config.devices import check_devices, cores_of, devices_of
from bei.config.settings import ServeConfig
from bei.errors import ConfigError

CPU = {"one": "cpu", "other": "cpu"}
GPU = {"one": "tensorrt"}
CORES = range(32)


@pytest.mark.parametrize(
    ("name", "cores"),
    [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1+4-5", [0, 1, 4, 5]), ("7+3", [3, 7]), ("1-2+2-3", [1, 2, 3])],
)
def test_a_set_of_cores_is_ranges_with_plus_between(name: str, cores: list[int]) -> None:
    assert list(cores_of(name)) == cores


@given(st.sets(st.integers(0, 31), min_size=1))
def test_a_set_that_is_named_core_by_core_is_that_set(cores: set[int]) -> None:
    (device,) = devices_of(["+".join(map(str, cores))], CPU, {}, CORES)
    assert device.cores == tuple(sorted(cores))


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("cuda:0",), "'cuda:0'"),
        (("0-",), "'0-'"),
        (("3-1",), "range 3-1 ends before it begins"),
        (("0", "0"), "names one of them twice"),
    ],
)
def test_what_cannot_be_a_device_is_refused_by_the_setting(devices: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig(devices=devices)
    with pytest.raises(ConfigError, match=said):
        check_devices(devices)


@pytest.mark.parametrize(
    ("names", "targets", "said"),
    [
        (["0-3", "3-5"], CPU, "core 3 in '0-3' and in '3-5'"),
        (["30-40"], CPU, "may not use core 32: it may use 0-31"),
        (["0-3"], GPU, "the models are for GPUs"),
        (["0"], {**CPU, **{"three": "tensorrt-rtx"}}, "need both .one: cpu, other: cpu, three: tensorrt-rtx."),
    ],
)
def test_devices_that_the_models_or_the_machine_do_not_go_with_are_refused(
    names: list[str], targets: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        devices_of(names, targets, {}, CORES)


def test_a_gpu_is_counted_among_those_that_are_visible() -> None:
    def visible(name: str, env: dict[str, str]) -> str:
        (device,) = devices_of([name], GPU, env, CORES)
        return device.variables["CUDA_VISIBLE_DEVICES"]

    assert visible("1", {}) == "1"
    assert visible("1", {"CUDA_VISIBLE_DEVICES": "4, GPU-5a"}) == "GPU-5a"
    with pytest.raises(ConfigError, match="shows 2 GPUs"):
        visible("2", {"CUDA_VISIBLE_DEVICES": "4,6"})


def test_gpus_are_counted_as_nvidia_smi_does_unless_the_environment_says_otherwise() -> None:
    """Among visible ones it means another GPU in another order."""

    def variables(env: dict[str, str]) -> Mapping[str, str]:
        (device,) = devices_of(["1"], GPU, env, CORES)
        return device.variables

    assert variables({}) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    fastest = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert variables(fastest) == {"CUDA_VISIBLE_DEVICES": "1", **fastest}
    assert variables({"CUDA_VISIBLE_DEVICES": "4,6"}) == {"CUDA_VISIBLE_DEVICES": "6"}


def test_one_device_that_nobody_names_is_left_as_it_is() -> None:
    (device,) = devices_of([], {**CPU, **GPU}, {}, CORES)
    assert (device.name, device.cores, device.variables) == ("", (), {})


def test_processes_are_for_several_workers_or_devices() -> None:
    assert not ServeConfig().has_processes
    assert not ServeConfig(devices=("0",)).has_processes
    assert ServeConfig(http_workers=2).has_processes
    assert ServeConfig(devices=("0", "1")).has_processes
    with pytest.raises(ConfigError, match="http_workers must be from 1 to 256"):
        ServeConfig(http_workers=257)
