"""What a call of a Model may say beside its inputs: the fields that requests have, under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from bei.config.sources import nearest
from bei.errors import InvalidRequestError, MalformedRequestError
from bei.port import Lane
from bei.tasks.entities import Aggregation
from bei.tasks.vector_formats import DenseDType
from bei.utils.surrogates import check_characters

OptionsT = TypeVar("OptionsT")

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0)]


class CallOptions(TypedDict, total=False):
    """``lane``: interactive or bulk; None: lists by their size, everything else is bulk. ``timeout_s``: seconds from
    the beginning of the call, after which it ends with DeadlineExceededError; None: never."""

    lane: Lane | None
    timeout_s: _Seconds | None


class ReadOptions(CallOptions, total=False):
    """How inputs are tokenized. ``truncate`` None: as the setting ``auto_truncate``; False: a text that is too long is
    an InputTooLongError. ``truncation_direction``: the side that is cut off, unless said the model's own.
    ``truncate_prompt_tokens``: fewer tokens than the model takes, special ones counted; -1: as many as it takes.
    ``add_special_tokens``: True unless said otherwise."""

    truncate: bool | None
    truncation_direction: Literal["left", "right"] | None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None
    add_special_tokens: bool


class PromptOptions(ReadOptions, total=False):
    """The prompt of texts: one of the model's by ``prompt_name``, the one for ``input_type`` (query, document, or a
    prompt's name), or ``prompt`` itself, in front of texts or around {text}; None: the model's default prompt."""

    prompt_name: str | None
    input_type: str | None
    prompt: str | None


class EmbedOptions(PromptOptions, total=False):
    """``dimensions``: vectors are cut to so many components. ``normalize``: to unit length; None: as the checkpoint
    says. ``output_dtype``: what the numbers are (``bei.tasks.vector_formats``); None: float32."""

    dimensions: _Count | None
    normalize: bool | None
    output_dtype: DenseDType | Literal["float32"] | None


class SparseOptions(PromptOptions, total=False):
    """``top_k``: only so many of the largest weights; None: all."""

    top_k: _Count | None


class ScoreOptions(ReadOptions, total=False):
    """``raw_scores``: logits in the place of probabilities."""

    raw_scores: bool


class RerankOptions(ScoreOptions, total=False):
    """``top_n``: only so many of the best documents; None or 0: all. ``instruction``: for models whose template has a
    slot for one."""

    top_n: Annotated[int, Meta(ge=0)] | None
    instruction: str | None


class EntityOptions(ScoreOptions, total=False):
    """``aggregation_strategy``: how tokens are joined to entities (``bei.tasks.entities``); "none" unless said otherwise."""

    aggregation_strategy: Aggregation


class ZeroShotOptions(ReadOptions, total=False):
    """``multi_label``: each label has a probability of its own. ``hypothesis_template``: a sentence with {} for the
    label."""

    multi_label: bool
    hypothesis_template: str


class TokenizeOptions(CallOptions, total=False):
    """``prompt_name`` and ``input_type``: as of texts that are embedded. ``add_special_tokens``: True unless said
    otherwise."""

    prompt_name: str | None
    input_type: str | None
    add_special_tokens: bool


def checked(kind: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """``given`` as ``kind``, a TypedDict. Raises InvalidRequestError that names the option."""
    known: frozenset[str] = kind.__optional_keys__  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            raise InvalidRequestError(
                f"There is no option {name!r} here.{nearest(name, sorted(known), 'options')}", name
            )
        value = given[name]
        if isinstance(value, str):
            check_characters(value, name, name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise MalformedRequestError(f"{name} is not valid: {what}.", name) from error
