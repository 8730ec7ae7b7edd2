"""docs/api.md is what the code says today."""

from __future__ import annotations

import re

import pytest

from tests.api_docs import DOCUMENT, Document, page


@pytest.fixture(scope="module")
def text() -> str:
    return DOCUMENT.read_text("utf-8")


def test_the_document_is_up_to_date(text: str) -> None:
    assert text == Document(page()).text(), "run python -m tests.api_docs"


def test_every_route_is_in_it(text: str) -> None:
    for path in page()["paths"]:
        assert re.search(rf"^\| (DELETE|GET|POST) \| [^|]*`{re.escape(path)}`[^|]* \|", text, re.M), path


def test_its_links_lead_to_headings(text: str) -> None:
    headings = {re.sub(r"[^a-z0-9_-]", "", line[4:].lower()) for line in text.split("\n") if line.startswith("### ")}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_it_is_short_enough_to_be_read(text: str) -> None:
    assert len(text) < 150_000
