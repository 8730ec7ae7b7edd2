"""The processes of a server, real ones, without HTTP: which of them hang, what they open, what is known of costs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bei.artifact.store import load
from bei.config.devices import Device
from bei.config.settings import ServeConfig
from bei.errors import EngineError
from bei.multiprocess.control.messages import COSTS, Reload, Served
from bei.multiprocess.supervisor import fleet as fleets
from bei.multiprocess.supervisor.child import Child, Role
from bei.multiprocess.supervisor.fleet import Fleet
from bei.multiprocess.supervisor.supervisor import Swaps
from bei.scheduler.cost_model import CostModel
from tests.e2e.process import DEADLINE_S
from tests.e2e.swapping_server import put_in_place, save_build
from tests.support.artifacts import LIMITS

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "tests.e2e.standin_child")
CONFIG = ServeConfig(http_workers=2, tune="off", hang_timeout=1.0)


def with_fleet(folder: Path, test: Callable[[Fleet, Swaps], Awaitable[None]], num_devices: int) -> None:
    """Build 1 is served from ``folder / "tiny"``. At the end no process and no descriptor is left."""
    artifact = save_build(folder / "tiny", 1)

    async def run() -> None:
        fleet = Fleet(CONFIG, 1, [Device("", (), {}) for _ in range(num_devices)], COMMAND, 0)
        try:
            await fleet.start()
            await fleet.load_first(load(artifact.path), 0)
            await fleet.load()
            await fleet.serve([])
            await test(fleet, Swaps(fleet, {"tiny": artifact.path}, CONFIG))
        finally:
            await fleet.close()

    num_open = psutil.Process().num_fds()
    asyncio.run(asyncio.wait_for(run(), 2 * DEADLINE_S))
    assert psutil.Process().num_fds() == num_open
    assert psutil.Process().children() == []


async def another(fleet: Fleet, role: Role, former: Child) -> Child:
    """The process that follows ``former``, when it is ready."""
    give_up_s = time.monotonic() + DEADLINE_S
    while former in fleet.of(role) or not fleet.can_answer() or not await is_ready(fleet):
        assert time.monotonic() < give_up_s, "no other process has come"
        await asyncio.sleep(0.02)
    return fleet.of(role)[former.place.index]


async def is_ready(fleet: Fleet) -> bool:
    return {*await fleet.all_ready(DEADLINE_S)} == {*fleet.of("front", "manager", "engine")}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_process_that_hangs_is_ended_and_another_one_takes_its_place(
    tmp_path: Path, num_devices: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleets, "LEAST_S", 0.5)
    hangs: list[tuple[Role, signal.Signals]] = [
        ("front", signal.SIGUSR1),  # its event loop
        ("front", signal.SIGSTOP),
        ("engine", signal.SIGSTOP),
    ]
    if num_devices > 1:
        hangs.append(("manager", signal.SIGSTOP))

    async def test(fleet: Fleet, swaps: Swaps) -> None:
        for role, number in hangs:
            former = fleet.of(role)[-1]
            others = {child for child in fleet.of("front", "manager", "engine") if child is not former}
            psutil.Process(former.pid).send_signal(number)
            await another(fleet, role, former)
            assert await former.wait() == -signal.SIGKILL
            assert others < {*fleet.of("front", "manager", "engine")}  # nobody else was ended

    with caplog.at_level(logging.ERROR, "bei.multiprocess.supervisor.fleet"):
        with_fleet(tmp_path, test, num_devices)
    said = [record.getMessage() for record in caplog.records if "has not answered for" in record.getMessage()]
    expected = ["front-1", "front-1", "engine-0"] if num_devices == 1 else ["front-1", "front-1", "engine-1", "manager"]
    assert [line.split()[0] for line in said] == expected
    assert all(line.endswith("s: the process is ended") for line in said)


def test_a_front_end_that_follows_looks_at_its_keys_once_more_when_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are ready alone hear of a SIGHUP, and it has read its keys long before."""
    told: list[tuple[Child, object]] = []
    call = Child.call

    async def recorded(child: Child, command: Any, *rest: Any) -> Any:
        found = await call(child, command, *rest)
        told.append((child, command))
        return found

    async def test(fleet: Fleet, swaps: Swaps) -> None:
        former = fleet.of("front")[-1]
        psutil.Process(former.pid).kill()
        new = await another(fleet, "front", former)
        give_up_s = time.monotonic() + DEADLINE_S
        while (new, Reload()) not in told:
            assert time.monotonic() < give_up_s, "it was not told"
            await asyncio.sleep(0.02)
        assert [child for child, command in told if command == Reload()] == [new]

    monkeypatch.setattr(Child, "call", recorded)
    with_fleet(tmp_path, test, 1)


def test_without_a_hang_timeout_nobody_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "LEAST_S", 0.1)
    monkeypatch.setattr(f"{__name__}.CONFIG", dataclasses.replace(CONFIG, hang_timeout=0.0))

    async def test(fleet: Fleet, swaps: Swaps) -> None:
        child = fleet.with_queues()
        process = psutil.Process(child.pid)
        process.suspend()
        await asyncio.sleep(4.0)
        assert fleet.with_queues() is child
        assert child.is_alive
        process.resume()
        while await child.ask(COSTS) is None:
            pass

    with_fleet(tmp_path, test, 1)


@pytest.mark.parametrize(("num_devices", "lies_there"), [(1, "another build"), (1, "nothing"), (2, "another build")])
def test_processes_that_follow_open_what_is_served_whatever_lies_in_its_place(
    tmp_path: Path, num_devices: int, lies_there: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(fleet: Fleet, swaps: Swaps) -> None:
        if lies_there == "nothing":
            shutil.rmtree(tmp_path / "tiny")
        else:
            save_build(tmp_path / "next", 2)
            put_in_place(tmp_path / "next", tmp_path / "tiny")
        roles: tuple[Role, ...] = ("engine", "front") if num_devices == 1 else ("engine", "manager", "front")
        for role in roles:
            (former, *_) = fleet.of(role)
            former.kill()
            # A front end's canary is answered as build 1 answered it: else it does not come.
            await another(fleet, role, former)
        assert {served.artifact.manifest.digest for served in fleet.open.values()} == {swaps.served("tiny").digest}
        if lies_there == "another build":
            found = await swaps.find("tiny")
            assert found is not None
            assert found.served.artifact.manifest.digest != swaps.served("tiny").digest
            await swaps.swap("tiny", found)
            assert fleet.served["tiny"] is found.served
            (former, *_) = fleet.of("engine")
            former.kill()
            await another(fleet, "engine", former)

    with caplog.at_level(logging.ERROR, "bei.multiprocess.supervisor.fleet"):
        with_fleet(tmp_path, test, num_devices)
    assert not any("cannot be started" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("num_devices", "role"), [(1, "engine"), (2, "manager")])
def test_what_steps_were_observed_to_cost_is_known_after_a_swap_and_to_another_batch_manager(
    tmp_path: Path, num_devices: int, role: Role
) -> None:
    assumed = CostModel.assumed(LIMITS).speed

    def speed(served: Served) -> float:
        assert served.costs is not None
        return CostModel.from_json(served.costs).speed

    async def test(fleet: Fleet, swaps: Swaps) -> None:
        first = fleet.served["tiny"]
        assert speed(first) == assumed
        observed = speed(await fleet.observed(first))  # by the steps of the canaries
        assert observed != assumed
        (former,) = fleet.of(role)
        assert fleet.with_queues() is former
        former.kill()
        await another(fleet, role, former)
        assert speed(await fleet.observed(first)) == pytest.approx(observed)
        save_build(tmp_path / "next", 2)
        put_in_place(tmp_path / "next", tmp_path / "tiny")
        before = speed(await fleet.observed(first))
        found = await swaps.find("tiny")
        assert found is not None
        assert speed(found.served) == pytest.approx(before)
        await swaps.swap("tiny", found)
        assert found.served.key != first.key

    with_fleet(tmp_path, test, num_devices)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_artifact_that_no_engine_can_load_leaves_the_former_one_and_no_descriptor(
    tmp_path: Path, num_devices: int
) -> None:
    async def test(fleet: Fleet, swaps: Swaps) -> None:
        num_open = psutil.Process().num_fds()
        former = fleet.served["tiny"]
        save_build(tmp_path / "next", 2, canary_of=90_000)
        put_in_place(tmp_path / "next", tmp_path / "tiny")
        with pytest.raises(Exception, match="canary") as raised:
            await swaps.find("tiny")
        assert getattr(raised.value, "code", "") == EngineError.code
        assert [*fleet.open] == [former.key]
        assert psutil.Process().num_fds() == num_open

    with_fleet(tmp_path, test, num_devices)
