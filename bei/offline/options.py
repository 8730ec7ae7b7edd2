"""Options of a Model's calls: the fields of HTTP requests, under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypedDict, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta

from bei.config.sources import nearest
from bei.errors import InvalidRequestError, MalformedRequestError
from bei.offline.progress import Progress
from bei.offline.results import Report
from bei.port import Lane
from bei.tasks.compare import ScoreMode
from bei.tasks.entities import Aggregation
from bei.tasks.vector_formats import DenseDType
from bei.utils.surrogates import check_characters

T = TypeVar("T")
OptionsT = TypeVar("OptionsT")

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0)]
_LOCAL = ("report", "progress")
# Options of ``encode``, and what the other methods call them.
_OF_ENCODE = {
    "truncate_dim": "dimensions",
    "normalize_embeddings": "normalize",
    "precision": "output_dtype",
    "show_progress_bar": "progress",
}


class CallOptions(TypedDict, total=False):
    """``lane``: interactive or bulk; None: lists by their size, all else bulk. ``timeout_s``: seconds from the start of
    the call until it raises DeadlineExceededError; None: no limit. ``report`` and ``progress`` are no fields of
    requests: see ``Report`` and ``Progress``."""

    lane: Lane | None
    timeout_s: _Seconds | None
    report: Report | None
    progress: Progress


class ReadOptions(CallOptions, total=False):
    """Options of tokenization. ``truncate``: None: as the setting ``auto_truncate``; False: a text that is too long
    raises InputTooLongError. ``truncation_direction``: the side that is cut off; None: the model's own.
    ``truncate_prompt_tokens``: at most this many tokens, special ones included; -1: as many as the model takes.
    ``add_special_tokens``: True by default."""

    truncate: bool | None
    truncation_direction: Literal["left", "right"] | None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None
    add_special_tokens: bool


class PromptOptions(ReadOptions, total=False):
    """The prompt of texts: one of the model's by ``prompt_name``, the one for ``input_type`` (query, document, or the
    name of a prompt), or the literal ``prompt``, in front of texts or around {text}; None: the model's default."""

    prompt_name: str | None
    input_type: str | None
    prompt: str | None


class EmbedOptions(PromptOptions, total=False):
    """``dimensions``: shortens vectors to this width. ``normalize``: to unit length; None: as the checkpoint says.
    ``output_dtype``: number format (``bei.tasks.vector_formats``); None: float32."""

    dimensions: _Count | None
    normalize: bool | None
    output_dtype: DenseDType | Literal["float32"] | None


class SparseOptions(PromptOptions, total=False):
    """``top_k``: keeps the largest weights; None: all."""

    top_k: _Count | None


class ScoreOptions(ReadOptions, total=False):
    """``raw_scores``: logits instead of probabilities."""

    raw_scores: bool


class RerankOptions(ScoreOptions, total=False):
    """``top_n``: returns the best documents only; None or 0: all. ``instruction``: for models whose template has a slot
    for one. ``label``: of a classifier, whose probability is the score. ``score_mode``: of an embedder, the vectors
    that are compared (``bei.tasks.compare``); ``score_weights``: of each kind, in the mode hybrid."""

    top_n: Annotated[int, Meta(ge=0)] | None
    instruction: str | None
    label: str | None
    score_mode: ScoreMode | None
    score_weights: dict[str, float] | None


class EntityOptions(ScoreOptions, total=False):
    """``aggregation_strategy``: how tokens are joined to entities (``bei.tasks.entities``); "none" by default."""

    aggregation_strategy: Aggregation


class ZeroShotOptions(ReadOptions, total=False):
    """``multi_label``: each label has an independent probability. ``hypothesis_template``: a sentence with {} for the
    label. ``examples``: texts with the label of each, for GLiNER2."""

    multi_label: bool
    hypothesis_template: str
    examples: list[tuple[str, str]]


class ExtractOptions(CallOptions, total=False):
    """``threshold``: spans score above it, one number or one for each label by name; 0.5 by default. ``flat``: spans do
    not overlap, which is the default, else they may lie inside each other. ``multi_label``: a span may have several
    labels."""

    threshold: float | dict[str, float]
    flat: bool
    multi_label: bool


class RelationOptions(CallOptions, total=False):
    """``threshold``: pairs of entities score above it; 0.5 by default. A relation may have its own."""

    threshold: float


class TokenizeOptions(CallOptions, total=False):
    """``prompt_name`` and ``input_type``: as in PromptOptions. ``add_special_tokens``: True by default."""

    prompt_name: str | None
    input_type: str | None
    add_special_tokens: bool


def checked(kind: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """``given`` as ``kind``, a TypedDict. Raises InvalidRequestError that names the option."""
    fields = _request_fields(kind)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    options = dict(given)
    if not isinstance(given.get("report"), Report | None):
        raise MalformedRequestError("report must be a Report, which is filled, or None.", "report")
    if not isinstance(progress := given.get("progress"), bool | None) and not callable(progress):
        raise MalformedRequestError("progress must be True, False, or a function of (done, total).", "progress")
    for name in [name for name in given if name not in _LOCAL]:
        if name not in fields:
            known = _OF_ENCODE.get(name)
            meant = f" Use {known!r}." if known in {*fields, *_LOCAL} else nearest(name, sorted(fields), "options")
            raise InvalidRequestError(f"There is no option {name!r} here.{meant}", name)
        value = given[name]
        if isinstance(value, str):
            check_characters(value, name, name)
        try:
            options[name] = msgspec.convert(value, fields[name])
        except msgspec.ValidationError as error:
            raise MalformedRequestError(f"{name} is not valid: {error}.", name) from error
    return cast("OptionsT", options)


def converted(given: object, kind: type[T], name: str) -> T:
    """``given`` as ``kind``, of which requests are made. Raises InvalidRequestError that names ``name``."""
    try:
        msgspec.json.encode(given)  # half a surrogate pair is no text
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError) as error:
        raise MalformedRequestError(f"{name} is not valid: {error}.", name) from error
    except RecursionError as error:
        raise MalformedRequestError(f"{name} is nested too deeply, or in itself: send fewer levels.", name) from error


@lru_cache
def _request_fields(kind: type) -> dict[str, Any]:
    """The types of an option class's fields by name, without those that are no fields of requests."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if name not in _LOCAL}
