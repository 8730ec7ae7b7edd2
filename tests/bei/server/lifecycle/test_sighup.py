"""SIGHUP, also while models are loaded: what is read anew, one after the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from bei.server.lifecycle.sighup import SighupReloads
from bei.utils.sighup import LogTerminal, SighupMemory


@pytest.fixture
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_reloads_do_not_overlap_and_each_reads_everything() -> None:
    done: list[str] = []

    def part(name: str) -> object:
        async def read() -> None:
            done.append(f"{name} begins")
            await asyncio.sleep(0)
            done.append(f"{name} ends")

        return read

    async def run() -> None:
        reloading = SighupReloads([part("keys")], SighupMemory(LogTerminal()))  # type: ignore[list-item]
        reloading.add(part("certificate"))  # type: ignore[arg-type]
        reloading.soon()
        reloading.soon()
        for _ in range(30):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert done == ["keys begins", "keys ends", "certificate begins", "certificate ends"] * 2


def test_a_part_that_cannot_be_read_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def fails() -> None:
        raise RuntimeError("damaged")

    async def reads() -> None:
        done.append("read")

    async def run() -> None:
        SighupReloads([fails, reads], SighupMemory(LogTerminal())).soon()
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert done == ["read"]
    assert "damaged" in caplog.text


@pytest.mark.parametrize("num_signals", [0, 1, 2])
def test_a_signal_while_models_are_loaded_is_obeyed_at_the_start(handlers: None, num_signals: int) -> None:
    times: list[int] = []

    async def read() -> None:
        times.append(1)

    async def run() -> None:
        memory = SighupMemory(LogTerminal())
        memory.begin()
        reloading = SighupReloads([read], memory)
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGHUP)
        assert times == []
        reloading.start()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert times == [1] * min(num_signals, 1)


class ClosedTerminal(LogTerminal):
    is_closed = True


def test_who_closes_the_terminal_while_models_are_loaded_ends_the_process(handlers: None) -> None:
    SighupMemory(ClosedTerminal()).begin()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGHUP)
    assert ended.value.code == 128 + signal.SIGHUP
