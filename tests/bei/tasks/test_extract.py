"""How many labels a text may be scored for."""

from __future__ import annotations

import pytest

from bei.artifact.label_layouts import Extraction
from bei.tasks.extract import MOST_LABELS, _most_vectors


@pytest.mark.parametrize(
    ("width", "by_word", "most"), [(8, False, 256), (12, False, 256), (64, False, 48), (384, True, 64)]
)
def test_wide_spans_leave_room_for_fewer_labels(width: int, by_word: bool, most: int) -> None:
    layout = Extraction(
        label_id=-1, separator_id=-1, reads_marker=False, max_width=width, max_words=384, by_word=by_word, label_width=8
    )
    assert _most_vectors(layout) == most
    if not by_word:
        assert most * width <= MOST_LABELS * 12
