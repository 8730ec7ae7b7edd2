"""Classifications of GLiNER2 in one pass with what else a schema asks: as the gliner2 library scores them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Extracted, LabelScore, Model
from bei.artifact.manifest import Artifact
from bei.errors import InvalidRequestError, MalformedRequestError
from tests.bei.server.app import App, check_error
from tests.bei_build.families.test_gliner import TEXT
from tests.bei_build.families.test_gliner2 import built
from tests.bei_build.families.test_gliner2_descriptions import texts_of
from tests.bei_build.families.test_gliner2_structures import LABELS, RELATIONS, STRUCTURES, plain, rows_of_job, same
from tests.support.builds import build_artifact, open_engine
from tests.support.gliner2_models import save_gliner2

CLASSES: list[dict[str, Any]] = [
    {"task": "mood", "labels": ["good", "bad", "日本"]},
    {"task": "topic", "labels": {"cat": "an animal", "the news": "of today"}, "multi_label": True},
    {
        "task": "topic of it",  # begins as another one
        "labels": ["cat", "dog", "a", "good"],
        "multi_label": True,
        "cls_threshold": 0.0,
        "top_k": 3,
        "prompt": "what it is about",
        "examples": [("the cat sat", "cat"), ("hello world", "good")],
    },
    {"task": "sure", "labels": ["yes", "no"], "class_act": "sigmoid"},
    {
        "task": "shared",
        "labels": ["yes", "no", "cat"],
        "multi_label": True,
        "class_act": "softmax",
        "cls_threshold": 0.3,
    },
]

ROOM = {"max_position_embeddings": 1024}  # the schema alone takes 500 tokens of the tiny tokenizer


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner2"), counting_layer="count_lstm_v2", none=-20.0, encoder=ROOM)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


@pytest.fixture(scope="module")
def app(artifact: Artifact) -> Iterator[App]:
    found = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    yield found
    found.close()


def pairs(found: LabelScore | list[LabelScore] | Any) -> list[tuple[str, float]]:
    """Of one answer, ours or the library's."""
    every = found if isinstance(found, list) else [found]
    return [
        (one.label, one.score) if isinstance(one, LabelScore) else (one["label"], one["confidence"]) for one in every
    ]


def same_classes(ours: Any, theirs: Any) -> None:
    assert isinstance(ours, list) == isinstance(theirs, list)
    assert [label for label, _ in pairs(ours)] == [label for label, _ in pairs(theirs)]
    assert [score for _, score in pairs(ours)] == pytest.approx([score for _, score in pairs(theirs)], abs=2e-4)


def one_wrong(**fields: Any) -> list[dict[str, Any]]:
    return [{"task": "a", "labels": ["b", "c"], **fields}]


WRONG: list[tuple[Any, str]] = [
    ([], "classifications is empty"),
    (one_wrong(task=" "), "classifications 0 has an empty task"),
    ([*one_wrong(), *one_wrong()], "has the task 'a' twice"),
    (one_wrong(labels=["b"]), "'a' has 1 labels: send 2 or more"),
    (one_wrong(labels={}), "'a' has 0 labels"),
    (one_wrong(labels=["b", "c", "b"]), "'a' has the label 'b' twice"),
    (one_wrong(labels=["b", "\u2003"]), "'a' has an empty label"),
    (one_wrong(labels={"b": "", "c": "d"}), "an empty description of 'b'"),
    (one_wrong(labels=["b", "c [L]"]), r"classifications 'a' 1 has '\[L\]'"),
    (one_wrong(labels={"b": "[SEP_TEXT]", "c": "d"}), r"The description of 'b' in classifications 'a' has '\[SEP_TEXT"),
    (one_wrong(task="a [P]"), r"The name of classifications 'a \[P\]' has '\[P\]'"),
    (one_wrong(prompt="[E]"), r"The description of classifications 'a' has '\[E\]'"),
    (one_wrong(prompt=" "), "'a' has an empty prompt"),
    (one_wrong(examples=[("d", "e")]), "'a' examples 0 has 'e'"),
    (one_wrong(examples=[("\t", "b")]), "'a' examples 0 has an empty text"),
    (one_wrong(examples=[("[E]", "b")]), r"classifications 'a' examples 0 has '\[E\]'"),
    (one_wrong(labels=[f"label {place}" for place in range(10_000)]), "10000 labels"),
    ([{"task": f"task {place}", "labels": ["b", "c"]} for place in range(5_000)], "10000 labels"),
    (one_wrong(labels=["b" * 100_000, "c"]), "has 100000 characters"),
    (one_wrong(prompt="cat the " * 10_000), "is read in front of a text has"),
    (one_wrong(prompt="cat the " * 2_000), "The labels take"),
    (one_wrong(top_k=0), "top_k"),
    (one_wrong(top_k=2), "'a' has top_k, and the best label is wanted"),
    (one_wrong(cls_threshold=0.4), "'a' has cls_threshold, and the best label is wanted"),
    (one_wrong(cls_threshold=1.5), "cls_threshold"),
    (one_wrong(class_act="relu"), "class_act"),
    (one_wrong(temperature=2), "temperature"),
    (one_wrong(labels="b"), "labels"),
]


@pytest.mark.parametrize(("classes", "said"), WRONG, ids=[str(place) for place in range(len(WRONG))])
def test_what_does_not_fit_is_refused_by_name(classes: Any, said: str, model: Model) -> None:
    with pytest.raises((InvalidRequestError, MalformedRequestError), match=said):
        model.extract_schema([TEXT], classifications=classes)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"multi_label": True}, "multi_label is of spans for labels"),
        ({"multi_label": True, "relations": RELATIONS}, "multi_label is of spans for labels"),
        ({"threshold": 0.9}, "threshold is of spans"),
        ({"flat": False}, "flat is of spans"),
    ],
)
def test_settings_of_spans_that_a_classification_does_not_read_are_refused(
    settings: dict[str, Any], said: str, model: Model, app: App
) -> None:
    """They did nothing: of several labels with ``multi_label`` the best one came."""
    with pytest.raises(InvalidRequestError, match=said):
        model.extract_schema([TEXT], classifications=CLASSES, **settings)
    body = json.dumps({"input": TEXT, "classifications": CLASSES, **settings}).encode()
    check_error(app.request("POST", "/v1/extract", body), 400, said, param=next(iter(settings)))


def test_settings_of_spans_as_they_are_by_default_are_no_fault(model: Model) -> None:
    asked: dict[str, Any] = {"threshold": 0.5, "flat": True, "multi_label": False}
    assert model.extract_schema([TEXT], classifications=CLASSES[:1], **asked)


def everything(model: Model, texts: list[str], threshold: float = 0.3, **options: Any) -> list[Extracted]:
    return model.extract_schema(
        texts,
        labels=LABELS,
        structures=STRUCTURES,
        relations=RELATIONS,
        classifications=CLASSES,
        threshold=threshold,
        **options,
    )


def test_other_texts_of_a_step_change_nothing(model: Model) -> None:
    texts = [*texts_of(8), "cat", " ", "\u200b", "hello world " * 60]  # without words, in windows
    together = everything(model, texts)
    for text, found in zip(texts, together, strict=True):
        (alone,) = everything(model, [text])
        for task, ours in alone.classifications.items():
            assert [label for label, _ in pairs(ours)] == [label for label, _ in pairs(found.classifications[task])]
            scores = [score for _, score in pairs(found.classifications[task])]
            assert [score for _, score in pairs(ours)] == pytest.approx(scores, abs=1e-4)


def test_classes_change_no_other_part_s_form(model: Model) -> None:
    (found,) = everything(model, ["the cat sat on a mat"])
    assert found.structures.keys() == STRUCTURES.keys()
    assert any(found.structures.values())
    assert found.relations.keys() == {*RELATIONS}
    assert found.classifications.keys() == {one["task"] for one in CLASSES}
    assert len(pairs(found.classifications["topic of it"])) == 3


def test_labels_of_one_task_alone_have_the_scores_of_zero_shot(model: Model) -> None:
    texts = texts_of(8)
    asked = [{"task": "category", "labels": ["good", "bad", "cat"], "multi_label": True, "cls_threshold": 0.0}]
    expected = model.zero_shot(texts, ["good", "bad", "cat"], multi_label=True).scores
    for one, row in zip(model.extract_schema(texts, classifications=asked), expected, strict=True):
        assert one.spans == []
        assert [score for _, score in pairs(one.classifications["category"])] == pytest.approx(row.tolist(), abs=1e-4)


def test_of_windows_each_label_has_its_largest_probability(model: Model) -> None:
    asked = [{"task": "mood", "labels": ["good", "bad", "cat"], "multi_label": True, "cls_threshold": 0.0}]
    words = [["the", "cat", "a", "is"][place % 7 % 4] for place in range(60)]  # windows of 40, which share 10
    whole, *windows = model.extract_schema(
        [" ".join(words), " ".join(words[:40]), " ".join(words[30:])], classifications=asked
    )
    parts = [[score for _, score in pairs(one.classifications["mood"])] for one in windows]
    found = [score for _, score in pairs(whole.classifications["mood"])]
    assert found == pytest.approx(np.max(parts, axis=0).tolist(), abs=1e-4)


def test_a_model_that_finds_spans_alone_says_what_to_build(tmp_path: Path) -> None:
    artifact = build_artifact(save_gliner2(tmp_path / "checkpoint"), tmp_path / "artifact", task="extract")
    with (
        Model(artifact.path, tune="off") as model,
        pytest.raises(InvalidRequestError, match="built to find spans alone: build it without --task"),
    ):
        model.extract_schema([TEXT], classifications=CLASSES)


def test_every_form_of_the_method_gives_the_same(model: Model) -> None:
    texts = texts_of(5)
    asked: dict[str, Any] = {"labels": ["cat"], "relations": RELATIONS, "classifications": CLASSES, "threshold": 0.3}
    expected = model.extract_schema(texts, **asked)

    async def every() -> list[Extracted]:
        return await model.aextract_schema(texts, **asked)

    async def chunks_of_two() -> list[Any]:
        return [chunk async for chunk in model.aextract_schema_iter(texts, chunk_size=2, **asked)]

    assert [places(one) for one in asyncio.run(every())] == [*map(places, expected)]
    for chunks in ([*model.extract_schema_iter(iter(texts), chunk_size=2, **asked)], asyncio.run(chunks_of_two())):
        assert [chunk.inputs for chunk in chunks] == [texts[:2], texts[2:4], texts[4:]]
        assert [places(one) for chunk in chunks for one in chunk.results] == [*map(places, expected)]


def places(found: Extracted) -> Any:
    """All but scores, which other texts of a step round."""
    records = {name: [plain(one) for one in each] for name, each in found.relations.items()}
    labels = {task: {label for label, _ in pairs(one)} for task, one in found.classifications.items()}
    return [span[:4] for span in found.spans], records, labels


def test_the_route_has_the_same_classes(artifact: Artifact, model: Model) -> None:
    text = "the cat sat on a mat in 東京"
    body = {"input": text, "relations": RELATIONS, "classifications": CLASSES, "threshold": 0.3}
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        response = app.request("POST", "/v1/extract", json.dumps(body).encode())
        wrong = app.request("POST", "/v1/extract", json.dumps({**body, "classifications": one_wrong(task="")}).encode())
    finally:
        app.close()
    assert response.status_code == 200, response.text
    check_error(wrong, 400, "classifications 0 has an empty task")
    (found,) = response.json()["data"]
    (expected,) = model.extract_schema([text], relations=RELATIONS, classifications=CLASSES, threshold=0.3)
    assert "structures" not in found
    for task, ours in expected.classifications.items():
        answered = found["classifications"][task]
        assert isinstance(answered, list) == isinstance(ours, list)
        scores = [(one["label"], one["score"]) for one in (answered if isinstance(answered, list) else [answered])]
        assert scores == [(label, pytest.approx(score, abs=1e-5)) for label, score in pairs(ours)]


def test_a_job_has_the_same_classes(artifact: Artifact, model: Model, tmp_path: Path) -> None:
    texts = texts_of(6)
    rows = rows_of_job(artifact, tmp_path, texts, labels=["cat"], classifications=CLASSES, threshold=0.3)
    expected = model.extract_schema(texts, labels=["cat"], classifications=CLASSES, threshold=0.3)
    assert len(rows) == len(texts)
    for row, one in zip(rows, expected, strict=True):
        assert row.keys() == {"row", "spans", "classifications"}
        found = json.loads(row["classifications"])
        for task, ours in one.classifications.items():
            answered = found[task] if isinstance(found[task], list) else [found[task]]
            assert isinstance(found[task], list) == isinstance(ours, list)
            scores: list[Any] = [(each["label"], pytest.approx(each["score"], abs=1e-5)) for each in answered]
            assert scores == pairs(ours)
            assert all(len(str(each["score"])) <= len("0.123456789") for each in answered)  # float32's digits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "counting", "threshold"),
    [("deberta-v2", "count_lstm", 0.5), ("deberta-v2", "count_lstm_v2", 0.3), ("modernbert", "count_lstm_v2", 0.5)],
)
def test_all_parts_of_a_schema_are_the_gliner2_librarys(
    tmp_path: Path, kind: str, counting: str, threshold: float
) -> None:
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path, kind, counting_layer=counting, none=-20.0, encoder=ROOM)
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    texts = [*texts_of(148), " ", "…"]
    schema = library.Schema.from_dict(
        {"entities": LABELS, "structures": STRUCTURES, "relations": RELATIONS, "classifications": CLASSES}
    )
    with Model(artifact.path, tune="off") as model:
        ours = everything(model, texts, threshold, multi_label=True)
    asked_for: dict[str, Any] = {"threshold": threshold, "include_confidence": True, "include_spans": True}
    compared: list[tuple[str, float]] = []
    records = 0
    for text, mine, answer in zip(texts, ours, theirs.batch_extract(texts, schema, **asked_for), strict=True):
        for task, found in mine.classifications.items():
            same_classes(found, answer[task])
            compared += pairs(found)
        if f"'end': {len(text) + 1}" in repr(answer):  # the full stop that the library adds
            continue
        for name in STRUCTURES:
            same(mine.structures[name], answer[name])
            records += len(mine.structures[name])
        for name in RELATIONS:
            same(mine.relations[name], answer["relation_extraction"][name])
    assert len({label for label, _ in compared}) > 5
    assert np.ptp([score for _, score in compared]) > 0.03
    assert len(compared) > 1_000
    assert records > 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_the_best_label_of_a_long_text_is_the_gliner2_librarys(tmp_path: Path) -> None:
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path)
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    rng = np.random.default_rng(39)
    texts = [" ".join(rng.choice(["cat", "the", "a", "b", "is"], count)) + "." for count in (39, 41, 80, 111, 150)]
    classes = [CLASSES[0], CLASSES[3], {**CLASSES[1], "cls_threshold": 0.0}]
    schema = library.Schema.from_dict({"classifications": classes})
    answers = theirs.batch_extract_long(texts, schema, chunk_size=40, chunk_overlap=10, include_confidence=True)
    with Model(artifact.path, tune="off") as model:
        found = model.extract_schema(texts, classifications=classes)
    for mine, answer in zip(found, answers, strict=True):
        for one in classes:
            same_classes(mine.classifications[one["task"]], answer[one["task"]])
