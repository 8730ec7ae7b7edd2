"""From the start of ``bei serve ARTIFACT`` to its first answer: seconds.

python -m benchmarks.startup [--repetitions 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.common import write
from benchmarks.models import built, minilm_folder
from benchmarks.server import free_port

_DEADLINE_S = 60.0


def main() -> None:
    """Measure and write ``results/startup.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch)).path
        first_answer_s(artifact)  # warms the page cache
        values = [first_answer_s(artifact) for _ in range(options.repetitions)]
    write("startup", {"first answer, s": {"median": statistics.median(values), "values": values}})


def first_answer_s(artifact: Path) -> float:
    """Start a server, ask it until it answers an embedding request, stop it."""
    port = free_port()
    started = time.perf_counter()
    command = [sys.executable, "-m", "bei", "serve", str(artifact), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"input": "first"}).encode()
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/embeddings", body, timeout=10) as answer:
                    answer.read()
                    return time.perf_counter() - started
            except OSError:
                if process.poll() is not None or time.perf_counter() - started > _DEADLINE_S:
                    raise SystemExit("the server did not answer") from None
                time.sleep(0.005)
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main()
