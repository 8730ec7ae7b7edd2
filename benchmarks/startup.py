"""From the start of ``bei serve ARTIFACT`` to its first answer: seconds.

python -m benchmarks.startup [--repetitions 7] [--before CHECKOUT]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path

from benchmarks.harness.arguments import parsed
from benchmarks.harness.load import EMBEDDINGS, embeddings_body
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio
from benchmarks.harness.servers import BEFORE, NOW, Kind, environment, free_port, kinds

_DEADLINE_S = 120.0  # the warm-up measures the engine


def main() -> None:
    options = parsed(__doc__, repetitions=7, before=Path)
    with tempfile.TemporaryDirectory() as scratch:
        models = {built(minilm_folder(), Path(scratch)).path: minilm_folder()}
        sides = {
            name: partial(first_answer_s, kind, Path(scratch) / name)
            for name, kind in kinds(models, options, Path(scratch)).items()
        }
        found = alternate(sides, options.repetitions)
    compared = {"before": found[BEFORE], "now / before": ratio(found, NOW, BEFORE)} if options.before else {}
    write("startup", {"first answer, s": found[NOW], **compared})


def first_answer_s(kind: Kind, home: Path) -> float:
    """Start a server, ask it until it answers an embedding request, stop it."""
    home.mkdir(exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "bei", "serve", *map(str, kind.artifacts), "--port", str(port)]
    env = environment(kind.checkout, home)
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=kind.checkout, env=env)
    try:
        url, body = f"http://127.0.0.1:{port}{EMBEDDINGS}", embeddings_body("first").encode()
        while True:
            try:
                with urllib.request.urlopen(url, body, timeout=10) as answer:
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
