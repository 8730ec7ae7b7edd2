"""/docs: without a network, the groups at one glance, an example that is sent as it stands, light and dark."""

from __future__ import annotations

import json

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.browser.conftest import DESK, PHONE, OpenPage, Shoot
from tests.browser.test_page import LOOKS, check_width
from tests.e2e.process import DEADLINE_S, Server

# What axe-core finds in Swagger UI's own markup, which is not ours to write.
SWAGGER_S = {"heading-order", "nested-interactive", "region"}


@pytest.mark.parametrize(("look", "size", "dark"), LOOKS, ids=[look for look, *_ in LOOKS])
def test_groups_are_seen_at_one_glance_and_the_first_is_open(
    open_page: OpenPage, shoot: Shoot, server: Server, look: str, size: dict[str, int], dark: bool
) -> None:
    page = open_page("/docs", size=size, dark=dark)  # which fails where another host is asked
    expect(page.locator(".opblock").first).to_be_visible()
    document = httpx.get(f"{server.url}/openapi.json", timeout=DEADLINE_S).json()
    assert page.locator(".opblock-tag").evaluate_all("all => all.map(one => one.dataset.tag)") == [
        tag["name"] for tag in document["tags"]
    ]
    first = page.locator(".opblock-tag-section.is-open")
    expect(first).to_have_count(1)
    expect(first.locator(".opblock").first).to_contain_text("/v1/embeddings")
    expect(page.locator(".opblock-summary-method", has_text="HEAD")).to_have_count(0)
    widths = page.locator(".opblock-tag small").evaluate_all("all => all.map(one => one.offsetWidth)")
    assert min(widths) >= 250, "a description is squeezed beside a name"
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (background == "rgb(28, 32, 34)") is dark
    found = Axe().run(page, options={"preload": False})
    assert {one["id"] for one in found.response["violations"]} <= SWAGGER_S, found.generate_report()
    check_width(page)
    shoot(page, f"docs-{look}")


@pytest.mark.parametrize(("size", "look"), [(DESK, "light"), (PHONE, "phone")])
def test_the_example_of_a_route_is_sent_as_it_stands(
    open_page: OpenPage, shoot: Shoot, size: dict[str, int], look: str
) -> None:
    page = open_page("/docs", size=size)
    expect(page.locator(".opblock").first).to_be_visible()  # the first group opens, and what is below it moves
    page.locator('[data-tag="Rerank"]').click()
    route = page.locator('.opblock:has([data-path="/v1/rerank"])')
    route.locator(".opblock-control-arrow").click()
    expect(route.locator(".responses-table")).to_contain_text("relevance_score")
    check_width(page)
    shoot(page, f"docs-open-{look}")
    route.get_by_role("button", name="Try it out").click()
    with page.expect_response("**/v1/rerank") as asked:
        route.get_by_role("button", name="Execute").click()
    assert asked.value.status == 200
    assert [result["document"] for result in json.loads(asked.value.text())["results"]]
    expect(route.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
