"""Target cuda from checkpoint to HTTP without a GPU: the same way with the slow form of every kernel, compiled.

One model, since PyTorch takes a dozen seconds to compile it, and twice as long for the first of a process: second tier.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors import safe_open

from bei.artifact.manifest import CUDA_WEIGHTS, Artifact
from bei.artifact.store import load
from bei.engine.load import load_engine
from tests.e2e.process import ROOT, Server, run, serve
from tests.support.builds import build_artifact, embed, random_encodings, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++"),
]

TEXTS = ["hello world", "a", "the cat sat on a mat", "hello the world " * 20]


@pytest.fixture(scope="module")
def twin(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """``checkpoint``, compiled. Read-only."""
    out = tmp_path_factory.mktemp("artifacts") / "twin"
    return build_artifact(checkpoint, out, load_engine, target="cuda-twin", name="twin")


@pytest.fixture(scope="module")
def twin_server(twin: Artifact, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    with serve([twin.path], env, home) as server:
        yield server


def test_the_package_computes_what_the_other_engine_does(twin: Artifact, tiny: Artifact) -> None:
    """Another compiler, other kernels, another description of the graph; in large batches and alone."""
    batches = [[1], [2, 1], [16, 3, 16, 1, 7, 11, 2], [5] * 32]
    with closing(load_engine(twin.engine_dir, twin.manifest)) as engine, running(tiny) as other:
        for lengths in batches:
            encodings = random_encodings(lengths, twin.manifest.spec.vocab_size)
            np.testing.assert_allclose(embed(engine, encodings), embed(other, encodings), atol=2e-5)


def test_nobody_can_take_it_for_an_engine_of_a_gpu(
    twin: Artifact, twin_server: Server, env: Mapping[str, str], home: Path
) -> None:
    shown = " ".join(run(["inspect", twin.path], env, home).stdout.split())
    assert "cuda-twin, fp32" in shown
    assert "packed kernels need CUDA, and the device is cpu" in shown
    info = httpx.get(f"{twin_server.url}/info").json()
    assert "cuda-twin" in json.dumps(info)
    assert any("cuda-twin is the slow form of target cuda, for tests" in line for line in twin_server.log)


def test_it_is_served(twin_server: Server, server: Server) -> None:
    """As the artifact of target cpu is, which comes from the same checkpoint."""
    for texts in (TEXTS, *([text] for text in TEXTS)):
        rows = [np.array([row["embedding"] for row in at.embed(texts).json()["data"]]) for at in (twin_server, server)]
        np.testing.assert_allclose(rows[0], rows[1], atol=2e-5)


def test_its_weights_stay_in_their_file_and_are_let_go(twin: Artifact) -> None:
    """They are mapped, also from a sealed copy: PyTorch unpacks the package into a temporary folder, without them."""
    with safe_open(twin.engine_dir / CUDA_WEIGHTS, "numpy") as file:
        some = file.get_tensor("embeddings.word.weight").tobytes()[:256]

    def mapped(end: str) -> list[Path]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [Path(line.split(maxsplit=5)[5]) for line in lines if line.removesuffix(" (deleted)").endswith(end)]

    before, artifact = mapped(".wrapper.so"), load(twin.path, sealed=True)
    with closing(load_engine(artifact.engine_files, artifact.manifest)) as engine:
        embed(engine, random_encodings([3, 5], twin.manifest.spec.vocab_size))
        (library,) = set(mapped(".wrapper.so")).difference(before)  # those of closed engines stay
        folder = library.parent
        assert not any(some in path.read_bytes() for path in folder.iterdir())
        assert mapped(CUDA_WEIGHTS)
    assert not mapped(CUDA_WEIGHTS)


def test_loading_it_imports_neither_the_builder_nor_the_compiler(twin: Artifact) -> None:
    code = (
        "import sys; from pathlib import Path; from bei.artifact.store import load; "
        "from bei.engine.load import load_engine; "
        f"artifact = load(Path({str(twin.path)!r})); engine = load_engine(artifact.engine_dir, artifact.manifest); "
        "engine.warmup(); engine.close(); "
        "print([name for name in ('bei_build', 'transformers', 'onnx', 'torch._inductor.compile_fx') "
        "if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
