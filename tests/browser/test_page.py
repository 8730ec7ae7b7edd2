"""The page as a whole: axe-core, keyboard alone, colours, widths, keys, the live view under load."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import DESK, PHONE, ROOT, SECRET, OpenPage, Shoot
from tests.e2e.process import DEADLINE_S, Server
from tests.support.two_towers import png

LONG = "A sentence of many words that goes on and on, as sentences in documents do. " * 12
TABS = [
    ("embed", "embedder", "Embed"),
    ("rerank", "reranker", "Rerank"),
    ("classify", "classifier", "Classify"),
    ("zero-shot", "nli", "Classify"),
    ("entities", "ner", "Find entities"),
    ("extract", "gliner", "Extract"),
    ("extract", "gliner2", "Extract"),
    ("extract", "glirel", "Extract"),
    ("sparse", "splade", "Weigh words"),
    ("images", "clip", "Search"),
    ("live", "embedder", None),
    ("certificate", "embedder", None),
    ("rerank", "embedder", None),  # which cannot
]
PICTURES: list[Any] = [
    {"name": f"{name} of a rather long name with many words in it.png", "mimeType": "image/png", "buffer": png(*size)}
    for name, size in {"wide": (300, 40), "tall": (40, 300), "square": (64, 64)}.items()
]
LOOKS = [("light", DESK, False), ("dark", DESK, True), ("phone", PHONE, False), ("phone-dark", PHONE, True)]


def check_accessible(page: Page) -> None:
    """axe-core, with its best practices."""
    results = Axe().run(page, options={"preload": False})  # it would copy style sheets, which the policy forbids
    assert results.violations_count == 0, results.generate_report()


def check_width(page: Page) -> None:
    """The page itself must not scroll sideways."""
    assert page.evaluate("document.scrollingElement.scrollWidth <= document.scrollingElement.clientWidth")


def test_spans_and_code_are_within_their_boxes_on_a_phone(open_page: OpenPage) -> None:
    page = open_page("/ui#extract", size=PHONE)
    page.get_by_label("Model", exact=True).select_option("gliner")
    shown = page.get_by_role("tabpanel")
    shown.get_by_role("button", name="Extract", exact=True).click()
    for box in (shown.locator(".result .scroll"), shown.locator(".snippets pre").first):
        expect(box).to_be_visible()
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize(("look", "size", "dark"), LOOKS, ids=[look for look, *_ in LOOKS])
def test_every_tab_is_accessible_and_fits(
    open_page: OpenPage, shoot: Shoot, look: str, size: dict[str, int], dark: bool
) -> None:
    page = open_page(dark=dark, size=size)
    for tab, model, button in TABS:
        page.get_by_label("Model", exact=True).select_option(model)
        page.evaluate("tab => { location.hash = tab }", tab)
        shown = page.get_by_role("tabpanel")
        if tab == "images":
            shown.get_by_label("Images", exact=True).set_input_files(PICTURES)
            expect(shown.locator(".pictures li")).to_have_count(len(PICTURES))
        if button is not None:
            shown.get_by_role("button", name=button, exact=True).click()
            expect(shown.get_by_text(re.compile(r" in [\d.]+ m?s$"))).to_be_visible()
            expect(shown.locator(".snippets")).to_be_visible()
        elif tab == "live":
            expect(shown.locator("svg")).to_have_count(4)
        elif tab == "certificate":
            expect(shown.get_by_text("What the figures say")).to_be_visible()
        check_accessible(page)
        check_width(page)
        shoot(page, f"{tab}-{model}-{look}")


def test_long_texts_do_not_break_the_layout(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page("/ui#rerank", size=PHONE)
    shown = page.get_by_role("tabpanel")
    shown.get_by_label("Documents").fill("\n".join([LONG, "x" * 300, "short"]))
    shown.get_by_role("button", name="Rerank", exact=True).click()
    expect(shown.locator(".bars li")).to_have_count(3)
    check_width(page)
    shoot(page, "long-texts-phone")


def test_the_page_is_used_by_keyboard_alone(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page()
    expect(page.get_by_role("tab", name="Embed")).to_be_visible()

    def press(*keys: str) -> None:
        for key in keys:
            page.keyboard.press(key)

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    def outline() -> str:
        return str(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))

    press("Tab")
    assert (focused(), outline()) == ("Skip to content", "solid")
    shoot(page, "keyboard-skip")
    press("Tab")
    assert focused() == "model"
    press("Tab")
    assert (focused(), outline()) == ("tab-embed", "solid")
    press("ArrowRight")
    assert focused() == "tab-rerank"
    expect(page.get_by_role("tab", name="Rerank")).to_have_attribute("aria-selected", "true")
    press("End")
    assert focused() == "tab-certificate"
    press("ArrowRight")
    assert focused() == "tab-embed"
    press("ArrowLeft", "Home")
    assert focused() == "tab-embed"
    press("Tab")  # the panel
    press("Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("one text\nanother text")
    press("Control+Enter")
    expect(page.locator("td.heat-cell")).to_have_count(4)
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"  # where it was
    press("Tab")
    assert focused() == "Embed"
    with page.expect_response("**/v1/embeddings"):
        press("Enter")
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    expect(page.locator("td.heat-cell")).to_have_count(4)
    press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Cosine of each pair of texts"
    shoot(page, "keyboard-answer")


def test_what_changes_is_announced(open_page: OpenPage) -> None:
    page = open_page()
    shown = page.get_by_role("tabpanel")
    shown.get_by_role("button", name="Embed", exact=True).click()
    expect(shown.get_by_role("status").first).to_contain_text("5 texts in")
    page.get_by_role("tab", name="Live").click()
    expect(shown.locator("svg").first).to_be_visible()
    assert shown.locator("[aria-live], [role=status]").count() == 0  # figures that change every second are not


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Bulk requests and single texts, from four threads."""
    stop = threading.Event()
    statuses: list[int] = []

    def run(inputs: int, lane: str) -> None:
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S, headers={"X-Bei-Lane": lane}) as client:
            number = 0
            while not stop.is_set():
                number += 1
                texts = [f"the cat {number} {index} sat" for index in range(inputs)]
                response = client.post("/v1/embeddings", json={"model": "embedder", "input": texts})
                statuses.append(response.status_code)

    threads = [threading.Thread(target=run, args=args) for args in [(40, "bulk")] * 2 + [(1, "interactive")] * 2]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert set(statuses) == {200}


@pytest.mark.parametrize(("look", "size", "dark"), LOOKS[:3], ids=[look for look, *_ in LOOKS[:3]])
def test_the_live_view_under_load(
    open_page: OpenPage, server: Server, shoot: Shoot, look: str, size: dict[str, int], dark: bool
) -> None:
    page = open_page("/ui#live", size=size, dark=dark)
    shown = page.get_by_role("tabpanel")
    with load(server):
        for title in ("Requests per second", "Tokens per second", "Time to answer"):
            expect(shown.get_by_label(title).locator("path.line").first).to_be_visible()
        chart = shown.get_by_label("Requests per second").get_by_role("img")
        expect(chart).to_have_attribute("aria-label", re.compile(r"interactive [1-9].* at most .*; bulk [1-9]"))
        first = chart.get_attribute("aria-label")
        expect(chart).not_to_have_attribute("aria-label", first or "")
        shoot(page, f"load-{look}")
        found = httpx.get(f"{server.url}/stats", timeout=DEADLINE_S).json()
    answered = shown.locator("tbody").first.locator("tr").nth(0).locator("td").first.inner_text()
    assert 0 < int(answered.replace(",", "")) <= found["requests"]["interactive"]["answered"]["200"] + 1000
    row = shown.get_by_role("row", name=re.compile("^embedder"))
    assert "%" in row.inner_text()
    check_width(page)


def test_the_live_view_asks_only_while_it_is_seen(open_page: OpenPage) -> None:
    page = open_page("/ui#live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(2):
        with page.expect_request("**/stats"):
            pass
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(300)
    before = len(asked)
    page.wait_for_timeout(1500)
    assert len(asked) == before
    with page.expect_request("**/stats"):
        page.get_by_role("button", name="Go on").click()
    page.get_by_role("tab", name="Embed").click()
    page.wait_for_timeout(300)
    before = len(asked)
    page.wait_for_timeout(1500)
    assert len(asked) == before


def test_the_live_view_survives_a_server_that_is_away(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page("/ui#live", expects="ERR_FAILED|Failed to load")
    shown = page.get_by_role("tabpanel")
    expect(shown.locator("svg")).to_have_count(4)
    page.route("**/stats", lambda route: route.abort())
    expect(shown.get_by_role("alert")).to_contain_text("cannot be reached")
    shoot(page, "live-away")
    page.unroute("**/stats")
    expect(shown.get_by_role("alert")).to_have_count(0)


# Keys, a prefix, another dialect


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(
    open_page: OpenPage, guarded: Server, shoot: Shoot, tmp_path: Path
) -> None:
    page = open_page(f"{ROOT}/ui", of=guarded, expects="status of 401")
    field = page.get_by_label("API key", exact=True)
    expect(field).to_be_focused()
    check_accessible(page)
    shoot(page, "key")
    field.fill("wrong-0123456789")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("invalid_api_key")
    expect(page.get_by_role("alert")).to_contain_text("HTTP 401")
    check_accessible(page)
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.get_by_label("API key", exact=True).fill(SECRET)
    page.get_by_role("button", name="Use it").click()
    shown = page.get_by_role("tabpanel")
    shown.get_by_role("button", name="Embed", exact=True).click()
    expect(shown.locator("td.heat-cell")).to_have_count(25)
    for tab in ("Live", "Certificate"):
        page.get_by_role("tab", name=tab).click()
        expect(shown.locator("svg").first).to_be_visible()
    assert not [url for url in [*urls, page.url] if SECRET in url or not url.startswith(guarded.url + ROOT)]
    page.reload()
    page.get_by_role("tab", name="Embed").click()
    shown.get_by_role("button", name="Embed", exact=True).click()
    expect(shown.locator("td.heat-cell")).to_have_count(25)
    code = " ".join(pre.text_content() or "" for pre in shown.locator(".snippets pre").all())
    assert SECRET not in page.content()
    assert "$API_KEY" in code
    assert 'os.environ["API_KEY"]' in code
    assert "x-bei-dialect: bei" in code
    page.get_by_role("button", name="Forget API key").click()
    expect(page.get_by_label("API key", exact=True)).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0
    page.reload()
    expect(page.get_by_label("API key", exact=True)).to_be_visible()


def test_a_key_that_is_no_longer_good_is_asked_for_again(open_page: OpenPage, guarded: Server) -> None:
    page = open_page(f"{ROOT}/ui", of=guarded, expects="status of 401")
    page.get_by_label("API key", exact=True).fill(SECRET)
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Embed")).to_be_visible()
    page.evaluate("sessionStorage.setItem('bei-api-key', 'gone-0123456789')")
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("invalid_api_key")
    expect(page.get_by_label("API key", exact=True)).to_be_visible()


def test_the_certificate_alone_is_accessible(open_page: OpenPage) -> None:
    for dark in (False, True):
        for size in (DESK, PHONE):
            page = open_page("/certificate?model=embedder", dark=dark, size=size, expects="favicon")
            check_accessible(page)
            check_width(page)
