"""Which pairs of boundaries are a text's candidates, and which candidates are its spans."""

from __future__ import annotations

from itertools import combinations, product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.label_layouts import Candidates, Extraction, Schema
from bei.core import EXTRAS, Encoding, Float32Array
from bei.engine.boundaries import DIGIT, Pairs
from bei.engine.words import LABEL, OTHER, WORD, with_absent
from bei.errors import InvalidRequestError
from bei.tasks.candidate_spans import CandidateReader, in_pool, ranked
from bei.tasks.extract_labels import CheckedLabels
from bei.tasks.schema_forms import AskedField, AskedPart, AskedSchema
from bei.tasks.schema_spans import Found, RawValue
from bei.tasks.span_choice import Candidates as Scored
from bei.tasks.span_choice import choose_most
from bei.tokenizer.schema_prompt import SchemaPart

POOL = Candidates(most_boundaries=3, pool_size=4, least_per_label=1, absent_above=0.5)
SCHEMA = Schema(
    task="entities",
    opening=[1],
    closing=[3],
    part_id=7,
    field_id=4,
    relation_id=5,
    between_id=6,
    separator_id=9,
    num_counts=4,
)
LAYOUT = Extraction(
    label_id=8, separator_id=9, reads_marker=True, max_width=40, max_words=40, schema=SCHEMA, candidates=POOL
)
LABELS = CheckedLabels(("cat", "dog"), (0.5, 0.9))


def pairs(seed: int, num_labels: int, size: int) -> Pairs:
    rng = np.random.default_rng(seed)
    one, two, three, four = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((size, size), (num_labels, size, size), (num_labels, size), (num_labels, size))
    )
    places = np.sort(rng.choice(20, (2, size), replace=False) if size <= 10 else rng.integers(0, 20, (2, size)))
    return Pairs(places[0], places[1] + 1, one, two, three, four, np.zeros(num_labels, np.float32))


@given(seed=st.integers(0, 1000), num_labels=st.integers(1, 6), size=st.integers(1, 6), pool_size=st.integers(1, 12))
def test_candidates_are_the_best_of_each_label_then_the_best_of_all(
    seed: int, num_labels: int, size: int, pool_size: int
) -> None:
    given_pairs = pairs(seed, num_labels, size)
    pool = Candidates(most_boundaries=size, pool_size=pool_size, least_per_label=min(2, pool_size), absent_above=0.5)
    spans = [
        (start, end)
        for start, end in product(range(size), range(size))
        if given_pairs.ends[end] > given_pairs.starts[start]
    ]

    def score(label: int, span: tuple[int, int]) -> float:
        starts, ends = given_pairs.start_scores[label, span[0]], given_pairs.end_scores[label, span[1]]
        return float(starts + ends + given_pairs.compat[span])

    rank = {}
    for span in spans:
        best = [side.max(axis=0)[at] for side, at in zip(given_pairs[4:6], span, strict=True)]
        rank[span] = float(given_pairs.compat[span] + best[0] + best[1])
    for label in range(num_labels):
        ordered = sorted(spans, key=lambda span: (-score(label, span), span))
        for place, span in enumerate(ordered[: pool.least_per_label]):
            rank[span] = max(rank[span], 5000.0 + pool.least_per_label - place)
    wanted = sorted(spans, key=lambda span: (-rank[span], span))[:pool_size]
    assert sorted(map(tuple, np.argwhere(in_pool(given_pairs, pool)).tolist())) == sorted(wanted)
    assert [*zip(*(side.tolist() for side in ranked(given_pairs, pool)), strict=True)] == wanted


@given(
    spans=st.dictionaries(
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 1)),
        st.sampled_from([0.25, 0.5, 0.75, 0.875]),
        max_size=7,
    ),
    apart=st.booleans(),
)
def test_spans_have_the_largest_sum_of_scores_of_all_that_do_not_overlap(
    spans: dict[tuple[int, int, int], float], apart: bool
) -> None:
    found: Scored = {(first, first + more, label): score for (first, more, label), score in spans.items()}
    chosen = [*choose_most(found, apart=apart)]
    assert all(found[first, last, label] == score for first, last, label, score in chosen)
    assert [one[0] for one in chosen] == sorted(one[0] for one in chosen)

    def fits(some: tuple[tuple[int, int, int], ...]) -> bool:
        return all(
            (apart and one[2] != two[2]) or one[1] < two[0] or two[1] < one[0] for one, two in combinations(some, 2)
        )

    sets = [some for size in range(len(found) + 1) for some in combinations(found, size) if fits(some)]
    most = max(sum(found[one] for one in some) for some in sets)
    assert fits(tuple(one[:3] for one in chosen))
    assert sum(one[3] for one in chosen) == most


def test_of_equal_sums_more_spans_are_chosen_then_the_better_one() -> None:
    assert [one[:2] for one in choose_most({(0, 1, 0): 1.0, (0, 0, 0): 0.5, (1, 1, 0): 0.5}, apart=True)] == [
        (0, 0),
        (1, 1),
    ]
    assert [one[:2] for one in choose_most({(0, 1, 0): 0.5, (1, 2, 0): 0.5}, apart=True)] == [(0, 1)]


def rows_of(scores: list[float], absent: list[float], num_tokens: int) -> Float32Array:
    """Of three words, whose boundaries are all chosen; ``scores``: of all pairs for each label."""
    rows = np.zeros((num_tokens, 3, 3 + EXTRAS), np.float32)
    for label, (score, missing) in enumerate(zip(scores, absent, strict=True), 1):
        rows[:, label, :3] = score
        rows[:, label, 5] = missing
    rows[:3, 0, 3:] = [[start // DIGIT, start, 0, start + 1] for start in range(3)]
    return rows.reshape(num_tokens, -1)


def read(rows: Float32Array, num_words: int = 3) -> Scored:
    found = Found()
    kinds = np.array([LABEL, LABEL, *[WORD] * 3, *[OTHER] * (len(rows) - 5)])
    encoding = Encoding(np.zeros(len(rows), np.int32), with_absent(kinds, np.zeros(len(kinds), np.int64)))
    reader = CandidateReader(LABELS, AskedSchema(), LAYOUT, flat=True)
    assert reader.read(found, rows, encoding, range(10, 10 + num_words), []) is None
    return found.labels


def test_spans_are_of_the_pool_and_reach_their_thresholds() -> None:
    found = read(rows_of([2.0, 2.0], [-1.0, -1.0], 6))
    assert {label for _, _, label in found} == {0}  # 0.88 is below the other's threshold
    assert len(found) == POOL.pool_size
    assert [*found.values()] == pytest.approx([0.8808] * len(found), abs=1e-4)


def test_an_absent_label_has_no_spans() -> None:
    assert {label for _, _, label in read(rows_of([5.0, 5.0], [1.0, -1.0], 6))} == {1}


def test_no_span_ends_in_the_full_stop_that_a_text_lacks() -> None:
    assert max(last for _, last, _ in read(rows_of([5.0, 5.0], [-1.0, -1.0], 6), num_words=2)) == 11


def test_a_structure_has_one_instance_of_its_fields_best_spans_and_no_field_is_absent() -> None:
    fields = AskedField("name", 0.5), AskedField("kind", 0.5, is_single=True)
    asked = AskedSchema((AskedPart("pet", fields, SchemaPart("structures 'pet'", "pet", ("name", "kind"))),))
    found = Found()
    kinds = np.array([LABEL, LABEL, WORD, WORD, WORD, OTHER])
    encoding = Encoding(np.zeros(6, np.int32), with_absent(kinds, np.zeros(6, np.int64)))
    pool = msgspec.structs.replace(POOL, pool_size=6)
    reader = CandidateReader(None, asked, msgspec.structs.replace(LAYOUT, candidates=pool), flat=True)
    assert reader.read(found, rows_of([2.0, 1.0], [9.0, 9.0], 6), encoding, range(10, 13), [1]) is None
    ((window, (names, (kind,))),) = found.records[0]
    assert window == 10
    assert [raw[1:3] for raw in names] == [(10, 10), (11, 11), (12, 12)]  # more spans have a larger sum
    assert isinstance(kind, RawValue)
    assert kind.score == pytest.approx(0.7311, abs=1e-4)


def test_a_structure_without_spans_has_no_instance() -> None:
    asked = AskedSchema((AskedPart("pet", (AskedField("name", 0.9),), SchemaPart("structures", "pet", ("name",))),))
    found = Found()
    encoding = Encoding(np.zeros(5, np.int32), np.array([LABEL, OTHER, WORD, WORD, WORD], np.int32))
    reader = CandidateReader(None, asked, LAYOUT, flat=True)
    reader.read(found, rows_of([1.0], [0.0], 5)[:, :21], encoding, range(3), [1])
    assert found.records == {0: []}


def test_a_text_of_words_without_tokens_is_refused() -> None:
    encoding = Encoding(np.zeros(2, np.int32), with_absent(np.array([LABEL, WORD]), np.array([0, 5])))
    with pytest.raises(InvalidRequestError, match="6 words, most of which have no tokens"):
        CandidateReader(LABELS, AskedSchema(), LAYOUT, flat=True).read(
            Found(), rows_of([1.0, 1.0], [0.0, 0.0], 5)[:2], encoding, range(6), []
        )
