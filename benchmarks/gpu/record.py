"""The measurements of a GPU, kept as they come; times of work on a device; agreement with a reference."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Found = dict[str, Any]

_PACKAGES = ("torch", "triton", "transformers", "flash-attn")


class Skipped(Exception):
    """A measurement that this machine cannot make, and why. It is tried again in the next run."""


class Record:
    """Measurements by name in the file ``path``, which is written after each of them.

    A file of another machine or other versions is refused: figures of two machines do not belong into one table.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any]) -> None:
        self._path = path
        self._content: Found = {"benchmark": "gpu", "machine": dict(machine), "measurements": {}}
        if path.is_file():
            self._content = json.loads(path.read_bytes())
            if self._content["machine"] != dict(machine):
                raise SystemExit(
                    f"{path} has figures of {self._content['machine']}, and this is {machine}: --out FILE."
                )

    @property
    def measurements(self) -> Mapping[str, Found]:
        """Those that failed or were skipped too."""
        measurements: Mapping[str, Found] = self._content["measurements"]
        return measurements

    def is_finished(self, name: str) -> bool:
        found = self.measurements.get(name, {"error": "never tried"})
        return not {"error", "skipped"} & found.keys()

    def keep(self, name: str, found: Mapping[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._content["measurements"][name] = {**found, "at": now}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps(self._content, indent=2) + "\n")
        scratch.replace(self._path)


def machine_of(device: torch.device) -> Found:
    """The GPU and its driver, or the CPU, and versions."""
    packages = {}
    for package in _PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    name = f"CPU ({platform.machine()})"
    if device.type == "cuda":
        found, driver = torch.cuda.get_device_properties(device), Path("/proc/driver/nvidia/version")
        about = driver.read_text().splitlines()[0].strip() if driver.is_file() else "driver not known"
        name = f"{found.name}, SM {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors; {about}"
    return {"device": name, "python": platform.python_version(), "cuda": torch.version.cuda, **packages}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def throughput(work: Callable[[], object], device: torch.device, *, budget_s: float) -> Found:
    """Milliseconds of one call of many in a row, by the device's own clock: its median, extremes and number."""
    first = _warm_s(work, device)
    count = _repetitions(first, budget_s)
    if device.type != "cuda":
        return latency(work, device, budget_s=budget_s)
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(count + 1)
    ]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    synchronize(device)
    return _summary([start.elapsed_time(end) for start, end in pairwise(events)])


def latency(work: Callable[[], object], device: torch.device, *, budget_s: float) -> Found:
    """Milliseconds of one call on an idle device until it is finished, by the host's clock."""
    first = _warm_s(work, device)
    values = []
    for _ in range(_repetitions(first, budget_s)):
        started = time.perf_counter()
        work()
        synchronize(device)
        values.append(1000 * (time.perf_counter() - started))
    return _summary(values)


def _warm_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the third call: the first two allocate and compile."""
    for _ in range(3):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
    return time.perf_counter() - started


def _repetitions(one_s: float, budget_s: float) -> int:
    return max(3, min(200, int(budget_s / max(one_s, 1e-6))))


def _summary(values_ms: list[float]) -> Found:
    found = {"ms": statistics.median(values_ms), "ms_min": min(values_ms), "ms_max": max(values_ms)}
    return {**{name: round(value, 4) for name, value in found.items()}, "repetitions": len(values_ms)}


def agreement(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The lowest cosine between rows of each output; of one number a row, that of all of them together.

    Raises ValueError for numbers that are not finite.
    """
    found = {}
    for name, rows in expected.items():
        if not torch.isfinite(actual[name]).all():
            raise ValueError(f"output {name} has NaN or infinite numbers")
        ours, theirs = (side.double().cpu() for side in (actual[name], rows))
        if rows.shape[1] == 1:
            ours, theirs = ours.T, theirs.T
        found[name] = round(float(torch.nn.functional.cosine_similarity(ours, theirs, dim=1).min()), 6)
    return found


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
