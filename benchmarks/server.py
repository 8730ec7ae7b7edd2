"""``bei serve`` processes for benchmarks, on free loopback ports: of this checkout, or of another one beside it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[1]
_READY_S = 300.0  # a first start may measure the engine before it listens
_STOP_S = 60.0


class Server(NamedTuple):
    """A server that is ready."""

    port: int
    process: subprocess.Popen[bytes]


def tied(command: Sequence[object]) -> list[str]:
    """``command``, as a process that gets SIGTERM when the thread that starts it ends, and so with this process."""
    program = Path(__file__).with_name("tied.py")
    return [sys.executable, "-IS", str(program), str(os.getpid()), *map(str, command)]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    artifacts: Path | Sequence[Path],
    *flags: str,
    checkout: Path = ROOT,
    home: Path | None = None,
    env: Mapping[str, str] | None = None,
    wait: bool = True,
    program: str = "bei",
) -> Iterator[Server]:
    """A server that is ready; stopped by SIGTERM at the end, and at this process's end, however that comes.

    ``checkout``: the folder whose ``bei`` runs. ``home``: HOME of the process, where it keeps what it measures at its
    first start: give the same one to all servers of a run. BEI_* variables of this process are not passed on; ``env``
    is. ``wait`` False: the caller waits until it is ready (``wait_ready``). ``program``: the module that is run.
    """
    paths = [artifacts] if isinstance(artifacts, Path) else list(artifacts)
    port = free_port()
    command = [sys.executable, "-m", program, "serve", *map(str, paths), "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        # "-m" looks into the working directory first, and into the installed packages last.
        process = subprocess.Popen(tied(command), stderr=log, cwd=checkout, env=environment(checkout, home, env or {}))
        try:
            if wait:
                wait_ready(port, process)
        except TimeoutError as error:
            process.kill()
            process.wait()
            log.seek(0)
            raise SystemExit(f"{error}:\n{log.read()[-2000:].decode(errors='replace')}") from None
        try:
            yield Server(port, process)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def built_by(checkout: Path, folder: Path, artifact: Path, scratch: Path) -> Path:
    """The checkpoint in ``folder``, built by another checkout as ``artifact`` was here: schemas may differ."""
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    out = scratch / f"{artifact.name}-before"
    options = {"name": manifest["name"], "precision": manifest["precision"], "max-seq-len": manifest["max_seq_len"]}
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "bei", "build", str(folder), f"--out={out}", "--reference=engine", *flags]
    command.append("--allow-below-threshold")
    subprocess.run(command, cwd=checkout, env=environment(checkout, None, {}), check=True, capture_output=True)
    return out


def revision(checkout: Path) -> str:
    """The commit of a checkout, with a plus sign where its tracked files were changed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass
class Samples:
    """What a process held over time, in MB of 10^6 bytes; ``times_s`` on time.monotonic's clock."""

    times_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


@contextmanager
def sampling(pid: int, every_s: float = 0.5) -> Iterator[Samples]:
    """Samples of the process ``pid`` with its children, taken in a thread until the end of the block."""
    samples, stop = Samples(), threading.Event()
    process = psutil.Process(pid)

    def sample() -> None:
        while not stop.is_set():
            try:
                members = [process, *process.children(recursive=True)]
                rows = [(each.memory_info().rss / 1e6, each.num_fds(), each.num_threads()) for each in members]
            except psutil.NoSuchProcess:  # a child that has just ended, or all of it
                if not process.is_running():
                    return
            else:
                samples.times_s.append(time.monotonic())
                samples.rss_mb.append(round(sum(row[0] for row in rows), 1))
                samples.descriptors.append(sum(row[1] for row in rows))
                samples.threads.append(sum(row[2] for row in rows))
            stop.wait(every_s)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def environment(checkout: Path, home: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that runs ``checkout``: without BEI_* variables, with ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BEI_")}
    if home is not None:
        kept["HOME"] = str(home)
    return {**kept, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'build'}", **extra}


def metric(port: int, name: str, **labels: str) -> float | None:
    """The value of a metric with exactly these labels now; None if the server has none of that name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = (sample for family in families for sample in family.samples)
    return next((each.value for each in samples if each.name == name and each.labels == labels), None)


def wait_ready(port: int, process: subprocess.Popen[bytes], path: str = "/ready") -> None:
    """Return when the server answers ``path`` with 200. Raises TimeoutError."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.02)
    raise TimeoutError("the server ended" if process.poll() is not None else "the server did not become ready")
