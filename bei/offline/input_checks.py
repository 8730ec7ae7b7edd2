"""Inputs of a Model, checked one by one: what a JSON decoder and the routes of ``bei serve`` check of a request's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import numpy as np

from bei.errors import EmptyInputError, MalformedRequestError
from bei.tokenizer.encoder import Input
from bei.utils.surrogates import check_characters

InputT = TypeVar("InputT")

TextOrIds: TypeAlias = "str | list[int]"

# An input and its place -> the input; raises InvalidRequestError that names the place.
Check: TypeAlias = Callable[[object, int], InputT]


def text(value: object, index: int, param: str = "inputs") -> str:
    """``value``, a text that is not empty."""
    if not isinstance(value, str):
        raise _malformed(value, index, param, "a text")
    if not value:
        raise EmptyInputError(f"{param} {index} is an empty text: leave it out.", param)
    check_characters(value, f"{param} {index}", param)
    return value


def text_or_ids(value: object, index: int) -> TextOrIds:
    """``value``, a text, or the token ids of one input."""
    if not isinstance(value, list):
        if isinstance(value, str):
            return text(value, index)
        raise _malformed(value, index, "inputs", "a text, or a list of the token ids of one input")
    if not all(isinstance(one, (int, np.integer)) for one in value):
        raise MalformedRequestError(
            f"inputs {index} is a list that does not hold token ids alone: give texts as inputs of their own, not in "
            "a list.",
            "inputs",
        )
    return value


def text_or_pair(value: object, index: int) -> Input:
    """``value``, a text, or two that the model reads together."""
    if isinstance(value, str):
        return text(value, index)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise _malformed(value, index, "inputs", "a text, or a pair of texts")
    return text(value[0], index), text(value[1], index)


def _malformed(value: object, index: int, param: str, expected: str) -> MalformedRequestError:
    kind = type(value).__name__
    return MalformedRequestError(f"{param} {index} has the type {kind}, and must be {expected}.", param)
