"""``/v1/extract``: spans of texts for labels that the request brings, by a model that finds any (GLiNER).

``threshold``, ``flat`` and ``multi_label`` are those of the gliner library's ``inference``; ``flat`` is its flat_ner.
With ``multi_label`` GLiNER2 chooses each label's spans by themselves, as the gliner2 library does.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import Example
from bei.server.endpoint.field_schema import MAX_INPUTS, Text, limits, limits_of_inputs
from bei.server.endpoint.parse import parser
from bei.server.endpoint.render import Items, Reply, items_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Model, Tiered
from bei.tasks.extract import ExtractTask, Span, extract
from bei.tasks.extract_labels import THRESHOLD, LabelForm, Share, checked_labels, extraction_of

# What JSON takes, about: of a span beside its text and label; of a text beside its spans.
_SPAN_BYTES = 100
_TEXT_BYTES = 40
_Label = Annotated[str, limits(minLength=1, pattern=r"\S")]


class ExtractRequest(Tiered, kw_only=True):
    """Texts and labels. Long texts are read in windows: nothing is cut."""

    model: Model | None = None
    input: Text | Annotated[list[Text], limits_of_inputs]
    labels: Annotated[
        Annotated[list[_Label], limits(minItems=1, maxItems=MAX_INPUTS, uniqueItems=True)]
        | Annotated[dict[_Label, str | LabelForm], limits(minProperties=1, maxProperties=MAX_INPUTS)],
        Meta(description="What to find, in words: all different. GLiNER2 reads `{name: description}` too."),
    ]
    threshold: Annotated[
        Share | dict[str, Share], Meta(description="Spans score above it: one number, or one for a label.")
    ] = THRESHOLD
    flat: Annotated[bool, Meta(description="Spans do not overlap; else they may lie inside each other.")] = True
    multi_label: Annotated[bool, Meta(description="A span may have several labels.")] = False


class ExtractedSpan(TypedDict):
    """What stands at ``start`` to ``end``, counted in code points, its label and its score."""

    start: int
    end: int
    text: str
    label: str
    score: float


class TextSpans(TypedDict):
    """The spans of one text, in its order."""

    index: int
    spans: list[ExtractedSpan]


class ExtractUsage(TypedDict):
    """Of all windows, with labels and special tokens."""

    prompt_tokens: int
    total_tokens: int


class ExtractResponse(TypedDict):
    """One entry a text."""

    object: Literal["list"]
    model: str
    data: list[TextSpans]
    usage: ExtractUsage


async def extract_spans(body: ExtractRequest, context: RequestContext) -> Reply:
    """Find spans of each text for `labels`. A long text is read in windows that overlap, and nothing of it is cut."""
    service = context.able("extract", body.model)
    extraction_of(service)
    texts = [body.input] if isinstance(body.input, str) else body.input
    context.check_inputs(texts, "input")
    labels = checked_labels(body.labels, body.threshold, service)
    task = ExtractTask(texts, labels=labels, flat=body.flat, multi_label=body.multi_label)
    ticket = context.admit(service, texts, num_around=labels.num_chars)
    answer = await extract(service, task, ticket=ticket)
    sizes = [
        sum(_SPAN_BYTES + len(span.text) + len(span.label) for span in spans) + _TEXT_BYTES for spans in answer.spans
    ]
    context.check_answer(sum(sizes))

    def items(start: int, stop: int) -> list[object]:
        return [
            {"index": index, "spans": items_of(answer.spans[index], _SPAN_BYTES, _rendered)}
            for index in range(start, stop)
        ]

    usage = {"prompt_tokens": answer.num_tokens, "total_tokens": answer.num_tokens}
    data = Items(len(texts), sum(sizes), items)
    return Reply({"object": "list", "model": service.name, "data": data, "usage": usage})


def _rendered(span: Span) -> ExtractedSpan:
    return {"start": span.start, "end": span.end, "text": span.text, "label": span.label, "score": span.score}


_EXAMPLE = Example(
    {"input": ["Ada Lovelace lived in London."], "labels": ["person", "city"], "threshold": 0.5},
    {
        "object": "list",
        "model": "gliner_small-v2.1",
        "data": [
            {
                "index": 0,
                "spans": [
                    {"start": 0, "end": 12, "text": "Ada Lovelace", "label": "person", "score": 0.9871},
                    {"start": 22, "end": 28, "text": "London", "label": "city", "score": 0.9923},
                ],
            }
        ],
        "usage": {"prompt_tokens": 15, "total_tokens": 15},
    },
)

ROUTE = Route(
    "/v1/extract",
    "Extract spans for labels of the request",
    ExtractRequest,
    ExtractResponse,
    parser(ExtractRequest),
    extract_spans,
    _EXAMPLE,
)
