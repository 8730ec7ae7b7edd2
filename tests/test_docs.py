"""docs/reference.md names every setting, flag, variable, metric and error code; the README's links lead somewhere."""

import argparse
import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bei import errors
from bei.cli import main
from bei.cli.bench.dialects import DIALECTS
from bei.cli.bench.options import add_arguments
from bei.config.settings import ServeConfig
from bei.metrics.aggregate import GAUGES
from bei_build.config import BuildConfig
from tests.support.scraped import scraped

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


def documented_settings(title: str) -> set[str]:
    """What stands in the first column of the settings' table."""
    table = section(title).split("\n### ")[0]
    return {name for row in re.findall(r"^\| (`.*?) \| ", table, re.M) for name in re.findall(r"`([a-z_]+)`", row)}


def test_no_setting_is_documented_that_there_is_not() -> None:
    for title, config in (("Settings of `bei serve`", ServeConfig), ("Settings of `bei build`", BuildConfig)):
        documented = documented_settings(title)
        assert documented, title
        assert documented <= {field.name for field in dataclasses.fields(config)}, title


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """By name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices


@pytest.mark.parametrize(
    "command", sorted(commands_of(main._parser(None)).keys() - {"bench"})
)  # which has a page of its own
def test_every_flag_is_documented(command: str) -> None:
    parser = main._parser(command)
    settings = {field.name for config in (ServeConfig, BuildConfig) for field in dataclasses.fields(config)}
    for action in (*parser._actions, *commands_of(parser)[command]._actions):
        if action.option_strings and action.dest not in settings:
            for flag in action.option_strings:
                assert re.search(rf"`{flag}[`= ]|`bei {command} [^`]*{flag}", REFERENCE), flag


def test_every_variable_that_is_read_or_set_is_documented() -> None:
    """By their names where they look like one, and by what is read from the environment."""
    named, used = set(), set()
    for path in [*(ROOT / "bei").rglob("*.py"), *(ROOT / "build").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'"((?:BEI|HF|HUGGINGFACE|OMP|OTEL|TOKENIZERS|TRANSFORMERS|XDG)_[A-Z_]+)"', text))
        if "environ" in text or "getenv" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and re.search("environ|getenv", ast.unparse(node.func)):
                    used |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    assert {"HF_HOME", "OTEL_SDK_DISABLED"} <= named  # else nothing is looked at
    assert {"HF_HUB_OFFLINE", "OMP_WAIT_POLICY"} <= used
    assert not [name for name in named | used if f"`{name!s}" not in REFERENCE]


def test_no_variable_that_somebody_may_export_is_taken_for_a_setting_that_there_is_not() -> None:
    """What the documents, the page and the tests call BEI_... must not keep ``bei serve`` from starting."""
    settings = {field.name for config in (ServeConfig, BuildConfig) for field in dataclasses.fields(config)}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "bei" / "server" / "ui").glob("*.js")]
    sources = [*(ROOT / "tests" / "browser").glob("*.py"), *(ROOT / "tests" / "real").glob("*.py")]
    named = {name for page in [*pages, *sources] for name in re.findall(r"\bBEI_([A-Z_]*[A-Z])\b", page.read_text())}
    assert "MODELS" in named  # else nothing is looked at
    links = {name for name in named if re.search(r"_(SERVICE|PORT)(_|$)", name)}  # what Kubernetes injects
    assert {name.lower() for name in named - links} <= settings


def documented_metrics() -> dict[str, tuple[str, set[str]]]:
    """Name -> kind and labels."""
    rows = re.findall(r"^\| (`.*?) \| (\w*) \| ", section("Metrics"), re.M)
    return {
        name: (kind, set(filter(None, labels.split(","))))
        for names, kind in rows
        for name, labels in re.findall(r"`([\w:]+)(?:{([\w,]+)})?`", names)
    }


def test_every_metric_is_documented_with_its_kind_and_labels() -> None:
    text, documented = scraped(), documented_metrics()
    kinds = dict(re.findall(r"^# TYPE ([\w:]+) (\w+)$", text, re.M))
    assert {name: kind for name, (kind, _) in documented.items()} == kinds
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = re.sub(r"_(bucket|sum|count)$", "", sample.name) if family.type == "histogram" else sample.name
            name = name if name in documented else name.removesuffix("_total")  # TEI's counters have none
            assert documented[name][1] == set(sample.labels) - {"le"}, sample.name


def test_how_each_gauge_of_several_processes_is_put_together_is_documented() -> None:
    table = section("Metrics").split("put together like this:")[1].split("\n\nGauges are")[0]
    named = set(re.findall(r"`(\w+)`", table)) - {"process_cpu_seconds_total", "bei_process_up"}
    assert named == GAUGES.keys()


def test_every_error_code_is_documented() -> None:
    codes = {cls.code for cls in error_classes() if cls.__module__ == "bei.errors"}
    rows = re.findall(r"^\| (`.*?) \| ", section("Error codes"), re.M)
    assert codes == {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}


DEPLOY = (ROOT / "docs" / "deploy.md").read_text()


def test_the_limits_of_the_deployment_page_have_their_defaults() -> None:
    config = ServeConfig()
    table = DEPLOY.split("## Limits")[1].split("\n## ")[0]
    shown = {
        "max_client_batch_size": "16,384",
        "max_queue_tokens": "4,000,000",
        "interactive_max_wait": "5 s",
        "bulk_max_wait": "20 s",
        "payload_limit": "8 MB",
        "body_memory": "256 MB",
        "answer_limit": "256 MB",
        "answer_memory": "1 GB",
        "max_headers": "128",
        "max_connections": "16,384",
        "header_timeout": "20 s",
        "body_timeout": "30 s",
        "keep_alive_timeout": "75 s",
        "hang_timeout": "30 s",
    }
    units = {"": 1, "s": 1, "MB": 10**6, "GB": 10**9}
    for name, text in shown.items():
        number, _, unit = text.partition(" ")
        assert getattr(config, name) == float(number.replace(",", "")) * units[unit], name
        assert any(f"`{name}`" in row and text in row for row in table.splitlines()), name


def test_the_error_codes_of_the_deployment_page_exist() -> None:
    codes = set(re.findall(r"`([a-z_]+)`", DEPLOY.split("## What to do about an error")[1]))
    assert "overloaded" in codes
    assert codes <= {cls.code for cls in error_classes()}


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


# Of artifacts, a placeholder, and a protocol.
_NOT_HERE = re.compile(r"engine/[\w.-]+\.(json|pt2|safetensors)|.*NAME.*|http/protobuf")


def test_paths_and_headings_that_are_named_exist() -> None:
    """Paths as ``tests/e2e``, ``bei/core.py``, ``cli/bench`` or ``artifact/store.load``; quotations of decisions."""
    places = [ROOT / place for place in ("", "bei", "bei/server", "build", "build/bei_build")]
    folders = {path.name for place in places for path in place.iterdir() if path.is_dir()}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]
    paths, quotations = set(), set()
    for page in pages:
        for path in re.findall(r"`([a-z_][\w.-]*(?:/[\w.-]+)+/?)`", page.read_text()):
            if path.split("/")[0] in folders and not _NOT_HERE.fullmatch(path):
                names = (path, f"{path}.py", f"{path.rpartition('.')[0]}.py")
                paths.add((path, any((place / name).exists() for place in (page.parent, *places) for name in names)))
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "decisions.md").read_text(), re.M)
    sources = [path for folder in ("bei", "build", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    for source in [*pages, *sources]:
        text = re.sub(r"\s*\n\s*(# )?", " ", source.read_text())
        quotations |= set(re.findall(r'decisions\.md\)?, "([^"]+)"', text))
    assert len(paths) > 100  # else nothing is looked at
    assert len(quotations) > 15
    assert [path for path, exists in paths if not exists] == []
    assert [quoted for quoted in quotations if not any(heading.startswith(quoted) for heading in headings)] == []


@pytest.mark.parametrize("config_class", [ServeConfig, BuildConfig])
def test_the_reference_has_the_range_of_every_number(config_class: type[Any]) -> None:
    for field in dataclasses.fields(config_class):
        if (within := field.metadata.get("within")) is not None:
            (row,) = [line for line in REFERENCE.splitlines() if line.startswith(f"| {within} |")]
            assert f"`{field.name}`" in row
