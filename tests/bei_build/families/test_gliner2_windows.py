"""Windows of a long text, beside the same model that reads the text whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bei import Model
from tests.bei_build.families.test_gliner import LABELS
from tests.bei_build.families.test_gliner2 import built
from tests.support.gliner2_models import MAX_WIDTH

WORDS, OVERLAP = 40, 10  # of a window
FAR = 4  # words: two layers look at two tokens to each side
ENCODER = {
    "layer_types": ["sliding_attention"] * 2,
    "local_attention": 4,
    "max_position_embeddings": 2048,
}


def test_what_has_its_context_in_a_window_scores_as_in_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(39)
    words = [*rng.choice(["cat", "the", "a", "b", "is", "日本"], 129).tolist(), "."]
    text = " ".join(words)
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])[:-1].tolist()
    # All candidates, so that none is left out for a better one that a window's end has made.
    monkeypatch.setattr("bei.tasks.extract.choose", lambda found, **_: [(*key, found[key]) for key in sorted(found)])
    found = []
    for name, most in (("windows", WORDS), ("whole", len(words))):
        artifact = built(tmp_path / name, "modernbert", none=-20.0, encoder=ENCODER, max_len=most)
        with Model(artifact.path, tune="off") as model:
            (spans,) = model.extract([text], LABELS, threshold=0.0)
        assert all(span.text == text[span.start : span.end] for span in spans)
        found.append({(starts.index(span.start), span.text.count(" "), span.label): span.score for span in spans})
    windows, whole = found
    assert windows.keys() == whole.keys()
    assert len(whole) == len(LABELS) * sum(min(MAX_WIDTH, len(words) - place) for place in range(len(words)))
    ranges = [(first, first + WORDS) for first in range(0, len(words) - OVERLAP, WORDS - OVERLAP)]
    num_alone = num_shared = 0
    for (first, width, label), score in whole.items():
        holding = [one for one in ranges if one[0] <= first and first + width < one[1]]
        far = [
            (start, stop)
            for start, stop in holding
            if (start == 0 or first >= start + FAR) and (stop == len(words) or first + width < stop - FAR)
        ]
        if len(holding) == len(far) == 1:
            assert windows[first, width, label] == pytest.approx(score, abs=2e-4)
            num_alone += 1
        elif far:  # of two windows the better score counts
            assert windows[first, width, label] > score - 2e-4
            num_shared += 1
    assert min(num_alone, num_shared) > 100
    assert max(abs(windows[key] - whole[key]) for key in whole) > 1e-3  # at ends of windows
