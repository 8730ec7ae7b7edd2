"""OpenVINOEngine as the batch manager uses it. Its numbers are tested in tests/bei_build/."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bei.artifact.manifest import Artifact
from bei.core import Encoding, Engine, Float32Array, PackedBatch
from bei.engine.load import load_engine
from tests.support.builds import build_artifact, random_encodings
from tests.support.checkpoints import save_checkpoint
from tests.support.cpus import BF16

NUM_STREAMS = 2


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("openvino")
    return build_artifact(save_checkpoint(folder / "checkpoint"), folder / "artifact", reference="engine")


@pytest.fixture(scope="module")
def engine(artifact: Artifact) -> Iterator[Engine]:
    engine = load_engine(artifact.engine_dir, artifact.manifest, {"num_threads": 2, "num_streams": NUM_STREAMS})
    engine.warmup()
    yield engine
    engine.close()


def encodings_of(seed: int) -> list[Encoding]:
    lengths = np.random.default_rng(seed).integers(1, 40, 6).tolist()
    return random_encodings(lengths, vocab_size=60, seed=seed)


def embed(engine: Engine, encodings: list[Encoding]) -> Float32Array:
    return engine.run(PackedBatch.from_encodings(encodings))["embedding"]


def test_it_states_the_facts_of_its_manifest(engine: Engine, artifact: Artifact) -> None:
    info = engine.info
    assert (info.target, info.precision, info.num_streams) == ("cpu", "fp32", NUM_STREAMS)
    assert info.limits == artifact.manifest.limits
    assert info.outputs == {"embedding": artifact.manifest.dimension("embedding")}


def test_batches_that_run_side_by_side_get_their_own_rows(engine: Engine) -> None:
    batches = [encodings_of(seed) for seed in range(40)]
    one_after_the_other = [embed(engine, batch) for batch in batches]
    with ThreadPoolExecutor(NUM_STREAMS) as streams:
        side_by_side = list(streams.map(lambda batch: embed(engine, batch), batches))
    for rows, expected in zip(side_by_side, one_after_the_other, strict=True):
        np.testing.assert_allclose(rows, expected, atol=1e-6)


def test_rows_are_the_caller_s_to_keep(engine: Engine) -> None:
    batches = [encodings_of(seed) for seed in range(2 * NUM_STREAMS + 1)]
    kept = embed(engine, batches[0])
    copy = kept.copy()
    for batch in batches[1:]:  # every stream's buffers are used again
        embed(engine, batch)
    np.testing.assert_array_equal(kept, copy)
    kept[:] = 0  # and may be written to


def test_the_largest_batch_and_the_smallest_run(engine: Engine) -> None:
    limits = engine.info.limits
    longest = random_encodings([limits.max_seq_len] * (limits.max_num_tokens // limits.max_seq_len), vocab_size=60)
    many = random_encodings([1] * limits.max_batch_size, vocab_size=60)
    for encodings in (longest[: limits.max_batch_size], many, many[:1]):
        rows = embed(engine, encodings)
        assert rows.shape == (len(encodings), engine.info.outputs["embedding"])
        assert np.isfinite(rows).all()


def test_a_closed_engine_can_be_loaded_again(artifact: Artifact, tmp_path: Path) -> None:
    for _ in range(2):
        engine = load_engine(artifact.engine_dir, artifact.manifest, {"num_threads": 1})
        assert embed(engine, encodings_of(0)).shape[0] == 6
        engine.close()


LOAD_AND_MEASURE = """
import sys
from pathlib import Path
from bei.artifact.store import load
from bei.engine.load import load_engine

def held():
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")]

artifact = load(Path(sys.argv[1]))
size = sum(file.size for file in artifact.manifest.files)
import openvino
before = held()
engine = load_engine(artifact.engine_dir, artifact.manifest, {"num_threads": 1})
print(size, *(after - early for early, after in zip(before, held())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("precision", [BF16, "fp32"])
def test_weights_are_in_memory_once(precision: str, tmp_path: Path) -> None:
    """As packed for the kernels, and as wide as they are stored; not as FP32, nor as the file's pages."""
    checkpoint = save_checkpoint(tmp_path / "checkpoint", hidden_size=512, intermediate_size=16_384)
    artifact = build_artifact(checkpoint, tmp_path / "artifact", precision=precision, verify=False)
    command = [sys.executable, "-c", LOAD_AND_MEASURE, str(artifact.path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    size, anonymous, files = map(int, output.split())
    # Beside the weights: OpenVINO's plugin, its libraries, compiled kernels and activations.
    assert 0.9 * size < anonymous < size + 50e6
    assert files < 60e6
