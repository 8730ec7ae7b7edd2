"""Which spans of a window are candidates."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bei.artifact.label_layouts import Extraction, Schema
from bei.core import Encoding
from bei.engine.words import LABEL, OTHER, WORD, with_absent
from bei.tasks.span_choice import Candidates, collect

GLINER = Extraction(label_id=5, separator_id=6, reads_marker=True, max_width=1, max_words=40)
GLINER2 = msgspec.structs.replace(GLINER, schema=Schema(before=[7], place=0, behind=[6]))


def found(layout: Extraction, kinds: list[int], absent: list[int], logit: float, num_words: int) -> Candidates:
    """At the threshold 0.5, of tokens whose scores are all ``logit``, and whose margin, if they have one, is 1."""
    columns = 2 if layout.schema else 1
    logits = np.full((len(kinds), columns * layout.max_width), logit, np.float32)
    logits[:, : columns - 1] = 1.0
    encoding = Encoding(np.zeros(len(kinds), np.int32), with_absent(np.array(kinds), np.array(absent)))
    candidates: Candidates = {}
    collect(candidates, logits, encoding, range(num_words), np.array([0.5], np.float32), layout)
    return candidates


@pytest.mark.parametrize("layout", [GLINER, GLINER2])
def test_words_that_have_no_tokens_are_in_no_span(layout: Extraction) -> None:
    kinds = [LABEL, *([LABEL] if layout.schema else []), OTHER]
    assert found(layout, kinds, [0] * (len(kinds) - 1) + [3], 5.0, 3) == {}


def test_a_score_at_the_threshold_is_a_span_in_gliner2_alone() -> None:
    assert found(GLINER, [LABEL, OTHER, WORD], [0, 0, 0], 0.0, 1) == {}
    assert found(GLINER2, [LABEL, LABEL, OTHER, WORD], [0, 0, 0, 0], 0.0, 1) == {(0, 0, 0): 0.5}
