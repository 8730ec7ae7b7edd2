"""certificate.html shows the whole certificate, is self-contained, and escapes untrusted text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest

from bei.artifact.certificate.charts import MOST_LAYERS, histogram_chart, layers_chart
from bei.artifact.certificate.page import certificate_page
from bei.artifact.certificate.record import Certificate, LayerSensitivity, Thresholds, WorstText
from bei.verification.comparison import HISTOGRAM_EDGES
from tests.support.quality_certificates import agreement, certificate, quantization, retrieval

FACTS = [("Model", "org/model & co"), ("Precision", "int8")]
LAYERS = [
    LayerSensitivity(layer="layers.0.attention.qkv", error=0.0123, is_high=False),
    LayerSensitivity(layer="layers.0.mlp.down", error=0.2345, is_high=True),
]
QUANTIZATION = quantization(
    format="int8",
    method="smooth quantization",
    calibration="Two hundred <made-up> texts.",
    num_texts=200,
    num_tokens=12345,
    layers=LAYERS,
)
FULL = certificate(
    quantization=QUANTIZATION,
    retrieval=retrieval(),
    thresholds=Thresholds(mean=0.995, p1=0.95, min=0.75, ndcg_loss=0.005),
    outputs=[agreement(), agreement(output="logits", spearman=None, label_agreement=0.99, kl_divergence=0.000123)],
)


class Elements(HTMLParser):
    """Names of the elements, texts, and whether what was opened is closed."""

    VOID = ("meta", "rect", "line")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(shown: Certificate, name: str = "org/model") -> str:
    return certificate_page(name, FACTS, shown)


@pytest.fixture(scope="module")
def page() -> str:
    return page_of(FULL)


def test_what_the_certificate_says_is_on_the_page(page: str) -> None:
    text = " ".join(Elements(page).text.split())
    for said in (
        "Certificate of org/model",
        "Passed on 101 texts",
        "org/model & co",
        "transformers 5.0, FP32",
        "independent of bei's graph",
        "a CPU",
        "a" * 64,
        "mean 0.995, first percentile 0.95, minimum 0.75",
        "0.5% of the reference's",
        "0.999123",
        "0.99912",
        "0.981234",
        "99.00%",
        "0.000123",
        "<script>alert('worst')</script> & \"quoted\"",
        "0.81234",
        "0.80987",
        "60 queries, 150 documents",
        "smooth quantization",
        "Two hundred <made-up> texts.",
        "200 texts, 12,345 tokens",
        "b" * 64,
        "1 of 2",
        "layers.0.mlp.down",
        "0.2345, not quantized",
    ):
        assert said in text, said


def test_the_page_is_whole_and_needs_nothing_but_itself(page: str) -> None:
    elements = Elements(page)
    assert elements.open == []
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert not {"script", "img", "link", "iframe", "object", "embed", "form", "a"} & set(elements.names)
    assert not re.search(r"https?:|//|@import|javascript:", page)
    assert not [name for name, _ in elements.attributes if name.startswith("on") or name in ("src", "href")]
    assert set(re.findall(r"url\((.*?)\)", page)) == {"#layers-hatch"}
    assert "default-src 'none'" in page


def test_it_can_be_read_by_a_screen_reader_in_the_dark_and_on_paper(page: str) -> None:
    elements = Elements(page)
    assert [name for name in elements.names if re.fullmatch(r"h\d", name)][:3] == ["h1", "h2", "h2"]
    assert elements.names.count("h1") == elements.names.count("main") == 1
    assert elements.names.count("svg") == elements.names.count("desc") == 3
    assert elements.names.count("title") == 4  # the page's own
    assert ("scope", "col") in elements.attributes
    assert ("scope", "row") in elements.attributes
    ids = [value for name, value in elements.attributes if name == "id"]
    named = [value for name, value in elements.attributes if name == "aria-labelledby" and value]
    assert len(ids) == len(set(ids))
    assert {one for both in named for one in both.split()} <= set(ids)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_equal_certificates_give_equal_bytes(page: str) -> None:
    again = msgspec.json.decode(msgspec.json.encode(FULL), type=Certificate)
    assert page_of(again) == page


EVIL = "</td><img src=x onerror=alert(1)>\x00\x1b[31m\u202egnp.exe & 'a' \"b\""


def test_no_text_gets_out_of_its_place(page: str) -> None:
    """Held-out texts, names of layers and of models are other people's."""
    evil = msgspec.structs.replace(
        FULL,
        outputs=[agreement(output=EVIL, worst_texts=[WorstText(text=EVIL, cosine=0.5)], failures=[EVIL])],
        reference=EVIL,
        device=EVIL,
        quantization=msgspec.structs.replace(
            QUANTIZATION,
            method=EVIL,
            calibration=EVIL,
            layers=[LayerSensitivity(layer=EVIL, error=0.1, is_high=True)],
        ),
        retrieval=retrieval(failures=[EVIL]),
        passed=False,
    )
    shown = certificate_page(EVIL, [(EVIL, EVIL)], evil)
    elements = Elements(shown)
    assert elements.open == []
    assert "img" not in elements.names
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
    assert not set("\x00\x1b\u202e") & set(shown)
    assert set(elements.names) <= {*Elements(page).names, "ul", "li"}


@pytest.mark.parametrize(
    ("fields", "kind", "verdict"),
    [
        ({}, "pass", "Passed on 101 texts"),
        ({"num_texts": 40}, "pass", "Passed on 40 of 101 texts"),
        (
            {"passed": False, "outputs": [agreement(failures=["mean cosine 0.9 below 0.995"])]},
            "fail",
            "Below threshold on 101 texts",
        ),
        (
            {"passed": False, "kind": "pending", "outputs": [], "num_texts": 0, "device": ""},
            "open",
            "Pending the engine",
        ),
        ({"passed": False, "kind": "none", "outputs": [], "thresholds": None}, "open", "Not verified built with"),
    ],
    ids=["passed", "some", "failed", "pending", "none"],
)
def test_the_verdict_stands_first_in_words(fields: dict[str, object], kind: str, verdict: str) -> None:
    shown = page_of(certificate(**fields))
    assert f'<p class="verdict {kind}">' in shown
    elements = Elements(shown)
    text = " ".join(elements.text.split())
    assert verdict in text
    assert elements.open == []
    assert ("mean cosine 0.9 below 0.995" in text) == (kind == "fail")


def test_a_retrieval_that_was_left_out_is_named() -> None:
    asked = Thresholds(mean=0.995, p1=0.95, min=0.75, ndcg_loss=0.005)
    assert "Not measured: the time for verifying was over." in page_of(certificate(thresholds=asked))
    pending = certificate(thresholds=asked, kind="pending", outputs=[], passed=False)
    assert "Not measured yet." in page_of(pending)
    assert "<h2>Retrieval" not in page_of(certificate())


# Charts.


def drawn(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart)


def test_a_histogram_draws_a_column_for_each_range_that_has_cosines() -> None:
    row, thresholds = agreement(), Thresholds(mean=0.995, p1=0.95, min=0.98)
    svg = drawn(histogram_chart(row, thresholds, "x"))
    bars = svg.findall("rect")
    assert len(bars) == sum(count > 0 for count in row.histogram.counts)
    by_height = sorted(bars, key=lambda bar: float(bar.get("height", "0")))
    counts = [text.text for text in svg.findall("text") if text.get("class") == "count"]
    assert counts[bars.index(by_height[-1])] == "40"
    lefts = [float(bar.get("x", "0")) for bar in bars]
    assert lefts == sorted(lefts, reverse=True)  # the closest to 1 on the right
    assert [bar.get("class") for bar in bars][-1] == "bar low"  # 0.9 to 0.97, below the minimum
    assert [bar.get("class") for bar in bars][:-1] == ["bar"] * (len(bars) - 1)
    ticks = [text.text for text in svg.findall("text") if text.get("class") == "tick"]
    assert [float(tick or "x") for tick in ticks] == [pytest.approx(1 - edge) for edge in HISTOGRAM_EDGES]
    assert "40 above 0.9997 up to 0.9999" in (svg.findtext("desc") or "")


def test_thresholds_stand_between_the_ranges_that_they_part() -> None:
    svg = drawn(histogram_chart(agreement(), Thresholds(mean=0.999, p1=0.99, min=0.9), "x"))
    ticks = {text.text: float(text.get("x", "0")) for text in svg.findall("text") if text.get("class") == "tick"}
    lines = [float(line.get("x1", "0")) for line in svg.findall("line") if line.get("class") == "threshold"]
    assert lines == [pytest.approx(ticks[name], abs=0.1) for name in ("0.9", "0.99", "0.999")]


@pytest.mark.parametrize("least", [-1.0, 0.5, 1.0])
def test_thresholds_stay_within_the_chart(least: float) -> None:
    svg = drawn(histogram_chart(agreement(), Thresholds(mean=1.0, p1=least, min=least), "x"))
    for line in svg.findall("line"):
        assert 0 <= float(line.get("x1", "-1")) <= 720


def test_layers_are_drawn_by_their_error_and_those_left_high_are_marked() -> None:
    svg = drawn(layers_chart(QUANTIZATION, "x"))
    names = [text.text for text in svg.findall("text") if text.get("class") == "name"]
    values = [text.text for text in svg.findall("text") if text.get("class") == "value"]
    assert names == ["layers.0.mlp.down", "layers.0.attention.qkv"]
    assert values == ["0.2345, not quantized", "0.0123"]
    assert [bar.get("fill") for bar in svg.findall("rect")] == ["url(#x-hatch)", None]
    assert [bar.get("class") for bar in svg.findall("rect")] == [None, "bar"]  # whose fill the style sheet has


def test_where_effects_on_the_outputs_were_measured_layers_are_drawn_by_these() -> None:
    layers = [
        LayerSensitivity(layer="own error", error=0.2, is_high=False, effect=0.000012),
        LayerSensitivity(layer="effect", error=0.1, is_high=True, effect=0.00034),
    ]
    record = msgspec.structs.replace(QUANTIZATION, layers=layers)
    svg = drawn(layers_chart(record, "x"))
    assert [text.text for text in svg.findall("text") if text.get("class") == "name"] == ["effect", "own error"]
    values = [text.text for text in svg.findall("text") if text.get("class") == "value"]
    assert values == ["3.4e-04, not quantized", "1.2e-05"]
    assert "changes of the outputs" in page_of(certificate(quantization=record))
    assert "changes of the outputs" not in page_of(certificate(quantization=QUANTIZATION))


def test_of_many_layers_the_worst_are_drawn_and_the_page_counts() -> None:
    layers = [LayerSensitivity(layer=f"layers.{i}.mlp.up", error=i / 1000, is_high=False) for i in range(100)]
    many = msgspec.structs.replace(QUANTIZATION, layers=layers)
    svg = drawn(layers_chart(many, "x"))
    names = [text.text for text in svg.findall("text") if text.get("class") == "name"]
    assert len(names) == MOST_LAYERS
    assert names[0] == "layers.99.mlp.up"
    said = page_of(certificate(quantization=many))
    assert f"The {MOST_LAYERS} largest of 100" in said
    assert "not drawn" not in said
    high = [msgspec.structs.replace(layer, is_high=layer.error >= 0.038) for layer in layers]
    said = page_of(certificate(quantization=msgspec.structs.replace(QUANTIZATION, layers=high)))
    assert "not drawn: layers.39.mlp.up, layers.38.mlp.up.<" in said


def test_layers_without_any_error_are_drawn() -> None:
    layers = [LayerSensitivity(layer="a", error=0.0, is_high=False)]
    drawn(layers_chart(msgspec.structs.replace(QUANTIZATION, layers=layers), "x"))
    assert "Sensitivity" not in page_of(certificate(quantization=msgspec.structs.replace(QUANTIZATION, layers=[])))
