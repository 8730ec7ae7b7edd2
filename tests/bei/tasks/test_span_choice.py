"""Which spans of a window are candidates."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bei.artifact.label_layouts import Extraction
from bei.core import Encoding
from bei.engine.words import LABEL, OTHER, WORD, with_absent
from bei.errors import InvalidRequestError
from bei.tasks import span_choice
from bei.tasks.span_choice import Candidates, choose, collect

GLINER = Extraction(label_id=5, separator_id=6, reads_marker=True, max_width=1, max_words=40)


def found(kinds: list[int], absent: list[int], logit: float, num_words: int) -> Candidates:
    """At the threshold 0.5, of tokens whose scores are all ``logit``."""
    logits = np.full((len(kinds), GLINER.max_width), logit, np.float32)
    encoding = Encoding(np.zeros(len(kinds), np.int32), with_absent(np.array(kinds), np.array(absent)))
    candidates: Candidates = {}
    collect(candidates, logits, encoding, range(num_words), np.array([0.5], np.float32), GLINER)
    return candidates


def test_words_that_have_no_tokens_are_in_no_span() -> None:
    assert found([LABEL, OTHER], [0, 3], 5.0, 3) == {}


def test_a_score_at_the_threshold_is_no_span() -> None:
    assert found([LABEL, OTHER, WORD], [0, 0, 0], 0.0, 1) == {}


def test_more_candidates_than_a_text_may_have_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_choice, "MOST_CANDIDATES", 2)
    assert len(found([LABEL, OTHER, WORD, WORD], [0] * 4, 1.0, 2)) == 2
    with pytest.raises(InvalidRequestError, match="More than 2 spans of a text score above") as caught:
        found([LABEL, OTHER, WORD, WORD, WORD], [0] * 5, 1.0, 3)
    assert caught.value.param == "threshold"


def plainly(
    candidates: Candidates, *, flat: bool, multi_label: bool, by_word: bool, apart: bool
) -> list[tuple[int, int, int]]:
    """As the libraries' loops: each candidate, best first, is compared with all that were kept."""
    kept: list[tuple[int, int, int]] = []

    def stands_beside(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        if apart and one[2] != other[2]:
            return True
        if one[:2] == other[:2]:
            return multi_label
        common = {*range(one[0], one[1] + 1)} & {*range(other[0], other[1] + 1)}
        nested = len(common) in (one[1] - one[0] + 1, other[1] - other[0] + 1)
        return not common or (nested and not flat)

    def rank(key: tuple[int, int, int]) -> tuple[float, ...]:
        first, last, label = key
        return (-candidates[key], first, *((label, last) if by_word else (last, label)))

    for candidate in sorted(candidates, key=rank):
        if all(stands_beside(candidate, other) for other in kept):
            kept.append(candidate)
    return sorted(kept, key=lambda one: one[0])  # the order of the rest stays


@pytest.mark.parametrize(("flat", "multi_label", "by_word", "apart"), [*product([False, True], repeat=4)])
def test_spans_are_chosen_as_by_comparing_all(flat: bool, multi_label: bool, by_word: bool, apart: bool) -> None:
    generator = np.random.default_rng(0)
    for count in (0, 1, 5, 40, 150):
        firsts, widths = generator.integers(0, 20, count), generator.integers(0, 6, count)
        labels, scores = generator.integers(0, 3, count), generator.integers(1, 30, count) / 30  # some are equal
        candidates = {
            (first, first + width, label): score
            for first, width, label, score in zip(
                firsts.tolist(), widths.tolist(), labels.tolist(), scores.tolist(), strict=True
            )
        }
        options = {"flat": flat, "multi_label": multi_label, "by_word": by_word, "apart": apart}
        assert [one[:3] for one in choose(candidates, **options)] == plainly(candidates, **options)
