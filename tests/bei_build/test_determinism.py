"""The same inputs give the same bytes: in another process, after other builds, with another number of threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from bei.artifact.store import load
from tests.support.builds import build_artifact
from tests.support.checkpoints import (
    Dense,
    Normalize,
    add_modules,
    read_tensors,
    save_checkpoint,
    write_json,
    write_tensors,
)

_BUILD = """
import sys
from pathlib import Path
from tests.bei_build.test_determinism import built
built(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
"""
_ROOT = Path(__file__).parents[2]
_PATH = os.pathsep.join((str(_ROOT), str(_ROOT / "build")))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("determinism") / "tiny", "xlm-roberta")
    add_modules(folder, ("mean", "max"), [Dense(24), Normalize()])
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: ", "document": "d: "}})
    return folder


# Precision and reference. A process that compares with transformers' classes takes six seconds to import them.
_BUILDS = [
    ("int8", "engine"),
    pytest.param(("int8", "hf"), marks=pytest.mark.slow),
    pytest.param(("fp32", "hf"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=_BUILDS, ids="-".join)
def settings(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def artifact(settings: tuple[str, str], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(checkpoint, tmp_path_factory.mktemp("first") / "artifact", *settings)


def built(checkpoint: Path, out: Path, precision: str, reference: str) -> Artifact:
    return build_artifact(checkpoint, out, precision=precision, reference=reference, verify_retrieval=None)


def assert_same(artifact: Artifact, first: Artifact) -> None:
    assert {file.path: file.sha256 for file in artifact.manifest.files} == {
        file.path: file.sha256 for file in first.manifest.files
    }
    assert artifact.manifest.digest == first.manifest.digest


def test_a_build_after_another_build_gives_the_same_bytes(
    artifact: Artifact, settings: tuple[str, str], checkpoint: Path, bert: Path, tmp_path: Path
) -> None:
    build_artifact(bert, tmp_path / "other")
    again = built(checkpoint, tmp_path / "again", *settings)
    assert_same(again, artifact)


def test_a_build_in_another_process_gives_the_same_bytes(
    artifact: Artifact, settings: tuple[str, str], checkpoint: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _BUILD, str(checkpoint), str(tmp_path / "artifact"), *settings]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env={**environment, "PYTHONPATH": _PATH}, cwd=tmp_path, check=True, capture_output=True)
    assert_same(load(tmp_path / "artifact"), artifact)


def test_the_time_and_place_of_the_checkpoint_do_not_matter(
    artifact: Artifact, settings: tuple[str, str], checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere" / checkpoint.name
    copy.mkdir(parents=True)
    for file in sorted(checkpoint.rglob("*"), reverse=True):
        if file.is_file():
            (copy / file.relative_to(checkpoint)).parent.mkdir(parents=True, exist_ok=True)
            (copy / file.relative_to(checkpoint)).write_bytes(file.read_bytes())
    again = built(copy, tmp_path / "again", *settings)
    assert_same(again, artifact)


def test_a_changed_weight_changes_the_digest(artifact: Artifact, checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    tensors = read_tensors(folder)
    tensors["encoder.layer.0.output.dense.bias"][0] += 1
    write_tensors(folder, tensors)
    other = build_artifact(folder, tmp_path / "artifact", precision=artifact.manifest.precision, verify=False)
    assert other.manifest.source.sha256 != artifact.manifest.source.sha256
    engines = [{one.path: one.sha256 for one in made.manifest.files}["engine/model.bin"] for made in (artifact, other)]
    assert engines[0] != engines[1]
    assert other.manifest.digest != artifact.manifest.digest
