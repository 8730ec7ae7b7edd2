"""Relations of GLiNER2.5: as the gliner2 library finds them, with structures and labels in front of them or alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bei import Extracted, Model, Value
from bei.artifact.manifest import Artifact
from bei.artifact.validation import manifest_fault
from tests.bei_build.families.test_gliner2_structures import same
from tests.bei_build.families.test_gliner25 import built, random_texts
from tests.support.gliner2_models import RELATION_HEAD

RELATIONS: dict[str, Any] = {
    "works for": {"description": "where one works", "threshold": 0.3},
    "住む": {"threshold": 0.5},
    "cat": {},
}
STRUCTURES: dict[str, Any] = {
    "product": {"fields": [{"name": "name", "dtype": "str"}, {"name": "state", "choices": ["new", "very old"]}]}
}
LABELS = {"person": "a human", "a place": {}}
THRESHOLD = 0.4


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner25"), **RELATION_HEAD)


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


def asked(model: Model, texts: list[str], **others: Any) -> list[Extracted]:
    return model.extract_schema(texts, relations=RELATIONS, threshold=THRESHOLD, **others)


def with_full_stops(texts: list[str]) -> list[str]:
    """``texts`` without the full stop that the library adds, and finds relations of."""
    return [text if text.endswith((".", "?")) else f"{text.rstrip()}." for text in texts]


def ends_of(answer: Any, name: str) -> list[Any]:
    """The library's relations, without the probability of each, for which there is no place."""
    found = (answer.get("relation_extraction") or {}).get(name) or []
    return [{end: one[end] for end in ("head", "tail")} for one in found]


def compared(folder: Path, texts: list[str], *, beside: bool) -> Counter[str]:
    """What of ``texts`` was compared with the library's; with ``beside`` structures and labels stand in front."""
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(folder / "checkpoint"))
    others: dict[str, Any] = {"structures": STRUCTURES, "labels": LABELS} if beside else {}
    schema = {"relations": RELATIONS, **({"structures": STRUCTURES, "entities": LABELS} if beside else {})}
    settings: dict[str, Any] = {"threshold": THRESHOLD, "include_confidence": True, "include_spans": True}
    # One at a time: its distances are shares of the longest text of a batch.
    answers = theirs.batch_extract(texts, library.Schema.from_dict(schema), batch_size=1, **settings)
    counts = Counter[str]()
    with Model(folder / "artifact", tune="off") as model:
        for text, mine, answer in zip(texts, asked(model, texts, **others), answers, strict=True):
            for name in RELATIONS:
                same(mine.relations[name], ends_of(answer, name))
                counts[name] += len(mine.relations[name])
                counts["none"] += not mine.relations[name]
            counts["texts"] += bool(text)
    return counts


def test_the_engine_agrees_with_the_module_that_computes_every_pair_whole(artifact: Artifact) -> None:
    relations = artifact.certificate.outputs[2]
    assert (relations.output, relations.failures) == ("relation_logits", [])
    assert relations.max_abs_difference < 2e-4
    assert artifact.manifest.tasks == ["extract", "zero_shot"]
    extraction = artifact.manifest.extraction
    assert extraction
    assert extraction.candidates
    limits = extraction.candidates.relations
    assert limits
    assert (limits.most_heads, limits.most_tails, limits.most_pairs, limits.least_end) == (5, 4, 7, 0.2)


@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize("beside", [False, True])
def test_relations_of_a_few_texts_are_the_gliner2_librarys(artifact: Artifact, beside: bool) -> None:
    counts = compared(artifact.path.parent, with_full_stops(random_texts(40, 8)), beside=beside)
    assert sum(counts[name] for name in RELATIONS) > 10, counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("deberta-v2", {}),
        ("deberta-v2", {"pool_boundary_top_k": 32, "pool_size": 192, "min_pool_per_query": 8, "relation_pair_cap": 64}),
        ("modernbert", {"directional_relation_states": False, "relation_argument_proposal_threshold": 0.0}),
        ("modernbert", {"relation_biaffine_content": False, "relation_heads_per_type": 32}),
    ],
)
def test_relations_and_scores_are_the_gliner2_librarys(tmp_path: Path, kind: str, head: Any) -> None:
    built(tmp_path, kind, **{**RELATION_HEAD, **head})
    for beside in (False, True):
        counts = compared(tmp_path, with_full_stops(random_texts(300, 10)), beside=beside)
        assert sum(counts[name] for name in RELATIONS) > 100, counts
        assert counts["none"] > 10, counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's
def test_relations_of_a_long_text_are_the_gliner2_librarys(artifact: Artifact, model: Model) -> None:
    library = pytest.importorskip("gliner2")
    theirs = library.AutoExtractor.from_pretrained(str(artifact.path.parent / "checkpoint"))
    rng = np.random.default_rng(39)
    texts = [" ".join(rng.choice(["cat", "the", "a", "b", "is"], count)) + "." for count in (41, 80, 111, 150)]
    schema = library.Schema.from_dict({"relations": RELATIONS})
    settings: dict[str, Any] = {"threshold": THRESHOLD, "include_confidence": True, "include_spans": True}
    answers = [
        theirs.batch_extract_long([text], schema, chunk_size=40, chunk_overlap=10, batch_size=1, **settings)[0]
        for text in texts
    ]
    found = asked(model, texts)
    for mine, answer in zip(found, answers, strict=True):
        for name in RELATIONS:
            wanted = ends_of(answer, name)
            if "'text': '.'" not in repr(wanted):
                same(mine.relations[name], wanted)
    assert sum(len(one.relations[name]) for one in found for name in RELATIONS) > 5


def test_other_texts_of_a_step_change_nothing(model: Model) -> None:
    texts = [*with_full_stops(random_texts(12, 8)), "cat", "hello world " * 60]  # the last one in windows
    together = asked(model, texts, structures=STRUCTURES, labels=LABELS)
    for text, found in zip(texts, together, strict=True):
        (alone,) = asked(model, [text], structures=STRUCTURES, labels=LABELS)
        for name in RELATIONS:
            other = [{end: named(value) for end, value in one.items()} for one in found.relations[name]]
            same(alone.relations[name], other)


def named(value: Any) -> dict[str, Any]:
    """A value as the library has it."""
    return {"text": value.text, "start": value.start, "end": value.end, "confidence": value.score}


def test_heads_and_tails_stand_in_the_text(model: Model) -> None:
    texts = [*random_texts(20, 8), "hello world " * 60]
    num_relations = 0
    for text, found in zip(texts, asked(model, texts, structures=STRUCTURES), strict=True):
        for one in (each for name in RELATIONS for each in found.relations[name]):
            for end in (one["head"], one["tail"]):
                assert isinstance(end, Value)
                assert end.text == text[end.start : end.end] != ""
            num_relations += 1
    assert num_relations > 5


def test_spans_and_structures_are_those_of_the_same_schema_whatever_the_threshold_of_relations(model: Model) -> None:
    texts = random_texts(12, 8)
    few = {name: {**form, "threshold": 1.0} for name, form in RELATIONS.items()}
    beside: dict[str, Any] = {"structures": STRUCTURES, "labels": LABELS, "threshold": THRESHOLD}
    for found, other in zip(
        model.extract_schema(texts, relations=RELATIONS, **beside),
        model.extract_schema(texts, relations=few, **beside),
        strict=True,
    ):
        assert found.spans == other.spans
        assert found.structures == other.structures


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"most_pairs": 8}, "the relations of extraction do not go with the output relation_logits"),
        ({"most_heads": 0}, "the relations of extraction have an invalid number"),
        ({"most_tails": 1 << 20}, "the relations of extraction have an invalid number"),
        ({"least_end": -0.1}, "the relations of extraction have an invalid number"),
    ],
)
def test_artifacts_with_invalid_relations_are_refused(artifact: Artifact, changed: Any, message: str) -> None:
    extraction = artifact.manifest.extraction
    assert extraction
    assert extraction.candidates
    assert extraction.candidates.relations
    relations = msgspec.structs.replace(extraction.candidates.relations, **changed)
    candidates = msgspec.structs.replace(extraction.candidates, relations=relations)
    extraction = msgspec.structs.replace(extraction, candidates=candidates)
    assert message in (manifest_fault(msgspec.structs.replace(artifact.manifest, extraction=extraction)) or "")
