"""Descriptions of labels and examples, which GLiNER2 reads: refused by name where they do not fit, else as the gliner2
library has them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Model
from bei.artifact.manifest import Artifact
from bei.errors import InvalidRequestError, MalformedRequestError
from tests.bei_build.families.test_gliner import PARTS, TEXT
from tests.bei_build.families.test_gliner2 import built
from tests.support.gliner2_models import save_gliner2

LABELS: dict[str, Any] = {
    "person": "a human being, e.g. Ada",
    "a place": {"description": "日本 or\nany other [place]", "dtype": "str"},
    "日本": {},
}
NAMES = list(LABELS)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner2"), counting_layer="count_lstm_v2", none=-20.0)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def texts_of(count: int, most: int = 5) -> list[str]:
    rng = random.Random(39)
    return [
        "".join(rng.choice(PARTS) + rng.choice([" ", " ", "", ", "]) for _ in range(rng.randint(1, most)))
        + rng.choice([".", "?", "", " "])
        for _ in range(count)
    ]


WRONG: list[tuple[Any, str]] = [
    ({"cat": ""}, "The description of 'cat' in labels is empty"),
    ({"cat": {"description": " \u2003"}}, "The description of 'cat' in labels is empty"),
    ({"cat": "a [E] b"}, r"The description of 'cat' in labels has '\[E\]'"),
    ({"cat": "a [DESCRIPTION] b: c"}, r"The description of 'cat' in labels has '\[DESCRIPTION\]'"),
    ({"a [P] b": "a cat"}, r"labels 0 has '\[P\]'"),
    ({"cat": {"validators": []}}, "validators"),
    ({"cat": {"dtype": "int"}}, "dtype"),
    ({"cat": {"threshold": 1.5}}, "threshold"),
    ({"cat": None}, "labels is not valid"),
    ({"cat": "half \ud800"}, "labels is not valid"),
    ({"": "a cat"}, "labels 0 is an empty text"),
    ({" ": "a cat"}, "labels 0 is empty"),
    ({"cat": "a " * 200_000}, "shorten labels and descriptions"),
    ({"cat": "the cat " * 400}, "The labels take"),
    ({f"label {place}": "a thing" for place in range(10_000)}, "send fewer"),
]


@pytest.mark.parametrize(("labels", "said"), WRONG, ids=[str(place) for place in range(len(WRONG))])
def test_what_does_not_fit_is_refused_by_name(labels: Any, said: str, model: Model) -> None:
    with pytest.raises((InvalidRequestError, MalformedRequestError), match=said):
        model.extract([TEXT], labels)


def test_a_label_has_one_threshold(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="threshold and labels both have one of 'cat'"):
        model.extract([TEXT], {"cat": {"threshold": 0.2}}, threshold={"cat": 0.3})
    labels = {"cat": {"threshold": 0.0}, "dog": {}}
    (found,) = model.extract(["the cat"], labels, threshold=1.0, multi_label=True)
    assert {span.label for span in found} == {"cat"}


def test_of_a_label_of_one_span_the_best_is_left(model: Model) -> None:
    for text in texts_of(20):
        (every,) = model.extract([text], ["cat", "dog"], threshold=0.0, multi_label=True)
        (best,) = model.extract([text], {"cat": {"dtype": "str"}, "dog": {}}, threshold=0.0, multi_label=True)
        cats = [span for span in every if span.label == "cat"]
        assert [span for span in best if span.label == "dog"] == [span for span in every if span.label == "dog"]
        kept = [span for span in best if span.label == "cat"]
        assert kept == ([max(cats, key=lambda span: span.score)] if cats else [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"examples": [("a text", "dog")]}, "examples 0 has 'dog', which is none of the labels"),
        ({"examples": [(" ", "cat")]}, "examples 0 has an empty text"),
        ({"examples": [("a [OUTPUT] b", "cat")]}, r"examples 0 has '\[OUTPUT\]'"),
    ],
)
def test_examples_that_do_not_fit_are_refused(options: Any, said: str, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        model.zero_shot([TEXT], {"cat": "an animal"}, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize("kind", ["deberta-v2", "modernbert"])
def test_spans_of_described_labels_are_the_gliner2_librarys(tmp_path: Path, kind: str) -> None:
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path, kind, none=-20.0)  # the count is never 0
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    texts = texts_of(300)
    with Model(artifact.path, tune="off") as model:
        scores = [span.score for spans in model.extract(texts[:50], NAMES, threshold=0.0) for span in spans]
        labels = {**LABELS, "日本": {"threshold": float(np.quantile(scores, 0.9))}}
        threshold = float(np.quantile(scores, 0.3))
        expected = theirs.batch_extract_entities(
            texts, labels, threshold=threshold, include_confidence=True, include_spans=True
        )
        ours = model.extract(texts, labels, threshold=threshold, multi_label=True)
        plain = model.extract(texts, NAMES, threshold=threshold, multi_label=True)
    num_compared = 0
    for text, spans, answer in zip(texts, ours, expected, strict=True):
        wanted = {
            (one["start"], one["end"], one["text"], label): one["confidence"]
            for label, found in dict(answer["entities"] or {}).items()
            for one in (found if isinstance(found, list) else [found] if found else [])
        }
        if any(end > len(text) for _, end, _, _ in wanted):  # the full stop that the library adds
            continue
        assert {span[:4]: span.score for span in spans} == pytest.approx(wanted, abs=2e-4), text
        num_compared += len(wanted)
    assert num_compared > 100
    assert plain != ours


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_scores_of_described_labels_with_examples_are_the_gliner2_librarys(tmp_path: Path) -> None:
    library = pytest.importorskip("gliner2")
    folder = save_gliner2(tmp_path / "checkpoint")
    artifact = built(tmp_path)
    theirs = library.GLiNER2.from_pretrained(str(folder))
    texts = texts_of(200, 7)
    meanings, examples = {"person": "a human", "a place": "日本", "日本": "an island"}, [("東京 is big", "日本")]
    asked = {"labels": meanings, "multi_label": True, "cls_threshold": 0.0, "examples": examples}
    expected = theirs.batch_classify_text(texts, {"category": asked}, include_confidence=True)
    with Model(artifact.path, tune="off") as model:
        ours = model.zero_shot(texts, meanings, multi_label=True, examples=examples).scores
        plain = model.zero_shot(texts, NAMES, multi_label=True).scores
    for text, row, answer in zip(texts, ours, expected, strict=True):
        wanted = {one["label"]: one["confidence"] for one in answer["category"]}
        assert dict(zip(meanings, row.tolist(), strict=True)) == pytest.approx(wanted, abs=2e-4), text
    assert float(np.abs(ours - plain).max()) > 1e-3
