"""The live view of a server that is asked seldom, or has only begun: lines can be read, figures say their window."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import DESK, PHONE, OpenPage, Shoot
from tests.e2e.process import DEADLINE_S, Server

CHARTS = ("Requests per second", "Tokens per second", "Time to answer", "Tokens that wait")
EVERY_S = 4
SECONDS = 60


@pytest.fixture
def show(open_page: OpenPage, server: Server) -> Callable[..., Page]:
    """``show(window_s, every_s, ...)``: the view of a server that has answered a request now and then."""
    real = httpx.get(f"{server.url}/stats", timeout=DEADLINE_S).json()

    def begin(window_s: float, every_s: int, **options: Any) -> Page:
        stats = json.dumps(seldom(real, window_s, every_s))
        page: Page = open_page("/ui", **options)
        page.route("**/stats", lambda route: route.fulfill(body=stats, content_type="application/json"))
        page.get_by_role("tab", name="Live").click()
        expect(page.get_by_role("tabpanel").locator("svg")).to_have_count(4)
        return page

    return begin


def seldom(real: Mapping[str, Any], window_s: float, every_s: int) -> dict[str, Any]:
    """``real`` with an interactive request of twelve tokens in each ``every_s`` seconds of a window."""
    first = SECONDS - min(SECONDS, int(window_s))
    asked = [second >= first and (second - first) % every_s == 0 for second in range(SECONDS)]
    times = [0.008 if one else None for one in asked]
    whole = 0.008 if any(asked) else None
    empty = {"p50": [None] * SECONDS, "p99": [None] * SECONDS, "answered": [0] * SECONDS}
    none = {"answered": {}, "latency_s": dict.fromkeys(("p50", "p90", "p99")), "per_second": empty}
    interactive = {
        "answered": {"200": sum(asked)} if any(asked) else {},
        "latency_s": dict.fromkeys(("p50", "p90", "p99"), whole),
        "per_second": {"answered": [int(one) for one in asked], "p50": times, "p99": times},
    }
    (model, *_) = real["models"]
    model = {**model, "per_second": {"tokens": [12 * one for one in asked]}}
    requests = {"interactive": interactive, "bulk": none, "other": none}
    return {**real, "window_s": window_s, "requests": requests, "models": [model]}


def chart(page: Page, title: str) -> Locator:
    return page.get_by_label(title, exact=True)


def heights(line: Locator) -> list[float]:
    """The y of each point of a path."""
    return [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", line.get_attribute("d") or "")]


def check_numbers(page: Page) -> None:
    """Nothing that is drawn or said is no number."""
    content = page.get_by_role("tabpanel").inner_html()
    assert not re.search(r"NaN|Infinity|undefined|null", content)


@pytest.mark.parametrize(("size", "dark", "look"), [(DESK, False, "light"), (PHONE, True, "phone-dark")])
def test_a_request_every_few_seconds_is_a_line_and_not_teeth(
    show: Callable[..., Page], shoot: Shoot, size: Mapping[str, int], dark: bool, look: str
) -> None:
    page = show(60.2, EVERY_S, size=size, dark=dark)
    for title, ticks, rate in (
        ("Requests per second", ["0", "0.5", "1"], 1),
        ("Tokens per second", ["0", "5", "10"], 12),
    ):
        shown = chart(page, title)
        expect(shown).to_contain_text("Means of up to 20 s; the figures are of the last 20 s.")
        assert shown.locator(".tick").all_text_contents() == [*ticks, "60 s ago", "30 s ago", "now"]
        found = heights(shown.locator("path.line").first)
        bottom, top = (float(shown.locator("line.grid").nth(at).get_attribute("y1") or 0) for at in (0, 2))
        most = float(ticks[-1])
        rates = [(bottom - y) / (bottom - top) * most for y in found]
        assert len(rates) == SECONDS - 9
        assert all(0.2 * rate - 0.05 <= one <= 0.31 * rate + 0.05 for one in rates), rates
        assert max(rates[10:]) - min(rates[10:]) <= 0.01 * most  # of the whole 20 s
    times = chart(page, "Time to answer")
    expect(times).to_contain_text("Of each second; the figures are of the last minute.")
    assert len(heights(times.locator("path.line").first)) == SECONDS // EVERY_S  # one line through all points
    expect(times.locator("circle.line-point")).to_have_count(2 * SECONDS // EVERY_S)  # of both percentiles
    check_numbers(page)
    shoot(page, f"live-seldom-{look}")


def test_points_far_apart_are_not_joined(show: Callable[..., Page]) -> None:
    times = chart(show(60.2, 15), "Time to answer")
    expect(times.locator("circle.line-point")).to_have_count(8)
    expect(times.locator("path.line")).to_have_count(0)


def test_every_figure_says_of_which_time_it_is(show: Callable[..., Page]) -> None:
    page = show(60.2, EVERY_S)
    shown = page.get_by_role("tabpanel")
    expect(shown).to_contain_text("15 requests in the last minute.")
    for title in CHARTS:
        assert re.search(r"figures are (means )?of (now|the last)", chart(page, title).inner_text())
        assert "figures are" in (chart(page, title).get_by_role("img").get_attribute("aria-label") or "")
    captions = shown.locator("caption").all_inner_texts()
    assert captions == ["Requests of the last minute", "Models, means of the last minute"]
    heads = shown.locator("table").last.locator("thead th").all_inner_texts()
    assert heads[-2:] == ["Texts waiting now", "Open requests now"]


@pytest.mark.parametrize(("window_s", "said"), [(0.2, "0 seconds"), (1.4, "1 second"), (7.4, "7 seconds")])
def test_a_server_that_has_just_begun_has_figures_since_its_start(
    show: Callable[..., Page], window_s: float, said: str
) -> None:
    page = show(window_s, EVERY_S)
    shown = page.get_by_role("tabpanel")
    assert shown.locator("caption").all_inner_texts() == [
        f"Requests of the {said} since the start",
        f"Models, means of the {said} since the start",
    ]
    points = chart(page, "Requests per second").locator("circle.line-point")
    expect(points).to_have_count(2 if window_s >= 1 else 0)  # of each lane the last mean, of all there is
    check_numbers(page)
