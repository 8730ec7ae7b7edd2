"""The commands of the README, line by line, in a fresh environment without a hub.

Second tier: it installs what the README says from the package index. The two models that the README takes from the hub
are tiny ones with random weights in the hub's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[2]
COPIED = ("bei", "build", "pyproject.toml", "README.md", "LICENSE")
REVISION = "1" * 40
FROM_HUB = {
    "cross-encoder/ms-marco-MiniLM-L6-v2": 1,
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": 2,
}
# Beyond the longest installation; a server's first start builds and measures three models.
PATIENCE_S = 600.0


def lines_of_the_readme() -> list[str]:
    """Of all blocks of commands up to the tests', without the comments behind them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Test it")[0]
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    return [re.sub(r" {2,}#.*", "", line) for block in blocks for line in block.splitlines() if line.strip()]


def keep_in_the_hub_s_cache(cache: Path) -> None:
    for name, num_labels in FROM_HUB.items():
        repository = cache / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        folder = repository / "snapshots" / REVISION
        save_checkpoint(folder, task="ForSequenceClassification", num_labels=num_labels)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone has, an empty virtual environment beside it, and a hub's cache."""
    folder = tmp_path_factory.mktemp("readme")
    clone = folder / "clone"
    clone.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, clone / name)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    keep_in_the_hub_s_cache(folder / "hub" / "hub")
    return folder


def environment(place: Path, port: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not re.match(r"BEI_|HF_|PYTHON|VIRTUAL_ENV", name)}
    return {
        **kept,
        "PATH": f"{place / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place),
        "HF_HOME": str(place / "hub"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nobody listens there
        "BEI_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(command: str, place: Path, port: int) -> Iterator[None]:
    log = (place / "log").open("w+")
    shell = subprocess.Popen(
        ["bash", "-c", command.replace("bei serve", "exec bei serve")],
        cwd=place / "clone",
        env=environment(place, port),
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not is_ready(port):
            said = (place / "log").read_text()
            assert shell.poll() is None, f"{command}: {said}"
            assert time.monotonic() < deadline, f"{command}: {said}"
            time.sleep(0.2)
        yield
        shell.send_signal(signal.SIGTERM)
        assert shell.wait(60) == 0, (place / "log").read_text()
    finally:
        shell.kill()
        shell.wait()
        log.close()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def ran(command: str, place: Path, port: int) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place / "clone",
        env=environment(place, port),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_line_of_the_readme_works_without_a_hub(place: Path) -> None:
    lines = lines_of_the_readme()
    assert len(lines) > 8
    assert any("pip install" in line for line in lines)
    port = free_port()
    server: list[str] = []
    while lines:
        line = lines.pop(0).replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("--port 8000", f"--port {port}")
        if "bei serve" not in line:
            ran(line, place, port)
            continue
        server.append(line)
        with serving(line, place, port):
            while lines and lines[0].startswith("curl "):
                asked = lines.pop(0).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
                answer = ran(asked.replace("curl ", "curl -sS --fail-with-body ", 1), place, port)
                assert answer.startswith(("{", "[")), asked
    assert len(server) >= 4
