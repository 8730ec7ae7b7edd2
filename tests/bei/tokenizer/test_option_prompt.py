"""Questions and options in front of texts: what a tokenizer makes of a marker."""

from __future__ import annotations

import pytest

from bei.artifact.label_layouts import OptionMarkers
from bei.errors import InvalidRequestError
from bei.tokenizer.option_prompt import OptionPrompt, around_text
from tests.support.checkpoints import unigram_tokenizer

LAYOUT = OptionMarkers(
    start_id=0,
    separator_id=2,
    marker_id=4,
    marker_token="<mask>",
    max_option_tokens=48,
    max_question_tokens=192,
    temperatures={"choice": 1.0, "score": 1.0, "noul": 1.0},
)
WIDE = "\uff1cmask\uff1e"  # which NFKC makes the marker


@pytest.mark.parametrize(("question", "option"), [(f"what {WIDE}", "a"), ("what", f"a {WIDE}")])
def test_a_marker_that_the_tokenizer_makes_is_refused_wherever_it_stands(question: str, option: str) -> None:
    """In front of the options it was read as the first of them."""
    with pytest.raises(InvalidRequestError, match="has the model's own token '<mask>'"):
        around_text(unigram_tokenizer(), OptionPrompt(LAYOUT, "q", 0, question, (option, "b")), 512)


def test_a_marker_that_is_spelled_is_a_blank() -> None:
    tokenizer = unigram_tokenizer()
    spelled, blank = (
        around_text(tokenizer, OptionPrompt(LAYOUT, "q", 0, f"what{one}is", (f"a{one}c", "b")), 512)[0].tolist()
        for one in ("<mask>", " ")
    )
    assert spelled == blank
    assert spelled.count(LAYOUT.marker_id) == 2
