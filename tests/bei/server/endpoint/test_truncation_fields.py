"""The words of all dialects for cutting inputs, as one kind of options."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import InvalidRequestError
from bei.server.endpoint.shared_fields import Controls
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions
from bei.tokenizer.truncation import encoding_options


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, AS_CONFIGURED),
        ({"truncate": True}, EncodingOptions(truncate=True)),
        ({"truncate": False}, EncodingOptions(truncate=False)),
        ({"truncate": "NONE"}, EncodingOptions(truncate=False)),
        ({"truncate": "START"}, EncodingOptions(truncate=True, direction="left")),
        ({"truncate": "END"}, EncodingOptions(truncate=True, direction="right")),
        ({"truncation_direction": "Left"}, EncodingOptions(direction="left")),
        ({"truncation_direction": "right"}, EncodingOptions(direction="right")),
        ({"truncation_side": "left"}, EncodingOptions(direction="left")),
        ({"truncate_prompt_tokens": 7}, EncodingOptions(truncate=True, max_tokens=7)),
        ({"truncate_prompt_tokens": -1}, EncodingOptions(truncate=True)),
        ({"truncate": True, "truncate_prompt_tokens": 7}, EncodingOptions(truncate=True, max_tokens=7)),
        ({"add_special_tokens": False}, EncodingOptions(add_special_tokens=False)),
    ],
)
def test_each_dialect_says_it_in_its_own_words(fields: dict[str, Any], options: EncodingOptions) -> None:
    assert Controls(**fields).encoding_options() == options


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate": "END", "truncation_direction": "Right"}, "truncate"),
        ({"truncate": False, "truncate_prompt_tokens": 7}, "truncate_prompt_tokens"),
        ({"truncate": "NONE", "truncate_prompt_tokens": 7}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Controls(**fields).encoding_options()
    assert caught.value.param == param


@given(
    st.sampled_from([None, True, False, "NONE", "START", "END"]),
    st.sampled_from([None, "Left", "Right", "left", "right"]),
    st.none() | st.integers(-1, 9),
)
def test_a_limit_always_allows_cutting_to_it(
    truncate: bool | str | None, direction: str | None, limit: int | None
) -> None:
    try:
        options = encoding_options(truncate, direction, limit)
    except InvalidRequestError:
        return
    assert options.truncate is True or limit is None
    assert options.max_tokens == (limit if limit is not None and limit > 0 else None)
