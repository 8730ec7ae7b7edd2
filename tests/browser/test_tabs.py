"""Every tab of /ui asks the server, and shows what it answers; its code does the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import MOST_INPUTS, OpenPage, Shoot
from tests.e2e.process import DEADLINE_S, Server

TEXTS = ["The cat sat on the mat.", "A cat lies on a rug.", "Grüße, 世界! \N{GRINNING FACE}", 'it\'s <b>"quoted"</b>']


def post(server: Server, path: str, **body: object) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response.json()


def panel(page: Page, tab: str, model: str) -> Any:
    """Choose both; the tab's panel."""
    page.get_by_label("Model", exact=True).select_option(model)
    page.get_by_role("tab", name=tab).click()
    return page.get_by_role("tabpanel")


def ask(shown: Any, button: str, **fields: str) -> None:
    """Fill the fields, by their labels, and press; return when there is an answer."""
    for label, value in fields.items():
        shown.get_by_label(label).first.fill(value)
    shown.get_by_role("button", name=button, exact=True).click()
    expect(shown.get_by_text(re.compile(r" in [\d.]+ m?s$"))).to_be_visible()


def test_embed_shows_the_cosines(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    page = open_page()
    shown = panel(page, "Embed", "embedder")
    ask(shown, "Embed", Texts="\n".join(TEXTS))
    vectors = np.array(
        [entry["embedding"] for entry in post(server, "/v1/embeddings", model="embedder", input=TEXTS)["data"]]
    )
    cells = [float(text) for text in shown.locator("td.heat-cell").all_inner_texts()]
    np.testing.assert_allclose(np.reshape(cells, (4, 4)), vectors @ vectors.T, atol=0.0051)
    assert [text.split(" ", 1)[1] for text in shown.locator("tbody th").all_inner_texts()] == TEXTS
    assert f"4 vectors of {vectors.shape[1]} numbers" in shown.inner_text()
    shoot(page, "embed")


def test_one_text_has_no_map(open_page: OpenPage) -> None:
    shown = panel(open_page(), "Embed", "embedder")
    ask(shown, "Embed", Texts="\n  one  \n\n")
    expect(shown.get_by_text("Add a second text")).to_be_visible()
    expect(shown.locator("table")).to_have_count(0)


def test_rerank_shows_documents_best_first(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    page = open_page()
    shown = panel(page, "Rerank", "reranker")
    ask(shown, "Rerank", Query="Where did the cat sit?", Documents="\n".join(TEXTS))
    results = post(server, "/v1/rerank", model="reranker", query="Where did the cat sit?", documents=TEXTS)["results"]
    assert shown.locator(".bar-name").all_inner_texts() == [TEXTS[one["index"]] for one in results]
    scores = [float(text) for text in shown.locator(".bar-value").all_inner_texts()]
    np.testing.assert_allclose(scores, [one["relevance_score"] for one in results], atol=1e-4)
    widths = [bar.bounding_box()["width"] for bar in shown.locator(".bar-fill").all()]
    tracks = [bar.bounding_box()["width"] for bar in shown.locator(".bar-track").all()]
    np.testing.assert_allclose(np.array(widths) / tracks, scores, atol=0.01)
    shoot(page, "rerank")


@pytest.mark.parametrize("second", ["", "Nobody sat there."])
def test_classify_shows_every_label(open_page: OpenPage, server: Server, shoot: Shoot, second: str) -> None:
    page = open_page()
    shown = panel(page, "Classify", "classifier")
    fields = {"Texts": "\n".join(TEXTS[:2]), "Second text": second}
    ask(shown, "Classify", **fields)
    inputs = [[text, second] if second else [text] for text in TEXTS[:2]]
    expected = [label for labels in post(server, "/predict", model="classifier", inputs=inputs) for label in labels]
    assert shown.locator(".bar-name").all_inner_texts() == [one["label"] for one in expected]
    found = [float(text) for text in shown.locator(".bar-value").all_inner_texts()]
    np.testing.assert_allclose(found, [one["score"] for one in expected], atol=1e-4)
    assert shown.locator("h3").all_inner_texts() == TEXTS[:2]
    if not second:
        shoot(page, "classify")


def test_zero_shot_takes_labels_of_one_s_own(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    page = open_page()
    shown = panel(page, "Zero-shot", "nli")
    ask(shown, "Classify", Texts=TEXTS[0], Labels="a cat, , a dog ,weather")
    body = {"model": "nli", "input": [TEXTS[0]], "labels": ["a cat", "a dog", "weather"]}
    (expected,) = post(server, "/v1/classify", **body)["data"]
    ranked = sorted(expected["predictions"], key=lambda one: -one["score"])
    assert shown.locator(".bar-name").all_inner_texts() == [one["label"] for one in ranked]
    shoot(page, "zero-shot")


def test_entities_are_marked_where_they_are(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    text = "Ada met \N{GRINNING FACE} Grace in Zürich.\nThen <i>they</i> went home."
    page = open_page()
    shown = panel(page, "Entities", "ner")
    ask(shown, "Find entities", Text=text)
    (entities,) = post(server, "/predict_tokens", model="ner", inputs=[[text]], aggregation_strategy="simple")
    assert entities, "the tiny model labels something"
    marks = [mark.evaluate("mark => mark.firstChild.textContent") for mark in shown.locator("mark").all()]
    assert marks == [text[one["start"] : one["end"]] for one in entities]
    marked = shown.locator(".marked").text_content()
    for one in reversed(entities):  # the labels stand behind what they are of
        place = one["end"] + sum(
            len(f" {next(iter(other['results']))}") for other in entities if other["end"] <= one["start"]
        )
        label = f" {next(iter(one['results']))}"
        assert marked[place : place + len(label)] == label
        marked = marked[:place] + marked[place + len(label) :]
    assert marked == text
    rows = shown.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows] == [next(iter(one["results"])) for one in entities]
    shoot(page, "entities")


def test_spans_are_marked_for_labels_typed_by_hand(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    text = "Ada met \N{GRINNING FACE} Grace in Zürich.\nThen <i>they</i> went home."
    page = open_page()
    shown = panel(page, "Extract", "gliner")
    shown.get_by_label("Least score").select_option("0.3")
    ask(shown, "Extract", Text=text, Labels="person, <b>city</b>")
    body = {"model": "gliner", "input": text, "labels": ["person", "<b>city</b>"], "threshold": 0.3}
    spans = post(server, "/v1/extract", **body)["data"][0]["spans"]
    assert spans, "the tiny model finds something"
    marks = [mark.evaluate("mark => mark.firstChild.textContent") for mark in shown.locator("mark").all()]
    assert marks == [one["text"] for one in spans]
    rows = shown.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows] == [one["label"] for one in spans]
    shoot(page, "extract")


SCHEMA: dict[str, Any] = {
    "labels": {"person": "who it is about", "<b>city</b>": {"threshold": 0.2}},
    "structures": {"<i>visit</i>": ["who", {"name": "where", "dtype": "str"}]},
    "relations": {"met": "came together"},
    "classifications": [
        {"task": "<u>mood</u>", "labels": ["good", "bad"]},
        {"task": "topic", "labels": {"a visit": "of friends", "<b>war</b>": "of enemies"}, "multi_label": True},
    ],
}


def values(instance: Mapping[str, Any]) -> list[str]:
    """What each field shows."""
    fields = [value if isinstance(value, list) else [value] if value else [] for value in instance.values()]
    return ["\n".join(f"{one['text']} {one['score']:.4f}" for one in field) for field in fields]


def test_a_schema_is_typed_and_its_instances_are_shown(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    text = "Ada met \N{GRINNING FACE} Grace in Zürich. Then they went home."
    page = open_page()
    shown = panel(page, "Extract", "gliner2")
    shown.get_by_label("Least score").select_option("0.3")
    ask(shown, "Extract", Text=text, Labels="street", Schema=json.dumps(SCHEMA))
    body = {**SCHEMA, "labels": {"street": {}, **SCHEMA["labels"]}}
    (found,) = post(server, "/v1/extract", model="gliner2", input=text, threshold=0.3, **body)["data"]
    assert "One text for 3 labels, 1 structure, 1 relation, 2 classifications in" in shown.inner_text()
    marks = [mark.evaluate("mark => mark.firstChild.textContent") for mark in shown.locator("mark").all()]
    assert marks == [one["text"] for one in found["spans"]]
    for name, instances in (*found["structures"].items(), *found["relations"].items()):
        table = shown.get_by_role("group", name=f"Instances of {name}")
        assert table.locator("th").all_inner_texts() == [*instances[0]]
        cells = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
        assert cells == [values(one) for one in instances]
    for task, chosen in found["classifications"].items():
        labels = [chosen] if isinstance(chosen, dict) else chosen
        bars = shown.locator("section", has=page.get_by_role("heading", name=task)).last
        assert bars.locator(".bar-name").all_inner_texts() == [one["label"] for one in labels]
        assert bars.locator(".bar-value").all_inner_texts() == [f"{one['score']:.4f}" for one in labels]
    shoot(page, "extract-schema")


def test_a_model_of_relations_has_an_example_with_entities(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    shown = panel(open_page(), "Extract", "glirel")
    expect(shown.get_by_label("Labels")).to_have_value("")
    shown.get_by_label("Least score").select_option("0.3")
    ask(shown, "Extract")
    assert "One text for 2 relations in" in shown.inner_text()
    asked = json.loads(shown.get_by_label("Schema").input_value())
    text = shown.get_by_label("Text").first.input_value()
    (found,) = post(server, "/v1/extract", model="glirel", input=text, threshold=0.3, **asked)["data"]
    assert any(found["relations"].values()), "the tiny model finds something"
    for name, instances in found["relations"].items():
        if instances:
            table = shown.get_by_role("group", name=f"Instances of {name}")
            cells = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
            assert cells == [values(one) for one in instances]
    shoot(shown.page, "extract-relations")


def test_a_schema_that_is_no_json_is_refused_where_it_stands(open_page: OpenPage) -> None:
    shown = panel(open_page(), "Extract", "gliner2")
    assert "structures" in shown.get_by_label("Schema").input_value()  # an example
    for wrong in ("{", "[]", "null", "person"):
        shown.get_by_label("Schema").fill(wrong)
        shown.get_by_role("button", name="Extract", exact=True).click()
        expect(shown.get_by_text("This is no JSON object")).to_be_visible()
        expect(shown.get_by_label("Schema")).to_be_focused()


def test_a_schema_somebody_wrote_stays_when_the_model_changes(open_page: OpenPage) -> None:
    page = open_page()
    shown = panel(page, "Extract", "gliner2")
    choose = page.get_by_label("Model", exact=True).select_option
    choose("gliner")
    expect(shown.get_by_label("Schema")).to_have_value("")
    shown.get_by_label("Schema").fill('{"relations": ["met"]}')
    choose("gliner2")
    expect(shown.get_by_label("Schema")).to_have_value('{"relations": ["met"]}')


def test_a_model_that_reads_no_schema_says_so(open_page: OpenPage) -> None:
    shown = panel(open_page(expects="status of 400"), "Extract", "gliner")
    shown.get_by_label("Schema").fill('{"relations": ["met"]}')
    shown.get_by_role("button", name="Extract", exact=True).click()
    expect(shown.get_by_role("alert")).to_contain_text("leave relations out")


def test_sparse_shows_words_by_weight(open_page: OpenPage, server: Server, shoot: Shoot) -> None:
    page = open_page()
    shown = panel(page, "Sparse", "splade")
    ask(shown, "Weigh words", Texts="\n".join(TEXTS[:2]))
    vectors = post(server, "/embed_sparse", model="splade", inputs=TEXTS[:2])
    for vector, card in zip(vectors, shown.locator("article").all(), strict=True):
        largest = sorted(vector, key=lambda one: -one["value"])[:24]
        weights = [float(text) for text in card.locator(".bar-value").all_inner_texts()]
        np.testing.assert_allclose(weights, [one["value"] for one in largest], atol=1e-3)
        ids = [[one["index"]] for one in largest]
        words = post(server, "/decode", model="splade", ids=ids, skip_special_tokens=False)
        assert [bdi.text_content() for bdi in card.locator(".bar-name bdi").all()] == words
    shoot(page, "sparse")


def test_the_certificate_is_drawn_in_the_page_s_colours(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page("/ui#certificate", dark=True)
    shown = page.get_by_role("tabpanel")
    expect(shown.get_by_text("Certificate of embedder")).to_be_visible()
    expect(shown.get_by_text("The texts with the lowest cosines of embedding")).to_be_visible()
    assert shown.locator("svg").count() == 1
    colour = "element => getComputedStyle(element).color"
    assert shown.locator("h1").evaluate(colour) == page.locator("body").evaluate(colour)
    shoot(page, "certificate-dark")
    page.get_by_label("Model", exact=True).select_option("reranker")
    expect(shown.get_by_text("Certificate of reranker")).to_be_visible()
    shown.get_by_role("link", name="page of its own").click()
    expect(page.get_by_role("heading", name="Certificate of reranker")).to_be_visible()
    shoot(page, "certificate-alone")


CODE = [
    ("Embed", "embedder", "Embed", {"Texts": "\n".join(TEXTS)}),
    ("Rerank", "reranker", "Rerank", {"Query": "it's?", "Documents": "\n".join(TEXTS)}),
    ("Classify", "classifier", "Classify", {"Texts": TEXTS[3]}),
    ("Zero-shot", "nli", "Classify", {"Texts": TEXTS[3]}),
    ("Entities", "ner", "Find entities", {"Text": "Ada's\n\tcat \\ dog $HOME `x`"}),
    ("Extract", "gliner", "Extract", {"Text": "Ada's\n\tcat \\ dog $HOME `x`"}),
    ("Extract", "gliner2", "Extract", {"Text": "Ada's\n\tcat \\ dog $HOME `x`"}),
    ("Sparse", "splade", "Weigh words", {"Texts": TEXTS[3]}),
]


@pytest.mark.parametrize(("tab", "model", "button", "fields"), CODE, ids=[f"{row[0]}-{row[1]}" for row in CODE])
def test_the_code_does_what_the_page_did(
    open_page: OpenPage, tab: str, model: str, button: str, fields: Mapping[str, str]
) -> None:
    page = open_page()
    shown = panel(page, tab, model)
    with page.expect_response(lambda response: response.request.method == "POST") as answered:
        ask(shown, button, **fields)
    answer = answered.value.json()
    texts = [code.text_content() for code in shown.locator(".snippets pre").all()]
    assert len(texts) == 2
    by_curl = run(["bash", "-c", f"{texts[0]} -sS"])
    assert same(json.loads(by_curl), answer)
    assert run([sys.executable, "-c", texts[1]]).strip()
    shown.get_by_text("Answer as JSON").click()
    expect(shown.locator(".raw pre")).to_be_visible()


def run(command: list[str]) -> str:
    variables = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return subprocess.run(
        command,
        env={**variables, "PYTHONIOENCODING": "utf-8"},
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    ).stdout


def same(found: Any, expected: Any) -> bool:
    """But for names and times of the answers, and what another batch rounds."""
    if isinstance(expected, dict):
        keys = expected.keys() - {"id", "created"}
        return keys == found.keys() - {"id", "created"} and all(same(found[key], expected[key]) for key in keys)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return abs(found - expected) < 1e-3 if isinstance(expected, float) else bool(found == expected)


# What a model cannot do, and what the server refuses


def test_a_tab_that_the_model_cannot_do_says_who_can(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page()
    shown = panel(page, "Rerank", "embedder")
    assert "embedder cannot rerank documents. That takes a reranker" in shown.inner_text()
    assert page.get_by_role("tab", name="Rerank").get_attribute("aria-description") == "not with this model"
    shoot(page, "unavailable")
    shown.get_by_role("button", name="Switch to reranker").click()
    assert page.get_by_label("Model", exact=True).input_value() == "reranker"
    expect(shown.get_by_role("button", name="Rerank", exact=True)).to_be_visible()
    expect(page.get_by_role("tab", name="Embed")).to_have_attribute("aria-description", "not with this model")


def test_another_model_s_answer_is_not_left_standing(open_page: OpenPage) -> None:
    page = open_page()
    shown = panel(page, "Classify", "classifier")
    ask(shown, "Classify")
    page.get_by_label("Model", exact=True).select_option("nli")
    expect(shown.locator(".bars")).to_have_count(0)
    expect(shown.get_by_text("The answer will be here")).to_be_visible()


def test_a_refusal_is_shown_with_its_message_and_code(open_page: OpenPage, shoot: Shoot) -> None:
    page = open_page(expects="status of 400")
    shown = panel(page, "Embed", "embedder")
    shown.get_by_label("Texts").fill("\n".join(["text"] * (MOST_INPUTS + 1)))
    shown.get_by_role("button", name="Embed", exact=True).click()
    alert = shown.get_by_role("alert")
    expect(alert).to_contain_text(f"{MOST_INPUTS + 1}")
    expect(alert).to_contain_text(re.compile(r"HTTP 400 · invalid_request · request \w{32}"))
    shoot(page, "refused")
    ask(shown, "Embed", Texts="one\ntwo")
    expect(shown.get_by_role("alert")).to_have_count(0)


def test_an_empty_field_is_named_and_nothing_is_asked(open_page: OpenPage) -> None:
    page = open_page()
    shown = panel(page, "Rerank", "reranker")
    shown.get_by_label("Query").fill("  ")
    shown.get_by_role("button", name="Rerank", exact=True).click()
    expect(shown.get_by_label("Query")).to_be_focused()
    expect(shown.get_by_label("Query")).to_have_attribute("aria-invalid", "true")
    expect(shown.get_by_text("Write something here first.")).to_be_visible()
    expect(shown.locator(".bars")).to_have_count(0)


def test_a_text_that_was_cut_is_named(open_page: OpenPage) -> None:
    shown = panel(open_page(), "Embed", "embedder")
    ask(shown, "Embed", Texts="short\n" + "cat " * 400)
    expect(shown.get_by_text("Too long for the model, and cut: text 2.")).to_be_visible()


def test_a_request_can_be_cancelled(open_page: OpenPage) -> None:
    page = open_page()
    page.route("**/v1/embeddings", lambda route: None)  # never answered
    shown = panel(page, "Embed", "embedder")
    shown.get_by_role("button", name="Embed", exact=True).click()
    expect(shown.get_by_role("button", name="Working …")).to_be_visible()
    shown.get_by_role("button", name="Cancel").click()
    expect(shown.get_by_text("Cancelled.")).to_be_visible()
    expect(shown.get_by_role("button", name="Embed", exact=True)).to_be_focused()
    expect(shown.get_by_role("button", name="Embed", exact=True)).to_be_visible()


def test_another_model_ends_a_request_and_nothing_is_said_of_it(open_page: OpenPage) -> None:
    """It said "Cancelled." over the other model's empty answer."""
    page = open_page()
    page.route("**/v1/embeddings", lambda route: None)  # never answered
    shown = panel(page, "Embed", "embedder")
    shown.get_by_role("button", name="Embed", exact=True).click()
    expect(shown.get_by_role("button", name="Working …")).to_be_visible()
    page.get_by_label("Model", exact=True).select_option("clip")
    expect(shown.get_by_role("button", name="Embed", exact=True)).to_be_visible()
    expect(shown.get_by_role("button", name="Cancel")).to_be_hidden()
    page.wait_for_timeout(200)
    expect(shown.get_by_role("status")).to_have_text("")
    page.unroute("**/v1/embeddings")
    ask(shown, "Embed", Texts="one\ntwo")


def test_a_server_that_is_gone_is_no_riddle(open_page: OpenPage) -> None:
    page = open_page(expects="ERR_FAILED|Failed to load")
    page.route("**/v1/embeddings", lambda route: route.abort())
    shown = panel(page, "Embed", "embedder")
    shown.get_by_role("button", name="Embed", exact=True).click()
    expect(shown.get_by_role("alert")).to_contain_text("The server cannot be reached")


def test_texts_are_texts(open_page: OpenPage) -> None:
    page = open_page()
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    shown = panel(page, "Embed", "embedder")
    ask(shown, "Embed", Texts=f"{evil}\ntwo")
    assert shown.locator("tbody th").first.inner_text().startswith("1 <img src=x")
    assert shown.locator("img, script").count() == 0
