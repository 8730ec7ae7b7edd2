"""docs/reference.md names every setting, metric and error code; the README's links lead somewhere."""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bei import errors
from bei.bench.dialects import DIALECTS
from bei.bench.options import add_arguments
from bei.config import ServeConfig
from bei.metrics import Metrics
from bei_build.config import BuildConfig

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def section(title: str) -> str:
    return REFERENCE.split(f"## {title}\n")[1].split("\n## ")[0]


def error_classes(root: type[errors.BeiError] = errors.BeiError) -> Iterator[type[errors.BeiError]]:
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda field: str(field.name))
def test_a_setting_of_serve_is_documented(field: dataclasses.Field[object]) -> None:
    assert f"`{field.name}`" in section("Settings of `bei serve`")


@pytest.mark.parametrize("field", dataclasses.fields(BuildConfig), ids=lambda field: str(field.name))
def test_a_setting_of_build_is_documented(field: dataclasses.Field[object]) -> None:
    assert f"`{field.name}`" in section("Settings of `bei build`")


def test_every_metric_is_documented() -> None:
    families = {family.name for family in Metrics().registry.collect()}
    documented = {name.removesuffix("_total") for name in re.findall(r"`(bei_\w+)", section("Metrics"))}
    assert families == documented


def test_every_error_code_is_documented() -> None:
    codes = {cls.code for cls in error_classes() if cls.__module__ == "bei.errors"}
    documented = set(re.findall(r"`([a-z_]+)`", section("Error codes")))
    assert codes <= documented


def test_every_flag_of_bench_is_documented() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    documented = set(re.findall(r"--[a-z-]+", (ROOT / "docs" / "bench.md").read_text()))
    assert flags - {"--help"} <= documented
    assert set(DIALECTS) <= set(re.findall(r"`([a-z-]+)`", (ROOT / "docs" / "bench.md").read_text()))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
