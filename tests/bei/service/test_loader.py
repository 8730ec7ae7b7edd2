"""From an artifact to what a service is made of, at start and while another one is served."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bei.artifact import store
from bei.artifact.held_files import Folder
from bei.artifact.manifest import Artifact, Manifest
from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from bei.errors import (
    ArtifactFileMissingError,
    ArtifactUntrustedError,
    SwapRefusedError,
    VerificationError,
)
from bei.service import loader
from bei.service.loader import Standing, load_model, load_next
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.keys import make_keys

CONFIG = ServeConfig(tokenizer_threads=1, tune="off")


class Served:
    """What ``load_next`` asks a service."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self.name = loaded.artifact.manifest.name
        self.manifest = loaded.artifact.manifest
        self.text_encoder = loaded.encoder


class CountedEngine(FakeEngine):
    is_open = True

    def close(self) -> None:
        self.is_open = False


class Rig:
    """Loads fake engines; ``engines`` are those that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: list[CountedEngine] = []
        self.options: dict[str, int] = {}  # of the last one
        self.read: list[bytes] = []  # the file of each
        monkeypatch.setattr(loader, "load_engine", self._load)

    def _load(self, folder: Folder, manifest: Manifest, options: dict[str, int]) -> CountedEngine:
        self.options = options
        self.read.append((folder / "fake.bin").read_bytes())
        self.engines.append(CountedEngine(manifest.limits, options.get("num_streams", 1)))
        return self.engines[-1]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "tiny")


def following(path: Path, config: ServeConfig = CONFIG) -> Any:
    """``load_next`` after what lies at ``path`` was loaded, and changed by the caller in between."""
    loaded = load_model(path, config)
    standing, served = Standing.of(path, loaded), Served(loaded)
    return lambda: load_next(standing, served, config)  # type: ignore[arg-type]


def rebuild(artifact: Artifact, **fields: Any) -> Artifact:
    """Another build in the place of ``artifact``."""
    new = save_artifact(artifact.path.with_name("rebuilt"), **fields)
    artifact.path.rename(artifact.path.with_name("former"))
    new.path.rename(artifact.path)
    return new


def test_the_same_artifact_is_not_loaded_again(rig: Rig, artifact: Artifact) -> None:
    assert following(artifact.path)() is None
    assert len(rig.engines) == 1


def test_another_build_is_loaded_with_the_tokenizer_that_is_there(rig: Rig, artifact: Artifact) -> None:
    load = following(artifact.path)
    rebuild(artifact, max_seq_len=8, precision="bf16")
    loaded = load()
    assert (loaded.artifact.manifest.precision, loaded.engine) == ("bf16", rig.engines[1])
    (encoding,) = loaded.encoder.encode(["hello " * 99])
    assert encoding.num_tokens == 8
    assert loaded.costs.limits.max_seq_len == 8
    assert rig.engines[1].is_open


@pytest.mark.parametrize(("streams", "expected"), [(None, 1), (2, 2), (0, 3)])
def test_as_many_streams_as_asked_for_or_as_were_chosen_at_the_start(
    rig: Rig, artifact: Artifact, streams: int | None, expected: int
) -> None:
    config = replace(CONFIG, engine_streams=streams, engine_threads=4)
    loaded = load_model(artifact.path, replace(config, engine_streams=3))
    rebuild(artifact, bei_version="0.0.1")
    found = load_next(Standing.of(artifact.path, loaded), Served(loaded), config)  # type: ignore[arg-type]
    assert found is not None
    assert found.engine.info.num_streams == expected


def test_the_options_of_a_gpu_reach_the_engine_and_the_one_in_its_place(rig: Rig, artifact: Artifact) -> None:
    load = following(artifact.path, replace(CONFIG, graph_megabytes=0, gpu_megabytes=9000))
    first, rig.options = rig.options, {}
    rebuild(artifact, bei_version="0.0.1")
    assert load() is not None
    assert first == rig.options == {"cuda_graphs": 0, "memory": 9000}


def test_what_is_refused_is_not_loaded(rig: Rig, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    load = following(artifact.path)
    rebuild(artifact, name="other")
    with pytest.raises(SwapRefusedError, match="another name"):
        load()
    (artifact.engine_dir / "fake.bin").unlink()
    with pytest.raises(ArtifactFileMissingError):
        load()
    assert len(rig.engines) == 1


def test_other_vectors_are_loaded_where_the_operator_allows_it(rig: Rig, artifact: Artifact) -> None:
    load = following(artifact.path, replace(CONFIG, swap_vectors=True))
    rebuild(artifact, prompts={"query": "query: "})
    assert load() is not None


def test_an_engine_that_fails_its_verification_is_closed(
    rig: Rig, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = following(artifact.path)
    rebuild(artifact, bei_version="0.0.1")

    def fail(*_: object) -> None:
        raise VerificationError("too far from its reference")

    monkeypatch.setattr(loader, "verified", fail)
    with pytest.raises(VerificationError):
        load()
    assert [engine.is_open for engine in rig.engines] == [True, False]


def test_an_engine_that_hangs_is_not_replaced_by_that_of_another_build(rig: Rig, artifact: Artifact) -> None:
    loaded = load_model(artifact.path, CONFIG)
    assert loaded.reload is not None
    assert loaded.reload().info.limits == LIMITS
    shutil.rmtree(artifact.path)
    save_artifact(artifact.path)
    (artifact.engine_dir / "fake.bin").write_bytes(b"another engine")
    loaded.reload()
    assert rig.read == [b"an engine would be here"] * 3


def test_a_link_that_leads_elsewhere_meanwhile_does_not_mix_two_builds(
    rig: Rig, artifact: Artifact, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(artifact.path)
    load = following(link)
    second = save_artifact(tmp_path / "second", bei_version="0.0.1")
    link.unlink()
    link.symlink_to(second.path)
    assert load().artifact.path == second.path


def test_what_is_to_be_signed_is_not_swapped_in_unsigned(rig: Rig, artifact: Artifact, tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    config = replace(CONFIG, require_signature=(str(keys.public),))
    store.sign(artifact, keys.key)
    load = following(artifact.path, config)
    rebuild(artifact, bei_version="0.0.1")
    with pytest.raises(ArtifactUntrustedError):
        load()
    store.sign(store.load(artifact.path), keys.key)
    assert load() is not None
