"""``/v1/extract``: spans of texts for labels that the request brings, by a model that finds any (GLiNER), and records,
relations and classes (GLiNER2), in the forms of gliner2's schema.

``threshold``, ``flat`` and ``multi_label`` are those of the gliner library's ``inference``; ``flat`` is its flat_ner.
With ``multi_label`` GLiNER2 chooses each label's spans by themselves, as the gliner2 library does.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast

import numpy as np
from msgspec import UNSET, Meta
from typing_extensions import NotRequired

from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import Example
from bei.server.endpoint.field_schema import MAX_INPUTS, Text, limits, limits_of_inputs
from bei.server.endpoint.parse import parser, with_unique_keys
from bei.server.endpoint.refused_fields import Refused, refused
from bei.server.endpoint.render import Items, Reply, items_of
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Model, Tiered
from bei.server.routes.classify import LabelScore
from bei.server.routes.openai_embeddings import Usage, usage
from bei.service.admission import Ticket
from bei.service.service import InferenceService
from bei.tasks.entity_relations import EntityForm, entity_texts
from bei.tasks.extract import ExtractTask, Span, Spans, extract, inputs_of, labels_beside, num_around
from bei.tasks.extract_labels import THRESHOLD, LabelForm, Share, extraction_of
from bei.tasks.schema_classes import ClassesForm
from bei.tasks.schema_classes import LabelScore as Chosen
from bei.tasks.schema_forms import FieldForm, RelationForm, StructureForm, check_span_settings, checked_request
from bei.tasks.schema_spans import Value, values_of
from bei.tasks.support import off_loop_if_large

# What JSON takes, about: of a span beside its text and label; of a text beside its spans.
_SPAN_BYTES = 100
_TEXT_BYTES = 40
PER_SPAN = 50  # as many numbers take as long as to look at one
_PER_ENTITY = 400  # to check one
_Label = Annotated[str, limits(minLength=1, pattern=r"\S")]


class ExtractRequest(Tiered, kw_only=True):
    """Texts and what to find."""

    model: Model | None = None
    input: Text | Annotated[list[Text], limits_of_inputs]
    labels: Annotated[
        Annotated[list[_Label], limits(minItems=1, maxItems=MAX_INPUTS, uniqueItems=True)]
        | Annotated[dict[_Label, str | LabelForm], limits(minProperties=1, maxProperties=MAX_INPUTS)]
        | None,
        Meta(description="What to find: all different. GLiNER2 reads `{name: description}` too."),
    ] = None
    structures: Annotated[
        Annotated[dict[_Label, StructureForm | list[str | FieldForm]], limits(minProperties=1)] | None,
        Meta(description="Records to find, by name, in gliner2's form (GLiNER2)."),
    ] = None
    relations: Annotated[
        Annotated[list[_Label], limits(minItems=1, uniqueItems=True)]
        | Annotated[dict[_Label, str | RelationForm], limits(minProperties=1)]
        | None,
        Meta(description="What heads and tails to find (GLiNER2; `{name: description}` too), or to score (GLiREL)."),
    ] = None
    classifications: Annotated[
        Annotated[list[ClassesForm], limits(minItems=1)] | None, Meta(description="What to classify by (GLiNER2).")
    ] = None
    entities: Annotated[
        list[list[EntityForm]] | None,
        Meta(description="Of each text, for relations (GLiREL)."),
    ] = None
    schema: Annotated[Refused, refused("send its parts")] = UNSET
    entity_attributes: Annotated[Refused, refused("ask for each as a label")] = UNSET
    overlap_policy: Annotated[Refused, refused("send flat and multi_label")] = UNSET
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


class FieldValue(TypedDict):
    """What a field has. A choice stands nowhere: ``start`` and ``end`` are null."""

    start: int | None
    end: int | None
    text: str
    score: float


Instance: TypeAlias = dict[str, FieldValue | list[FieldValue] | None]


class TextSpans(TypedDict):
    """The spans of one text, in its order, and where they were asked for, instances of structures and relations, and
    labels of classifications: one, or with `multi_label` a list."""

    index: int
    spans: list[ExtractedSpan]
    structures: NotRequired[dict[str, list[Instance]]]
    relations: NotRequired[dict[str, list[Instance]]]
    classifications: NotRequired[dict[str, LabelScore | list[LabelScore]]]


class ExtractResponse(TypedDict):
    """One entry a text. Tokens are those of all windows, with labels."""

    object: Literal["list"]
    model: str
    data: list[TextSpans]
    usage: Usage


async def extract_spans(body: ExtractRequest, context: RequestContext) -> Reply:
    """Find spans of each text for `labels`, of a long one in windows that overlap, or score relations of `entities`."""
    service = context.able("extract", body.model)
    extraction_of(service)
    texts = [body.input] if isinstance(body.input, str) else body.input
    context.check_inputs(texts, "input")
    num_entities = sum(map(len, body.entities or ()))
    texts = await off_loop_if_large(partial(entity_texts, texts, body.entities, service), _PER_ENTITY * num_entities)
    asked = checked_request(
        body.labels,
        body.structures,
        body.relations,
        body.classifications,
        body.threshold,
        service,
        has_entities=body.entities is not None,
    )
    check_span_settings(asked, body.threshold, flat=body.flat, multi_label=body.multi_label)
    labels, schema = asked
    task = ExtractTask(texts, labels=labels, flat=body.flat, multi_label=body.multi_label, schema=schema)
    answer = await extract(service, task, ticket=admitted(context, service, task))

    def sizes_of() -> list[int]:
        return [_bytes_of_text(answer, index) for index in range(len(texts))]

    num_instances = sum(len(instances) for found in answer.relations for instances in found.values())
    sizes = await off_loop_if_large(sizes_of, PER_SPAN * (num_instances + sum(map(len, answer.spans))))
    context.check_answer(sum(sizes))

    def items(start: int, stop: int) -> list[object]:
        return [_rendered_text(answer, index) for index in range(start, stop)]

    data = Items(len(texts), sum(sizes), items)
    return Reply({"object": "list", "model": service.name, "data": data, "usage": usage(answer.num_tokens)})


def admitted(context: RequestContext, service: InferenceService, task: ExtractTask) -> Ticket:
    """A ticket for the windows of the texts, with their labels, or with those that are vectors once."""
    around, beside = num_around(service, task.labels, task.schema), labels_beside(service, task.labels)
    pieces = inputs_of(service, cast("Seq[str]", task.inputs), around)
    return context.admit(service, pieces, num_around=around, labels=beside)


def _bytes_of_text(answer: Spans, index: int) -> int:
    """About what the answer to text number ``index`` takes as JSON."""
    return (
        sum(_SPAN_BYTES + len(span.text) + len(span.label) for span in answer.spans[index])
        + _bytes_of(answer.structures[index])
        + _bytes_of(answer.relations[index])
        + sum(_SPAN_BYTES + len(one.label) for one in _scores_of(answer.classifications[index]))
        + _TEXT_BYTES
    )


def _rendered_text(answer: Spans, index: int) -> dict[str, object]:
    found: dict[str, object] = {
        "index": index,
        "spans": items_of(answer.spans[index], _SPAN_BYTES, _rendered),
    }
    for name, of_texts in (("structures", answer.structures), ("relations", answer.relations)):
        if of_texts[index]:  # has the names of what was asked for
            found[name] = {
                one: items_of(instances, _bytes_of({one: instances}), _rendered_instance)
                for one, instances in of_texts[index].items()
            }
    if answer.classifications[index]:
        found["classifications"] = {
            task: [*map(_rendered_class, one)] if isinstance(one, list) else _rendered_class(one)
            for task, one in answer.classifications[index].items()
        }
    return found


def short(score: float) -> Any:
    """``score``, a float32, which is then written in as few digits as it has."""
    return np.float32(score)


def _rendered(span: Span) -> ExtractedSpan:
    return {"start": span.start, "end": span.end, "text": span.text, "label": span.label, "score": short(span.score)}


def _rendered_instance(instance: Mapping[str, Value | list[Value] | None]) -> Instance:
    return {
        name: [_rendered_value(one) for one in value] if isinstance(value, list) else value and _rendered_value(value)
        for name, value in instance.items()
    }


def _rendered_class(one: Chosen) -> LabelScore:
    return {"label": one.label, "score": short(one.score)}


def _scores_of(found: Mapping[str, Chosen | list[Chosen]]) -> list[Chosen]:
    return [each for one in found.values() for each in (one if isinstance(one, list) else [one])]


def _rendered_value(value: Value) -> FieldValue:
    return {"start": value.start, "end": value.end, "text": value.text, "score": short(value.score)}


def _bytes_of(found: Mapping[str, Seq[Mapping[str, Value | list[Value] | None]]]) -> int:
    """About what the instances of structures or relations take as JSON."""
    return sum(
        _SPAN_BYTES + len(name) + sum(_SPAN_BYTES + len(one.text) for one in values_of(value))
        for instances in found.values()
        for instance in instances
        for name, value in instance.items()
    )


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
    with_unique_keys(parser(ExtractRequest), "labels", "structures", "relations", "classifications", "threshold"),
    extract_spans,
    _EXAMPLE,
)
