"""``/v1/extract/{model}``: SIE's form of extraction, in JSON or MessagePack, as its clients send it.

Models that find any labels (GLiNER, GLiNER2) answer spans, those that classify by labels of a request (GLiClass,
natural language inference) their probabilities. ``metadata`` of items and SIE's headers change nothing here.

Source: superlinked/sie at 8634c1b (``sie_server``: types, ``api/extract``, adapters gliner, gliner2 and gliclass).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import UNSET, Meta
from starlette.requests import Request

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import Example
from bei.server.endpoint.field_schema import MAX_INPUTS, Text, limits, limits_of_inputs
from bei.server.endpoint.parse import packed_parser, parser, too_many_inputs
from bei.server.endpoint.refused_fields import Refused
from bei.server.endpoint.render import Items, Reply, items_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Tiered
from bei.server.http.accept import is_msgpack
from bei.server.routes.classify import LabelScore, ranked_bytes
from bei.server.routes.extract import PER_SPAN, admitted, short
from bei.service.service import InferenceService
from bei.tasks.extract import ExtractTask, Span, extract
from bei.tasks.extract_labels import THRESHOLD, Share, extraction_of
from bei.tasks.schema_forms import checked_request
from bei.tasks.support import off_loop_if_large
from bei.tasks.zero_shot import ZeroShotTask, check_zero_shot, inputs_of, num_around, zero_shot

_SPAN_BYTES, _ITEM_BYTES = 120, 100
_NOTHING = (b"null", b"\xc0")  # in JSON and in MessagePack
_Other = Annotated[Refused, limits(type="null")]


class SieItem(msgspec.Struct, kw_only=True):
    """A text, and what the answer calls it."""

    id: str | None = None
    text: Text | None = None
    images: _Other = UNSET
    audio: _Other = UNSET
    video: _Other = UNSET
    document: _Other = UNSET


class SieOptions(msgspec.Struct, kw_only=True):
    """Of spans ``threshold`` (0.5), ``flat_ner`` and ``multi_label``; of classes ``threshold`` (0) and
    ``classification_type``."""

    threshold: Share | None = None
    flat_ner: bool | None = None
    multi_label: bool | None = None
    classification_type: Literal["single-label", "multi-label"] | None = None
    merge_adjacent_entities: Annotated[Literal[False] | None, Meta(description="Not done here.")] = None
    profile: Annotated[Literal["default"] | None, Meta(description="There are no others here.")] = None


class SieParams(msgspec.Struct, kw_only=True):
    """``labels``: what to find, or to choose from."""

    labels: Annotated[list[Text], limits(minItems=1, maxItems=MAX_INPUTS, uniqueItems=True)] | None = None
    options: SieOptions | None = None
    output_schema: _Other = UNSET
    instruction: _Other = UNSET


class SieExtractRequest(Tiered, kw_only=True):
    """Texts and labels."""

    items: Annotated[list[SieItem], limits_of_inputs]
    params: SieParams | None = None


class SieEntity(TypedDict):
    """A span, in code points. It has no box."""

    text: str
    label: str
    score: float
    start: int
    end: int
    bbox: None


class SieItemFound(TypedDict):
    """What one item has: spans, or labels, best first. The other lists are empty."""

    id: str
    entities: list[SieEntity]
    relations: list[Any]
    classifications: list[LabelScore]
    objects: list[Any]
    data: dict[str, Any]


class SieExtractResponse(TypedDict):
    """One entry an item."""

    model: str
    items: list[SieItemFound]


class _Asked(NamedTuple):
    """A body, and the model in its path."""

    body: SieExtractRequest
    model: str = ""


_parse_json, _parse_packed = parser(SieExtractRequest), packed_parser(SieExtractRequest)


def _parse_for(request: Request) -> Callable[[bytes], _Asked]:
    model: str = request.path_params["model"]
    parse = _parse_packed if is_msgpack(request.headers.get("content-type", "")) else _parse_json
    return lambda content: _Asked(parse(content), model)


async def extract_items(asked: _Asked, context: RequestContext) -> Reply:
    """Spans of each item for `labels`, or the labels' probabilities."""
    service = context.named(asked.model)
    params = asked.body.params or SieParams()
    for name in ("output_schema", "instruction"):
        _check_none(getattr(params, name), f"params has {name}, which is not read here: leave it out.", "params")
    if not params.labels:
        raise InvalidRequestError("params has no labels: name what to find.", "params")
    texts = _texts_of(asked.body.items, context)
    names = [one.id if one.id is not None else f"item-{place}" for place, one in enumerate(asked.body.items)]
    ask = _spans if "extract" in service.manifest.tasks else _classes
    found, sizes, truncated = await ask(service, texts, params.labels, params.options or SieOptions(), context)
    num_bytes = sum(sizes) + sum(map(len, names)) + _ITEM_BYTES * len(names)
    context.check_answer(num_bytes)

    def items(start: int, stop: int) -> list[dict[str, object]]:
        return [_item(names[place], **found(place)) for place in range(start, stop)]

    return Reply({"model": service.name, "items": Items(len(names), num_bytes, items)}, truncated)


def _item(name: str, entities: object = (), classifications: object = ()) -> dict[str, object]:
    return {
        "id": name,
        "entities": entities,
        "relations": [],
        "classifications": classifications,
        "objects": [],
        "data": {},
    }


def _texts_of(items: Seq[SieItem], context: RequestContext) -> list[str]:
    context.check_count(items, "items")
    for place, item in enumerate(items):
        for name in ("images", "audio", "video", "document"):
            _check_none(getattr(item, name), f"items {place} has {name}, and texts alone are read here.", "items")
        if item.text is None:
            raise InvalidRequestError(f"items {place} has no text.", "items")
    texts = [item.text or "" for item in items]
    context.check_inputs(texts, "items")
    return texts


def _check_none(given: Refused, message: str, param: str) -> None:
    if given is not UNSET and bytes(given) not in _NOTHING:
        raise InvalidRequestError(message, param)


def _check_options(options: SieOptions, kind: str, *names: str) -> None:
    """Raise InvalidRequestError for one of ``names``, which models of this ``kind`` do not read."""
    if (name := next((name for name in names if getattr(options, name) is not None), None)) is not None:
        raise InvalidRequestError(f"options has {name}, which {kind} do not read: leave it out.", "params")


# What an item has, by its place; about the bytes of each; the places of those that were cut.
_Found = tuple[Callable[[int], dict[str, object]], Seq[int], list[int]]


async def _spans(
    service: InferenceService, texts: list[str], labels: list[str], options: SieOptions, context: RequestContext
) -> _Found:
    _check_options(options, "models of spans", "classification_type")
    threshold = THRESHOLD if options.threshold is None else options.threshold
    checked, schema = checked_request(labels, None, None, None, threshold, service)
    by_label = bool(extraction_of(service).schema)  # each label's spans are chosen by themselves there
    task = ExtractTask(
        texts,
        labels=checked,
        schema=schema,
        flat=options.flat_ner is not False,
        multi_label=by_label if options.multi_label is None else options.multi_label,
    )
    answer = await extract(service, task, ticket=admitted(context, service, task))

    def sizes_of() -> list[int]:
        return [sum(_SPAN_BYTES + len(span.text) + len(span.label) for span in spans) for spans in answer.spans]

    sizes = await off_loop_if_large(sizes_of, PER_SPAN * sum(map(len, answer.spans)))
    return lambda place: {"entities": items_of(answer.spans[place], _SPAN_BYTES, _entity)}, sizes, []


def _entity(span: Span) -> SieEntity:
    return {
        "text": span.text,
        "label": span.label,
        "score": short(span.score),
        "start": span.start,
        "end": span.end,
        "bbox": None,
    }


async def _classes(
    service: InferenceService, texts: list[str], labels: list[str], options: SieOptions, context: RequestContext
) -> _Found:
    check_zero_shot(service)
    context.check_inputs(labels, "params")
    _check_options(options, "models that classify", "flat_ner", "multi_label")
    if len(texts) * len(labels) > context.max_inputs:
        raise too_many_inputs(len(texts) * len(labels), context.max_inputs, "items")
    multi_label = options.classification_type == "multi-label"
    task = ZeroShotTask(texts, labels=labels, multi_label=multi_label, param="labels")
    ticket = context.admit(service, inputs_of(service, task), num_around=num_around(service, task))
    scores = await zero_shot(service, task, ticket=ticket)
    least, sizes = options.threshold or 0.0, [ranked_bytes(labels)] * len(texts)
    return lambda place: {"classifications": _ranked(labels, scores.values[place], least)}, sizes, scores.truncated


def _ranked(labels: Seq[str], row: Float32Array, least: float) -> list[LabelScore]:
    found = [(label, score) for label, score in zip(labels, row, strict=True) if score >= least]
    return [{"label": label, "score": score} for label, score in sorted(found, key=lambda one: -one[1])]


_EXAMPLE = Example(
    {"items": [{"text": "Ada Lovelace lived in London."}], "params": {"labels": ["person"]}},
    {
        "model": "gliner_small-v2.1",
        "items": [
            {
                "id": "item-0",
                "entities": [
                    {"text": "Ada Lovelace", "label": "person", "score": 0.9871, "start": 0, "end": 12, "bbox": None}
                ],
                "relations": [],
                "classifications": [],
                "objects": [],
                "data": {},
            }
        ],
    },
)

ROUTE: Route[Any] = Route(
    "/v1/extract/{model:path}",
    "Extract (SIE)",
    SieExtractRequest,
    SieExtractResponse,
    lambda content: _Asked(_parse_json(content)),
    extract_items,
    _EXAMPLE,
    parse_for=_parse_for,
)
