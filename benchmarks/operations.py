"""How many operations of the interpreter a short request and a step take, before and after: the same on any machine.

    python -m benchmarks.operations [--before CHECKOUT] [--requests 800] [--concurrency 16]

Single texts of prose that the servers have not met (about 29 tokens), MiniLM, in a closed loop. Counted are the
bytecodes that CPython runs (``sys.settrace`` with opcodes), by function: in the event loop's thread for a request, in
the engine's thread for a step. They are no times: what C does is not in them, and an operation takes several times as
long where the engine has just emptied the caches. But they are the same in every run, and say where to look.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import parsed
from benchmarks.harness.load import closed_loop, embeddings_body
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.servers import Kind, kinds, metric, revision, serving
from benchmarks.harness.texts import SHORT, read_prose

_WARM_REQUESTS = 4000  # of words, too: a text brings half a new one then
_FUNCTIONS = 40  # of each thread, those with the most operations
_WRITTEN_S = 20.0


def main() -> None:
    options = parsed(__doc__, before=Path, requests=800, concurrency=16)
    prose = read_prose()
    warming, texts = prose.take(_WARM_REQUESTS, SHORT), prose.take(options.requests, SHORT)
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        found = {
            name: {"commit": revision(kind.checkout)}
            | counted(kind, options.concurrency, warming, texts, Path(scratch) / name)
            for name, kind in kinds({artifact.path: minilm_folder()}, options, Path(scratch)).items()
        }
    write("operations", {"requests": options.requests, "concurrency": options.concurrency, **found})


def counted(
    kind: Kind, concurrency: int, warming: Sequence[str], texts: Sequence[str], scratch: Path
) -> dict[str, Any]:
    """Operations of the server for a request of one of ``texts``, and for a step."""
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
