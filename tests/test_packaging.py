"""The traps of a source folder called build/, each held by a line. The wheel itself is built and tried in .ci/run."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import bei

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


def test_build_is_not_ignored() -> None:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    assert "!/build/" in lines
    assert not [line for line in lines if re.fullmatch(r"/?build/?", line.strip())]
    docker = (ROOT / ".dockerignore").read_text().splitlines()
    assert not [line for line in docker if re.fullmatch(r"(\*\*/|/)?build/?", line.strip())]


def test_build_is_only_a_folder() -> None:
    assert not (ROOT / "build" / "__init__.py").exists()
    assert {path.name for path in (ROOT / "build").iterdir()} - {"__pycache__"} == {"bei_build"}


def test_both_packages_are_typed() -> None:
    assert (ROOT / "bei" / "py.typed").is_file()
    assert (ROOT / "build" / "bei_build" / "py.typed").is_file()


def test_every_folder_of_tests_is_a_package_and_none_is_called_build() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py") if "node_modules" not in path.parts}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
    assert not [folder for folder in folders if "build" in folder.relative_to(ROOT).parts]


def test_folders_of_tests_mirror_folders_of_sources() -> None:
    for package, source in (("bei", ROOT / "bei"), ("bei_build", ROOT / "build" / "bei_build")):
        folders = {path.relative_to(source) for path in source.rglob("*") if path.is_dir()} | {Path()}
        for folder in (ROOT / "tests" / package).rglob("*"):
            if folder.is_dir() and folder.name != "__pycache__":
                assert folder.relative_to(ROOT / "tests" / package) in folders, folder


def test_the_two_packages_are_what_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["bei", "build/bei_build"]}
    assert "/build" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert project["project"]["scripts"] == {"bei": "bei.__main__:main"}
    assert project["project"]["dynamic"] == ["version"]


def test_the_builder_is_importable_beside_the_runtime() -> None:
    assert importlib.util.find_spec("bei_build") is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", bei.__version__)


def test_files_of_the_page_are_inside_the_package_and_not_ignored() -> None:
    names = {path.name for path in (ROOT / "bei" / "server" / "ui").iterdir()}
    assert {"index.html", "app.js", "style.css", "icon.svg", "docs.html"} <= names
    for line in (ROOT / ".gitignore").read_text().splitlines():  # hatchling leaves out what git ignores
        assert not fnmatch.filter(names, line.strip("/")), line


@pytest.mark.parametrize("name", ["held_out.txt", "retrieval.json"])
def test_texts_for_verification_are_inside_the_package(name: str) -> None:
    assert (ROOT / "build" / "bei_build" / "data" / name).is_file()
