"""Servers of benchmarks end with the benchmark, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.servers import revision
from tests.e2e.process import DEADLINE_S

# A benchmark: it starts a server, says which process that is, and is then stopped.
_BENCHMARK = """
import subprocess, sys, time
from benchmarks.harness.servers import tied
said = "print('ready', flush=True); import time; time.sleep(600)"
server = subprocess.Popen(tied([sys.executable, "-c", said]), stdout=subprocess.PIPE, text=True)
assert server.stdout.readline() == "ready\\n"
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_stopped_leaves_no_server_behind(number: signal.Signals) -> None:
    benchmark = subprocess.Popen([sys.executable, "-c", _BENCHMARK], stdout=subprocess.PIPE, text=True)
    assert benchmark.stdout is not None
    server = psutil.Process(int(benchmark.stdout.readline()))
    try:
        benchmark.send_signal(number)
        assert benchmark.wait(DEADLINE_S) == -number
        assert psutil.wait_procs([server], DEADLINE_S)[1] == []
    finally:
        benchmark.stdout.close()
        if server.is_running():
            server.kill()


def test_a_changed_file_marks_the_revision_and_a_written_result_does_not(tmp_path: Path) -> None:
    result = tmp_path / "benchmarks" / "results" / "engine.json"
    result.parent.mkdir(parents=True)
    code = tmp_path / "code.py"
    for path in (result, code):
        path.write_text("")

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    committed = revision(tmp_path)
    result.write_text("{}")
    assert revision(tmp_path) == committed
    code.write_text("pass")
    assert revision(tmp_path) == committed + "+"
