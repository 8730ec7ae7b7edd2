"""Artifacts that ``bei serve CHECKPOINT`` builds once and finds again."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bei.artifact import held_files, store
from bei.artifact.cache import ModelCache
from bei.artifact.held_files import FileInfo
from bei.artifact.manifest import Artifact
from bei.artifact.store import load
from bei.cli.main import main
from bei.config.settings import ServeConfig
from bei.server.http.listen import Sockets
from bei.service.trusted_artifact import opened
from bei_build.cache import build_cached
from bei_build.config import BuildConfig
from bei_build.progress import Progress
from tests.support.builds import open_engine
from tests.support.checkpoints import add_modules

Build = Callable[..., tuple[Path, str]]
Serve = Callable[..., tuple[Artifact, list[Path]]]


@pytest.fixture
def checkpoint(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "tiny"))


@pytest.fixture
def build(checkpoint: Path, tmp_path: Path) -> Build:
    """Build through one cache, with its use closed; returns the artifact's folder and the output."""

    def build(**settings: str) -> tuple[Path, str]:
        text = io.StringIO()
        config = BuildConfig(**{"model": str(checkpoint), "precision": "fp32", **settings})  # type: ignore[arg-type]
        progress = Progress(Console(file=text, width=500))
        artifact, use = build_cached(config, ModelCache(tmp_path / "cache"), open_engine, progress)
        assert use.path == artifact.path
        assert artifact == load(artifact.path)
        use.close()
        return artifact.path, text.getvalue()

    return build


def test_a_checkpoint_is_built_once_and_says_so(build: Build, checkpoint: Path) -> None:
    first, said = build()
    assert f"{checkpoint} is a checkpoint: building it into {first} (once)" in said
    assert load(first).manifest.name == "tiny"
    again, said = build()
    assert (again, said) == (first, "")


def test_who_waits_for_another_one_s_build_says_so(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = build()
    shutil.rmtree(first)
    note = Progress.note
    with ExitStack() as other:
        other.enter_context(ModelCache(tmp_path / "cache").building(first.name))

        def noted(self: Progress, text: str) -> None:
            note(self, text)
            other.close()  # the other one ends without an artifact

        monkeypatch.setattr(Progress, "note", noted)
        again, said = build()
    assert again == first
    assert f"another process builds {tmp_path / 'tiny'} into {first}: waiting for it" in said


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


@pytest.fixture
def serve(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """``bei serve CHECKPOINT`` up to loading engines; returns the artifact to serve, and the cache's content."""
    cache = ModelCache(tmp_path / "cache")
    found: list[tuple[Artifact, list[Path]]] = []

    def run(sources: list[Artifact], config: ServeConfig, _: Sockets) -> None:
        (source,) = sources
        found.append((opened(source, config), [entry.path for entry in cache.entries()]))

    def serve(*flags: str) -> tuple[Artifact, list[Path]]:
        main(["serve", str(checkpoint), "--precision", "fp32", "--cache-dir", str(cache.folder), *flags])
        return found[-1]

    monkeypatch.setattr("bei.server.http.listen.bind_tcp", lambda *_: socket.socket())
    monkeypatch.setattr("bei.server.run.run", run)
    monkeypatch.setenv("BEI_VERIFY", "false")
    return serve


def test_files_that_settings_and_the_checkpoint_name_count(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retrained adapter, other texts to calibrate with, and another base model at the same places."""
    seen: list[str] = []

    def place(**settings: Any) -> str:
        class Stop(Exception):
            pass

        def use(self: ModelCache, name: str) -> Any:
            seen.append(name)
            raise Stop

        monkeypatch.setattr(ModelCache, "use", use)
        config = BuildConfig(**{"model": str(checkpoint), "precision": "fp32", **settings})
        with pytest.raises(Stop):
            build_cached(config, ModelCache(tmp_path / "cache"), open_engine, Progress(Console(file=io.StringIO())))
        return seen[-1]

    texts, adapter = tmp_path / "texts.txt", tmp_path / "adapter"
    adapter.mkdir()
    files: dict[Path, dict[str, Any]] = {texts: {"calibration_data": str(texts), "precision": "int8"}}
    files[adapter / "adapter_model.safetensors"] = {"lora": (f"one={adapter}",)}
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(checkpoint)}))
    files[checkpoint / "model.safetensors"] = {"model": str(adapter)}
    for file, settings in files.items():
        file.touch()
        first = place(**settings)
        assert place(**settings) == first
        os.utime(file, ns=(0, 1_000_000_000))
        assert place(**settings) != first, file


def test_a_start_hashes_each_file_of_the_artifact_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first, which has it built by another process."""
    hashed: list[str] = []
    hash_path, hash_open, read_file = store.sha256_of_file, held_files._sha256, held_files.read_file

    def of_path(path: Path) -> str:
        hashed.append(path.name)
        return hash_path(path)

    def of_open(descriptor: int) -> str:
        hashed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        return hash_open(descriptor)

    def of_read(folder: Path, info: FileInfo) -> bytes:
        hashed.append(Path(info.path).name)
        return read_file(folder, info)

    monkeypatch.setattr(store, "sha256_of_file", of_path)
    monkeypatch.setattr(held_files, "_sha256", of_open)
    monkeypatch.setattr(store, "read_file", of_read)
    served = []
    for _ in range(2):
        hashed.clear()
        served.append(serve()[0])
        names = [Path(info.path).name for info in served[-1].manifest.files]
        assert "model.bin" in names
        assert sorted(hashed) == sorted(names)
    assert served[0] == served[1]


def test_a_start_removes_what_is_too_much_and_not_what_it_serves(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    first, kept = serve("--cache-max-size", "1kB")
    assert kept == [first.path]
    monkeypatch.setenv("BEI_POOLING", "cls")  # another artifact
    second, kept = serve("--cache-max-size", "1kB")
    assert second.path != first.path
    assert kept == [second.path]


def test_a_server_s_build_leaves_none_of_its_libraries_in_it(checkpoint: Path, tmp_path: Path) -> None:
    """They took 500 MB of its memory."""
    script = (
        "import sys; from bei.cli import main; from bei.config.settings import ServeConfig\n"
        "config = ServeConfig(models=(sys.argv[1],), cache_dir=sys.argv[2], precision='fp32')\n"
        "with main._artifacts(config) as (made,):\n"
        "    print(made.path, {'torch', 'transformers'} & sys.modules.keys())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(checkpoint), str(tmp_path)],
        env={**os.environ, "BEI_VERIFY": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    path, _, loaded = run.stdout.strip().partition(" ")
    assert loaded == "set()"
    assert load(Path(path)).manifest.precision == "fp32"
    assert "building it into" in run.stderr
    assert "Read checkpoint" in run.stderr, "its progress"
    assert "leak" not in run.stderr


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
