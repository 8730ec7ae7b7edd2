"""Servers of benchmarks end with the benchmark, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

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
