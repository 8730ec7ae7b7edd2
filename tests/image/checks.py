"""Checks of an image. Each raises AssertionError, and says in a line what it has seen."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from bei import __version__
from tests.e2e.kinds import MODELS
from tests.e2e.process import wait_until
from tests.image.container import USER, Container, bei, config_of
from tests.image.tools import Tools
from tests.support.zoo import save_case

# Compressed, as a registry has it.
CPU_LIMIT_BYTES = 250e6

_NOT_IN_CPU = {"transformers", "onnx", "safetensors", "ml-dtypes", "sentencepiece", "pyarrow"}
_PLUGINS = "/opt/bei/lib/python3*/site-packages/openvino/libs/libopenvino_intel_*_plugin.so"
_REQUESTS, _TEXTS = 6, 32


def configuration(tools: Tools, image: str) -> str:
    config = config_of(tools, image)
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert {"title", "description", "licenses", "revision"} <= {name.rpartition(".")[2] for name in labels}
    return f"user {config['User']}, {len(labels)} labels, a health check"


def confined(container: Container) -> str:
    """The server has no privilege, no name and nowhere to write but its temporary folder."""
    status = container.execute("cat", "/proc/1/status")
    found = dict(re.findall(r"^(\w+):\s+(\S+)", status, re.M))
    assert f"{found['Uid']}:{found['Gid']}" == USER
    assert int(found["CapEff"], 16) == 0
    assert found["NoNewPrivs"] == "1"
    for folder in ("/", "/opt/bei", "/models", "/home/bei/.cache"):
        container.execute("python", "-c", f"open({folder + '/written'!r}, 'w')", code=1)
    container.execute("python", "-c", "open('/tmp/written', 'w')")
    return f"runs as {USER}, without capabilities, on a read-only root"


def contents(container: Container, target: str) -> str:
    """By the list of packages that the image carries, and by the files themselves."""
    bom = json.loads(container.execute("cat", "/opt/bei/bei.cdx.json"))
    names = {component["name"].lower().replace("_", "-") for component in bom["components"]}
    assert bom["bomFormat"] == "CycloneDX"
    assert {"bei", "openvino", "numpy", "starlette", "cryptography"} <= names
    plugins = set(re.findall(r"intel_(\w+)_plugin", container.execute("sh", "-c", f"ls {_PLUGINS}")))
    if target == "cpu":
        assert not names & _NOT_IN_CPU
        assert plugins == {"cpu"}
    else:
        assert names >= _NOT_IN_CPU
    return f"lists {len(names)} packages; OpenVINO's plugins: {', '.join(sorted(plugins))}"


def answers(container: Container) -> str:
    texts = ["A cat sits on the mat.", "A kitten lies on the rug.", "The bank raised its interest rates."]
    answer = container.embed(texts).raise_for_status().json()
    cat, kitten, bank = np.array([item["embedding"] for item in answer["data"]])
    assert cat.shape == (384,)
    assert abs(np.linalg.norm(cat) - 1) < 1e-3
    assert cat @ kitten > cat @ bank + 0.2
    return f"embeds: cat and kitten {cat @ kitten:.2f}, cat and bank {cat @ bank:.2f}"


def health(tools: Tools, container: Container, image: str) -> str:
    """The image's own command, as an engine with timers would run it."""
    command = config_of(tools, image)["Healthcheck"]["Test"][1:]
    container.execute(*command)
    container.execute(*command, env={"BEI_PORT": "1"}, code=1)
    return "the health command ends with 0, and with 1 where nobody answers"


def ends_under_load(container: Container) -> str:
    """SIGTERM while requests are under way: these are answered, new ones are not taken, the exit code is 0."""
    texts = [f"Sentence {number} says something about the number {number * 7}. " * 8 for number in range(_TEXTS)]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        accepted = _inputs(container)
        under_way = [pool.submit(container.embed, [f"{index} {text}" for text in texts]) for index in range(_REQUESTS)]
        wait_until(lambda: _inputs(container) == accepted + _REQUESTS * _TEXTS, "all requests are accepted")
        done_before = sum(future.done() for future in under_way)
        assert done_before < _REQUESTS, "all were answered before the signal"
        container.terminate()
        late = _after_the_signal(container)
        answered = [future.result() for future in under_way]
    assert [answer.status_code for answer in answered] == [200] * _REQUESTS
    assert all(len(answer.json()["data"]) == _TEXTS for answer in answered)
    assert (code := container.exit_code()) == 0, f"ended with {code}:\n{container.log()}"
    return f"SIGTERM with {_REQUESTS - done_before} requests under way: all answered; a later one: {late}; exit code 0"


def _inputs(container: Container) -> int:
    """Accepted so far."""
    metrics = httpx.get(f"{container.url}/metrics", timeout=60).text
    return int(sum(float(count) for count in re.findall(r"^bei_inputs_total{[^}]*} (\S+)", metrics, re.M)))


def _after_the_signal(container: Container) -> str:
    """The first answer that is no 200: the signal takes a moment to arrive."""
    while True:
        try:
            answer = container.embed(["too late"])
        except httpx.TransportError:
            return "no connection"
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            return "503 shutting_down"
        threading.Event().wait(0.01)


def refuses_to_build(tools: Tools, image: str) -> str:
    """One line that says what is missing, for both commands that would build."""
    for command in ("build", "serve"):
        said = bei(tools, image, command, "sentence-transformers/all-MiniLM-L6-v2", code=2)
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, said
        assert "Traceback" not in said
        assert "pip install 'bei[cpu]'" in lines[0]
        assert "cpu-build" in lines[0]
    return f"asked to build: {lines[0]}"


def builds_and_embeds(tools: Tools, image: str, folder: Path) -> Iterator[str]:
    """A checkpoint is built and answers a file of texts."""
    folder.mkdir()
    folder.chmod(0o777)
    for file in save_case(folder / "checkpoint", MODELS["embedder"]).iterdir():
        file.chmod(0o644)  # safetensors makes its files readable for their owner alone
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "text {number}"}}\n' for number in range(100)), "utf-8")
    bei(tools, image, "build", "checkpoint", "--out", "artifact", "--reference", "engine", folder=folder)
    assert (folder / "artifact" / "manifest.json").exists()
    yield "builds a checkpoint"
    bei(tools, image, "embed", "artifact", "--input", "texts.jsonl", "--output", "vectors", folder=folder)
    assert (folder / "vectors" / "_SUCCESS").exists()
    assert list((folder / "vectors").glob("*.parquet"))
    yield "embeds a file of 100 texts with it"
