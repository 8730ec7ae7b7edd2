"""Names of models that packages carry, and what the hub may answer. Folders and packages: ``test_checkpoint``."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bei.artifact.model_names import DEFAULT_MODEL
from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError, HubUnreachableError
from bei_build.checkpoint.locate import Location, check_entries, locate
from tests.bei.artifact.test_model_names import SPELLINGS
from tests.support.checkpoints import save_checkpoint


@contextmanager
def hub(status: int, code: str) -> Iterator[str]:
    """The address of a hub that answers every request with ``status``, and with the hub's ``code`` for it."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the hub was asked for; it has everything."""
    names: list[str] = []
    folder = save_checkpoint(tmp_path / "snapshot")

    def download(model: str, **_: object) -> str:
        names.append(model)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in the package of the default model, in place of an installed one."""
    root = tmp_path / "site" / DEFAULT_MODEL.package.replace("-", "_")
    save_checkpoint(root / "model")
    (root / "__init__.py").touch()
    monkeypatch.syspath_prepend(root.parent)
    monkeypatch.delitem(sys.modules, root.name, raising=False)
    return root / "model"


@pytest.mark.parametrize("called", SPELLINGS)
def test_every_name_of_a_packaged_model_is_the_installed_package(package: Path, asked: list[str], called: str) -> None:
    location = locate(called)
    assert location == Location(package, DEFAULT_MODEL.package, "package")
    assert location.name == DEFAULT_MODEL.name
    assert asked == []


@pytest.mark.parametrize("called", SPELLINGS)
def test_without_the_package_every_name_is_the_repository(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, called: str
) -> None:
    _hide_package(monkeypatch)
    location = locate(called)
    assert (location.model, location.kind, location.name) == (DEFAULT_MODEL.repository, "hub", DEFAULT_MODEL.name)
    assert asked == [DEFAULT_MODEL.repository]


def _hide_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei_build.checkpoint.locate._package_folder", lambda model: None)


def test_a_revision_of_the_repository_is_the_hub_s(package: Path, asked: list[str]) -> None:
    assert locate(DEFAULT_MODEL.repository, "v1").kind == "hub"
    with pytest.raises(ConfigError, match="is an installed package: leave it out"):
        locate(DEFAULT_MODEL.package, "v1")


def test_a_folder_of_the_name_goes_first(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_checkpoint(tmp_path / DEFAULT_MODEL.package)
    location = locate(DEFAULT_MODEL.package)
    assert (location.folder, location.name) == (folder.resolve(), DEFAULT_MODEL.package)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "the hub has no repository of this name: check the spelling"),
        (404, "RevisionNotFound", "The hub has no revision 'v1' of owner/name"),
        (403, "GatedRepo", "accept them on its page, and set HF_TOKEN"),
        (401, "", r"the hub refuses it \(401\): check the spelling \(owner/name\), and whether HF_TOKEN is valid"),
    ],
)
def test_what_the_hub_refuses_is_not_called_unreachable(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, words: str
) -> None:
    with hub(status, code) as address:
        _ask(monkeypatch, address)
        with pytest.raises(CheckpointNotFoundError, match=words) as caught:
            locate("owner/name", "v1")
    assert caught.value.code == "checkpoint_not_found"


def test_a_hub_that_fails_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(500, "") as address:
        _ask(monkeypatch, address)
        with pytest.raises(HubUnreachableError, match=r"could not be asked \(it answered 500\): check the network"):
            locate("owner/name")
    with pytest.raises(HubUnreachableError, match=r"could not be asked \(ConnectError") as caught:
        locate("owner/name")
    assert caught.value.code == "hub_unreachable"


def _ask(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_without_the_hub_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    _hide_package(monkeypatch)
    with pytest.raises(HubUnreachableError, match=f"Without the hub: {DEFAULT_MODEL.install}"):
        locate(DEFAULT_MODEL.name)
    with pytest.raises(HubUnreachableError, match=f"Did you mean {DEFAULT_MODEL.repository}"):
        locate("sentence-transformers/all-MiniLM-L6-v3")


def test_what_cannot_be_an_id_is_no_question_for_the_hub() -> None:
    with pytest.raises(CheckpointNotFoundError, match="nor an id that the hub could have"):
        locate("a b/c d/e")


def test_a_file_that_may_not_be_read_is_told_from_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "model")
    # Root may read any file: its mode says who else may.
    monkeypatch.setattr(os, "access", lambda path, _: bool(os.stat(path).st_mode & stat.S_IRUSR))
    check_entries(folder)
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match=r"model\.safetensors may not be read .*permissions"):
        check_entries(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_says_how_the_file_is_fetched(tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(tmp_path / "model")
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'53aa' * 16}\nsize 90868376\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS.*'git lfs pull'"):
        check_entries(folder)
