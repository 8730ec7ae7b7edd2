"""Artifacts that ``bei serve CHECKPOINT`` builds once and finds again."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bei.artifact import load
from bei_build.cache import build_cached
from bei_build.config import BuildConfig
from bei_build.progress import Progress
from tests.bei_build.builds import open_engine
from tests.checkpoints import add_modules

Build = Callable[..., tuple[Path, str]]


@pytest.fixture
def checkpoint(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "tiny"))


@pytest.fixture
def build(checkpoint: Path, tmp_path: Path) -> Build:
    """Builds through one cache; gives the artifact's folder and what was said."""

    def build(**settings: str) -> tuple[Path, str]:
        text = io.StringIO()
        config = BuildConfig(**{"model": str(checkpoint), "precision": "fp32", **settings})  # type: ignore[arg-type]
        return build_cached(
            config, tmp_path / "cache", open_engine, Progress(Console(file=text, width=500))
        ), text.getvalue()

    return build


def test_a_checkpoint_is_built_once_and_says_so(build: Build, checkpoint: Path) -> None:
    first, said = build()
    assert f"{checkpoint} is a checkpoint: building it into {first} (once)" in said
    assert load(first).manifest.name == "tiny"
    again, said = build()
    assert (again, said) == (first, "")


def test_what_changes_the_artifact_changes_its_place(build: Build, checkpoint: Path) -> None:
    first, _ = build()
    assert build(name="other")[0] != first
    assert build(pooling="cls")[0] != first
    assert build(precision="int8")[0] != first
    add_modules(checkpoint, ("max",))
    second, said = build()
    assert second != first
    assert "building it into" in said


def test_a_checkpoint_that_was_changed_is_built_again(build: Build, checkpoint: Path) -> None:
    first, _ = build()
    weights = checkpoint / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))  # another file of the same size
    assert build()[0] != first


@pytest.mark.parametrize("damage", ["changed", "cut off", "gone"])
def test_a_cached_artifact_with_a_damaged_manifest_is_built_again(damage: str, build: Build) -> None:
    first, _ = build()
    manifest = first / "manifest.json"
    if damage == "changed":
        manifest.write_text(manifest.read_text().replace("tiny", "tony"))
    elif damage == "cut off":
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        manifest.unlink()
    again, said = build()
    assert again == first
    assert "building it into" in said
    assert load(again).manifest.name == "tiny"
