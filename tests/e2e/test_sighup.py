"""SIGHUP while a server starts: it is remembered, and ends neither the server nor a process of it."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from bei.artifact.manifest import Artifact
from tests.e2e.process import DEADLINE_S, Server, serve, wait_until

_EVERY_S = 0.001


class Hangups(threading.Thread):
    """Sends SIGHUP without a pause to the processes that ``targets`` finds, until ``stop``."""

    def __init__(self, targets: Callable[[], list[psutil.Process]]) -> None:
        super().__init__(daemon=True)
        self._targets = targets
        self._is_over = threading.Event()
        self.count = 0

    def run(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            with contextlib.suppress(psutil.Error):
                for process in self._targets():
                    process.send_signal(signal.SIGHUP)
                    self.count += 1

    def stop(self) -> None:
        self._is_over.set()
        self.join(DEADLINE_S)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started here get no SIGHUP until they say that they can take it: Python itself cannot."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def checked(server: Server, hangups: Hangups) -> None:
    """``server`` comes up though ``hangups`` go on, has obeyed them, and ends as any other."""
    hangups.start()
    try:
        with server:
            hangups.stop()
            assert hangups.count > 10
            wait_until(lambda: any("SIGHUP: " in line for line in server.log), "what it was told is read anew")
            assert server.embed("a text").status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 0
    finally:
        hangups.stop()


@pytest.mark.parametrize("flags", [(), ("--http-workers", "2")], ids=["one process", "several"])
def test_a_server_that_gets_sighup_from_its_exec_on_remembers_it_and_serves(
    flags: tuple[str, ...], tiny: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    with held_back():
        server = serve([tiny.path, *flags], env, tmp_path)
    process = psutil.Process(server.pid)
    checked(server, Hangups(lambda: [process]))


def test_its_processes_ignore_sighup_from_their_exec_on(tiny: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    server = serve([tiny.path, "--http-workers", "2"], env, tmp_path)
    process = psutil.Process(server.pid)
    hangups = Hangups(process.children)
    hangups.start()
    try:
        with server:
            hangups.stop()
            assert hangups.count > 10
            assert not any("ended" in line for line in server.log)
            assert server.embed("a text").status_code == 200
    finally:
        hangups.stop()


def test_sighup_is_remembered_before_anything_of_a_server_is_imported(env: Mapping[str, str], tmp_path: Path) -> None:
    code = (
        "import bei.__main__, sys; "
        "print(sorted(name for name in sys.modules if name.startswith('bei') or name in ('msgspec', 'argparse')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=dict(env), cwd=tmp_path, capture_output=True, check=True)
    assert ended.stdout.decode().strip() == str(
        sorted(["bei", "bei.__main__", "bei.utils", "bei.utils.sighup", "bei.version"])
    )


def test_who_closes_the_terminal_while_it_starts_ends_it(tmp_path: Path, env: Mapping[str, str]) -> None:
    master, slave = pty.openpty()
    code = "import bei.__main__, time; bei.__main__.remember(); print('!'); time.sleep(99)"
    command = [sys.executable, "-u", "-c", code]
    process = subprocess.Popen(command, env=dict(env), cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
    try:
        os.close(slave)
        while b"!" not in os.read(master, 10_000):
            pass
        process.send_signal(signal.SIGHUP)  # the terminal is there
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        os.close(master)
        process.send_signal(signal.SIGHUP)
        assert process.wait(DEADLINE_S) in (128 + signal.SIGHUP, 120)  # Python's own, where it cannot flush
    finally:
        process.kill()
        process.wait()
