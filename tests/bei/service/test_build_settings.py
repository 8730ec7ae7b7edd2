"""Settings of builds for what has been built: it was built so, or they are refused by name."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bei.artifact.certificate.thresholds import PRECISIONS
from bei.artifact.manifest import CheckpointSource, Manifest
from bei.artifact.sides import Routes
from bei.config.settings import ServeConfig
from bei.config.sources import BUILD_SETTINGS
from bei.config.sources import load as load_config
from bei.errors import ConfigError
from bei.offline.model import Model
from bei.service.build_settings import _RECORDED, build_settings, check_built
from bei.service.loader import next_artifact
from bei.service.resolve import artifact_for
from bei_build.config import BuildConfig
from bei_build.spec import precision
from tests.support.artifacts import save_artifact


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BUILD_SETTINGS:
        monkeypatch.delenv(f"BEI_{name.upper()}", raising=False)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return save_artifact(tmp_path / "artifact").path


def found(artifact: Path, **settings: Any) -> object:
    with ExitStack() as held:
        return artifact_for(str(artifact), ServeConfig(**settings), held)


def manifest_of(path: Path, **changes: Any) -> Manifest:
    return save_artifact(path, **changes).manifest


def test_the_precision_that_an_artifact_has_may_be_named_and_no_other(artifact: Path) -> None:
    """It was served in its own, whatever the flag said."""
    assert found(artifact, precision="fp32") == found(artifact, precision="auto") == found(artifact) == artifact
    with pytest.raises(ConfigError) as caught:
        found(artifact, precision="int8")
    assert str(caught.value) == (
        "precision is int8, and tiny, which is an artifact, was built with fp32: build it anew with 'bei build', or "
        "leave the setting out."
    )


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_precision_that_there_is_not_is_refused_wherever_it_stands(source: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("precision: bf61\n" if source == "file" else "")
    flags = {"precision": "bf61"} if source == "flag" else {}
    env = {"BEI_PRECISION": "bf61"} if source == "environment" else {}
    with pytest.raises(ConfigError, match=r"precision must be one of auto, .*, not 'bf61'"):
        load_config(ServeConfig, flags, str(file), env)


def test_precisions_are_the_builder_s() -> None:
    assert set(PRECISIONS) == set(precision.PRECISIONS)


RECORDED = {
    **{"target": "fake", "precision": "fp32", "name": "tiny", "pooling": "mean", "normalize": "yes"},
    **{"include_prompt": "true", "max_seq_len": "16", "max_num_tokens": "64", "max_batch_size": "8"},
    **{"revision": "main", "attention": "causal", "adapter": "none", "default_prompt_name": "query"},
    "route": "document",
}
OTHER = {
    **{"precision": "int8", "normalize": "false", "include_prompt": "0"},
    **{"max_seq_len": "17", "max_num_tokens": "65", "max_batch_size": "9"},
}


@pytest.mark.parametrize("name", sorted(_RECORDED))
def test_a_variable_that_says_what_the_manifest_says_is_accepted_and_another_is_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(
        tmp_path / "artifact",
        source=CheckpointSource(model="org/model", kind="hub", revision="main", sha256="0" * 64, transformers="none"),
        prompts={"query": "query: "},
        default_prompt_name="query",
    )
    spec = msgspec.structs.replace(manifest.spec, attention="causal", adapter="none")
    manifest = msgspec.structs.replace(manifest, spec=spec, routes=Routes(default="document", absent=["query"]))
    monkeypatch.setenv(f"BEI_{name.upper()}", RECORDED[name])
    check_built(manifest, given_of())
    monkeypatch.setenv(f"BEI_{name.upper()}", OTHER.get(name, "another"))
    named = name if name == "precision" else rf"{name} \(BEI_{name.upper()}\)"
    with pytest.raises(ConfigError, match=rf"^{named} is .*tiny, which is an artifact, was built"):
        check_built(manifest, given_of())


@pytest.mark.parametrize("name", sorted(BUILD_SETTINGS - _RECORDED.keys()))
def test_one_that_it_does_not_record_is_refused(name: str, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"BEI_{name.upper()}", "1")
    if name.startswith("sign"):  # require_signature says what artifacts must have
        assert found(artifact) == artifact
        return
    with pytest.raises(ConfigError, match=rf"^{name} \(BEI_{name.upper()}\) is a setting of builds, and tiny has been"):
        found(artifact)


def test_what_a_model_has_not_is_not_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(tmp_path / "artifact", embedding=None)
    monkeypatch.setenv("BEI_POOLING", "cls")
    with pytest.raises(ConfigError, match=r"pooling \(BEI_POOLING\) is cls, and tiny, which is an artifact, has none"):
        check_built(manifest, given_of())


def test_a_model_in_process_is_asked_in_the_same_way(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="precision is bf16, and tiny"):
        Model(artifact, precision="bf16")
    monkeypatch.setenv("BEI_MAX_SEQ_LEN", "512")
    with pytest.raises(ConfigError, match=r"max_seq_len .* is 512, and tiny"):
        Model(artifact)


def test_an_artifact_that_takes_the_place_of_another_is_asked_too(tmp_path: Path) -> None:
    served = manifest_of(tmp_path / "served")
    manifest_of(tmp_path / "new", precision="bf16")
    with pytest.raises(ConfigError, match="precision is fp32, and tiny, which is an artifact, was built with bf16"):
        next_artifact(tmp_path / "new", served, ServeConfig(precision="fp32"))


def test_settings_of_builds_by_their_names() -> None:
    assert _RECORDED.keys() <= {field.name for field in fields(BuildConfig)}


def given_of() -> dict[str, str]:
    return build_settings(load_config(ServeConfig, {}))
