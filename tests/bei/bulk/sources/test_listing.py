"""Folders and patterns: which files they mean, and that none is left out without a word."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs
from fsspec.implementations.local import LocalFileSystem

from bei.bulk.sources.rows import Columns
from bei.bulk.sources.source import Source
from bei.errors import JobInputError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name in ("a.txt", "one/b.txt", "two/c.txt", "two/deep/d.txt", "two/deep/e.md", ".hidden/f.txt", "_dead/g.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n")
    return folder


def _names(folder: Path, pattern: str = "") -> list[str]:
    given = os.path.join(folder, pattern) if pattern else str(folder)
    return [os.path.relpath(file.path, folder) for file in Source((given,), Columns()).files]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["a.txt", "one/b.txt", "two/c.txt", "two/deep/d.txt"]),
        ("*.txt", ["a.txt"]),
        ("*/*.txt", [".hidden/f.txt", "_dead/g.txt", "one/b.txt", "two/c.txt"]),
        ("t*/*.txt", ["two/c.txt"]),
        ("two/**/*.txt", ["two/c.txt", "two/deep/d.txt"]),
        ("[ot]*/?.txt", ["one/b.txt", "two/c.txt"]),
    ],
)
def test_folders_and_patterns_mean_what_they_did(pattern: str, found: list[str], corpus: Path) -> None:
    assert sorted(_names(corpus, pattern)) == found


def _failing(monkeypatch: pytest.MonkeyPatch, file_system: type, folder: str) -> None:
    """Listing ``folder`` fails, as on a disk with a fault: root may read what has no permissions."""
    ls = file_system.ls  # type: ignore[attr-defined]

    def failing(self: object, path: str, *given: Any, **named: Any) -> Any:
        if path.rstrip("/").endswith(folder):
            raise OSError(5, "Input/output error")
        return ls(self, path, *given, **named)

    monkeypatch.setattr(file_system, "ls", failing)


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*/*.txt"])
def test_a_folder_that_cannot_be_listed_ends_the_job_by_its_name(
    pattern: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing(monkeypatch, LocalFileSystem, "two/deep")
    with pytest.raises(JobInputError, match=r"two/deep cannot be listed: .*Input/output error"):
        _names(corpus, pattern)
    assert _names(corpus, "one/*.txt") == ["one/b.txt"]


def test_folders_that_nothing_is_asked_of_are_not_listed(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (".hidden", "_dead"):
        _failing(monkeypatch, LocalFileSystem, folder)
    assert len(_names(corpus)) == 4
    assert _names(corpus, "t*/*.txt") == ["two/c.txt"]


def test_a_store_s_folder_that_cannot_be_listed_ends_the_job(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec leaves it out of patterns."""
    store = s3fs.S3FileSystem()
    for name in ("one/a.txt", "two/b.txt"):
        store.pipe_file(f"bucket/{tmp_path.name}/{name}", b"x\n")
    given = (f"{bucket}/{tmp_path.name}/*/*.txt",)
    assert len(Source(given, Columns()).files) == 2
    s3fs.S3FileSystem.clear_instance_cache()
    lsdir: Callable[..., Any] = s3fs.S3FileSystem._lsdir

    async def failing(self: object, path: str, *given: Any, **named: Any) -> Any:
        if path.endswith("two"):
            raise OSError(16, "Please reduce your request rate.")
        return await lsdir(self, path, *given, **named)

    monkeypatch.setattr(s3fs.S3FileSystem, "_lsdir", failing)
    with pytest.raises(JobInputError, match=r"/two cannot be listed: .*reduce your request rate"):
        Source(given, Columns())
    for pattern in (f"{tmp_path.name}/", f"{tmp_path.name}/**/*.txt"):  # listed in one go
        assert len(Source((f"{bucket}/{pattern}",), Columns()).files) == 2


def test_a_link_to_a_folder_is_followed(corpus: Path, tmp_path: Path) -> None:
    """Its files were left out without a word."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "h.txt").write_text("x\n")
    (corpus / "one" / "disk").symlink_to(tmp_path / "disk")
    assert "one/disk/h.txt" in _names(corpus)
    assert _names(corpus, "one/*/*.txt") == ["one/disk/h.txt"]


@pytest.mark.parametrize("pattern", ["", "*/*.txt", "**/*.txt"])
def test_of_a_file_that_a_link_leads_to_too_its_own_path_is_taken(
    pattern: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of versions, the latest of which a link names; also where the folder itself is given by a link."""
    before = _names(corpus, pattern)
    (corpus / "latest").symlink_to("two")
    (tmp_path / "given").symlink_to(corpus)
    assert _names(corpus, pattern) == before == _names(tmp_path / "given", pattern)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "z.txt").write_text("x\n")
    for name in ("first", "second"):
        (corpus / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JobInputError, match=r"first/z.txt and .*second/z.txt are one file"):
        _names(corpus, pattern)


@pytest.mark.parametrize("pattern", ["", "*/*.txt", "**/*.txt"])
def test_what_a_disk_keeps_for_repairs_is_passed_over(
    pattern: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root may list it, and it lies in the root of a volume."""
    before = _names(corpus, pattern)
    (corpus / "lost+found").mkdir()
    _failing(monkeypatch, LocalFileSystem, "lost+found")
    assert _names(corpus, pattern) == before


@pytest.mark.parametrize("target", [".", ".."])
def test_links_that_lead_around_are_named(target: str, corpus: Path) -> None:
    (corpus / "one" / "link").symlink_to(target)
    with pytest.raises(JobInputError, match="one/link"):
        _names(corpus)
    (corpus / "one" / "link").rename(corpus / "one" / "_link")
    assert len(_names(corpus)) == 4


def test_links_that_lead_to_each_other_end(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (corpus / "one" / "link").symlink_to(other)
    (other / "back").symlink_to(corpus / "one")
    with pytest.raises(JobInputError, match=r"one/link/back is a link to .*one, which it lies in"):
        _names(corpus)


def test_a_file_whose_name_is_a_pattern_too_is_that_file(tmp_path: Path) -> None:
    for name in ("x[1].txt", "x1.txt", "what?.txt", "whats.txt"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "y[2]").mkdir()
    (tmp_path / "y[2]" / "z.txt").write_text("x\n")
    for name in ("x[1].txt", "what?.txt"):
        assert _names(tmp_path, name) == [name]
    assert _names(tmp_path, "x[0-9].txt") == ["x1.txt"]
    assert _names(tmp_path, "y[2]") == ["y[2]/z.txt"]
