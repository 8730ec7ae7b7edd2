"""Truncation options: one form for the fields of the APIs."""

from __future__ import annotations

from bei.errors import InvalidRequestError
from bei.tokenizer.encoder import AS_CONFIGURED, CutSide, EncodingOptions

_SIDES: dict[str, CutSide] = {"START": "left", "END": "right"}


def encoding_options(
    truncate: bool | str | None = None,
    truncation_direction: str | None = None,
    truncate_prompt_tokens: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> EncodingOptions:
    """The encoding options of a request. ``truncate_prompt_tokens`` is vLLM's: -1 truncates at the model's own limit.

    Raises InvalidRequestError for contradicting options.
    """
    if truncate is None and truncation_direction is None and truncate_prompt_tokens is None and add_special_tokens:
        return AS_CONFIGURED
    direction: CutSide | None = None
    if truncation_direction is not None:
        direction = "left" if truncation_direction.lower() == "left" else "right"
    if isinstance(truncate, str):
        if truncation_direction is not None:
            raise InvalidRequestError(
                f"truncate {truncate!r} says which end is cut, as truncation_direction does: leave "
                "truncation_direction out.",
                "truncate",
            )
        direction = _SIDES.get(truncate)
        truncate = truncate != "NONE"
    if truncate_prompt_tokens is not None:
        if truncate is False or truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens asks for cutting to at least one token: set it to -1 or above 0, and truncate "
                "to true or nothing.",
                "truncate_prompt_tokens",
            )
        truncate = True
    limit = truncate_prompt_tokens if (truncate_prompt_tokens or -1) > 0 else None
    return EncodingOptions(truncate, direction, limit, add_special_tokens)
