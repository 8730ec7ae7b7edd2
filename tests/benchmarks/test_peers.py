"""The comparison with peers: its data file, its document, and what is made of figures. Nothing is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.texts import Prose
from benchmarks.peers import report
from benchmarks.peers.__main__ import chosen
from benchmarks.peers.cells import CELLS, measure
from benchmarks.peers.data import table
from benchmarks.peers.servers import COMMANDS
from benchmarks.peers.sides import Side, Timed
from benchmarks.peers.worker import LOADERS, timed


def test_the_document_agrees_with_the_json() -> None:
    assert report.DOCUMENT.read_text("utf-8") == report.rendered(report.results()), "python -m benchmarks.peers report"


@pytest.mark.parametrize("name", table().environments)
def test_every_package_of_an_environment_is_pinned_once(name: str) -> None:
    environment = table().environments[name]
    packages = [*environment.packages, *filter(None, [environment.llama_cpp])]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!-]+", package) for package in packages)
    names = [re.sub(r"[-_.]+", "-", package.partition("==")[0]).lower() for package in packages]
    assert len(set(names)) == len(names)


def test_no_environment_has_a_torch_that_brings_cuda() -> None:
    for environment in table().environments.values():
        assert not any(package.startswith(("nvidia", "cuda")) for package in environment.packages)
        assert {package for package in environment.packages if package.startswith("torch==")} <= {"torch==2.13.0"}


@pytest.mark.parametrize("name", table().peers)
def test_every_peer_has_code_that_starts_it_and_an_environment(name: str) -> None:
    peer = table().peers[name]
    assert peer.software in (COMMANDS if peer.transport == "http" else LOADERS)
    assert peer.environment in {"", *table().environments}
    assert set(peer.tasks) <= {"embed", "rerank"}


def test_the_worker_needs_only_the_standard_library_to_start() -> None:
    program = Path(report.__file__).with_name("worker.py")
    done = subprocess.run([sys.executable, "-IS", program], input="", text=True, capture_output=True)
    assert "JSONDecodeError" in done.stderr  # it has come to the first line, which is missing


def test_calls_are_timed_until_the_time_is_over() -> None:
    called: list[int] = []
    assert len(timed(called.append, [1, 2, 3], None)["latencies_s"]) == 3
    assert timed(called.append, [4], 0.0)["latencies_s"] == []
    assert called == [1, 2, 3]


def test_peers_that_cannot_run_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCHMARK_PEERS", str(tmp_path))
    others = [name for name, peer in table().peers.items() if peer.software != "bei"]
    peers, absent = chosen(table().models["ms-marco"], others, {"tei": tmp_path})
    assert list(peers) == ["text-embeddings-inference FP32"]
    assert absent["CTranslate2 FP32"] == "not for ms-marco"
    assert absent["infinity torch FP32"] == "not installed"
    assert chosen(table().models["minilm"], ["text-embeddings-inference FP32"], {})[1] == {
        "text-embeddings-inference FP32": "no binary was given"
    }


def test_a_comparison_without_the_bei_of_this_commit_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BENCHMARK_PEERS", str(tmp_path))
    with pytest.raises(SystemExit, match="install bei"):
        chosen(table().models["minilm"], ["infinity torch FP32", "bei FP32"], {})


def test_nothing_is_measured_as_bf16_on_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.__main__.cpu_capabilities", lambda: ["FP32", "INT8"])
    names = [name for name, peer in table().peers.items() if peer.precision == "bf16"]
    peers, absent = chosen(table().models["minilm"], names, {})
    assert not peers
    assert set(absent.values()) == {"this CPU does not compute in BF16"}


class _Refusing(Side):
    is_server = True

    def __init__(self, name: str, num_taken: int) -> None:
        super().__init__(table().peers[name], 0)
        self._left = num_taken

    def embed(self, requests: Sequence[Sequence[str]], concurrency: int, most_s: float | None = None) -> Timed:
        self._left -= 1
        if self._left < 0:
            raise SystemExit("400 too long")
        return Timed(np.ones(1), 1.0, 1)


@pytest.mark.parametrize("num_taken", [0, 3])
def test_a_peer_that_refuses_a_request_of_a_cell_is_left_out_of_it_alone(num_taken: int) -> None:
    sides = [_Refusing("bei FP32", 100), _Refusing("vLLM FP32", num_taken)]
    found = measure(CELLS["single-1"], sides, Prose([" ".join(map(str, range(50_000)))]), 2)
    assert list(found) == ["bei FP32"]


def _cells(**rates: float) -> dict[str, Any]:
    names = {
        "bei": "bei BF16",
        "infinity": "infinity torch BF16",
        "model": "bei.Model BF16",
        "fp32": "infinity torch FP32",
    }
    return {"single-64": {names[key]: {"per_s": {"median": rate}} for key, rate in rates.items()}}


def test_bei_is_compared_with_servers_and_libraries_of_its_precision_where_it_is_behind_too() -> None:
    found = list(report.ratios(_cells(bei=50.0, infinity=100.0, model=80.0, fp32=10.0), "single-64"))
    assert found == [("bf16", True, "bei BF16", "infinity torch BF16", 0.5)]
