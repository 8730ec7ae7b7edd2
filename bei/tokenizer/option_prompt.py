"""A question and its options in front of a text, each option behind a marker (Laya).

As laya's ``build_sequence`` lays them out, which cuts what does not fit; here that is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bei.artifact.label_layouts import OptionMarkers
from bei.core import Int32Array
from bei.errors import InvalidRequestError
from bei.tokenizer.alike import check_told_apart

# Tokens that a question has, and that an option has with its marker, however many options there are.
_LEAST_QUESTION, _LEAST_OPTION = 8, 4
_MOST_CHARS_PER_TOKEN = 64  # of longer texts the model reads more tokens than fit


class OptionPrompt(NamedTuple):
    """A question called ``name``, of the kind with this number, and its ``options``, as the model reads them."""

    layout: OptionMarkers
    name: str
    kind: int
    question: str
    options: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        """Characters that are read with each text."""
        return len(self.question) + sum(map(len, self.options))


def around_text(tokenizer: Tokenizer, prompt: OptionPrompt, most: int) -> tuple[Int32Array, Int32Array]:
    """The ids before and behind a text; ``most``: tokens that the model reads. Raises InvalidRequestError for what does
    not fit, of which the model would read a part, and for options that it cannot tell apart."""
    layout = prompt.layout
    question, *options = _tokens(tokenizer, prompt)
    named = f"The question {prompt.name[:40]!r}"
    for text, option in zip(prompt.options, options, strict=True):
        if len(option) > layout.max_option_tokens:
            raise _refused(
                f"{named} has the option {text[:40]!r} of {len(option)} tokens, and the model reads "
                f"{layout.max_option_tokens} of one: shorten it."
            )
    if any(layout.marker_id in tokens for tokens in (question, *options)):
        raise _refused(f"{named} has the model's own token {layout.marker_token!r} in its words: take it out.")
    check_told_apart(f"{named} has options, of which numbers", prompt.options, options, "questions")
    taken, least = sum(len(option) + 1 for option in options), 2 * _LEAST_QUESTION
    room = layout.max_question_tokens - taken
    share = max(_LEAST_OPTION, (layout.max_question_tokens - least) // len(options))
    if room < least and any(len(option) + 1 > share for option in options):
        raise _refused(
            f"{named} has options of {taken} tokens, and the model reads {layout.max_question_tokens - least} of "
            "them: send fewer or shorter ones."
        )
    if len(question) > max(_LEAST_QUESTION, room):
        raise _refused(
            f"{named} has {len(question)} tokens, and beside its options the model reads "
            f"{max(_LEAST_QUESTION, room)}: shorten its instructions."
        )
    ids = [layout.start_id, *question, layout.separator_id]
    for option in options:
        ids += [layout.marker_id, *option]
    ids.append(layout.separator_id)
    if len(ids) >= most:
        raise _refused(
            f"{named} and its options have {len(ids)} tokens, and the model reads {most} with the text: send fewer or "
            "shorter ones."
        )
    return np.array(ids, np.int32), np.array([layout.separator_id], np.int32)


def _tokens(tokenizer: Tokenizer, prompt: OptionPrompt) -> list[tuple[int, ...]]:
    """Of the question, then of each option."""
    layout = prompt.layout
    texts = [prompt.question, *(f" {option}" for option in prompt.options)]
    limits = [layout.max_question_tokens, *[layout.max_option_tokens] * len(prompt.options)]
    for text, most in zip(texts, limits, strict=True):
        if len(text) > most * _MOST_CHARS_PER_TOKEN:
            raise _refused(
                f"The question {prompt.name[:40]!r} has {len(text)} characters in its instructions or an option, and "
                f"the model reads {most} tokens of them: shorten them."
            )
    found = tokenizer.encode_batch_fast([layout.without_marker(text) for text in texts], add_special_tokens=False)
    return [tuple(one.ids) for one in found]


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "questions")
