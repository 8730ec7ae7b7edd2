"""How many operations of the interpreter a short request and a step take, before and after, on however noisy a machine.

    python -m benchmarks.operations [--before CHECKOUT] [--requests 800] [--concurrency 16]

Single texts of prose that the servers have not met (about 29 tokens), MiniLM, in a closed loop. Counted are the
bytecodes that CPython runs (``sys.settrace`` with opcodes), by function: in the event loop's thread for a request, in
the engine's thread for a step. They are no times: what C does is not in them, and an operation takes several times as
long where the engine has just emptied the caches. But they are the same in every run, and say where to look.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import write
from benchmarks.fleet import Kind, kinds
from benchmarks.load import closed_loop, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.prose import SHORT, read_prose
from benchmarks.server import metric, revision, serving

_WARM_REQUESTS = 4000  # of words, too: a text brings half a new one then
_FUNCTIONS = 40  # of each thread, those with the most operations
_WRITTEN_S = 20.0


def main() -> None:
    """Count, and write ``results/operations.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, whose server is counted too")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    prose = read_prose()
    warming, texts = prose.take(_WARM_REQUESTS, SHORT), prose.take(options.requests, SHORT)
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        servers = kinds({artifact.path: minilm_folder()}, "", options.before, "", Path(scratch))
        found = {
            name: {"commit": revision(kind.checkout)}
            | counted(kind, options.concurrency, warming, texts, Path(scratch) / name)
            for name, kind in servers.items()
        }
    write("operations", {"requests": options.requests, "concurrency": options.concurrency, **found})


def counted(
    kind: Kind, concurrency: int, warming: Sequence[str], texts: Sequence[str], scratch: Path
) -> dict[str, Any]:
    """What the server of ``kind`` takes for a request of one of ``texts``, and for a step."""
    scratch.mkdir()
    shutil.copy(Path(__file__).with_name("counted.py"), scratch)
    (model,) = (json.loads((folder / "manifest.json").read_bytes())["name"] for folder in kind.artifacts)
    path = [kind.checkout, kind.checkout / "build", scratch]
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), "COUNTED": str(scratch / "counted.json")}
    with serving(
        kind.artifacts, *kind.flags, checkout=kind.checkout, home=scratch, env=env, program="counted"
    ) as server:
        closed_loop(server.port, concurrency, [embeddings_body(text) for text in warming])
        steps = metric(server.port, "bei_engine_seconds_count", model=model) or 0.0
        server.process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        closed_loop(server.port, concurrency, [embeddings_body(text) for text in texts])
        server.process.send_signal(signal.SIGUSR2)
        threads = _written(scratch / "counted.json")
        steps = (metric(server.port, "bei_engine_seconds_count", model=model) or 0.0) - steps
    return {
        "event loop, a request": _shares(threads["event loop"], len(texts)),
        "engine's thread, a step": _shares(threads["engine"], steps),
        "sequences of a step": round(len(texts) / steps, 2),
    }


def _written(file: Path) -> dict[str, list[tuple[str, int, int]]]:
    deadline_s = time.monotonic() + _WRITTEN_S
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit("the server has not written what it has counted")
        time.sleep(0.05)
    found: dict[str, list[tuple[str, int, int]]] = json.loads(file.read_bytes())
    return found


def _shares(functions: list[tuple[str, int, int]], by: float) -> dict[str, Any]:
    return {
        "operations": round(sum(count for _, _, count in functions) / by),
        "calls": round(sum(calls for _, calls, _ in functions) / by),
        "by function": {name: round(count / by, 1) for name, _, count in functions[:_FUNCTIONS]},
    }


if __name__ == "__main__":
    main()
