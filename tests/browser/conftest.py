"""A real Chromium, servers of tiny models, and pages that must not complain."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import env, home
from tests.e2e.kinds import MODELS, case, labels
from tests.e2e.process import Server, serve
from tests.support.builds import build_artifact
from tests.support.gliner2_models import save_gliner2
from tests.support.gliner_models import save_gliner
from tests.support.glirel_models import save_glirel
from tests.support.two_towers import save_clip
from tests.support.zoo import Case, save_case

__all__ = ["env", "home"]

CASES: dict[str, Case] = {
    **MODELS,
    "nli": case("BertForSequenceClassification", **labels("contradiction", "neutral", "entailment")),
}
MOST_INPUTS = 60
SECRET = "s3cr3t-0123456789abcdef"
ROOT = "/embed-api"

MOST_MS = 20_000  # until something is seen, on a machine with other work

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}

OpenPage = Callable[..., Any]
Shoot = Callable[..., Path]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the tier's packages its modules cannot be imported. Whoever asks for the tier gets the ImportError."""
    is_asked = "browser" in config.option.markexpr.replace("not browser", "")
    return None if is_asked or not collection_path.name.startswith("test_") else True


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Every test beside this file belongs to the tier."""
    for item in items:
        if item.nodeid.startswith("tests/browser/"):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """An artifact of each of CASES."""
    folder = tmp_path_factory.mktemp("browser")
    found = {}
    for name, made in CASES.items():
        checkpoint = save_case(folder / name, made)
        found[name] = build_artifact(checkpoint, folder / f"{name}-built", name=name, reference="engine").path
    checkpoint = save_gliner(folder / "gliner")
    schemas = save_gliner2(folder / "gliner2", none=-20.0)  # it counts some instances of everything
    found["clip"] = build_artifact(save_clip(folder / "clip"), folder / "clip-built", name="clip").path
    found["gliner"] = build_artifact(checkpoint, folder / "gliner-built", name="gliner", reference="engine").path
    relations = save_glirel(folder / "glirel")
    found["glirel"] = build_artifact(relations, folder / "glirel-built", name="glirel", reference="engine").path
    found["gliner2"] = build_artifact(schemas, folder / "gliner2-built", name="gliner2", reference="engine").path
    return found


@pytest.fixture(scope="session")
def server(artifacts: Mapping[str, Path], env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """A server of all of them."""
    with serve([*artifacts.values(), "--max-client-batch-size", MOST_INPUTS], env, home) as server:
        yield server


@pytest.fixture(scope="session")
def guarded(artifacts: Mapping[str, Path], env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """One with an API key, a prefix in front of its paths, and another dialect."""
    settings = {**env, "BEI_API_KEYS": f"page:{SECRET}"}
    with serve([artifacts["embedder"], "--root-path", ROOT, "--dialect", "tei"], settings, home) as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or the one that BEITEST_CHROMIUM names."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=MOST_MS)
    path = os.environ.get("BEITEST_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("there is no Chromium: install Debian's package chromium, or name one with BEITEST_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[OpenPage]:
    """``open_page("/ui#live", server=..., dark=..., size=..., expects=...)``: a page in a context of its own.

    In the end there must be nothing on its console but what matches ``expects``, and it must have asked nobody but its
    server.
    """
    opened: list[tuple[Any, str, list[str], list[str], str]] = []
    with ExitStack() as stack:

        def begin(
            path: str = "/ui",
            *,
            of: Server = server,
            dark: bool = False,
            size: Mapping[str, int] = DESK,
            expects: str = r"(?!)",
            **options: Any,
        ) -> Any:
            scheme = "dark" if dark else "light"
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", **options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(MOST_MS)
            said: list[str] = []
            asked: list[str] = []
            page.on("console", lambda one: said.append(one.text) if one.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            opened.append((page, of.url, said, asked, expects))
            page.goto(of.url + path)
            return page

        yield begin
        for _, url, said, asked, expects in opened:
            assert [text for text in said if not re.search(expects, text)] == []
            assert [one for one in asked if not one.startswith((url + "/", "data:"))] == []


@pytest.fixture(scope="session")
def shoot(tmp_path_factory: pytest.TempPathFactory) -> Shoot:
    """``shoot(page, name)``: a picture of the whole page, in the folder that BEITEST_SCREENSHOTS names."""
    named = os.environ.get("BEITEST_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)

    def take(page: Any, name: str) -> Path:
        path = folder / f"{name}.png"
        page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 5_000
        return path

    return take
