"""The pages that commands write: they are opened as files, light, dark and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bei.cli.bench.report import report_page
from bei.cli.main import main
from tests.bei.cli.bench.results import LOADS, result_of, setup_of
from tests.browser.conftest import Shoot
from tests.browser.test_page import LOOKS, check_accessible, check_width


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name."""
    folder = tmp_path_factory.mktemp("files")
    files = {name: folder / f"{name}.html" for name in ("bench", "bench-sweep", "simulate")}
    files["bench"].write_text(report_page(result_of(setup_of(rates=None, loads=LOADS[1:]))), "utf-8")
    files["bench-sweep"].write_text(report_page(result_of(servers=("bei", "peer"))), "utf-8")
    main(["simulate", "--devices=1", "--seconds=1", "--bulk-texts=32", f"--html={files['simulate']}"])
    return files


@pytest.fixture(params=LOOKS, ids=[look for look, *_ in LOOKS])
def look(request: pytest.FixtureRequest, browser: Any) -> Iterator[tuple[str, Any]]:
    """A name, and a page in a context of its own that must have nothing on its console."""
    name, size, is_dark = request.param
    context = browser.new_context(viewport=size, color_scheme="dark" if is_dark else "light")
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda one: said.append(one.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    yield name, page
    context.close()
    assert said == []


@pytest.mark.parametrize("name", ["bench", "bench-sweep", "simulate"])
def test_a_page_of_a_command_is_accessible_and_fits(
    look: tuple[str, Any], files: dict[str, Path], shoot: Shoot, name: str
) -> None:
    shown, page = look
    page.goto(files[name].as_uri())
    assert page.locator("h1 + p, h1 + .finding").first.is_visible()  # the result in a sentence
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    check_accessible(page)
    check_width(page)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = false })")
    shoot(page, f"{name}-{shown}")
