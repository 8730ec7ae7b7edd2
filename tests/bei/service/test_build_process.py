"""A build in a process of its own: how it fails, and that it never outlives the one that waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bei.errors import BuildError, CheckpointNotFoundError, CompileError
from bei.service import build_process
from bei.service.build_process import build_apart
from bei_build.config import BuildConfig

# In the place of a build: one that says its process, cleans up, and takes long, in Python or in a library.
_BUILDING = """
import ctypes, os, pathlib, sys
from bei.service import build_process
def build(model, precision, out):
    pathlib.Path(out, "pid").write_text(str(os.getpid()))
    try:
        os.kill(os.getpid(), 9) if model == "dies" else [ctypes.CDLL(None).usleep(10_000) for _ in range(6000)]
    finally:
        pathlib.Path(out, "tidied").touch()
build_process._build = build
build_process.main()
"""
_WAITING = """
import sys
from bei.service import build_process
from bei_build.config import BuildConfig
build_process.COMMAND = (sys.executable, "-c", sys.argv[2])
build_process.build_apart(BuildConfig(model="slow", precision="fp32", out=sys.argv[1]))
"""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_its_error_is_raised_here(tmp_path: Path) -> None:
    config = BuildConfig(model=str(tmp_path / "nowhere"), precision="fp32", out=str(tmp_path / "out"))
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        build_apart(config)


def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the server died, where memory did not suffice for a build."""
    monkeypatch.setattr(build_process, "COMMAND", (sys.executable, "-c", _BUILDING))
    with pytest.raises(BuildError, match=r"ended by itself \(exit code -9\)"):
        build_apart(BuildConfig(model="dies", precision="fp32", out=str(tmp_path)))


_FAILING = """
from bei.errors import CompileError, ConfigError
from bei.service import build_process
class NoPlanError(CompileError): pass
def build(model, precision, out):
    if model == "subclass":
        raise NoPlanError("no plan")
    raise CompileError("not compiled") from MemoryError()
build_process._build = build
build_process.main()
"""


@pytest.mark.parametrize(("model", "message"), [("subclass", "no plan"), ("memory", "no memory left")])
def test_errors_of_the_builder_s_own_and_for_want_of_memory_arrive(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_process, "COMMAND", (sys.executable, "-c", _FAILING))
    with pytest.raises(CompileError, match=message):
        build_apart(BuildConfig(model=model, precision="fp32", out=str(tmp_path)))


def test_no_module_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a checkpoint's."""
    for name in ("msgspec", "tokenizers", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"open('{name} was run', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        build_apart(BuildConfig(model="./nowhere", precision="fp32", out=str(tmp_path / "out")))
    assert not [*tmp_path.glob("*was run")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_tidies_up_and_ends_with_the_one_that_waits(number: signal.Signals, tmp_path: Path) -> None:
    waiting = subprocess.Popen([sys.executable, "-c", _WAITING, str(tmp_path), _BUILDING], stderr=subprocess.DEVNULL)
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        waiting.send_signal(number)
        waiting.wait(30)
    finally:
        waiting.kill()
        waiting.wait()
    process = Path("/proc") / (tmp_path / "pid").read_text()
    until(lambda: not process.exists())
    assert (tmp_path / "tidied").exists()
