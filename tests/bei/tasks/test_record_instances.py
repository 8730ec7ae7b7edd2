"""Which instances of a structure are formed of candidates, and what they have."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Float32Array
from bei.engine.postprocess import apply_function
from bei.engine.record_columns import CandidateRows, LabelRows
from bei.errors import InvalidRequestError
from bei.tasks.record_instances import MOST_ASSIGNED, Formed, assignment, formed
from bei.tasks.schema_forms import AskedField, AskedPart
from bei.tokenizer.schema_prompt import SchemaPart

ONE = AskedField("one", 0.5, is_single=True, has_one=True)
LIST = AskedField("list", 0.5)


@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 4), more=st.integers(0, 3))
def test_an_assignment_has_the_least_sum(seed: int, num_rows: int, more: int) -> None:
    costs = np.random.default_rng(seed).integers(0, 9, (num_rows, num_rows + more)).astype(np.float64)
    found = assignment(costs)
    assert len({*found}) == num_rows
    every = permutations(range(costs.shape[1]), num_rows)
    assert costs[range(num_rows), found].sum() == min(costs[range(num_rows), columns].sum() for columns in every)


@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 9), more=st.integers(0, 6), kinds=st.integers(1, 3))
def test_of_equal_sums_scipys_assignment_is_taken(seed: int, num_rows: int, more: int, kinds: int) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    costs = np.random.default_rng(seed).integers(0, kinds, (num_rows, num_rows + more)).astype(np.float64)
    assert assignment(costs) == optimize.linear_sum_assignment(costs)[1].tolist()


def part(*fields: AskedField, **settings: Any) -> AskedPart:
    return AskedPart("a", fields, SchemaPart("structures 'a'", "a", tuple(one.name for one in fields)), **settings)


def of_scores(logits: list[list[float]], seeds: list[float]) -> tuple[CandidateRows, LabelRows]:
    """Candidates that score each other by ``logits`` [C, C], as instances by ``seeds``, and no value 0."""
    count = len(seeds)
    matrix, nothing = np.array(logits, np.float32), np.zeros(count, np.float32)
    identity, learned = np.eye(count, dtype=np.float32), np.zeros((count, 1), np.float32)
    candidates = CandidateRows(
        matrix, identity, matrix, learned, learned, np.array(seeds, np.float32), nothing, nothing, nothing
    )
    return candidates, labels(2, count)


def labels(num_fields: int, width: int) -> LabelRows:
    nothing: Float32Array = np.zeros((num_fields, 1), np.float32)
    return LabelRows(np.zeros((num_fields, width), np.float32), nothing, nothing[:, 0], np.zeros(1, np.float32))


def test_each_value_of_an_anchor_is_an_instance_the_best_first() -> None:
    candidates, own = of_scores([[0, 9, 0], [0, 0, 0], [0, 0, 5]], [-9, -9, -9])
    asked = part(ONE, LIST, mode="natural", anchor=0, threshold=0.6)
    found = formed(asked, np.array([1.0, -5.0, 3.0], np.float32), candidates, own)
    assert [one.values[0][0][0] for one in found] == [2, 0]
    assert [[place for place, _ in one.values[1]] for one in found] == [[2], [1]]
    assert [one.score for one in found] == pytest.approx([1 / (1 + np.exp(-3)), 1 / (1 + np.exp(-1))])


def test_exclusive_fields_give_each_value_to_one_instance() -> None:
    candidates, own = of_scores([[9, 8, 0], [9, 0, 0], [0, 0, 0]], [2, 1, -9])
    for exclusive, wanted in ((False, [0]), (True, [1, 0])):  # two instances with the same values are one
        field = ONE._replace(exclusive=exclusive)
        found = formed(part(field, field, mode="latent", threshold=0.2), None, candidates, own)
        assert [one.values[0][0][0] for one in found] == wanted


def test_a_list_that_is_exclusive_has_the_values_that_score_highest_in_its_instance() -> None:
    candidates, own = of_scores([[4, 1, 0], [5, 0.5, 0], [0, 0, 0]], [2, 1, -9])
    field = LIST._replace(exclusive=True)
    found = formed(part(field, field, mode="latent", threshold=0.6), None, candidates, own)
    assert [[place for place, _ in one.values[0]] for one in found] == [[1], [0]]


def test_near_one_probabilities_are_equal_and_the_first_instance_has_the_value() -> None:
    candidates, own = of_scores([[16.7, 0], [16.9, 0]], [2, 1])
    field = LIST._replace(exclusive=True)
    found = formed(part(field, LIST, mode="latent", threshold=0.6), None, candidates, own)
    assert [[place for place, _ in one.values[0]] for one in found] == [[0], []]


def test_of_equal_instances_the_best_is_left() -> None:
    candidates, own = of_scores([[9, 0], [9, 0]], [1, 2])
    found = formed(part(ONE, ONE, mode="latent"), None, candidates, own)
    assert [one.score for one in found] == pytest.approx([1 / (1 + np.exp(-2))])


def test_a_value_that_must_be_there_is_there_whatever_it_scores() -> None:
    candidates, own = of_scores([[-8, -9], [-9, -9]], [2, -9])
    for must_be_there, count in ((False, 0), (True, 1)):
        field = ONE._replace(must_be_there=must_be_there)
        found = formed(part(field, field, mode="latent"), None, candidates, own)
        assert len(found) == count
        assert all(one.values[0][0][0] == 0 for one in found)


@pytest.mark.parametrize("mode", ["natural", "latent", "anchorless"])
def test_instances_are_those_of_the_gliner2_librarys_decoder_for_the_same_scores(mode: Any) -> None:
    pytest.importorskip("gliner2")
    rng = np.random.default_rng(39)
    num_instances = num_values = 0
    for _ in range(40):
        fields = tuple(random_field(rng, place, is_anchor=mode == "natural" and not place) for place in range(4))
        threshold = float(rng.uniform(0.2, 0.8))
        asked = part(*fields, mode=mode, anchor=0 if mode == "natural" else None, threshold=threshold)
        candidates, own, anchors = random_rows(rng, len(fields))
        found = formed(asked, anchors if mode == "natural" else None, candidates, own)
        if mode == "natural":  # the library's are in the order of the text
            found.sort(key=lambda one: one.values[0][0][0])
        expected = of_library(asked, anchors, candidates, own)
        assert [[[place for place, _ in values] for values in one.values] for one in found] == [
            [[place for place, _ in values] for values in one.values] for one in expected
        ]
        for one, other in zip(found, expected, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-6)
            scores = [[score for values in each.values for _, score in values] for each in (one, other)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-6)
            num_values += len(scores[0])
        num_instances += len(found)
    assert num_instances > 100
    assert num_values > 300


def random_field(rng: np.random.Generator, place: int, *, is_anchor: bool) -> AskedField:
    has_one, must_be_there, exclusive = (bool(rng.integers(2)) for _ in range(3))
    if is_anchor:
        has_one, must_be_there = True, True
    return AskedField(
        str(place), 0.5, is_single=has_one, has_one=has_one, must_be_there=must_be_there, exclusive=exclusive
    )


def random_rows(rng: np.random.Generator, num_fields: int) -> tuple[CandidateRows, LabelRows, Float32Array]:
    """7 candidates and 5 learned instances of 6 numbers; scores of the anchor."""

    def random(*shape: int) -> Float32Array:
        return rng.normal(size=shape).astype(np.float32)

    candidates = CandidateRows(
        *(random(7, 6) for _ in range(3)), *(random(7, 5) for _ in range(2)), *(random(7) for _ in range(4))
    )
    return candidates, LabelRows(random(num_fields, 6), random(num_fields, 5), random(num_fields), random(5)), random(7)


def of_library(asked: AskedPart, anchors: Float32Array, candidates: CandidateRows, own: LabelRows) -> list[Formed]:
    """What ``decode_group`` has for the same scores of instances and of their fields."""
    records = pytest.importorskip("gliner2.models.boundary.records")
    torch = pytest.importorskip("torch")
    objects, queries = anchors, candidates.instances
    beside: Float32Array = np.zeros((1, 1), np.float32)
    no_value: Float32Array = candidates.nothing[:, None] + own.nothing
    if asked.mode == "latent":
        objects = candidates.seed
    elif asked.mode == "anchorless":
        shares = apply_function(candidates.attention.T, "softmax")
        objects, queries = own.learned + shares @ candidates.objects, shares @ candidates.values
        beside, no_value = candidates.learned.T, own.learned_nothing.T + (shares @ candidates.value_nothing)[:, None]
    scores = [(queries + field) @ candidates.fields.T + beside for field in own.fields]
    spans = torch.tensor([[place, place + 1] for place in range(len(candidates.seed))])
    names = {(True, True): "required_one", (True, False): "optional_one"}
    names |= {(False, True): "one_or_more", (False, False): "zero_or_more"}
    specs = [
        records.RecordFieldSpec(
            place,
            one.name,
            place,
            records.FieldCardinality(names[one.has_one, one.must_be_there]),
            is_anchor=place == asked.anchor,
            exclusive=one.exclusive,
        )
        for place, one in enumerate(asked.fields)
    ]
    count = len(specs)
    places = [(int(place), int(place) + 1) if asked.mode == "natural" else None for place in range(len(objects))]
    group = records.RecordGroupOutput(
        records.RecordSpec(0, "a", "json_structures", asked.mode, tuple(specs), anchor_query_id=asked.anchor),
        torch.tensor(objects),
        [torch.tensor(np.concatenate([no_value[:, [place]], score], axis=1)) for place, score in enumerate(scores)],
        [*range(count)],
        specs,
        [spans] * count,
        [torch.ones(len(spans), dtype=torch.bool)] * count,
        [torch.zeros(len(spans))] * count,
        [(asked.anchor, span[0]) if span else None for span in places],
        places,
    )
    thresholds = dict.fromkeys(("anchor_threshold", "field_threshold", "object_threshold"), asked.threshold)
    return [
        Formed(
            one.score,
            tuple(
                tuple((span[0], score) for span, score in zip(one.fields[place], one.field_scores[place], strict=True))
                if place in one.fields
                else ()
                for place in range(count)
            ),
        )
        for one in records.decode_group(group, **thresholds)
    ]


def test_more_values_than_a_text_may_have_are_refused_by_name() -> None:
    count = 182
    candidates, own = of_scores(np.full((count, count), 9.0).tolist(), [1.0] * count)
    with pytest.raises(InvalidRequestError, match="More than 65536 spans of a text score above their thresholds"):
        formed(part(LIST, LIST, mode="latent", threshold=0.5), None, candidates, own)


def test_more_instances_than_values_are_shared_out_between_are_refused_by_name() -> None:
    count = int((MOST_ASSIGNED / 2) ** 0.5) + 1
    candidates, own = of_scores(np.eye(count).tolist(), [1.0] * count)
    field = ONE._replace(exclusive=True)
    with pytest.raises(InvalidRequestError, match=f"The structure 'a' has {count} instances in a text"):
        formed(part(field, field, mode="latent", threshold=0.5), None, candidates, own)
