"""Which pairs of spans a text is read again for, and which relations are left of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.label_layouts import RelationPairs
from bei.engine.boundaries import Pairs
from bei.tasks.candidate_relations import Edge, Mention, proposed, without_repetitions

TEXT = "Ann Lee and Bo met ann lee in New York ."
WORDS = [(0, 3), (4, 7), (8, 11), (12, 14), (15, 18), (19, 22), (23, 26), (27, 29), (30, 33), (34, 38), (39, 40)]


def mention(first: int, last: int, score: float = 0.5) -> Mention:
    start, end = WORDS[first][0], WORDS[last][1]
    return Mention(first, last, start, end, TEXT[start:end], score)


def edge(score: float, head: tuple[int, int], tail: tuple[int, int]) -> Edge:
    return Edge(score, mention(*head), mention(*tail))


def places(edges: list[Edge]) -> list[tuple[float, int, int, int, int]]:
    return [(one.score, one.head.first, one.head.last, one.tail.first, one.tail.last) for one in edges]


def test_mentions_inside_of_others_are_read_as_these() -> None:
    found = without_repetitions([edge(0.6, (0, 0), (3, 3)), edge(0.5, (0, 1), (9, 9)), edge(0.7, (0, 1), (3, 3))])
    assert places(found) == [(0.7, 0, 1, 3, 3), (0.5, 0, 1, 9, 9)]


def test_of_equal_texts_the_nearest_pair_is_left() -> None:
    far, near = edge(0.9, (0, 1), (8, 9)), edge(0.6, (5, 6), (8, 9))
    assert places(without_repetitions([far, near])) == [(0.6, 5, 6, 8, 9)]


def test_a_part_of_anothers_words_is_left_out_where_the_other_end_is_the_same() -> None:
    whole, part, other = edge(0.6, (0, 1), (3, 3)), edge(0.9, (5, 5), (3, 3)), edge(0.9, (5, 5), (9, 9))
    assert places(without_repetitions([part, whole])) == [(0.6, 0, 1, 3, 3)]
    assert places(without_repetitions([other, whole])) == [(0.6, 0, 1, 3, 3), (0.9, 5, 5, 9, 9)]


def test_one_relation_is_left_as_it_is() -> None:
    alone = edge(0.1, (0, 1), (3, 3))
    assert without_repetitions([alone]) == [alone]
    assert without_repetitions([]) == []


@given(
    seed=st.integers(0, 1000),
    most_heads=st.integers(1, 5),
    most_tails=st.integers(1, 5),
    most_pairs=st.integers(1, 9),
    least=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
)
def test_pairs_are_the_best_of_the_best_heads_and_tails(
    seed: int, most_heads: int, most_tails: int, most_pairs: int, least: float
) -> None:
    rng = np.random.default_rng(seed)
    starts, ends = np.array([0, 2, 3]), np.array([1, 3, 5])
    scores = rng.normal(size=(5, 3, 3)).astype(np.float32)  # of one label, and of two relations
    nothing = np.zeros((5, 3), np.float32)
    pairs = Pairs(starts, ends, scores[0], scores, nothing, nothing, nothing[:, 0])
    is_candidate = pairs.is_span & (rng.random((3, 3)) > 0.2)
    limits = RelationPairs(most_heads=most_heads, most_tails=most_tails, most_pairs=most_pairs, least_end=least)
    found = proposed(pairs, is_candidate, np.array([1, 3]), limits)
    wanted = []
    for relation, label in enumerate((1, 3)):
        sides = []
        for side, most in ((label, most_heads), (label + 1, most_tails)):
            spans = [
                (float(1 / (1 + np.exp(-np.float64(scores[side, i, j])))), int(starts[i]), int(ends[j]))
                for i, j in np.argwhere(is_candidate)
            ]
            sides.append([one for one in sorted(spans, key=lambda one: -one[0])[:most] if one[0] >= least])
        every = [(head, tail) for head in sides[0] for tail in sides[1] if head[1:] != tail[1:]]
        best = sorted(every, key=lambda one: -one[0][0] * one[1][0])[:most_pairs]
        wanted += [(relation, *head[1:], *tail[1:]) for head, tail in best]
    if found is None:
        assert wanted == []
        return
    assert [(relation, *spans) for relation, spans in zip(found.relations, found.spans.tolist(), strict=True)] == wanted
    np.testing.assert_array_equal(found.table.rows[:, 0], np.array([1, 3])[found.relations])
    np.testing.assert_array_equal(found.table.rows[:, 1:], found.spans)
