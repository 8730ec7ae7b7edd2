"""The tab of images: chosen or dropped, shown, searched by a text, and what does not work."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PHONE, OpenPage, Shoot
from tests.browser.test_page import check_accessible, check_width
from tests.browser.test_tabs import ask, panel, post, run
from tests.e2e.process import Server
from tests.support.two_towers import data_url, drawn_files, png

FILES = {
    "red.png": png(90, 60, (220, 30, 40)),
    "it's a \N{GRINNING FACE} $HOME.png": png(60, 60, (20, 120, 230)),
    "drawn.png": drawn_files()[0],
}
QUERY = 'a "red" square of $5 or `six`'

DROP = """
(zone, files) => {
  const transfer = new DataTransfer()
  for (const [name, content] of files) {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0))
    transfer.items.add(new File([bytes], name))
  }
  zone.dispatchEvent(new DragEvent('dragover', { dataTransfer: transfer, bubbles: true, cancelable: true }))
  zone.dispatchEvent(new DragEvent('drop', { dataTransfer: transfer, bubbles: true, cancelable: true }))
}
"""


def drop(shown: Any, files: Mapping[str, bytes]) -> None:
    given = [[name, base64.b64encode(content).decode()] for name, content in files.items()]
    shown.locator(".drop").evaluate(DROP, given)


def choose(shown: Any, files: Mapping[str, bytes]) -> None:
    given = [{"name": name, "mimeType": "image/png", "buffer": content} for name, content in files.items()]
    shown.get_by_label("Images", exact=True).set_input_files(given)


def names(page: Page) -> list[str]:
    return [*page.locator(".pictures bdi").all_inner_texts()]


@pytest.mark.parametrize("how", ["chosen", "dropped"])
def test_images_are_found_by_a_text(open_page: OpenPage, server: Server, shoot: Shoot, how: str) -> None:
    page = open_page()
    shown = panel(page, "Images", "clip")
    (choose if how == "chosen" else drop)(shown, FILES)
    expect(shown.locator(".pictures li")).to_have_count(len(FILES))
    ask(shown, "Search", Text=QUERY)
    given = [QUERY, *({"image": data_url(content)} for content in FILES.values())]
    found = np.array(
        [entry["embedding"] for entry in post(server, "/v1/embeddings", model="clip", input=given)["data"]]
    )
    cosines = found[1:] @ found[0]
    order = np.argsort(-cosines)
    assert shown.locator(".bar-name bdi").all_inner_texts() == [[*FILES][place] for place in order]
    shown_cosines = [float(text) for text in shown.locator(".bar-value").all_inner_texts()]
    np.testing.assert_allclose(shown_cosines, cosines[order], atol=2e-4)
    sizes = shown.locator("img").evaluate_all("images => images.map((one) => one.naturalWidth)")
    assert len(sizes) == 2 * len(FILES)
    assert all(sizes)
    shoot(page, f"images-{how}")


def test_the_code_does_what_the_page_did(open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    page = open_page()
    shown = panel(page, "Images", "clip")
    choose(shown, FILES)
    with page.expect_response(lambda response: response.request.method == "POST") as answered:
        ask(shown, "Search", Text=QUERY)
    vectors = [entry["embedding"] for entry in answered.value.json()["data"]]
    by_curl, by_python = [code.text_content() for code in shown.locator(".snippets pre").all()]
    monkeypatch.chdir(tmp_path)
    found = json.loads(run(["bash", "-c", by_curl]))
    np.testing.assert_allclose([entry["embedding"] for entry in found["data"]], vectors, atol=2e-4)
    lines = run([sys.executable, "-c", by_python]).splitlines()
    assert [line.split()[:2] for line in lines] == [[str(place), str(len(vectors[0]))] for place in range(len(vectors))]


def test_images_are_taken_away_and_one_must_be_there(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page(size=PHONE)
    shown = panel(page, "Images", "clip")
    shown.get_by_role("button", name="Search", exact=True).click()
    expect(shown.get_by_text("Choose an image first.")).to_be_visible()
    assert page.evaluate("document.activeElement.type") == "file"
    choose(shown, FILES)
    expect(shown.get_by_text("Choose an image first.")).to_have_count(0)
    drop(shown, {"red.png": FILES["red.png"]})
    expect(shown.locator(".pictures li")).to_have_count(4)
    shown.get_by_role("button", name="Remove red.png").first.click()
    assert names(page) == [*[*FILES][1:], "red.png"]
    assert page.evaluate("document.activeElement.type") == "file"
    check_accessible(page)
    check_width(page)
    shoot(page, "images-phone")


def test_a_file_that_is_no_image_is_the_server_s_error(open_page: OpenPage) -> None:
    page = open_page(expects="400")
    shown = panel(page, "Images", "clip")
    drop(shown, {"red.png": FILES["red.png"], "notes.png": b"words"})
    expect(shown.locator(".pictures li")).to_have_count(2)
    shown.get_by_role("button", name="Search", exact=True).click()
    expect(shown.get_by_role("alert")).to_contain_text("invalid_image")
    expect(shown.locator(".snippets")).to_be_visible()


def test_models_without_an_image_tower_say_which_have_one(open_page: OpenPage) -> None:
    page = open_page()
    shown = panel(page, "Images", "embedder")
    assert "embedder cannot read images. That takes a model of texts and images" in shown.inner_text()
    shown.get_by_role("button", name="Switch to clip").click()
    expect(shown.get_by_role("button", name="Search", exact=True)).to_be_visible()
