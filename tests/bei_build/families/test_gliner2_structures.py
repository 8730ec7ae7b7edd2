"""Structures and relations of GLiNER2: as the gliner2 library finds them, whatever their count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bei import Extracted, Model, Value
from bei.artifact.manifest import Artifact
from bei.bulk.run import JobOptions, opened_source, run_job
from bei.config.settings import ServeConfig
from bei.errors import InvalidRequestError, MalformedRequestError
from bei.tasks import schema_forms
from tests.bei.server.app import App, check_error
from tests.bei_build.families.test_gliner import TEXT
from tests.bei_build.families.test_gliner2 import built
from tests.bei_build.families.test_gliner2_descriptions import texts_of
from tests.support.builds import open_engine

STRUCTURES: dict[str, Any] = {
    "product": {
        "fields": [
            {"name": "name", "dtype": "str", "description": "what it is called"},
            {"name": "price", "threshold": 0.4},
            {"name": "state", "dtype": "str", "choices": ["new", "very old", "newer"]},
        ]
    },
    "an event": {"fields": [{"name": "日本"}, {"name": "kind", "choices": ["party", "new"]}]},
}
RELATIONS = ["works for", "住む"]
LABELS = {"person": "a human", "a place": {}}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner2"), counting_layer="count_lstm_v2", none=-20.0)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def asked(model: Model, texts: list[str], threshold: float = 0.3, **options: Any) -> list[Extracted]:
    return model.extract_schema(
        texts, labels=LABELS, structures=STRUCTURES, relations=RELATIONS, threshold=threshold, **options
    )


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A field's values, sorted, without scores."""
    return {name: one if one is None else _places(one) for name, one in values.items()}


def _places(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(map(_places, value))
    fields = value._asdict() if isinstance(value, Value) else value
    start, end = (-1 if fields.get(name) is None else fields[name] for name in ("start", "end"))  # choices have none
    return fields["text"], start, end


def scores(instances: list[Any]) -> list[float]:
    found = []
    for one in instances:
        for value in one.values():
            values = value if isinstance(value, list) else [value] if value else []
            named = [(_places(each), each.score if isinstance(each, Value) else each["confidence"]) for each in values]
            found += [score for _, score in sorted(named)]
    return found


def same(ours: list[Any], theirs: Any) -> None:
    theirs = theirs or []
    assert [plain(one) for one in ours] == [plain(one) for one in theirs]
    assert scores(ours) == pytest.approx(scores(theirs), abs=2e-4)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "labels is missing"),
    ({"structures": {}}, "structures is empty"),
    ({"relations": []}, "relations is empty"),
    ({"relations": ["a", "b", "a"]}, "relations has 'a' twice"),
    ({"relations": [" "]}, "relations has an empty name"),
    ({"relations": {"a": ""}}, "The description of 'a' in relations is empty"),
    ({"relations": {"a": "b [R] c"}}, r"The description of relations 'a' has '\[R\]'"),
    ({"relations": ["a [SEP_TEXT]"]}, r"has '\[SEP_TEXT\]'"),
    ({"relations": [f"relation {place}" for place in range(10_000)]}, "20000 fields, heads and tails"),
    ({"structures": {"a": []}}, "structures 'a' has no fields"),
    ({"structures": {" ": ["b"]}}, "structures has an empty name"),
    ({"structures": {"a": ["b", "c", "b"]}}, "structures 'a' has the field 'b' twice"),
    ({"structures": {"a": [""]}}, "A field of structures 'a' has an empty name"),
    ({"structures": {"a": ["b::str"]}}, "has '::', gliner2's short form"),
    ({"structures": {"a": ["b [C]"]}}, r"structures 'a' 0 has '\[C\]'"),
    ({"structures": {"a": [{"name": "b", "choices": []}]}}, "choices of 'b' in structures 'a' is empty"),
    ({"structures": {"a": [{"name": "b", "choices": ["c", ""]}]}}, "A choice of 'b' in structures 'a' is empty"),
    ({"structures": {"a": [{"name": "b", "choices": ["c [P]"]}]}}, r"The choice 'c \[P\]' in structures has '\[P\]'"),
    ({"structures": {"a": [{"name": "b", "choices": ["c"] * 250}]}}, "The choices leave no room for a text"),
    ({"structures": {"a": [{"name": "b", "description": " "}]}}, "The description of 'b' in structures 'a' is empty"),
    ({"structures": {"a": {"fields": ["b"], "mode": "natural"}}}, "mode"),
    ({"structures": {"a": [{"name": "b", "cardinality": "required_one"}]}}, "cardinality"),
    ({"structures": {"a": [{"name": "b", "validators": []}]}}, "validators"),
    ({"structures": {"a": [{"name": "b", "dtype": "int"}]}}, "dtype"),
    ({"structures": {"a": [f"field {place}" for place in range(10_000)]}}, "10000 fields, heads and tails"),
    ({"structures": {"a": ["b"]}, "threshold": {"b": 0.5}}, "threshold has 'b'"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[str(place) for place in range(len(WRONG))])
def test_what_does_not_fit_is_refused_by_name(fields: Any, said: str, model: Model) -> None:
    with pytest.raises((InvalidRequestError, MalformedRequestError), match=said):
        model.extract_schema([TEXT], **fields)


def test_other_texts_of_a_step_change_nothing(model: Model) -> None:
    texts = [*texts_of(12), "cat"]
    together = asked(model, texts)
    for text, found in zip(texts, together, strict=True):
        (alone,) = asked(model, [text])
        assert [span[:4] for span in alone.spans] == [span[:4] for span in found.spans]
        for name in STRUCTURES:
            assert [plain(one) for one in alone.structures[name]] == [plain(one) for one in found.structures[name]]
            assert scores(alone.structures[name]) == pytest.approx(scores(found.structures[name]), abs=1e-4)


def test_values_stand_in_the_text_or_are_choices(model: Model) -> None:
    text = "hello world " * 60  # in windows
    (found,) = asked(model, [text])
    values = [
        (name, value)
        for instances in (*found.structures.values(), *found.relations.values())
        for one in instances
        for name, of_field in one.items()
        for value in (of_field if isinstance(of_field, list) else [of_field] if of_field else [])
    ]
    assert values
    for name, value in values:
        assert (value.start is None) == (name in ("state", "kind"))
        assert value.start is None or value.text == text[value.start : value.end]


def test_a_text_without_words_has_the_choices_of_a_full_stop(model: Model) -> None:
    blank, full_stop = asked(model, ["  ", "."], 0.2)
    assert blank.spans == []
    states = [plain(one)["state"] for one in blank.structures["product"]]
    assert any(states)
    assert states == [plain(one)["state"] for one in full_stop.structures["product"]]


def test_how_many_instances_are_read_at_first_changes_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of(20)
    expected = asked(model, texts)
    counts = Counter(len(instances) for one in expected for instances in one.structures.values())
    assert max(counts) > schema_forms.FIRST_INSTANCES
    monkeypatch.setattr(schema_forms, "FIRST_INSTANCES", 19)
    for one, other in zip(asked(model, texts), expected, strict=True):
        for name in STRUCTURES:
            assert [plain(record) for record in one.structures[name]] == [
                plain(record) for record in other.structures[name]
            ]
            assert scores(one.structures[name]) == pytest.approx(scores(other.structures[name]), abs=1e-4)


def test_a_count_of_more_instances_than_are_scored_at_once_is_an_error(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.tasks.extract.MOST_COLUMNS", 20)
    with pytest.raises(InvalidRequestError, match="20 are scored at once"):
        asked(model, texts_of(20))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "counting", "settings"),
    [
        ("deberta-v2", "count_lstm", {}),
        ("deberta-v2", "count_lstm_v2", {"none": 3.0}),
        ("deberta-v2", "count_lstm_v2", {"counts": {1: 1.33, 2: 5.44, 6: 2.83}}),  # texts have 1, 2 and 6 products
        ("modernbert", "count_lstm", {"none": 3.0}),
        ("modernbert", "count_lstm_v2", {}),
    ],
)
def test_instances_and_scores_are_the_gliner2_librarys(
    tmp_path: Path, kind: str, counting: str, settings: dict[str, Any]
) -> None:
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path, kind, counting_layer=counting, **settings)
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    texts = texts_of(300)
    schema = library.Schema.from_dict({"entities": LABELS, "structures": STRUCTURES, "relations": RELATIONS})
    with Model(artifact.path, tune="off") as model:
        found = asked(model, texts[:50], 0.0)
        threshold = float(np.quantile([one for each in found for one in scores(each.structures["product"])], 0.5))
        expected = theirs.batch_extract(texts, schema, threshold=threshold, include_confidence=True, include_spans=True)
        ours = asked(model, texts, threshold, multi_label=True)
    counts: Counter[str] = Counter()
    for text, mine, answer in zip(texts, ours, expected, strict=True):
        if f"'end': {len(text) + 1}" in repr(answer):  # the full stop that the library adds
            continue
        counts[f"{len(mine.structures['product'])} products"] += 1
        for name in STRUCTURES:
            same(mine.structures[name], answer[name])
            counts["structures"] += len(mine.structures[name])
        for name in RELATIONS:
            same(mine.relations[name], answer["relation_extraction"][name])
            counts["relations"] += len(mine.relations[name])
        spans = {
            (one["start"], one["end"], one["text"], label): one["confidence"]
            for label, every in dict(answer["entities"] or {}).items()
            for one in every
        }
        assert {span[:4]: span.score for span in mine.spans} == pytest.approx(spans, abs=2e-4), text
        counts["spans"] += len(spans)
    assert min(counts["structures"], counts["relations"]) > 100, counts
    if "counts" in settings:
        assert sum(name.endswith("products") for name in counts) > 2, counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_instances_of_a_long_text_are_the_gliner2_librarys(tmp_path: Path) -> None:
    """A full window had a full stop more than the library's, and other scores."""
    library = pytest.importorskip("gliner2")
    artifact = built(tmp_path, counting_layer="count_lstm_v2", counts={1: 1.33, 2: 5.44, 6: 2.83})
    theirs = library.GLiNER2.from_pretrained(str(tmp_path / "checkpoint"))
    structures = {"a": {"fields": [{"name": "cat"}, {"name": "b", "dtype": "str"}]}}
    rng = np.random.default_rng(39)
    texts = [" ".join(rng.choice(["cat", "the", "a", "b", "is"], count)) + "." for count in (41, 80, 111, 150)]
    schema = library.Schema.from_dict({"structures": structures, "relations": ["new"]})
    asked_for: dict[str, Any] = {"threshold": 0.3, "include_confidence": True, "include_spans": True}
    answers = theirs.batch_extract_long(texts, schema, chunk_size=40, chunk_overlap=10, **asked_for)
    with Model(artifact.path, tune="off") as model:
        found = model.extract_schema(texts, structures=structures, relations=["new"], threshold=0.3)
    for mine, answer in zip(found, answers, strict=True):
        same(mine.structures["a"], answer["a"])
        same(mine.relations["new"], answer["relation_extraction"]["new"])
    assert sum(len(mine.structures["a"]) for mine in found) > 10


def test_the_route_has_the_same_instances(artifact: Artifact, model: Model) -> None:
    text = "the cat sat on a mat in 東京"
    body = {"input": text, "labels": LABELS, "structures": STRUCTURES, "relations": RELATIONS, "threshold": 0.3}
    app = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    try:
        response = app.request("POST", "/v1/extract", json.dumps(body).encode())
        wrong = app.request("POST", "/v1/extract", json.dumps({**body, "structures": {"a": []}}).encode())
    finally:
        app.close()
    assert response.status_code == 200, response.text
    check_error(wrong, 400, "structures 'a' has no fields")
    (found,), (expected,) = response.json()["data"], asked(model, [text])
    assert found["structures"].keys() == STRUCTURES.keys()
    for name, instances in (*expected.structures.items(), *expected.relations.items()):
        side = found["structures"] if name in STRUCTURES else found["relations"]
        assert [plain(one) for one in side[name]] == [plain(one) for one in instances]
    assert [span["text"] for span in found["spans"]] == [span.text for span in expected.spans]


def rows_of_job(artifact: Artifact, folder: Path, texts: list[str], **asked_for: Any) -> list[dict[str, Any]]:
    pq.write_table(pa.table({"text": [*texts, None]}), folder / "in.parquet")
    options = JobOptions((str(folder / "in.parquet"),), str(folder / "out"), task="extract", task_options=asked_for)
    with opened_source(options) as source:
        run_job(source, artifact.path, options, ServeConfig(tune="off", tokenizer_threads=1), lambda _: None)
    rows: list[dict[str, Any]] = pq.read_table(folder / "out").to_pylist()
    return rows


def test_a_job_has_the_same_instances(artifact: Artifact, model: Model, tmp_path: Path) -> None:
    texts = texts_of(6)
    rows = rows_of_job(artifact, tmp_path, texts, structures=STRUCTURES, relations=RELATIONS, threshold=0.3)
    expected = model.extract_schema(texts, structures=STRUCTURES, relations=RELATIONS, threshold=0.3)
    assert len(rows) == len(texts)
    for row, one in zip(rows, expected, strict=True):
        assert row["spans"] == []
        for side, wanted in (("structures", one.structures), ("relations", one.relations)):
            found = json.loads(row[side])
            assert found.keys() == wanted.keys()
            for name, instances in wanted.items():
                assert [plain(each) for each in found[name]] == [plain(each) for each in instances]


def test_too_many_instances_are_an_error_of_the_row_in_a_job(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bei.tasks.extract.MOST_COLUMNS", 40)  # the model counts 11 of two structures of five fields
    assert rows_of_job(artifact, tmp_path, texts_of(3), structures=STRUCTURES) == []
