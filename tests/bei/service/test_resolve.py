"""From what a user calls a model to an artifact: paths, entries of the cache, and names."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from bei.artifact.cache import EntryUse, ModelCache
from bei.artifact.manifest import Artifact, CheckpointSource
from bei.artifact.model_names import DEFAULT_MODEL
from bei.config.settings import ServeConfig
from bei.errors import ArtifactFileMissingError, CheckpointNotFoundError, ConfigError, HubUnreachableError
from bei.service.resolve import artifact_for, built_artifact, check_is_checkpoint
from tests.bei.artifact.test_model_names import SPELLINGS
from tests.support.artifacts import save_artifact

KEY = "0123456789ab"
MINILM = f"all-MiniLM-L6-v2-fake-fp32-{KEY}"


def keep(cache: ModelCache, entry: str, source: str, kind: str = "hub", name: str | None = None) -> Path:
    """An artifact in the cache, as if built from ``source``."""
    checkpoint = CheckpointSource(
        model=source, kind=kind, revision="1" * 40 if kind == "hub" else None, sha256="0" * 64, transformers="5.24.0"
    )
    with cache.use(entry) as use:
        return save_artifact(use.path, name=name or source, source=checkpoint).path


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    """Has an artifact of the default model."""
    made = ModelCache(tmp_path / "cache")
    keep(made, MINILM, DEFAULT_MODEL.package, "package", DEFAULT_MODEL.name)
    return made


@pytest.fixture
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_cached(*_: object) -> tuple[Artifact, EntryUse]:
        raise HubUnreachableError("no network")

    monkeypatch.setattr("bei_build.cache.build_cached", build_cached)


def served(model: str, cache: ModelCache, precision: str = "auto") -> Path | Artifact:
    with ExitStack() as held:
        return artifact_for(model, ServeConfig(cache_dir=str(cache.folder), precision=precision), held)


def found(model: str, cache: ModelCache) -> Path:
    with ExitStack() as held:
        return built_artifact(model, lambda: cache, held)


@pytest.mark.parametrize("called", [*SPELLINGS, MINILM])
def test_every_name_of_a_model_finds_the_artifact_in_the_cache(cache: ModelCache, called: str) -> None:
    assert found(called, cache) == cache.folder / MINILM


@pytest.mark.parametrize("called", [*SPELLINGS, MINILM])
@pytest.mark.usefixtures("_no_hub")
def test_what_was_built_before_is_served_without_the_hub(cache: ModelCache, called: str) -> None:
    assert served(called, cache) == cache.folder / MINILM


@pytest.mark.usefixtures("_no_hub")
def test_what_was_built_otherwise_is_not_served_in_its_place(cache: ModelCache) -> None:
    with pytest.raises(HubUnreachableError, match="no network"):
        served(DEFAULT_MODEL.name, cache, precision="bf16")


@pytest.mark.usefixtures("_no_hub")
def test_a_name_of_several_artifacts_is_refused_with_theirs(cache: ModelCache) -> None:
    other = MINILM.replace("fp32", "bf16")
    keep(cache, other, DEFAULT_MODEL.repository, name=DEFAULT_MODEL.name)
    for find in (served, found):
        with pytest.raises(ConfigError, match=rf"means several models: {other}, {MINILM}\. Name one"):
            find(DEFAULT_MODEL.name, cache)
        assert find(other, cache) == cache.folder / other


def test_what_the_hub_does_not_have_is_not_served_from_the_cache(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is wrong stays wrong: only a hub that cannot be asked is passed by."""

    def build_cached(*_: object) -> tuple[Artifact, EntryUse]:
        raise CheckpointNotFoundError("no such repository")

    monkeypatch.setattr("bei_build.cache.build_cached", build_cached)
    with pytest.raises(CheckpointNotFoundError, match="no such repository"):
        served(DEFAULT_MODEL.name, cache)


def test_an_artifact_in_the_cache_is_kept_while_it_is_used(cache: ModelCache) -> None:
    with ExitStack() as held:
        built_artifact(DEFAULT_MODEL.name, lambda: cache, held)
        assert [entry.in_use for entry in cache.entries()] == [True]
    assert [entry.in_use for entry in cache.entries()] == [False]


def test_a_path_goes_before_a_name(cache: ModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_artifact(tmp_path / DEFAULT_MODEL.name).path
    assert found(DEFAULT_MODEL.name, cache).resolve() == path
    assert found(f"./{DEFAULT_MODEL.repository}", cache) == Path(DEFAULT_MODEL.repository), "loading says what it lacks"


def test_what_is_nowhere_is_refused_with_what_may_be_meant(
    cache: ModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactFileMissingError, match=r"neither a folder here.*Did you mean all-MiniLM-L6-v2\?"):
        found("all-MiniLM-L6-v3", cache)
    save_artifact(tmp_path / "model-cpu-bf16")
    for called in ("model", "owner/model"):
        with pytest.raises(ArtifactFileMissingError, match=r"Did you mean model-cpu-bf16\?"):
            found(called, cache)


def test_artifacts_of_another_schema_are_left_out(cache: ModelCache) -> None:
    (cache.folder / MINILM / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactFileMissingError):
        found(DEFAULT_MODEL.name, cache)


def test_only_checkpoints_are_built(cache: ModelCache, tmp_path: Path) -> None:
    for artifact in (MINILM, str(cache.folder / MINILM)):
        with pytest.raises(ConfigError, match=f"is an artifact, built of {DEFAULT_MODEL.package}: serve it"):
            check_is_checkpoint(artifact, lambda: cache)
    for checkpoint in (DEFAULT_MODEL.name, DEFAULT_MODEL.repository, str(tmp_path)):
        check_is_checkpoint(checkpoint, lambda: cache)
