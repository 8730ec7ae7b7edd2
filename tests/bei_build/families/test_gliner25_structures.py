"""Structures of GLiNER2.5: as the gliner2 library finds them, with choices, beside labels and classifications."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Extracted, Model
from bei.artifact.manifest import Artifact
from tests.bei_build.families.test_gliner2_classes import same_classes
from tests.bei_build.families.test_gliner2_structures import plain, same, scores
from tests.bei_build.families.test_gliner25 import built, random_texts

# With thresholds where scores of random weights lie.
STRUCTURES: dict[str, Any] = {
    "product": {
        "fields": [
            {"name": "name", "dtype": "str", "description": "what it is called"},
            {"name": "price", "threshold": 0.7},
            {"name": "state", "dtype": "str", "choices": ["new", "very old", "newer"], "threshold": 0.2},
        ]
    },
    "an event": {"fields": [{"name": "日本"}, {"name": "kind", "choices": ["party", "new"], "threshold": 0.4}]},
}
LABELS = {"person": {"description": "a human", "threshold": 0.02}, "a place": {"threshold": 0.02}}
CLASSES: list[dict[str, Any]] = [
    {"task": "mood", "labels": ["good", "bad", "日本"]},
    {
        "task": "topic",
        "labels": {"cat": "an animal", "the news": "of today"},
        "multi_label": True,
        "cls_threshold": 0.0,
    },
]
THRESHOLD = 0.8


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner25"))


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def asked(model: Model, texts: list[str], **options: Any) -> list[Extracted]:
    return model.extract_schema(
        texts,
        labels=LABELS,
        structures=STRUCTURES,
        classifications=CLASSES,
        threshold=THRESHOLD,
        multi_label=True,
        **options,
    )


def compared(folder: Path, texts: list[str]) -> Counter[str]:
    """What of ``texts`` was compared with the library's."""
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(folder / "checkpoint"))
    schema = library.Schema.from_dict({"entities": LABELS, "structures": STRUCTURES, "classifications": CLASSES})
    counts = Counter[str]()
    with Model(folder / "artifact", tune="off") as model:
        for flat, policy in ((True, "flat"), (False, "nested")):
            settings = {"threshold": THRESHOLD, "include_confidence": True, "include_spans": True}
            expected = theirs.batch_extract(texts, schema, overlap_policy=policy, **settings)
            for text, mine, answer in zip(texts, asked(model, texts, flat=flat), expected, strict=True):
                for task, classes in mine.classifications.items():
                    same_classes(classes, answer[task])
                if f"'end': {len(text) + 1}" in repr(answer):  # the full stop that the library adds
                    continue
                for name in STRUCTURES:
                    same(mine.structures[name], answer.get(name))
                    for field, value in (mine.structures[name] or [{}])[0].items():
                        counts[field] += bool(value)
                spans = {
                    (one["start"], one["end"], one["text"], label): one["confidence"]
                    for label, every in dict(answer["entities"] or {}).items()
                    for one in every
                }
                assert {span[:4]: span.score for span in mine.spans} == pytest.approx(spans, abs=2e-4), text
                counts["spans"] += len(spans)
    return counts


@pytest.mark.filterwarnings("ignore")  # the library's
def test_structures_of_a_few_texts_are_the_gliner2_librarys(artifact: Artifact) -> None:
    counts = compared(artifact.path.parent, random_texts(24, 6))
    assert min(counts["name"], counts["price"], counts["state"], counts["kind"], counts["spans"]) > 0, counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("deberta-v2", {}),
        ("deberta-v2", {"pool_boundary_top_k": 32, "pool_size": 192, "min_pool_per_query": 8}),
        ("modernbert", {"boundary_attention_layers": 1, "boundary_attention_window": 0}),
    ],
)
def test_structures_choices_and_scores_are_the_gliner2_librarys(tmp_path: Path, kind: str, head: Any) -> None:
    built(tmp_path, kind, **head)
    counts = compared(tmp_path, random_texts(300, 10))
    assert min(counts["name"], counts["price"], counts["日本"], counts["state"], counts["kind"]) > 30, counts
    assert counts["spans"] > 100, counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_structures_of_a_long_text_are_the_gliner2_librarys(artifact: Artifact, model: Model) -> None:
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(artifact.path.parent / "checkpoint"))
    rng = np.random.default_rng(39)
    texts = [" ".join(rng.choice(["cat", "the", "a", "b", "is"], count)) + "." for count in (41, 80, 111, 150)]
    structures = {"a": {"fields": [{"name": "cat"}, {"name": "b", "dtype": "str"}]}}
    schema = library.Schema.from_dict({"structures": structures})
    every = model.extract_schema(texts, structures=structures, threshold=0.0, flat=False)
    threshold = float(np.quantile([score for one in every for score in scores(one.structures["a"])], 0.4))
    asked_for: dict[str, Any] = {"threshold": threshold, "include_confidence": True, "include_spans": True}
    answers = theirs.batch_extract_long(texts, schema, chunk_size=40, chunk_overlap=10, **asked_for)
    found = model.extract_schema(texts, structures=structures, threshold=threshold)
    for mine, answer in zip(found, answers, strict=True):
        same(mine.structures["a"], answer.get("a"))
    assert sum(len(mine.structures["a"]) for mine in found) > 10


def test_other_texts_of_a_step_change_nothing(model: Model) -> None:
    texts = [*random_texts(12, 8), "cat", "hello world " * 60]  # the last one in windows
    for text, found in zip(texts, asked(model, texts), strict=True):
        (alone,) = asked(model, [text])
        for name in STRUCTURES:
            assert [plain(one) for one in alone.structures[name]] == [plain(one) for one in found.structures[name]]
            assert scores(alone.structures[name]) == pytest.approx(scores(found.structures[name]), abs=1e-4)


def test_values_stand_in_the_text_or_are_choices(model: Model) -> None:
    text = "hello world " * 60  # in windows
    (found,) = asked(model, [text])
    values = [
        (name, value)
        for instances in found.structures.values()
        for one in instances
        for name, of_field in one.items()
        for value in (of_field if isinstance(of_field, list) else [of_field] if of_field else [])
    ]
    assert {name for name, _ in values} >= {"name", "state"}
    for name, value in values:
        assert (value.start is None) == (name in ("state", "kind"))
        assert value.start is None or value.text == text[value.start : value.end]


def test_a_text_without_words_has_the_choices_of_a_full_stop(model: Model) -> None:
    blank, full_stop = asked(model, ["  ", "."])
    assert blank.spans == []
    for name in STRUCTURES:
        assert [plain(one) for one in blank.structures[name]] == [plain(one) for one in full_stop.structures[name]]
        assert len(blank.structures[name]) == 1
