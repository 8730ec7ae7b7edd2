"""The inputs of a request before they are submitted: estimated lengths, and encodings of token ids."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from bei.artifact.manifest import Manifest
from bei.core import Encoding
from bei.errors import InputTooLongError, InvalidRequestError
from bei.service.admission import estimated_length
from bei.service.call import ModelInput

# With more token ids, or more inputs, a call begins off the event loop: these take a millisecond.
_MANY_IDS = 16_384
_MANY_INPUTS = 1_000


def estimated_lengths(inputs: Seq[ModelInput], max_tokens: int) -> list[int]:
    """Tokens of each input; of texts a guess, at most ``max_tokens``."""
    return [
        estimated_length(len(value), max_tokens)
        if isinstance(value, str)
        else len(value)
        if isinstance(value, list)
        else estimated_length(len(value[0]) + len(value[1]), max_tokens)
        for value in inputs
    ]


def encoding_of_ids(ids: Seq[int], manifest: Manifest) -> Encoding:
    """Token ids as the engine gets them. Raises InvalidRequestError for ids that the model cannot read."""
    if not ids:
        raise InvalidRequestError("An input of token ids is empty: leave it out.", "input")
    if len(ids) > manifest.max_seq_len:
        raise InputTooLongError(
            f"An input has {len(ids)} token ids, the model takes up to {manifest.max_seq_len}: shorten it.", "input"
        )
    if min(ids) < 0 or max(ids) >= manifest.spec.vocab_size:
        raise InvalidRequestError(
            f"Token ids must be from 0 to {manifest.spec.vocab_size - 1}: use the tokenizer of {manifest.name}, "
            "or send texts.",
            "input",
        )
    return Encoding(np.array(ids, np.int32))


def is_large(inputs: Seq[ModelInput]) -> bool:
    """Whether a call with ``inputs`` should begin off the event loop."""
    return len(inputs) > _MANY_INPUTS or sum([len(ids) for ids in inputs if isinstance(ids, list)]) > _MANY_IDS
