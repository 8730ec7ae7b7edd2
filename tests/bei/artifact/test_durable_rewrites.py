"""What is written into an artifact that is in place is on the disk before it takes the name of what was there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bei.artifact import store
from bei.artifact.manifest import Artifact
from tests.support.artifacts import save_artifact
from tests.support.keys import make_keys


@pytest.mark.parametrize("change", ["certificate", "signature"])
def test_a_power_cut_leaves_the_old_file_or_the_whole_new_one(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = save_artifact(tmp_path / "artifact")
    changes: dict[str, Callable[[], Artifact]] = {
        "certificate": lambda: store.recertify(artifact, artifact.certificate),
        "signature": lambda: store.sign(artifact, make_keys(tmp_path).key),
    }
    synced: set[int] = set()
    renamed: list[str] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def record_sync(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def of_synced(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any) -> None:
            files = [Path(source), *Path(source).glob("*")]
            assert [file.name for file in files if file.stat().st_ino not in synced] == []
            synced.discard(artifact.path.stat().st_ino)  # it has a new name in it
            renamed.append(Path(target).name)
            move(source, target)

        return moved

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", of_synced(rename))
    monkeypatch.setattr(os, "replace", of_synced(replace))
    changes[change]()
    assert {"certificate": "manifest.json", "signature": "signature.json"}[change] in renamed
    assert artifact.path.stat().st_ino in synced
