"""``bei serve`` processes on free loopback ports: of this checkout, and of another one beside it."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.load import closed_loop
from benchmarks.harness.texts import Prose, ProseExhaustedError, Words

ROOT = Path(__file__).parents[2]
NOW, BEFORE = "now", "before"
_READY_S = 300.0  # a first start may measure the engine before it listens
_STOP_S = 60.0
_POLL_S = 0.01
_WARM_REQUESTS = 12
_WARM_TEXTS = 16
_WARM_TOKENS = 256  # of a text, at most


class Server(NamedTuple):
    port: int
    process: subprocess.Popen[bytes]


def tied(command: Sequence[object]) -> list[str]:
    """``command``, as a process that gets SIGTERM when the thread that starts it ends, and so with this process."""
    program = Path(__file__).with_name("tied.py")
    return [sys.executable, "-IS", str(program), str(os.getpid()), *map(str, command)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(checkout: Path, home: Path | None = None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that runs ``checkout``: without BEI_* variables, with ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BEI_")}
    if home is not None:
        kept["HOME"] = str(home)
    return {**kept, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'build'}", **(extra or {})}


@contextmanager
def running(
    command: Sequence[object],
    port: int,
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    wait: bool = True,
) -> Iterator[Server]:
    """A process that answers ``/ready`` on ``port``; stopped by SIGTERM at the end, and at this process's end, however
    that comes. ``wait`` False: the caller waits until it is ready (``wait_ready``)."""
    with tempfile.TemporaryFile() as log:
        env = environment(cwd) if env is None else env
        process = subprocess.Popen(tied(command), stdout=log, stderr=log, cwd=cwd, env=env)
        try:
            if wait:
                wait_ready(port, process)
            yield Server(port, process)
        except TimeoutError as error:
            log.seek(0)
            raise SystemExit(f"{error}:\n{log.read()[-2000:].decode(errors='replace')}") from None
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


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
    """``bei serve`` by ``checkout``, ready. ``home``: HOME of the process, where it keeps what it measures at its first
    start: give the same one to all servers of a run. ``program``: the module that is run."""
    paths = [artifacts] if isinstance(artifacts, Path) else list(artifacts)
    port = free_port()
    # "-m" looks into the working directory first, and into the installed packages last.
    command = [sys.executable, "-m", program, "serve", *paths, "--port", port, *flags]
    with running(command, port, cwd=checkout, env=environment(checkout, home, env), wait=wait) as server:
        yield server


def wait_ready(port: int, process: subprocess.Popen[bytes], path: str = "/ready", most_s: float = _READY_S) -> None:
    """Return when the server answers ``path`` with 200. Raises TimeoutError."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10):
                return
        except OSError:
            time.sleep(_POLL_S)
    raise TimeoutError("the server ended" if process.poll() is not None else "the server did not become ready")


def metric(port: int, name: str, **labels: str) -> float | None:
    """The value of a metric with exactly these labels; None if the server has none of that name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = (sample for family in families for sample in family.samples)
    return next((each.value for each in samples if each.name == name and each.labels == labels), None)


_WRITTEN = ("benchmarks/results", "benchmarks/README.md", "docs/comparison.md")


def revision(checkout: Path) -> str:
    """The commit of a checkout, with a plus sign where its tracked files were changed: what benchmarks themselves write
    does not count."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "--", ".", *(f":!{path}" for path in _WRITTEN))
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Kind:
    """How to start one server: the artifacts it serves, its flags, the checkout that runs."""

    artifacts: Sequence[Path]
    flags: Sequence[str] = ()
    checkout: Path = ROOT


def kinds(models: Mapping[Path, Path], options: argparse.Namespace, scratch: Path) -> dict[str, Kind]:
    """The server of this checkout and, where ``options.before`` is given, that checkout's; ``options.serve`` and
    ``options.serve_before`` are flags as in a shell.

    ``models``: the artifacts to serve, and the checkpoint of each, from which the other checkout builds its own.
    """
    flags = {name: tuple(shlex.split(getattr(options, name, ""))) for name in ("serve", "serve_before")}
    now = {NOW: Kind(list(models), flags["serve"])}
    if options.before is None:
        return now
    before = options.before.resolve()
    built = [_built_by(before, folder, artifact, scratch) for artifact, folder in models.items()]
    return {**now, BEFORE: Kind(built, flags["serve_before"] or flags["serve"], before)}


def _built_by(checkout: Path, folder: Path, artifact: Path, scratch: Path) -> Path:
    """The checkpoint in ``folder``, built by another checkout as ``artifact`` was here: schemas may differ."""
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    out = scratch / f"{artifact.name}-before"
    options = {"name": manifest["name"], "precision": manifest["precision"], "max-seq-len": manifest["max_seq_len"]}
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "bei", "build", str(folder), f"--out={out}", "--reference=engine", *flags]
    command.append("--allow-below-threshold")
    subprocess.run(command, cwd=checkout, env=environment(checkout), check=True, capture_output=True)
    return out


class Fleet:
    """Named servers, all running, with one HOME. A context manager."""

    def __init__(self, kinds: Mapping[str, Kind], home: Path) -> None:
        self.kinds = kinds
        self._home = home
        self._stack = ExitStack()
        self._servers: dict[str, Server] = {}
        self.num_starts = 0

    def __enter__(self) -> Fleet:
        self._home.mkdir(parents=True, exist_ok=True)
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def restart(self) -> None:
        """Stop all servers and start them anew: they have met no word. Their engines are warmed by token ids."""
        self._stack.close()
        for name, kind in self.kinds.items():
            server = serving(kind.artifacts, *kind.flags, checkout=kind.checkout, home=self._home)
            self._servers[name] = self._stack.enter_context(server)
            for artifact in kind.artifacts:
                manifest = json.loads((artifact / "manifest.json").read_bytes())
                _warm(self._servers[name].port, manifest["name"], min(_WARM_TOKENS, manifest["max_seq_len"]))
        self.num_starts += 1

    def described(self) -> dict[str, object]:
        return {
            name: {"commit": revision(kind.checkout), "flags": shlex.join(kind.flags)}
            for name, kind in self.kinds.items()
        }


class UnseenTexts:
    """Texts that no server of a fleet has met. Take them between measurements: where the prose ends, it begins again
    and all servers are restarted."""

    def __init__(self, prose: Prose, fleet: Fleet) -> None:
        self._prose = prose
        self._fleet = fleet

    def take(self, *wanted: tuple[int, Words]) -> list[list[str]]:
        """As many texts of each kind as asked for."""
        try:
            return [self._prose.take(count, length) for count, length in wanted]
        except ProseExhaustedError:
            self._prose.new_lap()
            self._fleet.restart()
        return [self._prose.take(count, length) for count, length in wanted]

    def give_back(self, texts: Sequence[str], length: Words) -> None:
        """Texts that were not sent."""
        self._prose.give_back(texts, length)

    def described(self) -> dict[str, int]:
        counts = {"laps": self._prose.lap + 1, "server starts": self._fleet.num_starts}
        return {"distinct texts in the last lap": self._prose.num_taken, **counts}


def _warm(port: int, model: str, longest: int) -> None:
    """Run batches of many shapes, of texts of up to ``longest`` tokens, without showing the tokenizer a word: the route
    /embed takes token ids as they are."""
    rng = random.Random(0)

    def body(lengths: Sequence[int]) -> str:
        ids = [[rng.randrange(1000, 20_000) for _ in range(length)] for length in lengths]
        return json.dumps({"model": model, "inputs": ids})

    mixed = [body([rng.randint(8, longest) for _ in range(_WARM_TEXTS)]) for _ in range(_WARM_REQUESTS)]
    closed_loop(port, 4, mixed, path="/embed")
    closed_loop(port, 1, [body([29]) for _ in range(_WARM_TEXTS)], path="/embed")
