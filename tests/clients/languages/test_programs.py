"""The programs in Java, Go and Rust of docs/clients.md, as they stand there: what they print is what plain HTTP gets.

Java needs a JDK and Jackson's jars (Debian: libjackson2-databind-java), Go its compiler (golang-go), Rust cargo and the
crates as Debian has them (librust-ureq-dev, librust-serde-json-dev).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.clients.conftest import FullServer, post
from tests.clients.table import PAGE
from tests.e2e.kinds import TOLERANCE
from tests.e2e.process import DEADLINE_S, Server

JARS = Path("/usr/share/java")
CRATES = Path("/usr/share/cargo/registry")
CARGO = """
[package]
name = "bei-client"
version = "0.0.0"
edition = "2021"
[dependencies]
ureq = { version = "2", default-features = false, features = ["json"] }
serde_json = "1"
"""
VENDORED = f"""
[source.crates-io]
replace-with = "debian"
[source.debian]
directory = "{CRATES}"
"""
TEXTS = ["one text", "another"]
QUERY = "Which is another?"
INPUTS = [["What a day!"], ["Oh no."]]

Start = Callable[[str, str, str], subprocess.CompletedProcess[str]]
row = pytest.mark.client_call


def program(language: str, model: str) -> str:
    """The first program of the page in ``language``, asking ``model`` for vectors; ``tiny``, for those of one text."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert found is not None
    assert '"all-MiniLM-L6-v2"' in found[1]
    source = found[1].replace('"all-MiniLM-L6-v2"', f'"{model}"')
    return source.replace('"one text", "another"', '"hello"') if model == "tiny" else source


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GOCACHE": str(folder / "cache"), "GOFLAGS": "-mod=mod"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S)


def rust_program(model: str, folder: Path) -> Path:
    """The compiled program, of Debian's crates alone."""
    if shutil.which("cargo") is None or not any(CRATES.glob("ureq-2.*")):
        pytest.skip("Rust is not there: apt-get install cargo librust-ureq-dev librust-serde-json-dev")
    for name, text in (
        (".cargo/config.toml", VENDORED),
        ("Cargo.toml", CARGO),
        ("src/main.rs", program("rust", model)),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    done = run(["cargo", "build", "--offline", "--quiet"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "target/debug/bei-client"


@pytest.fixture(scope="module")
def rust(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``rust(model)``: the compiled program."""
    return cache(lambda model: rust_program(model, tmp_path_factory.mktemp("rust")))


@pytest.fixture
def rust_built(rust: Callable[[str], Path]) -> None:
    """Compiled before a server is there that waits for it."""
    rust("tiny")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, rust: Callable[[str], Path]) -> Start:
    """``start(language, model, url)`` runs the program."""

    def start(language: str, model: str, url: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp(language)
        if language == "java":
            if shutil.which("java") is None or not (JARS / "jackson-databind.jar").is_file():
                pytest.skip("a JDK with Jackson is not there: apt-get install openjdk-17-jdk libjackson2-databind-java")
            (folder / "Bei.java").write_text(program(language, model))
            jars = ":".join(str(JARS / f"jackson-{part}.jar") for part in ("core", "annotations", "databind"))
            return run(["java", "-cp", jars, "Bei.java", url], folder)
        if language == "rust":
            return run([str(rust(model)), url], folder)
        if shutil.which("go") is None:
            pytest.skip("the Go compiler is not there: apt-get install golang-go")
        (folder / "main.go").write_text(program(language, model))
        return run(["go", "run", "main.go", url], folder)

    return start


def check(server: Server, done: subprocess.CompletedProcess[str]) -> None:
    """Two lines of vectors, of ranks and of labels."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    vectors = [item["embedding"] for item in post(server, "/v1/embeddings", input=TEXTS, model="embedder")["data"]]
    np.testing.assert_allclose([json.loads(line) for line in lines[:2]], vectors, atol=TOLERANCE)
    ranked = post(server, "/v1/rerank", query=QUERY, documents=TEXTS)["results"]
    found = [line.split(" ") for line in lines[2:4]]
    assert [int(index) for index, _ in found] == [result["index"] for result in ranked]
    scores = [result["relevance_score"] for result in ranked]
    np.testing.assert_allclose([float(score) for _, score in found], scores, atol=TOLERANCE)
    best = [labels[0] for labels in post(server, "/predict", inputs=INPUTS)]
    assert [line.split(" ")[0] for line in lines[4:]] == [label["label"] for label in best]
    found_scores = [float(line.split(" ")[1]) for line in lines[4:]]
    np.testing.assert_allclose(found_scores, [label["score"] for label in best], atol=TOLERANCE)


@row("java.net.http (Java)", "OpenAI", "", "/v1/embeddings; /v1/rerank, /predict: the program above")
def test_the_program_in_java(server: Server, start: Start) -> None:
    check(server, start("java", "embedder", server.url))


@row("net/http (Go)", "OpenAI", "", "/v1/embeddings; /v1/rerank, /predict: the program above")
def test_the_program_in_go(server: Server, start: Start) -> None:
    check(server, start("go", "embedder", server.url))


@row("java.net.http (Java)", "OpenAI", "", "an unknown model is an error with its reason: the program above")
def test_java_says_why_it_was_refused(server: Server, start: Start) -> None:
    done = start("java", "unknown", server.url)
    assert done.returncode == 1
    assert "404: " in done.stderr
    assert "unknown" in done.stderr


@row("net/http (Go)", "OpenAI", "", "an unknown model is an error with its reason: the program above")
def test_go_says_why_it_was_refused(server: Server, start: Start) -> None:
    done = start("go", "unknown", server.url)
    assert done.returncode == 1
    assert "404: " in done.stderr
    assert "unknown" in done.stderr


def retried(full: FullServer, start: Start, language: str) -> None:
    """The program waits as long as the server says, and asks again."""

    def call() -> object:
        done = start(language, "tiny", full.url)
        assert "400: " in done.stderr  # this server has no model that ranks
        return json.loads(done.stdout.splitlines()[0])

    full.check_retried(call)


@row("java.net.http (Java)", "OpenAI", "", "a 429 is asked again after Retry-After: the program above")
def test_java_comes_back_when_it_is_told(full: FullServer, start: Start) -> None:
    retried(full, start, "java")


@row("net/http (Go)", "OpenAI", "", "a 429 is asked again after Retry-After: the program above")
def test_go_comes_back_when_it_is_told(full: FullServer, start: Start) -> None:
    retried(full, start, "go")


@row("ureq (Rust)", "OpenAI", "", "/v1/embeddings; /v1/rerank, /predict: the program above")
def test_the_program_in_rust(server: Server, start: Start) -> None:
    check(server, start("rust", "embedder", server.url))


@row("ureq (Rust)", "OpenAI", "", "an unknown model is an error with its reason: the program above")
def test_rust_says_why_it_was_refused(server: Server, start: Start) -> None:
    done = start("rust", "unknown", server.url)
    assert done.returncode == 1
    assert "404: " in done.stderr
    assert "unknown" in done.stderr


@row("ureq (Rust)", "OpenAI", "", "a 429 is asked again after Retry-After: the program above")
def test_rust_comes_back_when_it_is_told(rust_built: None, full: FullServer, start: Start) -> None:
    retried(full, start, "rust")
