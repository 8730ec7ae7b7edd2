"""``bei`` as users start it: a process of its own, stopped by its own pid. Waits are bounded and never plain sleeps."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import httpx
import psutil

# Whoever waits longer than this has failed. Starting imports, loads and compiles, on two busy cores too, which others
# take away now and then.
DEADLINE_S = 120.0
_POLL_S = 0.02

# Programs of these tests that write the stacks of their threads to the log on SIGUSR2.
_WRITE_STACKS = {"tests.e2e.processes_server", "tests.e2e.standin_child"}
_STACKS_S = 1.0

ROOT = Path(__file__).parents[2]
BEI = (sys.executable, "-m", "bei")
_PATH = os.pathsep.join((str(ROOT), str(ROOT / "build")))  # of this checkout, whichever is installed
_IDS = {"BEI_OPENAI_TOKEN_IDS": "accept"}


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A clean environment: no settings of whoever runs the tests, no hub, no measuring at every start. Tests send token
    ids where the engine's work must be known to the token."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    fixed = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": _PATH, "BEI_TUNE": "off"}
    return {**kept, **fixed, **_IDS, **extra}


def run(arguments: Sequence[object], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A ``bei`` command to its end."""
    command = [*BEI, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Poll until ``is_true()``; fails after the deadline."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < give_up_s, f"waited too long: {what}"
        threading.Event().wait(_POLL_S)


class Server:
    """A running server. Use as a context manager: at the end the process is stopped, if it has not stopped itself."""

    running: ClassVar[set[Server]] = set()  # of this process's

    def __init__(self, command: Sequence[object], env: Mapping[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            [str(part) for part in command],
            env=env,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.url = ""

    def __enter__(self) -> Server:
        try:
            self.wait_until_up()
        except BaseException:
            self._kill()
            raise
        self.running.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.running.discard(self)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.say("open")  # a gated engine must not wait for a test that is over
            try:
                self._process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._kill()
                raise
        self._close()

    def wait_until_up(self) -> None:
        """Return when it answers, and set ``url``."""
        line = self.wait_for_log(r"listening on (http://\S+)")
        self.url = line.split("listening on ")[1].rstrip('"}')  # the log may be JSON
        wait_until(lambda: self.get_status("/health") == 200, "/health")

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(DEADLINE_S)
        for stream in (self._process.stdin, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line.rstrip())
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def wait_for_log(self, pattern: str) -> str:
        """The next line of the log that matches; fails if the process ends first."""
        give_up_s = time.monotonic() + DEADLINE_S
        while True:
            line = self._lines.get(timeout=max(0.0, give_up_s - time.monotonic()))
            assert line is not None, f"the process ended before it said {pattern!r}:\n" + "\n".join(self.log)
            if re.search(pattern, line):
                return line

    def say(self, word: str) -> None:
        """A line to the process's standard input (the gated server listens)."""
        stream = self._process.stdin
        assert stream is not None
        if not stream.closed:
            try:
                stream.write(word + "\n")
                stream.flush()
            except BrokenPipeError:  # it has ended already; what is left in the buffer goes to nobody
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def log_with_stacks(self) -> list[str]:
        """The log, with the stacks of all threads of the processes that write them when asked (``_WRITE_STACKS``)."""
        if self._process.poll() is None:
            for process in (found := psutil.Process(self.pid), *found.children()):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if _WRITE_STACKS & {*process.cmdline()}:
                        process.send_signal(signal.SIGUSR2)
            threading.Event().wait(_STACKS_S)
        return self.log

    def send_signal(self, number: signal.Signals) -> None:
        """To this process alone."""
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait_exit(self) -> int:
        """The exit code, once it has stopped by itself."""
        code = self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return code

    def get_status(self, path: str) -> int:
        """The status of a GET; 0 where nobody listens."""
        try:
            return httpx.get(self.url + path, timeout=DEADLINE_S).status_code
        except httpx.TransportError:
            return 0

    def metric(self, name: str, **labels: str) -> float:
        """The value of the sample with these labels among its own; 0 if there is none yet."""
        return _sample(self._metrics(), name, labels)

    def metric_of_all(self, name: str, **labels: str) -> float:
        """The same, once every process of the server has said what it has counted: of one that does not answer in time
        it is what it said before."""
        found: list[str] = []

        def has_all() -> bool:
            found[:] = [self._metrics()]
            return not re.search(r"^bei_process_up\{.*\} 0\.0$", found[0], re.MULTILINE)

        wait_until(has_all, "every process says what it has counted")
        return _sample(found[0], name, labels)

    def _metrics(self) -> str:
        return httpx.get(self.url + "/metrics", timeout=DEADLINE_S).text

    def embed(self, given: object, **fields: object) -> httpx.Response:
        """POST to the embeddings route."""
        body = {"input": given, **fields}
        return httpx.post(f"{self.url}/v1/embeddings", json=body, timeout=DEADLINE_S)


def _sample(metrics: str, name: str, labels: Mapping[str, str]) -> float:
    for line in metrics.splitlines():
        wanted = all(f'{key}="{value}"' in line for key, value in labels.items())
        if wanted and re.match(rf"{name}[{{ ]", line):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def serve(arguments: Sequence[object], env: Mapping[str, str], cwd: Path) -> Server:
    """``bei serve`` on a port that the system chooses."""
    return Server([*BEI, "serve", *arguments, "--port", "0"], env, cwd)
