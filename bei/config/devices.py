"""The devices of ``--devices``: indexes of GPUs, or sets of CPU cores. Each device has an engine process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bei.errors import ConfigError

_MOST = 128

# Targets whose engines run on CPU cores: OpenVINO, and those of tests.
_ON_CPUS = frozenset(("cpu", "cuda-twin", "fake"))

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"  # CUDA's own is the fastest first
_INDEX = re.compile(r"[0-9]{1,4}")
_CORES = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(\+[0-9]{1,5}(-[0-9]{1,5})?)*")


@dataclass(frozen=True)
class Device:
    """A device of an engine process. ``name``: as in the setting; empty: no device was named. ``cores``: the process is
    pinned to these; empty: not pinned. ``variables``: added to its environment."""

    name: str
    cores: tuple[int, ...]
    variables: Mapping[str, str]

    def take(self) -> None:
        """Bind this process to the device. Call it in the main thread, before other threads start and libraries look
        for devices."""
        os.environ.update(self.variables)
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def check_devices(devices: Seq[str]) -> None:
    """Raise ConfigError for devices that are invalid whatever the target."""
    for name in devices:
        if not _CORES.fullmatch(name):
            raise ConfigError(
                f"devices has {name!r}: give indexes of GPUs, as 0,1, or sets of cores, as 0-15,16-31 (or 0-7+16-23)."
            )
        if not _INDEX.fullmatch(name):
            cores_of(name)
    if len(devices) > _MOST:
        raise ConfigError(f"devices names {len(devices)} of them: name {_MOST} at most, and start several servers.")
    if len(set(devices)) < len(devices):
        raise ConfigError(f"devices names one of them twice: {', '.join(devices)}.")


def cores_of(name: str) -> tuple[int, ...]:
    """The cores of ``0-7+16-23``. Raises ConfigError for a descending range."""
    cores: set[int] = set()
    for part in name.split("+"):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if not found:
            raise ConfigError(f"devices has {name!r}, whose range {part} ends before it begins.")
        cores.update(found)
    return tuple(sorted(cores))


def devices_of(names: Seq[str], targets: Mapping[str, str], env: Mapping[str, str], usable: Seq[int]) -> list[Device]:
    """The devices called ``names`` for models of these ``targets`` (by model name). Without names: one unnamed device.

    ``usable``: cores available to this process. Raises ConfigError that names the setting.
    """
    if not names:
        return [Device("", (), {})]
    if len(kinds := {is_for_gpus(target) for target in targets.values()}) > 1:
        models = ", ".join(f"{name}: {target}" for name, target in targets.items())
        raise ConfigError(
            f"devices are GPUs or sets of cores, and the models need both ({models}): serve them from two servers."
        )
    if True in kinds:
        return [_gpu(name, env) for name in names]
    return _sets_of_cores(names, usable)


def is_for_gpus(target: str) -> bool:
    """True if engines of ``target`` run on GPUs."""
    return target not in _ON_CPUS


def _gpu(name: str, env: Mapping[str, str]) -> Device:
    """The GPU with this index among those visible to this process; if all are, as nvidia-smi counts them."""
    if not _INDEX.fullmatch(name):
        raise ConfigError(f"devices has {name!r}, and the models are for GPUs: give their indexes, as 0,1.")
    visible = env.get(_VISIBLE)
    if visible is None:
        return Device(name, (), {_VISIBLE: str(int(name)), _ORDER: env.get(_ORDER, "PCI_BUS_ID")})
    seen = [part.strip() for part in visible.split(",") if part.strip()]
    if int(name) >= len(seen):
        raise ConfigError(f"devices has {name}, and {_VISIBLE} shows {len(seen)} GPUs ({visible}): count from 0.")
    return Device(name, (), {_VISIBLE: seen[int(name)]})


def _sets_of_cores(names: Seq[str], usable: Seq[int]) -> list[Device]:
    taken: dict[int, str] = {}
    found = []
    for name in names:
        cores = cores_of(name)
        if missing := sorted(set(cores) - set(usable)):
            raise ConfigError(
                f"devices has {name!r}, and this process may not use core {missing[0]}: it may use {_ranges(usable)}."
            )
        for core in cores:
            if core in taken:
                raise ConfigError(
                    f"devices has core {core} in {taken[core]!r} and in {name!r}: give it to one of them."
                )
            taken[core] = name
        found.append(Device(name, cores, {}))
    return found


def _ranges(cores: Seq[int]) -> str:
    """Cores as ranges: ``0-3+6`` for 0, 1, 2, 3 and 6."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return "+".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def usable_cores() -> list[int]:
    """Indexes of the cores available to this process."""
    return sorted(os.sched_getaffinity(0))
