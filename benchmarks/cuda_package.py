"""Memory, disk and seconds of building a package for ``cuda-twin`` and of loading it twice, on this machine's CPU: of a
model of a billion parameters in BF16 by default.

python -m benchmarks.cuda_package [--before CHECKOUT] [--layers 16]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.harness.arguments import parsed
from benchmarks.harness.record import write
from benchmarks.harness.sampling import repeating
from benchmarks.harness.servers import BEFORE, NOW, ROOT, environment, revision

_CHILD = Path(__file__).with_name("cuda_package_child.py")
_EVERY_S = 0.2


def main() -> None:
    options = parsed(__doc__, before=Path, layers=16)
    checkouts = ({BEFORE: options.before.resolve()} if options.before else {}) | {NOW: ROOT}
    found = {name: of_checkout(checkout, options.layers) for name, checkout in checkouts.items()}
    commits = {name: revision(checkout) for name, checkout in checkouts.items()}
    write("cuda-package", {"commits": commits, "layers": options.layers, **found})


def of_checkout(checkout: Path, layers: int) -> dict[str, Any]:
    """Figures of a build, and of two processes that load what it wrote, one after the other; MB are 10^6 bytes."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as children:
        folder, temporary = Path(scratch) / "engine", Path(scratch) / "tmp"
        folder.mkdir()
        temporary.mkdir()
        with child(checkout, temporary, "build", str(folder), str(layers)) as process, peaks(process, scratch) as most:
            built = last_line(process)
        written = mb_in(folder)
        loaded = []
        for _ in range(2):
            process = children.enter_context(child(checkout, temporary, "load", str(folder)))
            loaded.append(last_line(process))
    return {"build": built | most | {"written, MB": written}, "load": loaded}


@contextmanager
def child(checkout: Path, temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of ``checkout``, which ends when its standard input does."""
    env = environment(checkout, extra={"TMPDIR": str(temporary)})
    command = [sys.executable, str(_CHILD), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=checkout, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        _stream(process.stdin).close()


def last_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the child has measured."""
    line = _stream(process.stdout).readline()
    if not line:
        raise SystemExit("the child ended without an answer")
    found: dict[str, Any] = json.loads(line)
    return found


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextmanager
def peaks(process: subprocess.Popen[str], scratch: str) -> Iterator[dict[str, float]]:
    """The most memory of a process with its children, files of the system's cache left out, and of files in
    ``scratch``."""
    most = {"peak of memory, MB": 0.0, "peak of files, MB": 0.0}
    parent = psutil.Process(process.pid)

    def sample() -> bool:
        try:
            members = [parent, *parent.children(recursive=True)]
            memory = sum(each.memory_info().rss - each.memory_info().shared for each in members) / 1e6
        except psutil.NoSuchProcess:
            memory = 0.0
        most["peak of memory, MB"] = max(most["peak of memory, MB"], round(memory))
        most["peak of files, MB"] = max(most["peak of files, MB"], mb_in(Path(scratch)))
        return True

    started = time.monotonic()
    with repeating(sample, _EVERY_S):
        yield most
    most["seconds"] = round(time.monotonic() - started, 1)


def mb_in(folder: Path) -> float:
    """MB of the files in ``folder``."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # it has just been removed
            continue
    return round(total / 1e6, 1)


if __name__ == "__main__":
    main()
