"""Structures of GLiNER2.5 with a mode: as the gliner2 library forms their instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bei import Extracted, Model
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from bei.errors import InvalidRequestError
from bei.tasks import record_instances
from tests.bei_build.families.test_gliner import TEXT
from tests.bei_build.families.test_gliner2_structures import same
from tests.bei_build.families.test_gliner25 import built, random_texts
from tests.bei_build.families.test_gliner25_relations import named, with_full_stops
from tests.support.gliner2_models import RECORD_HEAD

STRUCTURES: dict[str, Any] = {
    "product": {
        "mode": "natural",
        "anchor": "price",
        "fields": [
            {"name": "name", "dtype": "str", "description": "what it is called"},
            {"name": "price"},
            {"name": "parts", "threshold": 0.3},
            {"name": "maker", "cardinality": "required_one", "exclusive": True},
        ],
    },
    "an event": {
        "mode": "latent",
        "fields": [
            {"name": "日本", "exclusive": True},
            {"name": "kind", "dtype": "str", "exclusive": True},
            {"name": "state", "cardinality": "optional_one", "exclusive": True},
            {"name": "where", "cardinality": "one_or_more"},
        ],
    },
    "trip": {"mode": "anchorless", "fields": [{"name": "from", "cardinality": "optional_one"}, {"name": "to"}]},
    "plain": {"fields": [{"name": "state", "choices": ["new", "very old"]}, {"name": "cat"}]},
}
THRESHOLD = 0.4
# Small weights and many candidates: instances are nearly as good with each other's values.
MANY_QUERIES: dict[str, Any] = {"record_instance_queries": 32, "enable_span_content": False}
LARGE_POOL: dict[str, Any] = {
    "spread": 0.1,
    "pool_boundary_top_k": 32,
    "pool_size": 192,
    "min_pool_per_query": 8,
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner25"), **RECORD_HEAD)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def asked(model: Model, texts: list[str], **options: Any) -> list[Extracted]:
    return model.extract_schema(texts, structures=STRUCTURES, threshold=THRESHOLD, **options)


def instances_of(answer: Any, name: str) -> list[Any]:
    """The library's instances, without the probability of each, for which there is no place."""
    return [{field: one[field] for field in one if field != "confidence"} for one in answer.get(name) or []]


def without_exclusive(structures: dict[str, Any]) -> dict[str, Any]:
    """``structures`` without fields whose values are shared out."""
    shorter = {name: [{**one, "exclusive": False} for one in form["fields"]] for name, form in structures.items()}
    return {name: {**form, "fields": shorter[name]} for name, form in structures.items()}


def compared(folder: Path, texts: list[str], structures: dict[str, Any] = STRUCTURES) -> Counter[str]:
    """What of ``texts`` was compared with the library's."""
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(folder / "checkpoint"))
    schema = library.Schema.from_dict({"structures": structures})
    settings: dict[str, Any] = {"threshold": THRESHOLD, "include_confidence": True, "include_spans": True}
    counts = Counter[str]()
    with Model(folder / "artifact", tune="off") as model:
        for flat, policy in ((True, "flat"), (False, "nested")):
            answers = theirs.batch_extract(texts, schema, overlap_policy=policy, **settings)
            found = model.extract_schema(texts, structures=structures, threshold=THRESHOLD, flat=flat)
            for mine, answer in zip(found, answers, strict=True):
                for name in structures:
                    same(mine.structures[name], instances_of(answer, name))
                    counts[name] += len(mine.structures[name])
                    counts[f"several {name}"] += len(mine.structures[name]) > 1
    return counts


def test_the_engine_agrees_with_the_module_that_multiplies_matrix_by_matrix(artifact: Artifact) -> None:
    records = artifact.certificate.outputs[-1]
    assert (records.output, records.failures) == ("record_states", [])
    assert records.max_abs_difference < 1e-3
    extraction = artifact.manifest.extraction
    assert extraction
    assert extraction.candidates
    assert extraction.candidates.records
    assert (extraction.candidates.records.width, extraction.candidates.records.num_queries) == (12, 5)


@pytest.mark.filterwarnings("ignore")  # the library's
def test_instances_of_a_few_texts_are_the_gliner2_librarys(artifact: Artifact) -> None:
    counts = compared(artifact.path.parent, with_full_stops(random_texts(24, 6)))
    assert min(counts["product"], counts["an event"], counts["trip"]) > 5, counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "count", "head", "structures"),
    [
        ("deberta-v2", 300, {}, without_exclusive(STRUCTURES)),
        ("deberta-v2", 300, {"spread": 0.1}, STRUCTURES),
        ("deberta-v2", 16, LARGE_POOL, without_exclusive(STRUCTURES)),
        ("modernbert", 300, MANY_QUERIES, without_exclusive(STRUCTURES)),
    ],
)
def test_instances_and_scores_are_the_gliner2_librarys(
    tmp_path: Path, kind: str, count: int, head: Any, structures: dict[str, Any]
) -> None:
    built(tmp_path, kind, **{**RECORD_HEAD, **head})
    counts = compared(tmp_path, with_full_stops(random_texts(count, 10)), structures)
    least = 100 if count > 100 else 1
    assert min(counts[name] for name in ("product", "an event", "trip")) > least, counts
    assert min(counts["several product"], counts["several an event"]) > least / 2, counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "head", "places", "least"),
    [
        ("deberta-v2", LARGE_POOL, range(8), 12),
        ("modernbert", MANY_QUERIES, range(120, 200), 80),  # among them two with other values than the library's
    ],
)
def test_where_a_rounding_decides_values_are_shared_out_as_well_as_in_the_gliner2_library(
    kind: str, head: Any, places: range, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("gliner2")
    theirs_module = pytest.importorskip("gliner2.models.boundary.records")
    built(tmp_path, kind, **{**RECORD_HEAD, **head})
    mine, theirs, of_same_costs = list[float](), list[float](), list[bool]()
    share_out, solve = record_instances.assignment, theirs_module.linear_sum_assignment

    def noted(costs: Any) -> list[int]:
        columns = share_out(costs)
        mine.append(float(costs[range(len(costs)), columns].sum()))
        return columns

    def noted_theirs(costs: torch.Tensor) -> Any:
        rows, columns = solve(costs)
        theirs.append(float(costs.double()[rows, columns].sum()))
        of_same_costs.append(share_out(record_instances.ranked_by_place(costs.double().numpy())) == columns.tolist())
        return rows, columns

    monkeypatch.setattr(record_instances, "assignment", noted)
    monkeypatch.setattr(theirs_module, "linear_sum_assignment", noted_theirs)
    extractor = library.AutoExtractor.from_pretrained(str(tmp_path / "checkpoint"))
    schema = library.Schema.from_dict({"structures": STRUCTURES})
    with Model(tmp_path / "artifact", tune="off") as model:
        for text in with_full_stops(random_texts(places.stop, 10))[places.start :]:
            extractor.batch_extract([text], schema, threshold=THRESHOLD)
            asked(model, [text])
    assert len(mine) >= least
    assert all(of_same_costs)
    assert mine == pytest.approx(theirs, rel=0, abs=2e-4)  # sums of logarithms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_instances_of_a_long_text_are_the_gliner2_librarys(artifact: Artifact, model: Model) -> None:
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(artifact.path.parent / "checkpoint"))
    rng = np.random.default_rng(39)
    texts = [" ".join(rng.choice(["cat", "the", "a", "b", "is"], count)) + "." for count in (41, 80, 111)]
    structures = {"a": {"mode": "natural", "fields": [{"name": "cat"}, {"name": "b", "dtype": "str"}]}}
    settings: dict[str, Any] = {"threshold": THRESHOLD, "include_confidence": True, "include_spans": True}
    schema = library.Schema.from_dict({"structures": structures})
    answers = theirs.batch_extract_long(texts, schema, chunk_size=40, chunk_overlap=10, **settings)
    found = model.extract_schema(texts, structures=structures, threshold=THRESHOLD)
    for mine, answer in zip(found, answers, strict=True):
        wanted = instances_of(answer, "a")
        if "'text': '.'" not in repr(wanted):
            same(mine.structures["a"], wanted)
    assert sum(len(mine.structures["a"]) for mine in found) > 10


def test_other_texts_of_a_step_change_nothing(model: Model) -> None:
    texts = [*with_full_stops(random_texts(12, 8)), "cat", "hello world " * 60]  # the last one in windows
    for text, found in zip(texts, asked(model, texts), strict=True):
        (alone,) = asked(model, [text])
        for name in STRUCTURES:
            others = [{field: as_library(value) for field, value in one.items()} for one in found.structures[name]]
            same(alone.structures[name], others)


def as_library(value: Any) -> Any:
    """What a field has, as the library has it."""
    if isinstance(value, list):
        return [named(one) for one in value]
    return None if value is None else named(value)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"fields": ["b"], "mode": "latent", "anchor": "b"}, "has the anchor 'b'"),
    ({"fields": ["b"], "mode": "natural", "anchor": "c"}, "has the anchor 'c'"),
    ({"fields": ["b"], "anchor": "b"}, "has the anchor 'b'"),
    ({"fields": [{"name": "b", "cardinality": "one_or_more"}]}, "has cardinality, which goes with a mode"),
    ({"fields": [{"name": "b", "exclusive": True}]}, "has exclusive, which goes with a mode"),
    ({"fields": [{"name": "b", "choices": ["c", "d"]}], "mode": "latent"}, "has choices, which bei does not find"),
]


@pytest.mark.parametrize(("form", "said"), WRONG, ids=[str(place) for place in range(len(WRONG))])
def test_what_does_not_go_with_a_mode_is_refused_by_name(form: Any, said: str, model: Model) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        model.extract_schema([TEXT], structures={"a": form})


def test_models_that_form_no_instances_refuse_modes(tmp_path: Path) -> None:
    with (
        Model(built(tmp_path).path, tune="off") as other,
        pytest.raises(InvalidRequestError, match="has the mode 'latent', and gliner25 forms no instances so"),
    ):
        other.extract_schema([TEXT], structures={"a": {"fields": ["b"], "mode": "latent"}})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 13}, "the records of extraction do not go with the output record_states"),
        ({"num_queries": 0}, "the records of extraction have an invalid number"),
    ],
)
def test_artifacts_with_invalid_records_are_refused(artifact: Artifact, changed: Any, message: str) -> None:
    extraction = artifact.manifest.extraction
    assert extraction
    assert extraction.candidates
    assert extraction.candidates.records
    records = msgspec.structs.replace(extraction.candidates.records, **changed)
    candidates = msgspec.structs.replace(extraction.candidates, records=records)
    extraction = msgspec.structs.replace(extraction, candidates=candidates)
    assert message in (manifest_fault(msgspec.structs.replace(artifact.manifest, extraction=extraction)) or "")
